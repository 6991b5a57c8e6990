"""`InfCLModelParallelStrategy` on two gloo ranks, against one process in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_mp import (
    ContrastiveLoss,
    InfCLModelParallelStrategy,
    ModelParallelBalancedAMP,
)
from tests.processes import run_ranks
from tests.quiet import parameters_of
from tests.reference.contrastive import relative_error
from tests.strategies.models import TinyCLIP, loader, make_trainer

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RANKS, STEPS, BATCH, ROWS = 2, 2, 24, 5
SHARES = {"equal": [12, 12], "unequal": [15, 9]}


class Scatters(TorchDispatchMode):
    """Counts reduce-scatters of gradients."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.count += "reduce_scatter" in function._schema.name
        return function(*args, **(kwargs or {}))


class Towers(nn.Module):
    """Both towers in one sharded module, called through its methods."""

    def __init__(self, visual: nn.Module, text: nn.Module) -> None:
        super().__init__()
        self.visual, self.text = visual, text

    def encode_image(self, x: Tensor) -> Tensor:
        return self.visual(x)

    def encode_text(self, x: Tensor) -> Tensor:
        return self.text(x)


class Model(TinyCLIP):
    """A float64 model that shards itself if there is a mesh, and records collectives per step."""

    def __init__(self, layout: str = "towers", **kwargs: Any) -> None:
        super().__init__(dropout=0.0, **kwargs)
        self.double()
        self.layout = layout
        self.loss = ContrastiveLoss(exchange="ring")  # slices would use reduce-scatter, too
        self.counts: list[int] = []
        if layout == "methods":
            self.both = Towers(self.visual, self.text)
            del self.visual, self.text

    def encode_image(self, x: Tensor) -> Tensor:
        return self.visual(x)

    def encode_text(self, x: Tensor) -> Tensor:
        return self.text(x)

    def features(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        if self.layout == "methods":
            self.visual, self.text = self.both.encode_image, self.both.encode_text
        if self.layout != "own methods":
            return super().features(batch)
        image, text = self.head(self.encode_image(batch[0])), self.encode_text(batch[1])
        return F.normalize(image, dim=-1), F.normalize(text, dim=-1)

    def configure_model(self) -> None:
        if self.device_mesh is None:
            return
        plugin, mesh = self.trainer.precision_plugin, self.device_mesh["data_parallel"]
        policy = {}
        if isinstance(plugin, ModelParallelBalancedAMP):
            self.float()
            plugin.shard_fp32_modules(self, mesh)
            policy = {"mp_policy": plugin.mp_policy}
        if self.layout == "methods":
            fully_shard(self.both, mesh=mesh)
            for name in ("encode_image", "encode_text"):
                register_fsdp_forward_method(self.both, name)
            return
        for tower in (self.visual, self.text):
            if self.layout == "blocks":
                fully_shard(tower[0], mesh=mesh, **policy)
            fully_shard(tower, mesh=mesh, **policy)
        if self.layout != "plain head":
            fully_shard(self.head, mesh=mesh, **policy)

    def on_train_start(self) -> None:
        self.counting = Scatters()
        if self.global_rank == 0:  # one rank suffices, and tracing operations is slow
            self.counting.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(self.counting.count)

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            self.counting.__exit__(None, None, None)
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]
        self.end = torch.cat([p.detach().double().flatten() for p in full])


def batches(rows: slice = slice(None), dtype: torch.dtype = torch.float64) -> DataLoader:
    whole = loader(count=BATCH * STEPS, batch_size=BATCH)
    parts = [[part[rows].to(dtype) for part in batch] for batch in whole]
    return DataLoader(parts, batch_size=None)


CASES: dict[str, dict[str, Any]] = {
    "equal": {},
    "unequal": {"shares": "unequal"},
    "blocks": {"model": {"layout": "blocks"}},
    "plain head": {"model": {"layout": "plain head"}},
    "methods": {
        "model": {"layout": "methods"},
        "strategy": {"towers": ["both.encode_image", "both.encode_text"]},
    },
    "own methods": {
        "model": {"layout": "own methods"},
        "strategy": {"towers": ["encode_image", "encode_text"]},
    },
    "manual": {"model": {"automatic": False}},
    "accumulated": {"trainer": {"accumulate_grad_batches": 2}},
    "norm": {"trainer": {"gradient_clip_val": 0.07}},
    "value": {"trainer": {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}},
    "host": {"strategy": {"offload": "host"}},
    "auto": {"strategy": {"micro_batch_size": "auto", "activation_bytes": 2**12}},
}


def _train(rank: int, names: list[str]) -> dict[str, dict[str, Any]]:
    results = {}
    for name in names:
        case = CASES[name]
        sizes = SHARES[case.get("shares", "equal")]
        rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        model = Model(**case.get("model", {}))
        strategy = InfCLModelParallelStrategy(
            **{"micro_batch_size": ROWS, **case.get("strategy", {})}
        )
        trainer = make_trainer(
            strategy,
            devices=RANKS,
            max_epochs=1,
            use_distributed_sampler=False,
            **case.get("trainer", {}),
        )
        trainer.fit(model, batches(rows))
        results[name] = {
            "end": model.end,
            "losses": model.losses,
            "counts": model.counts,
            "sizes": strategy._cache.micro_batch_sizes,
        }
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    first, second = run_ranks(_train, RANKS, list(CASES))
    for name, result in first.items():
        assert torch.equal(result["end"], second[name]["end"]), name
    return first


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_like_one_process(results: Any, name: str) -> None:
    case, model = CASES[name], TinyCLIP(dropout=0.0, **_without_layout(CASES[name]))
    model.double()
    start = parameters_of(model)
    trainer = make_trainer("auto", max_epochs=1, **case.get("trainer", {}))
    trainer.fit(model, batches())
    expected, value = parameters_of(model), results[name]["end"]
    if name == "methods":  # its towers come after the head
        assert sorted(value.tolist()) == pytest.approx(sorted(expected.tolist()), rel=1e-9)
    else:
        # float64 sums of some hundred terms in a different order.
        assert relative_error(value, expected) < 1e-12
    assert relative_error(expected, start) > 1e-3
    assert results[name]["losses"] == pytest.approx(model.losses, rel=1e-12)


def _without_layout(case: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in case.get("model", {}).items() if k != "layout"}


def test_gradients_are_reduce_scattered_once_per_step(results: Any) -> None:
    # One per group of parameters: two towers and the head.
    groups = {"equal": 3, "plain head": 2, "blocks": 5, "methods": 1, "own methods": 3}
    for name, each in groups.items():
        counts = results[name]["counts"]
        assert counts == [each * (step + 1) for step in range(STEPS)], name
    steps = [3 * ((step + 1) // 2) for step in range(STEPS)]
    assert results["accumulated"]["counts"] == steps


def test_auto_size_is_found_in_step_with_the_other_rank(results: Any) -> None:
    sizes = results["auto"]["sizes"]
    assert set(sizes) == {"visual", "text"}
    assert all(1 <= rows < 12 for rows in sizes.values())
