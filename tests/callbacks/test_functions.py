"""Measurements of functions that modules call: entropy, log Z, and the tokens of experts."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_mp import BalancedAMP
from lightning_mp.callbacks import ActivationRangeMonitor
from lightning_mp.callbacks._rules.outputs import ExpertRule, LogitRule
from lightning_mp.callbacks._step.functions import FunctionMode, entropy_share
from tests.monitors.planted_outputs import Sparse
from tests.monitors.running import Learner
from tests.precision.models import make_trainer


def test_entropy_share_over_unmasked_keys_equals_a_float64_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 4, 7, 9, generator=generator)
    hidden = torch.ones(7, 9, dtype=torch.bool).triu(1)
    hidden[0] = True  # a fully masked row
    share = entropy_share(logits.masked_fill(hidden, -torch.inf))
    rows = []
    for row in range(7):
        seen = logits[:, :, row, ~hidden[row]].double()
        if seen.shape[-1] > 1:
            p = seen.softmax(dim=-1)
            rows.append((-(p * p.log()).sum(dim=-1) / math.log(seen.shape[-1])).flatten())
    # Sums of 9 numbers in fp32, and a mean of 40.
    assert float(share) == pytest.approx(float(torch.cat(rows).mean()), rel=50 * 2**-23)


@pytest.mark.parametrize(("scale", "share"), [(0.0, 1.0), (1e4, 0.0)])
def test_entropy_share_is_1_for_uniform_and_0_for_one_hot_softmax(
    scale: float, share: float
) -> None:
    assert float(entropy_share(scale * torch.arange(9.0)[None])) == share


def seen_in(module: nn.Module, *args: Tensor, **callers: nn.Module) -> list[tuple[str, Any]]:
    seen: list[tuple[str, Any]] = []
    modules = callers or {name: each for name, each in module.named_modules() if name}
    with FunctionMode(modules, lambda *call: seen.append(call)):
        module(*args)
    return [(name, found) for name, found in seen if found]


class Loss(nn.Module):
    def forward(self, *args: Tensor) -> Tensor:
        return F.cross_entropy(*args)


def test_log_z_of_a_cross_entropy_of_any_shape_equals_a_float64_reference() -> None:
    logits_BCL = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    target = torch.zeros(2, 3, dtype=torch.long)
    ((_, found),) = seen_in(loss := Loss(), logits_BCL, target, loss=loss)
    log_z = logits_BCL.double().logsumexp(dim=1)
    expected = float(log_z.square().mean().sqrt())
    assert float(found["output_log_z"]) == pytest.approx(expected, rel=20 * 2**-23)
    assert float(found["output_logit"].abs().max()) == float(logits_BCL.abs().max())


class Block(nn.Module):
    """A router beside its experts, as in Hugging Face's mixtures of experts.

    Args:
        experts: As a list of modules, or stacked in one parameter.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = Gate(), experts

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(dim=-1).topk(2, dim=-1).values


class Stacked(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(count, 2, 2))


@pytest.mark.parametrize(
    "experts", [nn.ModuleList(nn.Linear(2, 2) for _ in range(4)), Stacked(4)], ids=["list", "one"]
)
def test_router_counts_the_tokens_of_each_expert(experts: nn.Module) -> None:
    x = torch.tensor([[9.0, 8, 0, 0], [9, 0, 8, 0], [0, 9, 8, 0]])
    found = seen_in(nn.Sequential(Block(experts)), x)
    assert [(name, each["expert"].tolist()) for name, each in found] == [
        ("0.gate", [[2.0, 2.0, 2.0, 0.0], [3.0] * 4])
    ]


class Call(nn.Module):
    """A module with eight experts that calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.experts = function, Stacked(8)

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


@pytest.mark.parametrize(
    ("named", "placed"),
    [
        (lambda x: torch.softmax(input=x, dim=-1), lambda x: torch.softmax(x, -1)),
        (lambda x: torch.topk(input=x, k=2, dim=-1), lambda x: x.topk(2)),
        (lambda x: torch.argmax(input=x, dim=-1), lambda x: x.argmax(-1)),
        (
            lambda x: F.scaled_dot_product_attention(query=x, key=x, value=x),
            lambda x: F.scaled_dot_product_attention(x, x, x),
        ),
    ],
    ids=["softmax", "topk", "argmax", "attention"],
)
def test_arguments_may_be_passed_by_name(named: Any, placed: Any) -> None:
    x = torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    found, expected = (seen_in(call := Call(f), x, call=call) for f in (named, placed))
    assert [name for name, _ in expected] == [name for name, _ in found] == ["call"]
    torch.testing.assert_close(found[0][1], expected[0][1], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_without_rows_or_of_nested_tensors_is_not_measured() -> None:
    x = torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    samples = [x[0].transpose(0, 1), x[1, :, :3].transpose(0, 1)]
    rows = torch.nested.nested_tensor(samples, layout=torch.jagged).transpose(1, 2)
    for inputs in ([x[:, :, :0], x, x], [rows, rows, rows]):
        call = Call(F.scaled_dot_product_attention)
        assert seen_in(call, *inputs, call=call) == []


def test_shards_of_a_router_count_their_own_tokens() -> None:
    x = torch.eye(8)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        shard = DTensor.from_local(x[:4], init_device_mesh("cpu", (2,)), [Shard(0)])
        ((_, found),) = seen_in(call := Call(lambda x: x.topk(1)), shard, call=call)
    finally:
        dist.destroy_process_group()
    assert found["expert"].tolist() == [[1.0] * 4 + [0.0] * 4, [4.0] * 8]


def test_topk_over_classes_is_not_a_router() -> None:
    assert seen_in(nn.Sequential(Block(nn.Linear(4, 4))), torch.eye(4)) == []


def test_experts_are_judged_from_500_tokens_per_expert_on() -> None:
    rule = ExpertRule()
    # Eight experts, 640 tokens: an even share of 80 tokens reaches 500 in the seventh sample.
    sample = [0.0, 160.0, *6 * [80.0]]
    found = [rule.judge("gate", 640.0, sample) for _ in range(7)]
    assert [len(each) for each in found] == [0] * 6 + [1]
    assert (found[-1][0].kind, found[-1][0].tensor) == ("expert_dead", "gate[0]")


@pytest.mark.parametrize(("count", "kinds"), [(8, ["expert_dead", "expert_overloaded"]), (2, [])])
def test_expert_of_all_tokens_is_overloaded_unless_tokens_use_half_of_the_experts(
    count: int, kinds: list[str]
) -> None:
    rule = ExpertRule()
    chosen = [6000.0, *(count - 1) * [0.0 if count > 2 else 5000.0]]
    found = [rule.judge("gate", 6000.0, chosen) for _ in range(5)][-1]
    assert [verdict.kind for verdict in found] == kinds
    # The count of starved experts belongs to the alarm about them.
    assert ["count" in verdict.numbers for verdict in found] == [True, False][: len(kinds)]


def test_large_but_constant_log_z_is_no_drift() -> None:
    rule = LogitRule()
    found = [rule.judge("output_log_z", "head", step, 60.0 + step / 10) for step in range(40)]
    assert found == [None] * 40


def test_slow_growth_of_logits_is_relative_to_the_first_samples() -> None:
    rule = LogitRule()
    found = [rule.judge("output_logit", "head", step, 10 * 1.02**step) for step in range(200)]
    alarms = [(step, verdict) for step, verdict in enumerate(found) if verdict is not None]
    step, verdict = alarms[0]
    usual = 10 * 1.02**2  # the median of the first five
    assert verdict.numbers["usual"] == pytest.approx(usual)
    assert verdict.threshold == pytest.approx(8 * usual)
    assert 1.02 ** (step - 5) < 8 * 1.02**2 < 1.02**step


class Mixture(Learner):
    def __init__(self) -> None:
        super().__init__(12)
        self.network = Sparse()

    def batch(self, index: int, generator: torch.Generator) -> list[Tensor]:
        return [torch.randn(64, 8, generator=generator)]

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.network(batch[0]).square().mean()


def test_monitor_records_the_load_of_each_expert() -> None:
    monitor = ActivationRangeMonitor(every_n_steps=4)
    make_trainer(None, callbacks=[monitor]).fit(Mixture())
    heat = monitor.history.maps["expert_load"]
    assert heat["names"] == [f"network[{index}]" for index in range(8)]
    for _, loads in heat["columns"]:
        assert sum(loads) == pytest.approx(8)
    highest = dict(monitor.history.curves["expert_load_max"])
    assert highest == {step: max(loads) for step, loads in heat["columns"]}


class Attending(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.MultiheadAttention(8, 2)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.network(*3 * batch)[0].square().mean()


def test_attention_of_a_model_with_a_shared_module_is_measured() -> None:
    monitor, model = ActivationRangeMonitor(every_n_steps=4), Attending()
    shared = nn.LayerNorm(8)  # as the embedding of T5, which three modules hold
    model.first, model.last = nn.Sequential(shared), nn.Sequential(shared)
    make_trainer(None, callbacks=[monitor]).fit(model)
    assert monitor.history.maps["attention_logit"]["names"] == ["network"]


@pytest.mark.parametrize("half", [None, "bf16"])
def test_attention_that_returns_its_weights_is_measured_under_the_op_policy_too(
    half: str | None,
) -> None:
    monitor = ActivationRangeMonitor(every_n_steps=4)
    plugin = BalancedAMP(half=half) if half else None
    make_trainer(plugin, callbacks=[monitor]).fit(Attending())
    assert monitor.history.maps["attention_logit"]["names"] == ["network"]


def test_state_of_version_0_1_without_rules_for_functions_is_loaded() -> None:
    """Version 0.1 stored the states of its rules beside `samples`, a number."""
    monitor, again = (ActivationRangeMonitor(every_n_steps=4) for _ in range(2))
    make_trainer(None, callbacks=[monitor]).fit(Attending())
    state = monitor.state_dict()
    own = {name: state.pop(name) for name in [*state] if name.startswith("_")}
    again.load_state_dict(state | own["_rule"] | own["_growth"])
    assert again.samples == monitor.samples > 0
    make_trainer(None, callbacks=[again]).fit(Attending())
    assert "attention_logit" in again.history.maps
