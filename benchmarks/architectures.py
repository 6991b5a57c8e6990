"""Trains the architectures of transformers at toy size, and compares with `32-true`.

    python benchmarks/architectures.py --names bert vit

Each architecture of `transformers.AutoModel` is made small, and tried with inputs of texts, images
and sounds; those that accept none of the inputs are left out. Three steps of SGD minimize a random
projection of all outputs. A row holds

- `monitors`: `equal` if the monitors change no bit of the weights and raise no alarm,
- of each precision plugin, |w - w'| / |w' - w_0|: the distance of the trained weights w from those
  of `32-true`, w', relative to the way that w' went from the start,
- `cache`: the relative difference of the gradients of `GradientCache` with one row per micro-batch
  from those of the whole batch, in float64.
"""

# ruff: noqa: D102
import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from lightning_mp import BalancedAMP, GradientCache, PureFP16
from lightning_mp._nested import tensors_in
from lightning_mp.callbacks import (
    ActivationRangeMonitor,
    GradientUnderflowMonitor,
    LossScaleMonitor,
    NonFiniteLocator,
    ParameterMonitor,
    SpikeGuard,
)
from lightning_mp.plan.table import aligned
from papers.machine import cpu_name

STEPS, ROWS = 3, 5
MOST = 4_000_000  # parameters
# Sizes by the ends of the names of a configuration's fields; the first match counts.
SIZES = {
    ("vocab_size",): 99,
    ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"): 32,
    ("word_embed_proj_dim", "moe_intermediate_size", "shared_expert_intermediate_size"): 32,
    ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "mlp_dim"): 64,
    ("max_position_embeddings", "n_positions"): 64,
    ("max_source_positions",): 32,
    ("num_key_value_heads", "num_experts_per_tok", "type_vocab_size"): 2,
    ("hidden_layers", "n_layer", "n_layers", "num_layers", "coder_layers"): 2,
    ("attention_heads", "n_head", "n_heads", "num_heads"): 4,
    ("num_experts", "local_experts", "routed_experts", "window_size", "state_size"): 4,
    ("qk_rope_head_dim", "qk_nope_head_dim"): 4,
    ("head_dim", "d_kv", "lora_rank", "rotary_dim", "patch_size"): 8,
    ("projection_dim", "num_mel_bins"): 16,
    ("image_size",): 32,
    ("pad_token_id",): 0,
    ("bos_token_id", "decoder_start_token_id"): 1,
    ("eos_token_id",): 2,
}
PLUGINS: dict[str, Callable[[], Any]] = {
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
    "BalancedAMP bf16": lambda: BalancedAMP(half="bf16"),
    "BalancedAMP fp16": lambda: BalancedAMP(half="fp16"),
    "PureFP16": lambda: PureFP16(),
}


def shrink(config: Any, depth: int = 0) -> Any:
    """Give a configuration and the configurations inside it small sizes, and no dropout."""
    for name, value in [*vars(config).items()]:
        size = next((s for ends, s in SIZES.items() if name.endswith(ends)), None)
        if isinstance(value, PretrainedConfig) and depth < 3:
            shrink(value, depth + 1)
        elif type(value) is int and size is not None:
            setattr(config, name, size)
        elif type(value) is float and "drop" in name:
            setattr(config, name, 0.0)
        elif name == "layer_types" and value:
            setattr(config, name, value[:2])
    return config


def made(name: str) -> nn.Module:
    """Return a small model of an architecture with the same random weights in each call."""
    config = shrink(transformers.AutoConfig.for_model(name))
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModel.from_config(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def candidates() -> Iterator[dict[str, Tensor]]:
    """Yield inputs of texts, images and sounds."""
    generator = torch.Generator().manual_seed(0)

    def words() -> Tensor:
        return torch.randint(3, 90, (ROWS, 8), generator=generator)

    def values(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, generator=generator)

    yield {"input_ids": words()}
    yield {"input_ids": words(), "decoder_input_ids": words()}
    yield {"pixel_values": values(3, 32, 32)}
    yield {"input_ids": words(), "pixel_values": values(3, 32, 32)}
    yield {"input_values": values(2000)}
    yield {"input_features": values(16, 64), "decoder_input_ids": words()}
    yield {"input_features": values(64, 16)}
    yield {"pixel_values": values(3, 64, 64)}
    yield {"pixel_values": values(2, 3, 32, 32)}


def floats(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's output."""
    return [each for each in tensors_in(dict(output)) if each.is_floating_point()]


def projected(outputs: list[Tensor]) -> Tensor:
    """Return a random projection, whose gradient does not vanish behind a norm."""
    generator = torch.Generator().manual_seed(1)

    def along(output: Tensor) -> Tensor:
        # `PureFP16` changes the default dtype in a step.
        direction = torch.randn(output.shape, generator=generator, dtype=torch.float32)
        return (output * direction).mean()

    return torch.stack([along(each) for each in outputs]).sum()


def inputs_of(name: str) -> dict[str, Tensor] | None:
    """Return the first inputs that an architecture accepts, if any."""
    try:
        model = made(name)
    except Exception:  # needs a backbone, a tokenizer or other sizes
        return None
    if sum(p.numel() for p in model.parameters()) > MOST:
        return None
    for inputs in candidates():
        try:
            loss = projected(floats(model(**inputs)))
            loss.backward()
        except Exception:  # the inputs of another modality
            continue
        if loss.isfinite() and all(p.grad.isfinite().all() for p in _trained(model)):
            return inputs
    return None


def _trained(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.grad is not None]


class Task(pl.LightningModule):
    """Trains an architecture.

    Args:
        name: Name of the architecture.
        inputs: The batch of each step.
    """

    def __init__(self, name: str, inputs: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.inputs = made(name), inputs

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return projected([each.float() for each in floats(self.model(**batch))])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        # Steps that a loss scaler skips do not count.
        batches: Any = [self.inputs] * 30 * STEPS
        return DataLoader(batches, batch_size=None)


class Weights(pl.Callback):
    """Keeps the weights at the end of training; those of `PureFP16` with their lost bits."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plugin = trainer.precision_plugin
        if isinstance(plugin, PureFP16):
            with plugin.exposed(pl_module):
                self.flat = _flat(pl_module)
        else:
            self.flat = _flat(pl_module)


def _flat(module: nn.Module) -> Tensor:
    trained = (p for p in module.parameters() if p.requires_grad)
    return torch.cat([p.detach().double().flatten() for p in trained])


def trained(task: Task, plugin: Any = None, monitors: tuple[Any, ...] = ()) -> Tensor:
    """Return the weights after training."""
    weights = Weights()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*monitors, weights],
        plugins=plugin,
    )  # fmt: skip
    torch.manual_seed(2)
    trainer.fit(task)
    return weights.flat


def watched(name: str, inputs: dict[str, Tensor], expected: Tensor) -> str:
    """Return whether monitors change a bit or raise an alarm."""
    monitors: tuple[Any, ...] = (
        ActivationRangeMonitor(every_n_steps=1, backward=True),
        GradientUnderflowMonitor(every_n_steps=1),
        LossScaleMonitor(),
        NonFiniteLocator(),
        ParameterMonitor(),
        SpikeGuard(),
    )
    if not torch.equal(trained(Task(name, inputs), None, monitors), expected):
        return "differs"
    raised = [a.kind for each in monitors for a in each.alarms if a.severity != "info"]
    return raised[0] if raised else "equal"


class Tower(nn.Module):
    """Returns the first output that has the rows of the batch, and is no table of pairs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        rows = len(next(iter(inputs.values())))
        found = (x for x in floats(self.model(**inputs)) if x.ndim > 1 and len(x) == rows)
        return next(x for x in found if x.shape[1:] != (rows,))


def cached(name: str, inputs: Mapping[str, Tensor]) -> str:
    """Return the relative difference of the gradients of `GradientCache`."""
    holder = nn.ModuleDict({"tower": Tower(made(name).double().eval())})
    batch = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    try:
        holder["tower"](**batch)
    except RuntimeError:  # grouped products of experts have no kernel in float64
        holder.float()
        batch = dict(inputs)

    def gradients() -> Tensor:
        holder.zero_grad()
        features = holder["tower"](**batch).flatten(1)
        # Each row depends on all others, as in a contrastive loss.
        projected([features, features @ features.mT / features.shape[1]]).backward()
        return torch.cat([p.grad.flatten() for p in _trained(holder)])

    expected = gradients()
    if not expected.isfinite().all():
        raise ValueError("the gradients of the whole batch are not finite")
    with GradientCache(micro_batch_size=1).serving(holder, ["tower"]):
        found = gradients()
    return f"{_relative(found, expected):.0e}"


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def measured(name: str, inputs: dict[str, Tensor]) -> dict[str, str]:
    """Return the row of an architecture."""
    start = _flat(Task(name, inputs))
    expected = trained(Task(name, inputs))
    way = (expected - start).norm()

    def distance(make: Callable[[], Any]) -> str:
        return f"{float((trained(Task(name, inputs), make()) - expected).norm() / way):.1e}"

    cells: dict[str, Callable[[], str]] = {"monitors": lambda: watched(name, inputs, expected)}
    cells |= {key: lambda make=make: distance(make) for key, make in PLUGINS.items()}  # type: ignore[misc]
    cells["cache"] = lambda: cached(name, inputs)
    row = {"architecture": name}
    for key, cell in cells.items():
        try:
            row[key] = cell()
        except Exception as error:
            # The colon marks a failure in `summary`.
            row[key] = f"{type(error).__name__}: {str(error).partition('. ')[0]}"[:100]
    return row


def main() -> None:
    """Print the table and its summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--names", nargs="+", choices=[*CONFIG_MAPPING_NAMES], metavar="NAME")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    names = args.names or [*CONFIG_MAPPING_NAMES]
    for name in tqdm(names, "architectures"):
        inputs = inputs_of(name)
        if inputs is not None:
            rows.append(measured(name, inputs))
    if not rows:
        raise SystemExit("No architecture accepts the inputs.")
    print("\n".join(summary(rows)), "\n")
    print(f"{len(names) - len(rows)} of {len(names)} architectures were left out.", end=" ")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {cpu_name()}.")


def summary(rows: list[dict[str, str]]) -> Iterator[str]:
    """Yield the lines of a table, the figures of each column, and the reasons of failures."""
    fails = {(row["architecture"], key) for row in rows for key in row if ":" in row[key]}
    yield from aligned(
        [
            [*rows[0]],
            *(
                ["fails" if (row["architecture"], key) in fails else row[key] for key in row]
                for row in rows
            ),
        ]
    )
    yield ""
    yield f"monitors: {sum(row['monitors'] == 'equal' for row in rows)} of {len(rows)} equal"
    for key in [*PLUGINS, "cache"]:
        numbers = sorted(float(row[key]) for row in rows if ":" not in row[key])
        high = numbers[int(0.95 * len(numbers))] if numbers else float("nan")
        yield (
            f"{key}: {len(numbers)} of {len(rows)} run; median {median(numbers or [high]):.1e}, "
            f"95% below {high:.1e}"
        )
        yield from (f"    {row['architecture']} {row[key]}" for row in rows if ":" in row[key])


if __name__ == "__main__":
    main()
