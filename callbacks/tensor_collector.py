"""`TensorCollector`: writes down what chosen tensors look like, step by step."""

import fnmatch
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
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
from lightning_mp.callbacks._step.outputs import eager_modules
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
from lightning_mp.precision._choice.module_selection import as_written

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
            words="a non-empty list of patterns; what follows `re:` is a regular expression",
        ),
        "collect reductions": Check(least=1),
        "dirpath": PATH,
    }
)
class TensorCollector(SamplingMonitor):
    """Writes norms, moments and histograms of chosen weights, gradients, states and outputs.

    Monitors say that something is wrong; when one of 300 tensors began to drift, say 5000 steps
    before, its numbers tell, which no logger has. One `.npz` file a sample, whose arrays are
    described in docs/callbacks/tensor-collector.md.

    Example: `Trainer(callbacks=TensorCollector(include=["*.attention.*"], every_n_steps=200))`

    Args:
        include: Names of parameters and, for outputs, of modules: `*`, `?` and `[...]` match as in
            a shell; what begins with `re:` is a regular expression for the whole name.
        collect: `"weights"`, `"gradients"` (unscaled), `"optimizer_state"` (all states of a
            parameter's shape), all right before the step; `"outputs"` of the step's forwards.
        reductions: Of each tensor: `"norm"`, `"rms"`, `"mean"`, `"std"`, `"absmax"`, `"kurtosis"`
            (3 for normal values), and `"histogram"`, by powers of two. The page of
            `InstabilityReport` shows the histograms of the first 12 tensors over time.
        every_n_steps: Steps between two samples.
        dirpath: The folder to write to; `tensors` in the logger's, or in `default_root_dir`. Where
            another run has it, `-v1` or a higher number is put behind the name.
        log: Whether loggers get the numbers too, as `gradients/<name>/<reduction>`.

    Raises:
        ValueError: An argument is out of range, or a pattern matches nothing.

    References:
        arXiv:1710.03740, figure 3, is such a histogram; the tensor collections of Amazon SageMaker
        Debugger.
    """

    moment: Moment = "batch end"

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
        self._patterns = {each: _pattern(each) for each in include}
        self.include = tuple(include)
        self.collect = tuple(collect)
        self.reductions = tuple(reductions)
        self.dirpath = dirpath
        self.log = log
        self.folder: Path | None = None  # on rank zero, once a sample has been written
        self._wanted = Path()
        self._earlier: str | None = None  # the folder of the run that is resumed
        self._failures = Failures(usage)
        self._names: dict[int, str] = {}
        self._modules: dict[str, nn.Module] = {}
        self._hooks = ExitStack()
        self._outputs: dict[str, list[Tensor]] = {}  # rows, by module; empty without hooks
        self._rows: dict[str, Tensor] = {}

    # --- what to look at -------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            root = trainer.log_dir or trainer.default_root_dir  # broadcast: the same on all ranks
            self._wanted = Path(os.path.abspath(self.dirpath or Path(root) / "tensors"))
            self._earlier, self.folder = str(self.folder) if self.folder else None, None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if step_of(trainer) == 0:  # a run from the start continues no other
            self._earlier = None
        self._rows.clear()
        self._unhook()
        modules = {as_written(path): module for path, module in eager_modules(pl_module) if path}
        parameters = parameter_names(pl_module)
        # A pattern that matches nothing is a mistake, whatever it was meant for.
        known = list(modules) if "outputs" in self.collect else []
        known += parameters.values() if {*self.collect} - {"outputs"} else []
        chosen = set(self._matching(known))
        self._modules = {name: modules[name] for name in modules if name in chosen}
        self._names = {key: name for key, name in parameters.items() if name in chosen}

    def _matching(self, names: list[str]) -> Iterable[str]:
        for text, pattern in self._patterns.items():
            found = [name for name in names if pattern.fullmatch(name)]
            if not found:
                some = ", ".join(map(repr, names[:3]))
                raise ValueError(usage("no_match", pattern=text, count=len(names), names=some))
            yield from found

    # --- a step ----------------------------------------------------------------------------------

    @override
    def is_due(self, step: int) -> bool:
        """Return whether to observe a step; at the start no more often."""
        return step % self.every_n_steps == 0

    def _row(self, tensor: Tensor, unscale: float | Tensor = 1.0) -> Tensor:
        return tensor_moments(tensor, unscale=unscale, histogram="histogram" in self.reductions)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if "outputs" in self.collect and self.is_due(step_of(trainer)) and not self._outputs:
            for name, module in self._modules.items():
                self._outputs[name] = []
                hook = module.register_forward_hook(partial(self._look, name))
                self._hooks.enter_context(hook)

    def _look(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        rows = [self._row(t) for t in tensors_in(output) if t.dtype in VALUE_DTYPES]
        self._outputs[name] += rows

    def _unhook(self) -> None:
        self._hooks.close()
        self._outputs.clear()

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
        # Several optimizers step in a batch; weights are taken before the first of them.
        if "weights" in self.collect and not any(key.startswith("weights/") for key in self._rows):
            for parameter in trainer.lightning_module.parameters():
                if name := self._names.get(id(parameter)):
                    self._rows[f"weights/{name}"] = self._row(parameter)
        if "optimizer_state" in self.collect:
            self._add_states(step.optimizer)

    def _add_states(self, optimizer: Optimizer) -> None:
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        states = {p: optimizer.state.get(p, {}) for p in stepped if id(p) in self._names}
        # All parameters have the same rows, as a rank may hold no part of one, and so no state.
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
        home = torch.device("cpu") if root.type == "mps" else root  # it has no float64
        for name, seen in self._outputs.items():
            # Every module has a row, called or not, as all ranks must send the same.
            parts = [part.to(home, non_blocking=True) for part in seen]
            parts = parts or [self._row(torch.empty(0, device=home))]
            self._rows[f"outputs/{name}"] = merge_moments(torch.stack(parts))
        self._unhook()
        rows, self._rows = self._rows, {}
        if not rows:
            return None
        table_NK = torch.stack([row.to(home, non_blocking=True) for row in rows.values()])
        return step.gather(table_NK, keys=list(rows))

    # --- files -----------------------------------------------------------------------------------

    @override
    def on_exception(self, *_: Any) -> None:
        self._unhook()

    @override
    def judge(self, sample: Sample) -> list[Verdict]:
        """Write a sample down, on rank zero."""
        trainer = self.recorder.trainer
        if not trainer.is_global_zero:
            return []
        keys, facts = sample.context["keys"], sample.facts
        ranks_WNK = torch.from_numpy(sample.array)
        merged_NK = merge_moments(ranks_WNK)
        if not is_sharded(trainer):  # all ranks hold the same weights, gradients and states
            same = torch.tensor([not key.startswith("outputs/") for key in keys])
            merged_NK = torch.where(same[:, None], ranks_WNK[0], merged_NK)
        arrays = reduced(merged_NK, self.reductions)
        # A trial run leaves no files, as Lightning's loggers and checkpoints leave none.
        if not trainer.fast_dev_run:
            counts = {"count": merged_NK[:, 0].numpy(), "non_finite": merged_NK[:, 6].numpy()}
            where = {"step": facts.step, "epoch": facts.epoch, "batch_idx": facts.batch_idx}
            self._write(facts.step, {"names": np.array(keys), **where, **counts, **arrays})
        if "histogram" in arrays:
            self._add_maps(facts.step, keys, arrays["histogram"])
        if self.log:
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
            # `mkdir` fails where a folder is, so that it claims the one that it makes.
            self.folder = self.folder or claim(self._wanted, Path.mkdir, self._earlier)
            # Zeros in front, so that names sort by step.
            path = self.folder / f"{step:08d}.npz"
            save(path, lambda file: np.savez_compressed(file, **arrays))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "folder": str(self.folder) if self.folder else None}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._earlier = state_dict["folder"]
