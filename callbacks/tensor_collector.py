"""`TensorCollector`: writes statistics of selected tensors to files."""

import fnmatch
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp._arguments import PATH, Check, explains_arguments
from lightning_mp._files import Failures, claim, save
from lightning_mp.callbacks._report.data import HISTOGRAM
from lightning_mp.callbacks._rules.moments import (
    EXPONENTS,
    Reduction,
    merge_moments,
    reduced,
    tensor_moments,
)
from lightning_mp.callbacks._rules.records import Sample, Verdict
from lightning_mp.callbacks._step.batches import tensors_in
from lightning_mp.callbacks._step.outputs import eager_modules, is_repetition
from lightning_mp.callbacks._step.sampling import SamplingMonitor
from lightning_mp.callbacks._step.training_state import (
    Moment,
    TrainingStep,
    is_sharded,
    parameter_names,
    step_of,
)
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.numerics.floats import VALUE_DTYPES
from lightning_mp.numerics.transforms import outside_transforms, unwrapped
from lightning_mp.precision._choice.module_selection import as_written
from lightning_mp.precision._weights.ledger import parameters_of

__all__ = ["TensorCollector"]

_MAPS = 12  # tensors whose histograms the page of `InstabilityReport` shows
Kind = Literal["weights", "gradients", "optimizer_state", "outputs"]


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text[3:] if text.startswith("re:") else fnmatch.translate(text))


@explains_arguments(
    checks={
        "include": Check(
            least=1,
            test=lambda include: [_pattern(each) for each in include],
            words="a non-empty list of patterns, each a name pattern or `re:<regular expression>`",
        ),
        "collect reductions": Check(least=1),
        "dirpath": PATH,
    }
)
class TensorCollector(SamplingMonitor):
    """Writes norms, moments and histograms of selected weights, gradients, states and outputs.

    A monitor reports that something is wrong; the collected numbers show which of 300 tensors began
    to drift 5000 steps earlier. Every sample is an `.npz` file, whose arrays are described in
    docs/callbacks/tensor-collector.md.

    Example: `Trainer(callbacks=TensorCollector(include=["*.attention.*"], every_n_steps=200))`

    Args:
        include: Patterns for names of parameters and, for outputs, of modules. `*`, `?` and `[...]`
            match as in a shell; `re:` is followed by a regular expression for the whole name.
        collect: `"weights"`, `"gradients"` (unscaled) and `"optimizer_state"` (states with the
            shape of the parameter), all right before the step; `"outputs"` of the forwards.
        reductions: Statistics per tensor: `"norm"`, `"rms"`, `"mean"`, `"std"`, `"absmax"`,
            `"kurtosis"` (3 for a normal distribution), and `"histogram"` by powers of two. The page
            of `InstabilityReport` shows the histograms of the first 12 tensors over time.
        every_n_steps: Number of steps between two samples.
        dirpath: Output folder; by default `tensors` in the folder of the logger or in
            `default_root_dir`. `-v1` and so on is appended if another run uses it.
        log: Whether to send the numbers to loggers as `gradients/<name>/<reduction>`.

    Raises:
        ValueError: An argument is out of range, or a pattern matches nothing.

    References:
        Histogram of gradient magnitudes, arXiv:1710.03740, figure 3; tensor collections of Amazon
        SageMaker Debugger.
    """

    moment: Moment = "batch end"
    keeps = ("samples", "_folder")

    def __init__(
        self,
        *,
        include: Sequence[str] = ("*",),
        collect: Sequence[Kind] = ("gradients",),
        reductions: Sequence[Reduction] = ("norm", "rms", "absmax", "kurtosis", "histogram"),
        every_n_steps: int = 100,
        dirpath: str | None = None,
        log: bool = False,
    ) -> None:
        super().__init__(every_n_steps)
        self.baseline_samples = 0  # no more samples at the start
        self.include = tuple(include)
        self.collect = tuple(collect)
        self.reductions = tuple(reductions)
        self.dirpath = dirpath
        self._is_logging = log  # Lightning sets `log` of callbacks
        self.folder: Path | None = None  # on rank zero, after the first sample
        self._wanted = Path()
        self._folder: str | None = None  # `folder`, or the folder of the resumed run
        self._failures = Failures(usage)
        self._names: dict[int, str] = {}
        self._modules: dict[str, nn.Module] = {}
        self._outputs: dict[str, list[Tensor]] = {}  # rows by module, of a sampled step
        self._rows: dict[str, Tensor] = {}

    # --- selection -------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            root = trainer.log_dir or trainer.default_root_dir  # equal on all ranks
            self._wanted = Path(self.dirpath or Path(root) / "tensors").absolute()
            self.folder = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if step_of(trainer) == 0:  # not resumed
            self._folder = None
        self._rows.clear()
        self._outputs.clear()
        modules = {as_written(path): module for path, module in eager_modules(pl_module) if path}
        parameters = parameter_names(pl_module)
        # A pattern without a match raises an error.
        known = list(modules) if "outputs" in self.collect else []
        known += parameters.values() if {*self.collect} - {"outputs"} else []
        chosen: set[str] = set()
        for text in self.include:
            found = [*filter(_pattern(text).fullmatch, known)]
            if not found:
                some = ", ".join(map(repr, known[:3]))
                raise ValueError(usage("no_match", pattern=text, count=len(known), names=some))
            chosen.update(found)
        self._modules = {name: modules[name] for name in modules if name in chosen}
        self._names = {key: name for key, name in parameters.items() if name in chosen}

    # --- a step ----------------------------------------------------------------------------------

    def _row(self, tensor: Tensor, unscale: float | Tensor = 1.0) -> Tensor:
        return tensor_moments(tensor, unscale=unscale, histogram="histogram" in self.reductions)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if "outputs" in self.collect and self.is_due(step_of(trainer)):
            for name, module in self._modules.items():
                self._outputs.setdefault(name, [])
                hook = module.register_forward_hook(partial(self._add_output, name))
                self.recorder.hooks.enter_context(hook)

    def _add_output(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        # A compiled function traces this hook, and a backward may repeat the forward.
        if torch.compiler.is_compiling() or is_repetition():
            return
        tensors = [t for t in tensors_in(output) if t.dtype in VALUE_DTYPES]
        with outside_transforms():
            self._outputs[name] += [self._row(unwrapped(each)) for each in tensors]

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, _: Any, optimizer: Optimizer) -> None:
        step = self.recorder.step
        if step is None or not self.is_due(step.facts.step):
            return
        if "gradients" in self.collect:
            found = step.found
            for parameter, gradient in zip(found.parameters, found.gradients, strict=True):
                if name := self._names.get(id(parameter)):
                    self._rows[f"gradients/{name}"] = self._row(gradient, found.unscale)
        # With several optimizers, weights are sampled before the first step of the batch.
        if "weights" in self.collect and not any(key.startswith("weights/") for key in self._rows):
            for parameter in trainer.lightning_module.parameters():
                if name := self._names.get(id(parameter)):
                    self._rows[f"weights/{name}"] = self._row(parameter)
        if "optimizer_state" in self.collect:
            self._add_states(step.optimizer)

    def _add_states(self, optimizer: Optimizer) -> None:
        stepped = (p for p in parameters_of(optimizer) if id(p) in self._names)
        states = {p: optimizer.state.get(p, {}) for p in stepped}
        # All parameters have the same rows, because a rank without a shard has no state.
        kinds = {
            kind: None
            for p, state in states.items()
            for kind, value in state.items()
            if isinstance(value, Tensor) and value.shape == p.shape and value.dtype in VALUE_DTYPES
        }
        for p, state in states.items():
            for kind in kinds:
                key = f"optimizer_state/{self._names[id(p)]}/{kind}"
                self._rows[key] = self._row(state.get(kind, torch.empty(0, device=p.device)))

    @override
    def observe(self, step: TrainingStep) -> Tensor | None:
        root = step.trainer.strategy.root_device
        home = torch.device("cpu") if root.type == "mps" else root  # MPS has no float64
        for name, seen in self._outputs.items():
            # Modules without a call have a row as well, because all ranks must send equal shapes.
            parts = [part.to(home, non_blocking=True) for part in seen]
            parts = parts or [self._row(torch.empty(0, device=home))]
            self._rows[f"outputs/{name}"] = merge_moments(torch.stack(parts))
        if self._outputs and not any(self._outputs.values()):
            self.warn_unmeasured(step)
        self._outputs.clear()
        rows, self._rows = self._rows, {}
        if not rows:
            return None
        table_NK = torch.stack([row.to(home, non_blocking=True) for row in rows.values()])
        return step.gather(table_NK, keys=list(rows))

    # --- files -----------------------------------------------------------------------------------

    @override
    def judge(self, sample: Sample) -> list[Verdict]:
        """Write a sample to a file, on rank zero."""
        trainer = self.recorder.trainer
        if not trainer.is_global_zero:
            return []
        keys, facts = sample.context["keys"], sample.facts
        ranks_WNK = torch.from_numpy(sample.array)
        merged_NK = merge_moments(ranks_WNK)
        if not is_sharded(trainer):  # all ranks hold the same weights, gradients and states
            same = [row for row, key in enumerate(keys) if not key.startswith("outputs/")]
            merged_NK[same] = ranks_WNK[0, same]
        arrays = reduced(merged_NK, self.reductions)
        # `fast_dev_run` writes no files, as in Lightning's loggers and checkpoints.
        if not trainer.fast_dev_run:
            counts = {"count": merged_NK[:, 0].numpy(), "non_finite": merged_NK[:, 6].numpy()}
            where = {"step": facts.step, "epoch": facts.epoch, "batch_idx": facts.batch_idx}
            self._write(facts.step, {"names": np.array(keys), **where, **counts, **arrays})
        if "histogram" in arrays:
            self._add_maps(facts.step, keys, arrays["histogram"])
        if self._is_logging:
            metrics = {
                f"{key}/{name}": float(value)
                for name, values in arrays.items()
                if name != "histogram"
                for key, value in zip(keys, values, strict=True)
                if np.isfinite(value)
            }
            self.log_metrics(trainer, metrics, facts.step)
        return []

    def _add_maps(self, step: int, keys: Sequence[str], counts: npt.NDArray[Any]) -> None:
        """Add the histograms of the first tensors to the page of `InstabilityReport`."""
        bins = ["0", *(f"2^{exponent:.0f}" for exponent in EXPONENTS[1:])]
        for key, row in list(zip(keys, counts, strict=True))[:_MAPS]:
            shares = {bins[at]: row[at] / row.sum() for at in row.nonzero()[0]}
            self.history.add_column(f"{HISTOGRAM}{key}", step, shares)

    def _write(self, step: int, arrays: dict[str, Any]) -> None:
        if "histogram" in arrays:
            arrays["histogram"] = arrays["histogram"].astype(np.int64)
            arrays["exponents"] = EXPONENTS
        with self._failures.forgiven("tensors_not_written", path=str(self._wanted)):
            # `mkdir` fails if the folder exists, so a created folder belongs to this run.
            self.folder = self.folder or claim(self._wanted, Path.mkdir, self._folder)
            self._folder = str(self.folder)
            # Leading zeros, so that names sort by step.
            path = self.folder / f"{step:08d}.npz"
            save(path, lambda file: np.savez_compressed(file, **arrays))
