"""Every op of the tables on the CPU under the policy, compared with the autocast of CUDA.

The autocast of CUDA runs without a GPU on fake tensors, which compute dtypes but no values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from lightning_mp.precision._choice.op_tables import (
    BEYOND_AUTOCAST,
    CLASS_OF,
    GROUPS,
    autocast_agrees,
    callables_of,
    canonical_name,
)
from lightning_mp.precision.op_policy import OpPolicy

HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
LIKE_CUDA = OpPolicy(norm_output="fp32")
pytestmark = pytest.mark.filterwarnings(
    "ignore:at..frobenius_norm is deprecated",
    "ignore:Mismatch dtype between input and weight",  # from rms_norm without the policy
)


def make_inputs(device: str, half: torch.dtype) -> SimpleNamespace:
    """Return functions: `h` creates half tensors, `w` fp32 tensors, with values in [1/4, 3/4]."""

    def wide(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device) / 2 + 0.25

    return SimpleNamespace(
        w=wide, h=lambda *shape: wide(*shape).to(half), i=lambda *v: torch.tensor(v, device=device)
    )


# fmt: off
UNARY = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "prod",
    "reciprocal", "rsqrt", "sinh", "square", "sum", "tan",
)
ALONG = ("cumprod", "cumsum", "log_softmax", "logsumexp")
PAIRED_LOSSES = (
    "binary_cross_entropy_with_logits", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
    "mse_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
)
# fmt: on
UPSAMPLING = {
    "upsample_linear1d": ("linear", 3),
    "upsample_bilinear2d": ("bilinear", 4),
    "upsample_bicubic2d": ("bicubic", 4),
    "upsample_trilinear3d": ("trilinear", 5),
    **{f"upsample_nearest{n}d": ("nearest", n + 2) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": ("nearest-exact", n + 2) for n in (1, 2, 3)},
}

# Inputs mix half and fp32, so casts in both directions are visible.
SAMPLES: dict[str, Callable[[SimpleNamespace], Any]] = {
    "addbmm": lambda x: torch.addbmm(x.w(2, 2), x.h(3, 2, 2), x.w(3, 2, 2)),
    "addmm": lambda x: torch.addmm(x.w(2), x.h(2, 2), x.w(2, 2)),
    "addmv": lambda x: torch.addmv(x.w(2), x.h(2, 2), x.w(2)),
    "addr": lambda x: torch.addr(x.w(2, 2), x.h(2), x.w(2)),
    "baddbmm": lambda x: torch.baddbmm(x.w(3, 2, 2), x.h(3, 2, 2), x.w(3, 2, 2)),
    "bmm": lambda x: (x.w(3, 2, 2).bmm(x.h(3, 2, 2)), torch.ops.aten.bmm(*[x.w(3, 2, 2)] * 2)),
    "chain_matmul": lambda x: torch.linalg.multi_dot([x.w(2, 2), x.h(2, 2), x.w(2, 2)]),
    "einsum": lambda x: torch.einsum("ij,jk->i", x.w(2, 2), x.h(2, 2)),
    "linalg_multi_dot": lambda x: torch.linalg.multi_dot([x.w(2, 2), x.h(2, 2), x.w(2, 2)]),
    "linalg_vecdot": lambda x: torch.linalg.vecdot(x.w(2), x.h(2)),
    "linear": lambda x: F.linear(x.w(2, 2), x.w(2, 2), x.w(2)),
    "matmul": lambda x: (x.w(2, 2) @ x.h(2, 2), torch.matmul(x.w(2), x.w(2))),
    "mm": lambda x: x.w(2, 2).mm(x.h(2, 2)),
    "mv": lambda x: x.w(2, 2).mv(x.h(2)),
    "conv_tbc": lambda x: torch.conv_tbc(x.h(4, 1, 2), x.w(1, 2, 2), x.w(2)),
    "convolution": lambda x: torch.convolution(
        x.h(1, 2, 4), x.w(2, 2, 1), None, [1], [0], [1], False, [0], 1
    ),
    "prelu": lambda x: F.prelu(x.w(2, 2), x.w(1)),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        x.w(1, 1, 2, 4), x.h(1, 1, 2, 4), x.w(1, 1, 2, 4)
    ),
    "pow": lambda x: (x.h(2) ** 2, 2 ** x.h(2), x.h(2).pow(x.h(2)), torch.pow(2, x.h(2))),
    "softplus": lambda x: F.softplus(x.h(2)),
    "native_layer_norm": lambda x: torch.native_layer_norm(x.h(2, 2), (2,), x.w(2), None, 1e-5),
    "norm": lambda x: (x.h(2).norm(), torch.norm(x.h(2, 2), dim=1), torch.norm(x.h(2), 3)),
    "linalg_norm": lambda x: (torch.linalg.norm(x.h(2)), torch.linalg.norm(x.h(2, 2), dim=1)),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x.h(2)),
    "frobenius_norm": lambda x: torch.frobenius_norm(x.h(2, 2), dim=(0, 1)),
    "norm_except_dim": lambda x: torch.norm_except_dim(x.h(2, 2)),
    "renorm": lambda x: torch.renorm(x.h(2, 2), 2, 0, 1.0),
    "trapezoid": lambda x: (torch.trapezoid(x.h(3)), torch.trapz(x.h(3))),
    "cumulative_trapezoid": lambda x: torch.cumulative_trapezoid(x.h(3)),
    "softmax": lambda x: (
        F.softmax(x.h(2), 0), x.h(2).softmax(0), torch.special.softmax(x.h(2), 0),
        F.softmin(x.h(2), 0), F.gumbel_softmax(x.h(2, 2)),
    ),  # fmt: skip
    "linalg_matrix_sqrth": lambda x: torch.linalg.matrix_sqrth(x.h(2, 2)),
    "cdist": lambda x: torch.cdist(x.h(2, 2), x.h(2, 2)),
    "cosine_similarity": lambda x: F.cosine_similarity(x.h(2, 2), x.h(2, 2)),
    "dist": lambda x: torch.dist(x.h(2), x.h(2)),
    "pairwise_distance": lambda x: F.pairwise_distance(x.h(2, 2), x.h(2, 2)),
    "pdist": lambda x: F.pdist(x.h(3, 2)),
    "cross_entropy": lambda x: (
        F.cross_entropy(x.h(2, 2), x.i(0, 1)),
        F.cross_entropy(x.h(2, 2), x.h(2, 2), label_smoothing=0.1),
    ),
    "nll_loss": lambda x: F.nll_loss(x.h(2, 2), x.i(0, 1)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x.h(2), x.h(2), x.h(2)),
    "triplet_margin_loss": lambda x: (
        F.triplet_margin_loss(*[x.h(2, 2)] * 3),
        F.triplet_margin_with_distance_loss(*[x.h(2, 2)] * 3),
    ),
    "layer_norm": lambda x: F.layer_norm(x.h(2, 2), (2,), x.w(2), x.w(2)),
    "rms_norm": lambda x: F.rms_norm(x.h(2, 2), (2,), x.w(2)),
    "group_norm": lambda x: F.group_norm(x.h(2, 2, 2), 1, x.w(2), x.w(2)),
    "addcdiv": lambda x: torch.addcdiv(x.h(2), x.h(2), x.w(2)),
    "addcmul": lambda x: torch.addcmul(x.h(2), x.w(2), x.h(2)),
    "atan2": lambda x: torch.atan2(x.h(2), x.w(2)),
    "bilinear": lambda x: F.bilinear(x.h(2, 2), x.h(2, 2), x.w(2, 2, 2)),
    "cross": lambda x: torch.cross(x.h(3), x.w(3), dim=0),
    "dot": lambda x: x.h(2).dot(x.w(2)),
    "index_put": lambda x: x.h(2).index_put((x.i(0),), x.w(1)),
    "inner": lambda x: (torch.inner(x.h(2), x.w(2)), torch.inner(x.w(2, 2), x.w(2, 2))),
    "scatter_add": lambda x: x.h(2).scatter_add(0, x.i(0), x.w(1)),
    "tensordot": lambda x: (torch.tensordot(x.h(2), x.w(2), 1), torch.tensordot(*[x.w(2)] * 2, 1)),
    "vdot": lambda x: torch.vdot(x.h(2), x.w(2)),
}  # fmt: skip


def _add_families() -> None:
    for name in UNARY:
        SAMPLES[name] = lambda x, name=name: (getattr(torch, name)(x.h(2)), getattr(x.h(2), name)())
    for name in ALONG:
        SAMPLES[name] = lambda x, name=name: getattr(x.h(2), name)(0)
    for name in PAIRED_LOSSES:
        SAMPLES[name] = lambda x, name=name: getattr(F, name)(x.h(2, 2), x.h(2, 2), reduction="sum")
    for n in (1, 2, 3):
        shape = (1, 2, *[3] * n)
        for name in (f"conv{n}d", f"conv_transpose{n}d"):
            SAMPLES[name] = lambda x, name=name, n=n, shape=shape: getattr(F, name)(
                x.h(*shape), x.w(2, 2, *[1] * n), x.w(2)
            )
    for name, (mode, dims) in UPSAMPLING.items():
        SAMPLES[name] = lambda x, mode=mode, dims=dims: F.interpolate(
            x.h(1, 1, *[2] * (dims - 2)), scale_factor=2.0, mode=mode
        )
    for mode in ("bilinear", "bicubic"):
        SAMPLES[f"_upsample_{mode}2d_aa"] = lambda x, mode=mode: F.interpolate(
            x.h(1, 1, 4, 4), scale_factor=0.5, mode=mode, antialias=True
        )


def _recurrent(kind: type[nn.Module]) -> Callable[[SimpleNamespace], Any]:
    return lambda x: kind(2, 2)(x.w(3, 2))


# These do not run on fake tensors without a GPU; CUDA has no matrix norms in half precision.
CPU_ONLY: dict[str, Callable[[SimpleNamespace], Any]] = {
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.h(2), x.h(2)),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x.h(2, 2), x.h(2, 2), x.i(1, -1)),
    "grid_sampler": lambda x: F.grid_sample(x.h(1, 1, 2, 2), x.w(1, 2, 2, 2), align_corners=False),
    "gru": lambda x: nn.GRU(2, 2)(x.w(1, 3, 2)),
    "gru_cell": _recurrent(nn.GRUCell),
    "linalg_lstsq": lambda x: torch.linalg.lstsq(_definite(x), x.w(2, 2)).solution,
    "linalg_matrix_norm": lambda x: torch.linalg.matrix_norm(x.h(2, 2), 2),
    "lstm": lambda x: nn.LSTM(2, 2)(x.w(1, 3, 2)),
    "lstm_cell": _recurrent(nn.LSTMCell),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x.h(2, 2), x.i(0, 1)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x.h(1, 2), x.i(0, 1)[None]),
    "nuclear_norm": lambda x: torch.norm(x.h(2, 2), p="nuc"),
    "rnn_relu": lambda x: nn.RNN(2, 2, nonlinearity="relu")(x.w(1, 3, 2)),
    "rnn_relu_cell": lambda x: nn.RNNCell(2, 2, nonlinearity="relu")(x.w(3, 2)),
    "rnn_tanh": lambda x: nn.RNN(2, 2)(x.w(1, 3, 2)),
    "rnn_tanh_cell": _recurrent(nn.RNNCell),
}
# CUDA's autocast does not promote these. The second call has the fp32 input in the other place.
BEYOND: dict[str, Callable[[SimpleNamespace], Any]] = {
    name: lambda x, name=name, args=args, more=more: [
        getattr(first, name)(*(a(x) for a in args), second, *more)
        for first, second in ((x.h(2), x.w(2)), (x.w(2), x.h(2)))
    ]
    for name, args, more in (
        ("index_add", (lambda x: 0, lambda x: x.i(1, 0)), ()),
        ("index_copy", (lambda x: 0, lambda x: x.i(1, 0)), ()),
        ("index_reduce", (lambda x: 0, lambda x: x.i(1, 0)), ("mean",)),
        ("lerp", (), (0.5,)),
        ("masked_scatter", (lambda x: x.i(1, 0).bool(),), ()),
        ("scatter", (lambda x: 0, lambda x: x.i(1, 0)), ()),
        ("scatter_reduce", (lambda x: 0, lambda x: x.i(1, 0)), ("sum",)),
    )
}
# CUDA has no half kernels of these, at least in bf16; outputs may be complex or integers.
WITHOUT_HALF: dict[str, Callable[[SimpleNamespace], Any]] = {
    "complex": lambda x: torch.complex(x.h(2), x.h(2)),
    "linalg_matrix_power": lambda x: torch.matrix_power(_definite(x), -1),
    "linalg_solve": lambda x: torch.linalg.solve(_definite(x), x.w(2, 2)),
    "linalg_solve_triangular": lambda x: torch.linalg.solve_triangular(
        _definite(x), x.w(2, 2), upper=True
    ),
    "logdet": lambda x: _definite(x).logdet(),
    "nanquantile": lambda x: x.h(2).nanquantile(0.5),
    "polar": lambda x: torch.polar(x.h(2), x.w(2)),
    "quantile": lambda x: x.h(2).quantile(0.5),
    "stft": lambda x: torch.stft(x.h(8), 4, window=x.w(4), return_complex=True),
    "view_as_complex": lambda x: torch.view_as_complex(x.h(2, 2)),
}
WITHOUT_HALF |= {
    op: lambda x, op=op: getattr(getattr(torch, op.split("_")[0]), op.split("_", 1)[1])(
        _definite(x)
    )
    for op in BEYOND_AUTOCAST
    if op.startswith(("fft_", "linalg_")) and op not in {*SAMPLES, *CPU_ONLY, *WITHOUT_HALF}
}
# Ops without a class, and composites of several ops.
GIVEN: dict[str, Callable[[SimpleNamespace], Any]] = {
    "binary": lambda x: (x.h(2) + x.h(2), x.h(2) * x.w(2), x.h(2) / 3, 1 - x.h(2), 1 / x.h(2)),
    "cat": lambda x: (torch.cat([x.h(2), x.w(2)]), torch.stack([x.h(2), x.w(2)])),
    "composite": lambda x: (
        F.normalize(x.h(2, 2)), F.local_response_norm(x.h(1, 2, 2), 2), F.tanhshrink(x.h(2)),
        F.lp_pool2d(x.h(1, 1, 2, 2), 2, 2), F.multilabel_soft_margin_loss(x.h(2, 2), x.h(2, 2)),
        F.softsign(x.h(2)),
    ),
    "explicit": lambda x: (
        x.h(2).softmax(0, dtype=torch.float16), F.softmax(x.w(2), 0, None, torch.float16),
        x.h(2).sum(dtype=torch.float32), x.i(1, 2).sum(),
    ),
    "float64": lambda x: (x.w(2).double().exp(), x.w(2, 2).double() @ x.w(2, 2).double()),
    "kernels_add_in_fp32": lambda x: (x.h(2).mean(), x.h(2).var(), F.instance_norm(x.h(2, 2, 3))),
    "pointwise": lambda x: (F.gelu(x.h(2)), F.silu(x.h(2)), x.h(2).tanh(), x.h(2).sigmoid()),
    "promoting_half": lambda x: (torch.addcmul(*[x.h(2)] * 3), torch.dot(x.h(2), x.h(2))),
}  # fmt: skip
_add_families()
# Ops that this version of torch does not have; they are removed from the samples.
LATER = {name for name in ("linalg_matrix_sqrth",) if not callables_of(name) and SAMPLES.pop(name)}


def _definite(x: SimpleNamespace) -> Tensor:
    return x.h(2, 2) / 4 + x.h(2).new_ones(2).diag()


def dtypes(values: object) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@contextmanager
def fake_cuda(half: torch.dtype) -> Iterator[None]:
    """Enable the autocast of CUDA; `torch.autocast` disables itself without a GPU."""
    with FakeTensorMode():
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", half)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)


def on_cpu(sample: Callable[[SimpleNamespace], Any], half: torch.dtype) -> list[torch.dtype]:
    with LIKE_CUDA.context("cpu", half):
        return dtypes(sample(make_inputs("cpu", half)))


@pytest.mark.parametrize("name", [*SAMPLES, *CPU_ONLY])
@HALVES
def test_op_on_the_cpu_runs_in_the_dtype_of_its_class(half: torch.dtype, name: str) -> None:
    expected = half if CLASS_OF[name] == "half" else torch.float32
    outputs = on_cpu({**SAMPLES, **CPU_ONLY}[name], half)
    assert outputs
    assert set(outputs) == {expected}


@pytest.mark.parametrize("name", [*SAMPLES, *GIVEN])
def test_op_on_the_cpu_returns_the_dtype_of_cuda_autocast(name: str) -> None:
    if not autocast_agrees("cuda", name):
        pytest.skip("torch 2.10's autocast does not know rms_norm")
    sample, half = {**SAMPLES, **GIVEN}[name], torch.float16
    with fake_cuda(half):
        expected = dtypes(sample(make_inputs("cuda", half)))
    assert on_cpu(sample, half) == expected


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize("name", BEYOND)
@HALVES
def test_op_beyond_autocast_has_the_widest_dtype_beside_half_weights(
    half: torch.dtype, name: str
) -> None:
    with OpPolicy().context("cpu", half):
        assert set(dtypes(BEYOND[name](make_inputs("cpu", half)))) == {torch.float32}
    key = "AutocastCUDA"
    assert not any(
        torch._C._dispatch_has_kernel_for_dispatch_key(op, key)
        for op in torch._C._dispatch_get_all_op_names()
        if op.removeprefix("aten::").split(".")[0] == name
    )


@pytest.mark.parametrize("name", WITHOUT_HALF)
@HALVES
def test_op_without_half_kernels_accepts_half_weights_on_every_device(
    half: torch.dtype, name: str
) -> None:
    sample = WITHOUT_HALF[name]
    with OpPolicy().context("cpu", half):
        on_cpu = dtypes(sample(make_inputs("cpu", half)))
    with fake_cuda(half), OpPolicy().recompute_context("cuda"):
        assert dtypes(sample(make_inputs("cuda", half))) == on_cpu
    assert not {half, torch.complex32} & set(on_cpu)


def test_every_op_of_the_tables_has_a_sample() -> None:
    listed = {op for group in GROUPS for op in group.ops}
    assert listed == {*SAMPLES, *CPU_ONLY, *BEYOND, *WITHOUT_HALF, *LATER}
    assert len(listed) == sum(len(group.ops) for group in GROUPS)


def test_tables_contain_every_op_of_cuda_autocast() -> None:
    names = {
        name.removeprefix("aten::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    assert len(names) > 100
    # Only builds with CUDA have `_cudnn_rnn`.
    inside = {"_convolution", "_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"}
    unknown = {name for name in names - inside if canonical_name(f"aten::{name}") not in CLASS_OF}
    assert not unknown


def test_dtypes_differ_from_those_of_cpu_autocast() -> None:
    """The function mode exists for these ops; without them it would be superfluous."""
    half = torch.float16
    different = []
    for name, sample in SAMPLES.items():
        expected = on_cpu(sample, half)
        try:
            with torch.autocast("cpu", dtype=half):
                if dtypes(sample(make_inputs("cpu", half))) != expected:
                    different.append(name)
        except RuntimeError:  # no kernel for half or for mixed dtypes
            different.append(name)
    assert {"softmax", "sum", "layer_norm", "rms_norm", "exp", "mv", "pdist"} <= set(different)
    assert not {"linear", "mse_loss", "cross_entropy"} & set(different)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("softmax", "softmax"),
        ("torch.softmax", "softmax"),
        ("torch.nn.functional.softmax", "softmax"),
        ("F.softmax", "softmax"),
        ("torch.Tensor.softmax", "softmax"),
        ("torch.special.softmax", "softmax"),
        ("aten::softmax.int", "softmax"),
        ("torch.ops.aten._softmax.default", "softmax"),
        ("torch.Tensor.__matmul__", "matmul"),
        ("torch.linalg.norm", "linalg_norm"),
        ("torch.fft.rfft", "fft_rfft"),
        ("torch.special.i0e", "special_i0e"),
        ("torch.arccos", "acos"),
        ("torch.nn.functional.grid_sample", "grid_sampler"),
    ],
)
def test_all_spellings_of_an_op_are_equivalent(name: str, expected: str) -> None:
    assert canonical_name(name) == expected


@pytest.mark.parametrize("name", ["sofmax", "torch.softmx", "softmax_", "aten::_softmx"])
def test_error_for_unknown_op_lists_similar_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"Similar names: .*'softmax'.* Pass the name of a func"):
        canonical_name(name)


@pytest.mark.parametrize("name", ["", "relu_", "torch.save", "shape", "torch.nn.functional"])
def test_name_that_is_not_a_function_raises(name: str) -> None:
    with pytest.raises(ValueError, match="does not exist in torch or works in place"):
        canonical_name(name)
