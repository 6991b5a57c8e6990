"""`RepresentationMonitor`: warns of features that collapse or stop changing.

Legend: N samples, L tokens, D width of features, P projections.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._rules.records import Sample, Verdict, first_of_each_kind
from lightning_mp.callbacks._rules.representation import RepresentationRule, Sketch
from lightning_mp.callbacks._step.batches import tensors_in
from lightning_mp.callbacks._step.outputs import eager_modules
from lightning_mp.callbacks._step.sampling import SamplingMonitor
from lightning_mp.callbacks._step.training_state import Moment, TrainingStep, step_of
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.contrastive.loss import ContrastiveLoss
from lightning_mp.contrastive.matryoshka import MatryoshkaLoss
from lightning_mp.numerics.async_readback import send
from lightning_mp.numerics.floats import state_dtype
from lightning_mp.precision._choice.module_selection import as_written, find_modules

__all__ = ["RepresentationMonitor"]

_ROWS = 256  # largest number of features for the effective rank
_LEAST = 4  # smallest number of features that are measured
_PROJECTIONS = 16  # random projections of features, which show whether a tower changes
_WIDTH = 2 + 4 * _PROJECTIONS  # numbers in a row
_FEATURES = ("image_features", "text_features")


@explains_arguments(checks={"min_spread": "[0, 1)"})
class RepresentationMonitor(SamplingMonitor):
    """Warns of features that collapse to one direction or to few, in any tower.

    A loss without negatives is lowest if all samples have the same features, and a contrastive loss
    may fall while one tower collapses. Measures the features that a loss of this package receives,
    or the outputs of `modules`, without another run of the towers. For normalized features f_i:

        spread = sqrt(1 - |mean_i f_i|^2)               in [0, 1]; 0: all point the same way
        effective rank = (sum_k v_k)^2 / sum_k v_k^2    v: eigenvalues of the covariance

    Rules: docs/callbacks/representation-monitor.md.

    Example: `Trainer(callbacks=RepresentationMonitor(modules=["image_tower", "text_tower"]))`

    Args:
        modules: Dotted names or names of classes, whose outputs (N, D) or (N, L, D) are features.
            By default the features that a `ContrastiveLoss` or another loss of this package
            receives.
        min_spread: Smallest spread without a warning. Warns after two samples in a row below it if
            the spread was three times as large before, or after 20 first samples below it.
        every_n_steps: Steps between two samples; a fifth of it for the first samples. A low sample
            is confirmed by the next steps.
        baseline_samples: Number of first samples.
        repeat_after_steps: Steps until the same alarm may be raised again.

    Raises:
        ValueError: An argument is out of range, or a module is unknown.

    References: dimensional collapse, arXiv:2110.09348; the cone of untrained towers,
    arXiv:2203.02053.
    """

    moment: Moment = "batch end"

    def __init__(
        self,
        *,
        modules: Sequence[str] | None = None,
        min_spread: float = 0.1,
        every_n_steps: int = 40,
        baseline_samples: int = 10,
        repeat_after_steps: int = 1000,
    ) -> None:
        super().__init__(every_n_steps, baseline_samples, repeat_after_steps)
        self.modules = modules
        self.min_spread = min_spread
        self._rule = RepresentationRule(min_spread)
        self._watched: dict[str, nn.Module] = {}  # losses, or the towers that `modules` names
        self._rows: dict[tuple[str, str], Tensor] = {}  # by kind and name
        self._is_sampling = False
        self._locked: set[str] = set()  # features whose tower is frozen on purpose
        self._has_frozen = False  # whether the model has frozen parameters

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        eager = {as_written(name): module for name, module in eager_modules(pl_module)}
        chosen: set[nn.Module]
        if self.modules is None:
            inner = {m.loss for m in eager.values() if isinstance(m, MatryoshkaLoss)}
            chosen = {m for m in eager.values() if isinstance(m, ContrastiveLoss | MatryoshkaLoss)}
            chosen -= inner
        else:
            chosen = {m for name in self.modules for m in find_modules(pl_module, name)}
        self._watched = {name: module for name, module in eager.items() if module in chosen}
        self._rows.clear()
        self._has_frozen = not all(p.requires_grad for p in pl_module.parameters())
        towers = {} if self.modules is None else self._watched
        trained = {n for n, m in towers.items() for p in m.parameters() if p.requires_grad}
        self._locked = towers.keys() - trained
        if not self._watched:
            rank_zero_warn(usage("no_features"))

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.is_due(step_of(trainer)):
            self._is_sampling = True
            for name, module in self._watched.items():
                if self.modules is None:
                    call = partial(self._add_call, name)
                    hook = module.register_forward_pre_hook(call, with_kwargs=True)
                else:
                    hook = module.register_forward_hook(partial(self._add_output, name))
                self.recorder.hooks.enter_context(hook)

    def _add_output(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        # A compiled function traces this hook, and `vmap` hides the samples.
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return
        found = next((t for t in tensors_in(output) if t.is_floating_point() and t.ndim > 1), None)
        if found is not None:
            self._add(name, found)

    def _add_call(self, name: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # a compiled function traces this hook
            return
        given = dict(zip((*_FEATURES, "logit_scale"), args, strict=False)) | kwargs
        received = [given.get(each) for each in _FEATURES]
        tensors = [x for x in received if isinstance(x, Tensor) and x.ndim == 2 and len(x)]
        if len(tensors) < 2 or ("pairs", name) in self._rows:
            return  # the loss itself raises an error for such a call
        named = {f"{name}.{each}": x for each, x in zip(_FEATURES, tensors, strict=True)}
        image_ND, text_ND = (self._add(each, x) for each, x in named.items())
        if self._has_frozen:
            self._locked |= {each for each, x in named.items() if not x.requires_grad}
        scale = given.get("logit_scale", 1.0)
        is_trained = isinstance(scale, Tensor) and scale.requires_grad
        self._rows["pairs", name] = _pair_row(image_ND, text_ND, scale if is_trained else torch.nan)

    def _add(self, name: str, features: Tensor) -> Tensor:
        """Measure the first call of a step; return the normalized features."""
        if features.is_nested:  # the tokens of samples of different lengths
            features = features.values().reshape(-1, features.size(-1))
        with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
            unit_ND = F.normalize(features.detach().flatten(0, -2).float(), dim=1)
            if ("features", name) in self._rows or len(unit_ND) < _LEAST:
                return unit_ND
            spread = (1 - unit_ND.mean(dim=0).square().sum()).clamp(min=0).sqrt()
            some_ND = unit_ND[:: -(-len(unit_ND) // _ROWS)]
            some_ND = some_ND - some_ND.mean(dim=0)
            gram_NN = some_ND @ some_ND.mT
            rank = gram_NN.trace().square() / gram_NN.square().sum().clamp(min=1e-30)
            sketch = _sketch(unit_ND.unflatten(0, features.shape[:-1]))
            self._rows["features", name] = torch.cat([torch.stack([spread, rank]), sketch])
            return unit_ND

    @override
    def observe(self, step: TrainingStep) -> Tensor | None:
        is_sampling, self._is_sampling = self._is_sampling, False
        rows, self._rows = self._rows, {}
        if not is_sampling:
            return None
        # NaN, because a tower that a rank does not call has no features to judge.
        dtype = state_dtype(step.trainer.strategy.root_device)
        missing = torch.full((_WIDTH,), torch.nan, dtype=dtype)
        padded = {key: F.pad(row, (0, _WIDTH - len(row))) for key, row in rows.items()}
        sampled = step.gather_rows(padded, missing)
        if sampled is None and self._watched:
            self.warn_unmeasured(step)
        return sampled

    @override
    def judge(self, sample: Sample) -> list[Verdict]:
        # Each rank sees its own samples; the mean over ranks approximates the global value.
        table = dict(zip(sample.context["keys"], sample.array.mean(axis=0), strict=True))
        features = {n: row for (kind, n), row in table.items() if kind == "features"}
        pairs = {n: row for (kind, n), row in table.items() if kind == "pairs"}
        facts, verdicts, metrics = sample.facts, list[Verdict](), dict[str, float]()
        spread = {name: float(row[0]) for name, row in features.items()}
        rank = {name: float(row[1]) for name, row in features.items()}
        for name in features:
            if np.isfinite(spread[name]) and np.isfinite(rank[name]):
                verdicts += self._rule.features(name, spread[name], rank[name])
        is_additional = facts.step <= self._until
        if self._rule.wants_more:
            self._rule.wants_more = False
            self.sample_again(facts.step)
        sketches = {
            name: _sketch_of(row, len(sample.array))
            for name, row in features.items()
            if name not in self._locked and np.isfinite(row).all()
        }
        if not is_additional:
            verdicts += self._rule.unchanged(sketches)
        for name, (positive, negative, scale) in ((n, row[:3]) for n, row in pairs.items()):
            metrics |= {"positive_similarity": positive, "negative_similarity": negative}
            if np.isfinite(scale):
                metrics["logit_scale"] = scale
                if not is_additional:
                    verdicts += self._rule.scale(name, float(scale))
        metrics |= {"feature_spread": min(spread.values(), default=np.nan)}
        metrics |= {"feature_rank": min(rank.values(), default=np.nan)}
        self.history.add_column("feature_spread", facts.step, spread)
        self.record(metrics, dataclasses.replace(facts, optimizer=0))
        return first_of_each_kind(verdicts)


@torch.no_grad()
def _pair_row(image_ND: Tensor, text_ND: Tensor, scale: Tensor | float) -> Tensor:
    """Return the mean similarity of positives and of negatives, and the logit scale."""
    count = min(len(image_ND), len(text_ND))  # texts without an image come last
    positives = (image_ND[:count] * text_ND[:count]).sum()
    total = (image_ND.sum(dim=0) * text_ND.sum(dim=0)).sum()
    others = max(len(image_ND) * len(text_ND) - count, 1)
    value = torch.as_tensor(scale, dtype=torch.float32, device=image_ND.device).detach()
    return torch.stack([positives / count, (total - positives) / others, value.reshape(())])


def _sketch(unit: Tensor) -> Tensor:
    """Return means of projections of features and of their squares, and errors of the means.

    The means tell whether a tower computes the same features as before, without running it again.
    """
    generator = torch.Generator().manual_seed(0)  # the same projections in every sample
    # Half-precision plugins change the default dtype during a step.
    shape = unit.shape[-1], _PROJECTIONS
    projections_DP = torch.randn(shape, generator=generator, dtype=unit.dtype, device="cpu")
    projected = unit @ send(projections_DP, unit.device)
    values = torch.cat([projected, projected.square()], dim=-1)
    # Tokens of one sample depend on each other, so samples are counted.
    samples = values.flatten(1, -2).mean(dim=1) if values.ndim > 2 else values
    # NaN without a warning for a single sample.
    squared_errors = samples.var(dim=0, correction=0) / (len(samples) - 1)
    return torch.cat([samples.mean(dim=0), squared_errors])


def _sketch_of(row: np.ndarray[Any, Any], ranks: int) -> Sketch:
    """Return the sketch in a row: means, and squared errors over all ranks."""
    means, errors = np.split(row[2:], 2)
    return list(zip(means.tolist(), (errors / ranks).tolist(), strict=True))
