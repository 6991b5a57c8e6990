"""On several ranks, `TensorCollector` writes the same as one process with the whole model."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from lightning_mp import FSDPBalancedAMP, ModelParallelBalancedAMP, TensorCollector
from tests.callbacks.models import Watched, watch
from tests.callbacks.test_tensor_collector import REL, samples_of, values
from tests.precision.test_fsdp import SCALE, _Model, _SelfSharding, fit_on_ranks
from tests.processes import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class OnRank(Watched):
    """Has different data on each rank, and stores outputs and gradients."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hook = self.network[2].register_forward_hook(self.keep)
        loss = super().training_step(batch, batch_idx + 100 * self.global_rank)
        hook.remove()
        return loss

    def keep(self, module: Any, inputs: Any, output: Tensor) -> None:
        self.output = output.detach()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.gradient = self.network[2].weight.grad.clone()


def _train(rank: int, folder: str) -> dict[str, Any]:
    collector = TensorCollector(
        include=["network.2*"], collect=["gradients", "weights", "outputs"], dirpath=f"{folder}/t"
    )
    model = OnRank(steps=1)
    watch(model, [collector], strategy=DDPStrategy(), devices=2)
    return {"output": model.output, "gradient": model.gradient, "folder": str(collector.folder)}


def test_collector_on_two_ranks_merges_outputs_and_writes_gradients_once() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(_train, 2, folder)
        assert (first["folder"], second["folder"]) == (f"{folder}/t", "None")  # rank zero writes
        (sample,) = samples_of(Path(folder, "t")).values()
    assert torch.equal(first["gradient"], second["gradient"])
    assert not torch.equal(first["output"], second["output"])
    outputs = torch.cat([first["output"], second["output"]])
    norms, counts = values(sample, "norm"), values(sample, "count")
    assert counts["outputs/network.2"] == outputs.numel()
    assert norms["outputs/network.2"] == pytest.approx(float(outputs.double().norm()), rel=REL)
    gradient = first["gradient"].double()
    assert counts["gradients/network.2.weight"] == gradient.numel()
    assert norms["gradients/network.2.weight"] == pytest.approx(float(gradient.norm()), rel=REL)


KINDS: dict[str, tuple[Any, Any]] = {
    "fsdp": (_Model, FSDPBalancedAMP),
    "fsdp2": (_SelfSharding, ModelParallelBalancedAMP),
}


def _train_shards(rank: int, kind: str, folder: str) -> list[dict[str, float]]:
    model, plugin = KINDS[kind]
    made, squares = model(), []

    def keep(optimizer: Optimizer) -> None:
        named = {name: p.detach() for name, p in made.named_parameters()}
        local = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in named.items()}
        squares.append({n: float(p.double().square().sum()) for n, p in local.items()})

    made.configure_optimizers = lambda: AdamW(made.parameters(), lr=1e-3)
    made.on_before_optimizer_step = keep
    collector = TensorCollector(
        collect=["weights", "gradients", "optimizer_state", "outputs"],
        every_n_steps=1,
        dirpath=f"{folder}/t",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_on_ranks(made, plugin(loss_scale=SCALE), rank, max_epochs=1, callbacks=[collector])
    return squares


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("fsdp", marks=pytest.mark.sweep)])
def test_collector_of_shards_writes_norms_of_whole_tensors(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(_train_shards, 2, kind, folder)
        samples = samples_of(Path(folder, "t"))
    assert len(samples) > 1
    for step, sample in samples.items():
        norms = values(sample, "norm")
        parts = [rank[step] for rank in ranks]
        for name in parts[0]:
            plain = name.replace("_fsdp_wrapped_module.", "")
            whole = sum(part[name] for part in parts) ** 0.5
            assert norms[f"weights/{plain}"] == pytest.approx(whole, rel=REL, nan_ok=True)
        kinds = {key.partition("/")[0] for key in norms}
        assert kinds >= {"weights", "gradients", "outputs"}
        assert ("optimizer_state" in kinds) == (step > 0)
