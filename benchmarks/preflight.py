"""Plants weaknesses in models with random weights, and prints what the preflight finds.

    python benchmarks/preflight.py

A cell holds the largest error of a gradient relative to its noise, now and in a second run with
the printed settings; the last column holds the arguments of the plugin that the settings change.
"""

# ruff: noqa: D102
import argparse
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_mp
from benchmarks._weak_models import HEALTHY, LOSSES, MODELS, WEAK, WEAK_MODELS, HalfLoss
from lightning_mp import PrecisionPreflight
from lightning_mp.precision._scaling.scaled_precision import HALVES
from papers.machine import cpu_name

STEPS = 2


class Task(pl.LightningModule):
    """Trains a model with a weakness planted behind one of its layers, or in the loss.

    Args:
        name: Name of the model.
        weak: Name of the weakness; `None` for the model as it is.
    """

    def __init__(self, name: str, weak: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        make, part = WEAK_MODELS.get(name, ({**MODELS, **HEALTHY}.get(name), None))
        assert make is not None
        self.model, path, self.batch = make()
        self.planted = part
        self.criterion = HalfLoss() if weak == LOSSES[0] else None
        self.squares = weak == LOSSES[1]
        if weak in LOSSES:
            self.planted = "criterion" if self.criterion else "training_step"
        elif weak is not None:
            parent, _, last = path.rpartition(".")
            owner = self.model.get_submodule(parent)
            layer = getattr(owner, last)
            setattr(owner, last, nn.Sequential(layer, WEAK[weak]()))
            if hasattr(layer, "weight"):
                owner.get_submodule(last).weight = layer.weight  # T5 asks for its dtype
            self.planted = f"model.{path}.1"
            if weak == "frozen tower in fp16":
                with torch.no_grad():  # makes the lazy layers
                    self.model(**self.batch)
                owner.get_submodule(last)[1].tower.half().requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        if self.criterion is not None:
            return output["loss"] + self.criterion(output["logits"])
        if self.squares:
            difference = output["logits"] - 300.0
            return output["loss"] + 1e-4 * (difference * difference).mean()
        return output["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([self.batch] * 4, batch_size=None)


def preflight_of(task: Task, plugin: Any) -> PrecisionPreflight:
    """Run the preflight."""
    callback = PrecisionPreflight(steps=STEPS, stops=True)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        plugins=plugin,
    )  # fmt: skip
    trainer.fit(task)
    if callback.result is None:
        raise SystemExit(f"{callback.failure}")
    return callback


class Diagnosis(NamedTuple):
    """Result of the preflight of one model."""

    before: str  # largest error of a gradient, relative to its noise
    after: str  # the same in a second run with the printed settings
    remedy: str  # arguments of the plugin that the settings change
    is_first: bool  # whether the planted weakness is named first
    is_clean: bool  # whether the second run is clean, or the only one of a healthy model
    seconds: float  # CPU time of the first run


def diagnosed(name: str, weak: str | None, kind: str, half: str) -> Diagnosis:
    """Run the preflight on a model, and again with the settings that it prints."""
    task, plugin = Task(name, weak), getattr(lightning_mp, kind)
    start = time.process_time()
    found = preflight_of(task, plugin(half=half))
    seconds = time.process_time() - start
    result = found.result
    assert result is not None
    before = f"{result.ratio:.2%}" if result.ratio < 1e6 else "not finite"
    if task.planted is None:
        return Diagnosis(before, "", "", True, result.is_clean, seconds)
    callers = [each or "training_step" for some in result.callers.values() for each in some]
    is_first = str(task.planted) in result.modules[0].path or task.planted in callers
    if not found.settings:
        return Diagnosis(before, "no settings", "", is_first, False, seconds)
    (entry,) = yaml.safe_load(found.settings)["trainer"]["plugins"]
    plugin, arguments = getattr(lightning_mp, entry["class_path"]), entry["init_args"]
    if isinstance(arguments.get("loss_scale"), dict):
        arguments["loss_scale"] = lightning_mp.LossScaleConfig(**arguments["loss_scale"])
    cured = preflight_of(Task(name, weak), plugin(**arguments)).result
    assert cured is not None
    after, remedy = f"{cured.ratio:.2%}", remedy_of(result.remedy)
    return Diagnosis(before, after, remedy, is_first, cured.is_clean, seconds)


def remedy_of(remedy: Any) -> str:
    """Return the arguments of the plugin that a remedy changes."""
    if remedy.half is not None:
        names = {dtype: name for name, dtype in HALVES.items()}
        return f"`half: {names[remedy.half]}`"
    if remedy.loss_scale is not None:
        return "`loss_scale`"
    return " and ".join(f"`{kind}`" for kind in dict.fromkeys(kind for kind, _ in remedy.names))


def table(outcomes: dict[tuple[str, str | None], Diagnosis]) -> Iterator[str]:
    """Yield the lines of a table with a row for each weakness and a column for each model."""
    names = [name for name in MODELS if (name, None) in outcomes]
    if not names:
        return
    yield f"| planted | {' | '.join(names)} | settings |"
    yield f"|---{'|---' * len(names)}|---|"
    for weak in (None, *WEAK, *LOSSES):
        row = [outcomes[name, weak] for name in names]
        cells = [f"{o.before} -> {o.after}" if o.after else o.before for o in row]
        remedies = ", ".join(dict.fromkeys(o.remedy for o in row))
        yield f"| {weak or 'nothing'} | {' | '.join(cells)} | {remedies} |".replace("|  |", "| |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [*MODELS, *HEALTHY, *WEAK_MODELS]
    parser.add_argument("--models", choices=names, nargs="+", default=names)
    parser.add_argument("--plugin", choices=["BalancedAMP", "PureFP16"], default="BalancedAMP")
    parser.add_argument("--half", choices=["fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    outcomes = {}
    for name in args.models:
        for weak in (None, *WEAK, *LOSSES) if name in MODELS else (None,):
            found = outcomes[name, weak] = diagnosed(name, weak, args.plugin, args.half)
            print(name, weak, *found, sep=", ", file=sys.stderr, flush=True)
    print("\n".join(table(outcomes)), "\n")
    weak_ones = {key: o for key, o in outcomes.items() if key[1] or key[0] in WEAK_MODELS}
    healthy = {key[0]: o for key, o in outcomes.items() if key not in weak_ones}
    clean = [name for name, o in healthy.items() if o.is_clean]
    first, cured = (
        sum(getattr(o, f) for o in weak_ones.values()) for f in ("is_first", "is_clean")
    )
    print(f"{len(clean)} of {len(healthy)} healthy models are clean:", end=" ")
    print(", ".join(f"{name} {o.before}" for name, o in healthy.items()), end=".\n")
    print(f"{first} of {len(weak_ones)} weaknesses are named first, {cured} are clean with the")
    print("printed settings; the others:", end=" ")
    wrong = [key for key, o in weak_ones.items() if not (o.is_first and o.is_clean)]
    print(", ".join(f"{name}, {weak}" for name, weak in wrong) or "none", end=".\n")
    for name in [name for name in WEAK_MODELS if (name, None) in outcomes]:
        found = outcomes[name, None]
        print(f"{name}: {found.before} -> {found.after} with {found.remedy}.")
    for name, some in (("healthy", healthy), ("weak", weak_ones)):
        seconds = [o.seconds for o in some.values()] or [0.0]
        print(f"CPU seconds, {name}: median {median(seconds):.1f}, at most {max(seconds):.1f}.")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {cpu_name()}.")


if __name__ == "__main__":
    main()
