"""`InfClamp` replaces infinite activations by half the maximum and leaves every other bit."""

import copy
import dataclasses
import io
import math
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.precision.inf_clamp import InfClamp, _top_before
from tests.precision.overflowing import Block, batch, overflowing

INF, NAN = math.inf, math.nan
LIMIT = 32752.0
Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Output:
    states: Tensor
    hidden: tuple[Tensor, ...]
    length: int


def clamped_identity(**arguments: Any) -> tuple[nn.Module, InfClamp]:
    module = nn.Identity()
    return module, InfClamp(["Identity"], **arguments).attach(module)


# --- values --------------------------------------------------------------------------------------


def test_clamp_replaces_inf_by_half_the_maximum_and_keeps_every_other_bit() -> None:
    module, clamp = clamped_identity()
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    result = module(every)
    is_inf = every.isinf()
    assert result[is_inf].tolist() == [LIMIT, -LIMIT]
    assert torch.equal(result[~is_inf].view(torch.int16), every[~is_inf].view(torch.int16))
    assert every.isinf().sum() == 2  # the input is not changed
    assert clamp.counts().tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_clamp_of_other_dtypes_returns_the_same_tensor(dtype: torch.dtype) -> None:
    module, clamp = clamped_identity()
    value = torch.ones(3, dtype=dtype) if dtype is torch.int64 else torch.tensor([INF, -INF, NAN])
    value = value.to(dtype)
    assert module(value) is value
    assert clamp.counts().tolist() == [0]


def test_clamp_gradient_is_zero_or_straight_through_even_if_infinite() -> None:
    values = torch.tensor([INF, 2.0, -INF, NAN, INF]).half()
    incoming = torch.tensor([3.0, 5.0, 7.0, 11.0, INF]).half()
    for gradient, expected in (
        ("zero", [0, 5, 0, 11, 0]),
        ("straight_through", [3, 5, 7, 11, INF]),
    ):
        module, _ = clamped_identity(gradient=gradient)
        leaf = values.clone().requires_grad_()
        module(leaf).backward(incoming)
        assert leaf.grad.tolist() == expected


@pytest.mark.parametrize(("gradient", "expected"), [("zero", 105), ("straight_through", 0)])
def test_clamp_saves_at_most_one_byte_per_element(gradient: str, expected: int) -> None:
    module, _ = clamped_identity(gradient=gradient)
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        module(torch.randn(15, 7).half().requires_grad_())
    assert sum(tensor.numel() * tensor.element_size() for tensor in saved) == expected


def test_clamp_makes_a_residual_stream_of_several_blocks_finite_forward_and_backward() -> None:
    for gradient in ("zero", "straight_through"):
        model = overflowing(6)
        assert model(batch()).isnan().all()
        InfClamp(gradient=gradient).attach(model)
        result = model(batch())
        assert result.isfinite().all()
        (result.float().mean() * 2**-12).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), name


def test_inf_without_the_clamp_makes_only_its_token_nan() -> None:
    model, x = overflowing(1).half(), batch()
    model[0].fc2.weight.data.zero_()
    x[3, 2] = INF
    result = model[0].norm(x)
    assert result[3].isnan().all()
    assert result[[0, 1, 2, 4]].isfinite().all()


def test_auto_in_fp16_clamps_the_sum_that_a_block_returns() -> None:
    model = nn.Sequential(Block()).half()
    model[0].fc2.weight.data.zero_()
    model[0].fc2.bias.data.fill_(40000)
    clamp = InfClamp().attach(model)
    x = torch.linspace(-1, 1, 8).half()[None] + 40000
    assert model(x).tolist() == [[LIMIT] * 8]
    assert clamp.counted() == {"0": 8, "0.norm": 0, "0.fc2": 0}


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9])
def test_value_before_dropout_is_the_largest_that_dropout_keeps_finite(p: float) -> None:
    top = _top_before(p)
    finite = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)  # in ascending order
    torch.manual_seed(0)
    kept = nn.functional.dropout(finite.expand(200, -1).contiguous(), p).amax(dim=0)
    at = int((finite == top).nonzero())
    assert kept[: at + 1].isfinite().all()
    assert finite[at] == top
    assert kept[at + 3 :].isinf().all()  # fp16 rounds the factor, which differs by device
    assert _top_before(0.1) == 58944 - 32


# --- outputs of many kinds ---------------------------------------------------------------------


def test_clamp_of_a_named_module_applies_to_tensors_in_any_container() -> None:
    module, clamp = clamped_identity()
    inf, mask, other = torch.tensor([INF]).half(), torch.tensor([-INF]), object()
    for value in (
        (inf, mask, other, None, 3),
        [inf, mask],
        Pair(inf, (inf,)),
        {"a": inf, "b": [inf], "c": "text"},
        OrderedDict(a=inf),
        Output(inf, (inf, mask), 3),
    ):
        result = module(value)
        assert type(result) is type(value)
        tensors = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        assert [t.item() for t in tensors] == [
            LIMIT if t.dtype is torch.float16 else -INF for t in tensors
        ]
        assert [leaf for leaf in leaves(result) if not isinstance(leaf, Tensor)] == [
            leaf for leaf in leaves(value) if not isinstance(leaf, Tensor)
        ]
    assert inf.isinf()
    assert clamp.counts().tolist() == [9]


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    elif dataclasses.is_dataclass(value):
        value = tuple(vars(value).values())
    if isinstance(value, (tuple, list)):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]


def test_auto_clamps_the_first_output_and_no_mask() -> None:
    class WithMask(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), torch.tensor([-INF]).half()

    model = nn.Sequential(WithMask()).half()
    model[0].fc2.bias.data.fill_(INF)
    InfClamp().attach(model)
    states, mask = model(batch())
    assert states.isfinite().all()
    assert mask.tolist() == [-INF]


def test_auto_clamps_a_norm_input_passed_by_keyword() -> None:
    model = overflowing(1)
    InfClamp().attach(model)
    assert model[0].norm(input=torch.full((2, 8), INF).half()).isfinite().all()


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["1.fc2"], ("1.fc2",)),
        (["1"], ("1",)),  # without its children
        (["Linear"], ("0.fc2", "1.fc2")),
        (["Block"], ("0", "1")),
        (["Block", "0.fc2"], ("0", "0.fc2", "1")),
        (["norm"], ("0.norm", "1.norm")),
        (["auto"], ("0", "0.norm", "0.fc2", "1", "1.norm", "1.fc2")),
        ([], ()),
    ],
    ids=str,
)
def test_names_select_modules_without_their_children(
    names: list[str], expected: tuple[str]
) -> None:
    assert InfClamp(names).attach(overflowing()).names == expected


def test_auto_without_a_residual_stream_clamps_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    clamp = InfClamp().attach(model)
    assert clamp.names == ()
    assert clamp.counts().tolist() == []
    assert clamp.counts().dtype is torch.int64
    assert clamp.counted() == {}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)


def test_attach_with_an_unknown_name_lists_similar_names_and_adds_no_hook() -> None:
    model = overflowing()
    with pytest.raises(ValueError, match=r"Passed the module 'fc_2'.*fc2"):
        InfClamp(["auto", "fc_2"]).attach(model)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": "auto"}, r"InfClamp\(modules='auto'\).*Pass `modules=\['auto'\]`"),
        ({"modules": [3]}, r"InfClamp\(modules=\[3\]\).*list of names"),
        ({"gradient": "ste"}, r"InfClamp\(gradient='ste'\).*'straight_through'"),
    ],
)
def test_invalid_argument_raises(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InfClamp(**arguments)


# --- copies, compiled models, removal ------------------------------------------------------------


def test_deep_copy_of_a_clamped_model_clamps_without_counting() -> None:
    model = overflowing()
    clamp = InfClamp().attach(model)
    twin = copy.deepcopy(model)
    expected = model(batch())
    counts = clamp.counts()
    assert torch.equal(twin(batch()), expected)
    assert torch.equal(copy.deepcopy(twin)(batch()), expected)
    assert torch.equal(clamp.counts(), counts)
    clamp.remove()
    assert twin(batch()).isfinite().all()
    assert model(batch()).isnan().all()


def test_deep_copy_clamps_below_dropout_and_first_outputs_as_the_model_does() -> None:
    class WithDropout(Block):
        dropout = 0.0

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), torch.tensor([-INF]).half()

    model = nn.Sequential(WithDropout()).half()
    model[0].dropout = 0.1
    model[0].fc2.bias.data.fill_(60000)
    InfClamp().attach(model)
    twin = copy.deepcopy(model)
    x = batch()
    assert torch.equal(twin(x)[0], model(x)[0])
    assert twin[0].fc2(x).max() == LIMIT
    assert twin(x)[1].tolist() == [-INF]
    assert twin.eval()[0].fc2(x).max() > LIMIT  # no dropout follows


def test_pickled_clamped_model_clamps() -> None:
    model = overflowing()
    InfClamp().attach(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)(batch()).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("compile_first", [False, True])
def test_compiled_model_clamps_and_counts_in_one_graph(compile_first: bool) -> None:
    torch._dynamo.reset()
    model = overflowing()
    clamp = InfClamp()
    if compile_first:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        clamp.attach(compiled)
    else:
        clamp.attach(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    result = compiled(batch())
    result.float().mean().backward()
    counts = clamp.counts()
    clamp.reset_counts()
    expected = model(batch())
    assert torch.equal(result, expected)
    assert torch.equal(clamp.counts(), counts)
    assert counts.sum() > 0
    assert clamp.names == ("0", "0.norm", "0.fc2", "1", "1.norm", "1.fc2")


def test_removed_clamp_leaves_no_hook_and_keeps_its_counts() -> None:
    model = overflowing()
    clamp = InfClamp().attach(model)
    model(batch())
    counted = clamp.counted()
    clamp.remove()
    clamp.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model(batch()).isnan().all()
    assert clamp.counted() == counted
    assert sum(counted.values()) > 0


def test_attach_to_another_model_detaches_from_the_first() -> None:
    first, second = overflowing(), overflowing()
    clamp = InfClamp().attach(first)
    clamp.attach(second)
    assert first(batch()).isnan().all()
    assert second(batch()).isfinite().all()
