"""Errors of the strategy and their messages; nothing is trained before an error."""

import copy
from typing import Any

import jsonargparse
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import Tensor

from lightning_mp import FSDPBalancedAMP, ModelParallelBalancedAMP
from lightning_mp.contrastive._exchange.exchange import CollectiveError
from lightning_mp.strategies import InfCLModelParallelStrategy, InfCLStrategy
from tests.processes import run_ranks
from tests.quiet import parameters_of
from tests.strategies.models import TinyCLIP, loader, make_trainer


class CallsNoTower(TinyCLIP):
    """Calls towers only in the given steps."""

    def __init__(self, steps: set[int]) -> None:
        super().__init__()
        self.steps = steps

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if batch_idx in self.steps:
            return super().training_step(batch, batch_idx)
        return (self.head.weight * (1 + self.trainer.global_rank)).sum()


def test_inf_cl_first_step_without_a_tower_raises_and_trains_nothing() -> None:
    model = CallsNoTower(steps={1})
    start = copy.deepcopy(model.state_dict())
    with pytest.raises(MisconfigurationException, match=r"first training step called none"):
        make_trainer(InfCLStrategy(), max_steps=2).fit(model, loader(16, 8))
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class ProbesFirst(TinyCLIP):
    """Trains something else before it calls the towers."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.manual_backward(self.head.weight.sum())
        return super().training_step(batch, batch_idx)


def test_inf_cl_backward_before_the_first_call_of_a_tower_trains() -> None:
    trainer = make_trainer(InfCLStrategy(), max_steps=2)
    trainer.fit(ProbesFirst(automatic=False), loader(16, 8))
    assert trainer.global_step == 2


def _step_without_tower(rank: int) -> Tensor:
    model = CallsNoTower(steps={0, 2})
    make_trainer(InfCLStrategy(), devices=2, max_steps=3).fit(model, loader(48, 8))
    return parameters_of(model)


@pytest.mark.distributed
def test_inf_cl_later_step_without_a_tower_still_reduces() -> None:
    weights = run_ranks(_step_without_tower, 2)
    assert torch.equal(*weights)


class LosesItsRanks(TinyCLIP):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if batch_idx == 2:
            raise CollectiveError("A collective of `ContrastiveLoss` failed.")
        return super().training_step(batch, batch_idx)


def test_inf_cl_collective_error_names_the_training_step() -> None:
    with pytest.raises(CollectiveError, match=r"`ContrastiveLoss` failed\. .* at step 2\.$"):
        make_trainer(InfCLStrategy(), max_steps=4).fit(LosesItsRanks(), loader(64, 8))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("visuall", "'visual'"),
        ("vision", "'visual'"),
        ("feature", "'features'"),
        ("visual.17", "'visual.1'"),
        ("nothing_like_it", r"Its submodules: \['visual', 'text', 'head', 'loss'\]"),
        ("log_scale", "has no submodule or method"),
    ],
)
def test_inf_cl_unknown_tower_lists_similar_names(name: str, hint: str) -> None:
    model = TinyCLIP()
    with pytest.raises(MisconfigurationException, match=hint):
        make_trainer(InfCLStrategy(towers=[name]), max_steps=1).fit(model, loader(8, 8))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"towers": []}, r"towers=\[\]"),
        ({"towers": "visual"}, r"towers='visual'"),
        ({"towers": ["visual", "visual"]}, "list of distinct names"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"micro_batch_size": -1}, "micro_batch_size=-1"),
        ({"micro_batch_size": 2.5}, "micro_batch_size=2.5"),
        ({"micro_batch_size": True}, "micro_batch_size=True"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"offload": "disk"}, "offload='disk'"),
        ({"static_graph": True}, "static_graph"),
        ({"mixed_precision": object()}, r"mixed_precision=.*plugins=BalancedAMP\(\)"),
    ],
)
def test_inf_cl_bad_arguments_raise(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InfCLStrategy(**kwargs)


@pytest.mark.slow
def test_inf_cl_compiled_lightning_module_raises() -> None:
    model = torch.compile(TinyCLIP())
    with pytest.raises(MisconfigurationException, match=r"self.visual.compile\(\)"):
        make_trainer(InfCLStrategy(), max_steps=1).fit(model, loader(8, 8))


@pytest.mark.parametrize("plugin", [FSDPPrecision("bf16-mixed"), FSDPBalancedAMP()])
def test_inf_cl_with_a_plugin_for_sharded_models_raises_at_construction(plugin: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"Pass `BalancedAMP\(\)` instead"):
        InfCLStrategy(precision_plugin=plugin)
    with pytest.raises(MisconfigurationException, match=type(plugin).__name__):
        make_trainer(InfCLStrategy(), plugins=[plugin])
    with pytest.raises(MisconfigurationException, match="ModelParallelBalancedAMP"):
        make_trainer(InfCLStrategy(), plugins=[ModelParallelBalancedAMP()])


@pytest.mark.parametrize("strategy", [InfCLStrategy, InfCLModelParallelStrategy])
def test_help_explains_the_arguments_of_the_cache(strategy: type) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(strategy, "strategy")
    said = " ".join(parser.format_help().split())
    for words in (
        "Dotted paths of submodules or methods",
        "Rows per micro-batch",
        "Roles of the towers' arguments and outputs",
        "(type: Union[int, Literal['auto']], default: 256)",
    ):
        assert words in said
    assert "--strategy.device DEVICE" not in said
    assert "--strategy.context" not in said


def test_validation_needs_no_towers() -> None:
    strategy = InfCLStrategy(towers=["missing"])
    (logged,) = make_trainer(strategy).validate(TinyCLIP(), loader(8, 4), verbose=False)
    assert logged["val_loss"] > 0
