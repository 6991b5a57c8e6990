"""Table of torch ops by class of the mixed-precision paper, and the names of each op.

The lists follow CUDA's autocast ("CUDA Op-Specific Behavior" in the documentation of `torch.amp`),
plus ops that torch implements by listed ones, such as `square` by `pow`. The classes are those of
the paper.

References:
    Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
"""

import difflib
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "BEYOND_AUTOCAST",
    "CLASS_OF",
    "GROUPS",
    "INPUT_ONLY",
    "WRITES",
    "OpClass",
    "OpGroup",
    "autocast_agrees",
    "callables_of",
    "canonical_name",
    "follow_changes_of_torch",
    "opened_composites",
]

OpClass = Literal["half", "fp32", "norm", "promote", "given"]
"""Treatment of floating-point inputs: cast to half; cast to fp32; cast to fp32 with the output in
the dtype of `OpPolicy.norm_output`; cast to the widest input dtype; unchanged."""


class OpGroup(NamedTuple):
    """Ops that belong to one class for the same reason."""

    op_class: OpClass
    title: str
    why: str
    ops: tuple[str, ...]


# fmt: off
# CUDA's autocast leaves these ops alone: without half weights, their inputs rarely differ in dtype,
_SCATTERING = (
    "index_add", "index_copy", "index_reduce", "lerp", "masked_scatter", "scatter",
    "scatter_reduce",
)
# and weights that have no half kernels are fp32.
_WITHOUT_HALF = (
    "complex", "fft_fft", "fft_fft2", "fft_fftn", "fft_hfft", "fft_ifft", "fft_ifft2", "fft_ifftn",
    "fft_ihfft", "fft_irfft", "fft_irfft2", "fft_irfftn", "fft_rfft", "fft_rfft2", "fft_rfftn",
    "linalg_cholesky", "linalg_cond", "linalg_det", "linalg_eig", "linalg_eigh", "linalg_eigvals",
    "linalg_eigvalsh", "linalg_inv", "linalg_lstsq", "linalg_lu", "linalg_matrix_exp",
    "linalg_matrix_power", "linalg_matrix_rank", "linalg_matrix_sqrth", "linalg_pinv", "linalg_qr",
    "linalg_slogdet", "linalg_solve", "linalg_solve_triangular", "linalg_svd", "linalg_svdvals",
    "logdet", "nanquantile", "polar", "quantile", "stft", "view_as_complex",
)
BEYOND_AUTOCAST: tuple[str, ...] = (*_SCATTERING, *_WITHOUT_HALF)

GROUPS: tuple[OpGroup, ...] = (
    OpGroup("half", "matrix products", "tensor cores multiply in half and add in fp32", (
        "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum",
        "linalg_multi_dot", "linalg_vecdot", "linear", "matmul", "mm", "mv",
    )),
    OpGroup("half", "convolutions", "tensor cores multiply in half and add in fp32", (
        "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "convolution", "prelu",
    )),
    OpGroup("half", "attention", "matrix products; the kernels keep its softmax in fp32", (
        "scaled_dot_product_attention",
    )),
    OpGroup("half", "recurrent cells", "made of matrix products", (
        "gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh",
        "rnn_tanh_cell",
    )),
    OpGroup("fp32", "pointwise", "f(x) >> x or cancellation: half overflows or loses digits", (
        "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow",
        "reciprocal", "rsqrt", "sinh", "softplus", "square", "tan",
    )),
    OpGroup("fp32", "reductions", "a sum overflows fp16 and stalls in bf16", (
        "cumprod", "cumsum", "cumulative_trapezoid", "frobenius_norm", "linalg_matrix_norm",
        "linalg_norm", "linalg_vector_norm", "log_softmax", "logsumexp", "native_layer_norm",
        "norm", "norm_except_dim", "nuclear_norm", "prod", "renorm", "softmax", "sum", "trapezoid",
    )),
    OpGroup("fp32", "distances", "differences of near values, squared and summed", (
        "cdist", "cosine_similarity", "dist", "pairwise_distance", "pdist",
    )),
    OpGroup("fp32", "linear algebra, Fourier transforms", "CUDA lacks half kernels", _WITHOUT_HALF),
    OpGroup("fp32", "losses", "everything after depends on them", (
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
        "cross_entropy", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
        "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss",
        "nll_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
        "triplet_margin_loss",
    )),
    OpGroup("fp32", "upsampling", "positions need more than 11 bits", (
        "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_bicubic2d",
        "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d",
        "upsample_nearest3d", "upsample_trilinear3d",
    )),
    OpGroup("norm", "norms", "mean and variance are reductions", (
        "group_norm", "layer_norm", "rms_norm",
    )),
    OpGroup("promote", "several inputs", "they need one dtype, the widest loses nothing", (
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
        "inner", "scatter_add", "tensordot", "vdot",
    )),
    OpGroup("promote", "scattering", "a half stream meets fp32 outputs of own norms", _SCATTERING),
)

# Functions of torch.nn.functional that call other ops from Python; the policy applies to each op.
_COMPOSITES: tuple[str, ...] = (
    "gaussian_nll_loss", "gumbel_softmax", "interpolate", "local_response_norm", "lp_pool1d",
    "lp_pool2d", "lp_pool3d", "multi_head_attention_forward", "multilabel_soft_margin_loss",
    "normalize", "softmin", "softsign", "tanhshrink", "triplet_margin_with_distance_loss",
)

# These ops write values to a tensor of the same dtype.
WRITES = ("__setitem__", "index_put_", "scatter_add_", *(f"{op}_" for op in _SCATTERING))

# These ops write to running statistics, which a cast would replace by copies.
INPUT_ONLY: frozenset[str] = frozenset({"batch_norm", "instance_norm"})

# Autocast casts inputs of these ops to half on every device, and caches the casts of weights.
_HALF_EVERYWHERE = frozenset({
    "addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "matmul", "mm",
    "scaled_dot_product_attention",
})

# Devices whose autocast uses CUDA's lists (the AT_FORALL macros of autocast_mode.h).
_WITH_THE_LISTS_OF_CUDA = frozenset({"cuda", "xpu"})

_ALIASES = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh",
    "arctan": "atan", "arctan2": "atan2", "arctanh": "atanh", "cholesky": "linalg_cholesky",
    "clip": "clamp", "concat": "cat", "concatenate": "cat", "cross_entropy_loss": "cross_entropy",
    "det": "linalg_det", "divide": "div", "grid_sample": "grid_sampler", "inverse": "linalg_inv",
    "linalg_matmul": "matmul", "log_sigmoid": "logsigmoid", "matrix_exp": "linalg_matrix_exp",
    "matrix_power": "linalg_matrix_power", "multiply": "mul", "negative": "neg",
    "nll_loss2d": "nll_loss", "nll_loss_nd": "nll_loss", "pinverse": "linalg_pinv",
    "qr": "linalg_qr", "slogdet": "linalg_slogdet", "special_expit": "sigmoid", "subtract": "sub",
    "svd": "linalg_svd", "trapz": "trapezoid", "true_divide": "div",
    # Methods behind Python operators.
    "__add__": "add", "__div__": "div", "__matmul__": "matmul", "__mul__": "mul",
    "__neg__": "neg", "__pow__": "pow", "__radd__": "add", "__rdiv__": "reciprocal",
    "__rmatmul__": "matmul", "__rmul__": "mul", "__rpow__": "pow", "__rsub__": "sub",
    "__rtruediv__": "reciprocal", "__sub__": "sub", "__truediv__": "div",
}

# Names of ops below autocast and autograd, as a profiler or dispatch mode shows them.
_INTERNAL_NAMES = {
    "_fused_rms_norm": "rms_norm", "_log_softmax": "log_softmax",
    "_native_batch_norm_legit": "batch_norm",
    "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "_softmax": "softmax", "_thnn_fused_gru_cell": "gru_cell",
    "_thnn_fused_lstm_cell": "lstm_cell", "cudnn_batch_norm": "batch_norm",
    "native_batch_norm": "batch_norm", "native_dropout": "dropout",
    "native_group_norm": "group_norm", "native_layer_norm": "layer_norm",
    "nll_loss2d_forward": "nll_loss", "nll_loss_forward": "nll_loss",
}
# fmt: on

CLASS_OF: dict[str, OpClass] = {op: group.op_class for group in GROUPS for op in group.ops}

# Prefixes of canonical names, and where their ops are; ops of the last may be aliases of others.
_NAMESPACES = (
    *(("", torch), ("", Tensor), ("", nn.functional), ("", torch.functional)),
    *(("", torch._C._nn), ("linalg_", torch.linalg), ("fft_", torch.fft)),
    ("special_", torch.special),
)

# Prefix of a name -> prefix of the canonical name; longest first.
_PREFIXES = (
    ("torch.nn.functional.", ""),
    ("torch.functional.", ""),
    ("torch.linalg.", "linalg_"),
    ("torch.special.", "special_"),
    ("torch.Tensor.", ""),
    ("torch.fft.", "fft_"),
    ("torch.", ""),
    ("Tensor.", ""),
    ("F.", ""),
)


def canonical_name(name: str) -> str:
    """Return the canonical name of an op, for example of "torch.special.softmax"."""
    known = _index()
    short = _resolve(name, known)
    if short in known:
        return short
    near = difflib.get_close_matches(short, list(known), n=5, cutoff=0.6)
    raise ValueError(
        f"Passed the op {name!r}, which does not exist in torch or works in place. "
        + (f"Similar names: {near}. " if near else "")
        + "Pass the name of a function or tensor method, such as 'softmax', "
        "'torch.nn.functional.gelu', 'torch.linalg.norm' or 'aten::bmm'."
    )


def callables_of(name: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions, methods and `torch.ops.aten` overloads of a canonical name."""
    found = dict.fromkeys(_index().get(name, ()))
    packet = getattr(torch.ops.aten, name, None)
    if packet is not None:
        overloads = [overload for overload in packet.overloads() if "out" not in overload]
        found.update(dict.fromkeys((packet, *(getattr(packet, each) for each in overloads))))
    return tuple(found)


def autocast_agrees(device_type: str, name: str) -> bool:
    """Whether a device's autocast already treats an op as its class in the table requires.

    CUDA's autocast computes norms in fp32 with fp32 outputs.
    """
    if device_type not in _WITH_THE_LISTS_OF_CUDA:
        return name in _HALF_EVERYWHERE
    if name == "rms_norm":  # missing from the lists of older versions
        key = f"Autocast{device_type.upper()}"
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", key))
    return True


@lru_cache(maxsize=1)
def opened_composites() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return a copy of each composite function that skips the `__torch_function__` check.

    A function mode receives a composite as one call and is disabled while it handles the call. If
    the mode were enabled again, the check inside the composite would call it recursively without
    end. The copies omit the check.
    """
    originals = [getattr(nn.functional, name, None) for name in _COMPOSITES]
    # These may recompute checkpointed forwards.
    originals += [Tensor.backward, torch.autograd.backward, torch.autograd.grad]
    copies: dict[Callable[..., Any], Callable[..., Any]] = {}
    for original in originals:
        if not isinstance(original, types.FunctionType):
            continue  # not in this version of torch
        copy = types.FunctionType(
            original.__code__,
            _namespace(original.__module__),
            original.__name__,
            original.__defaults__,
            original.__closure__,
        )
        copy.__kwdefaults__ = original.__kwdefaults__
        copies[original] = copy
    return copies


def follow_changes_of_torch() -> None:
    """Update the globals of the copies, because other libraries patch attention functions."""
    questions = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    answers = dict.fromkeys(questions, _nobody_overrides)
    for module in (nn.functional, torch._tensor, torch.autograd):
        namespace = _namespace(module.__name__)  # updated in place twice per step
        namespace.update(vars(module))
        namespace.update(answers)


@lru_cache(maxsize=8)
def _namespace(module: str) -> dict[str, Any]:
    """Return the globals of the copied functions of a module."""
    return {}


def _nobody_overrides(*_: Any) -> bool:
    return False


@lru_cache(maxsize=1)
def _index() -> dict[str, list[Callable[..., Any]]]:
    """Return the callables of all overridable torch ops by canonical name.

    In-place ops and properties such as `torch.Tensor.shape` are left out.
    """
    overridable = torch.overrides.get_overridable_functions()
    functions = {id(function) for each in overridable.values() for function in each}
    index: dict[str, list[Callable[..., Any]]] = {}
    for prefix, owner in _NAMESPACES:
        for attribute in dir(owner):
            function = getattr(owner, attribute, None)
            listed = id(function) in functions or owner is torch._C._nn
            if not listed or not callable(function):
                continue
            name = _alias(prefix + attribute, index)
            # An in-place op would write to the copy that a cast makes.
            if not name.endswith("_") and not name.startswith("__"):
                index.setdefault(name, []).append(function)
    return index


def _resolve(name: str, known: dict[str, list[Callable[..., Any]]]) -> str:
    for start in ("aten::", "torch.ops.aten.", "aten."):
        if name.startswith(start):
            short = name.removeprefix(start).split(".")[0]
            return _alias(_INTERNAL_NAMES.get(short, short), known)
    for start, replacement in _PREFIXES:
        if name.startswith(start):
            return _alias(replacement + name.removeprefix(start), known)
    return _alias(name, known)


def _alias(name: str, known: dict[str, list[Callable[..., Any]]]) -> str:
    without = name.removeprefix("special_")
    if name not in _ALIASES and without != name and (without in known or without in _ALIASES):
        name = without
    while name in _ALIASES:
        name = _ALIASES[name]
    return name
