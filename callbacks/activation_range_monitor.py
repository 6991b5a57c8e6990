"""`ActivationRangeMonitor`: warns of activations that come near the limits of their dtype."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_mp._arguments import explains_arguments
from lightning_mp.callbacks._rules.outputs import ExpertRule, GrowthRule, LogitRule
from lightning_mp.callbacks._rules.records import Sample, Verdict, first_of_each_kind
from lightning_mp.callbacks._rules.underflow import UnderflowJudge
from lightning_mp.callbacks._step.outputs import OutputKey, OutputSampler, blocks_in, eager_modules
from lightning_mp.callbacks._step.sampling import SamplingMonitor, merge_ranks
from lightning_mp.callbacks._step.training_state import Moment, TrainingStep, scaler_of, step_of
from lightning_mp.callbacks._words.usage import usage
from lightning_mp.numerics.floats import state_dtype
from lightning_mp.numerics.tensor_stats import StatField, TensorStats
from lightning_mp.precision._choice.module_selection import as_written, select_modules, select_norms
from lightning_mp.precision.inf_clamp import InfClamp

__all__ = ["ActivationRangeMonitor"]

# Growth of a variance since the last sample. One batch in ten with values 100 times as large makes
# 1e3.
_JUMP = 1e3
_ROOT = "training_step"  # name of the caller of functions outside all modules


@explains_arguments(
    checks={
        "min_headroom_bits": "[0, 16)",  # a value of 1 has 16 bits of headroom in fp16
        "max_attention_logit": "(0, inf]",
        "calls_per_step": "[1, inf)",
    }
)
class ActivationRangeMonitor(SamplingMonitor):
    """Warns of module outputs that come near overflow, underflow, or had to be clamped.

    A transformer's residual stream can double every few thousand steps for days before one value
    exceeds 65504, becomes inf, and ends the run. Its headroom, log2(65504 / amax) in bits, shows
    this days before. Also watches logits, entropy of attention, and experts:
    docs/callbacks/activation-range-monitor.md.

    Example: `Trainer(callbacks=ActivationRangeMonitor(backward=True))`

    Args:
        modules: Names of classes or dotted names. By default all modules without children, blocks
            (modules of one class in a list), the inputs of norms, and what functions compute:
            logits of attention, output logits, choices of routers.
        backward: Whether to sample gradients with respect to outputs too.
        min_headroom_bits: Smallest headroom without a warning.
        max_attention_logit: Largest attention logit without a warning. From 1024 on fp16 holds
            whole numbers only; runs are lost at about 10000.
        calls_per_step: Number of first calls of a module that are measured in a sampled step. Raise
            it if a forward calls one module more often.
        every_n_steps: Steps between two samples; a fifth of it for the first samples.
        baseline_samples: Number of first samples that form the baseline.
        repeat_after_steps: Steps until the same alarm may be raised again.

    Raises:
        ValueError: An argument is out of range, or a module is unknown.
    """

    moment: Moment = "batch end"  # gradients of outputs exist by then
    keeps = ("samples", "_finite", "_usual_buffers")

    def __init__(
        self,
        *,
        modules: Sequence[str] | None = None,
        backward: bool = False,
        min_headroom_bits: float = 2.0,
        max_attention_logit: float = 1000.0,
        calls_per_step: int = 4,
        every_n_steps: int = 100,
        baseline_samples: int = 10,
        repeat_after_steps: int = 1000,
    ) -> None:
        super().__init__(every_n_steps, baseline_samples, repeat_after_steps)
        self.modules = modules
        self.backward = backward
        self.min_headroom_bits = min_headroom_bits
        self.max_attention_logit = max_attention_logit
        self.calls_per_step = calls_per_step
        self._rule = UnderflowJudge(baseline_samples, 0.01, 0.05)
        self._growth = GrowthRule()
        self._logits = LogitRule()
        self._experts = ExpertRule()
        self._finite: dict[str, bool] = {}  # whether outputs and buffers were finite at first
        self._sampler = OutputSampler({}, backward, calls_per_step)
        self._usual_buffers: dict[str, float] = {}  # largest value at the last sample
        self._clamped: dict[str, float] = {}  # number of clamped values until the last sample

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        eager = dict(eager_modules(pl_module))
        if not eager:
            rank_zero_warn(usage("compiled"))
        if self.modules is None:
            # `x + f(x)` is the output of a block or the input of a norm, but no output of a leaf.
            parents = {name.rpartition(".")[0] for name in eager}
            blocks = set(blocks_in(pl_module))
            chosen = {n: m for n, m in eager.items() if n and (n not in parents or m in blocks)}
            norms = select_norms(pl_module)
            # A compiler would trace the mode that sees function calls.
            is_eager = {*eager.values()} == {*pl_module.modules()}
            callers = eager if is_eager else {}
        else:
            norms = callers = {}
            chosen = select_modules(pl_module, self.modules)
        modules, norms, callers = (
            {as_written(name): module for name, module in each.items() if name in eager}
            for each in (chosen, norms, callers)
        )
        self._sampler = OutputSampler(
            modules, self.backward, self.calls_per_step, norms=norms, callers=callers
        )
        self._clamped.clear()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.is_due(step_of(trainer)):
            self._sampler.start(self.recorder.hooks)

    @override
    def observe(self, step: TrainingStep) -> Tensor | None:
        rows = self._sampler.take(self._state(step))
        if rows is None:
            return None
        # Ranks see different data, so a single rank may be near overflow.
        root = step.trainer.strategy.root_device
        sampled = step.gather_rows(rows, torch.zeros(len(StatField) + 1, dtype=state_dtype(root)))
        if sampled is None and self._sampler.modules:
            self.warn_unmeasured(step)
        return sampled

    def _state(self, step: TrainingStep) -> Iterator[tuple[str, str, Tensor]]:
        """Yield name, kind and value of buffers, of the loss, and of counts of clamped values."""
        for name, buffer in step.trainer.lightning_module.named_buffers():
            yield as_written(name), "buffer", buffer
        if step.loss is not None:
            yield "loss", "loss", step.loss
        clamp = getattr(step.trainer.precision_plugin, "inf_clamp", None)
        if isinstance(clamp, InfClamp) and clamp.names:
            counts = clamp.counts()
            for name, count in zip(clamp.names, counts.to(state_dtype(counts.device)), strict=True):
                yield name, "clamped", count

    @override
    def judge(self, sample: Sample) -> list[Verdict]:
        metrics: dict[str, float] = {}
        verdicts = [*self._judge_buffers(sample), *self._judge_logits(sample, metrics)]
        verdicts += self._judge_experts(sample, metrics)
        losses = [row_WK[:, StatField.NON_FINITE] for _, row_WK in _rows_of_kind(sample, "loss")]
        is_lost = any(map(np.any, losses))
        for kind in dict.fromkeys(key.kind for key in sample.context["keys"]):
            if kind in ("activation", "output_gradient", "norm_input"):
                verdicts += self._judge_kind(sample, kind, is_lost, metrics)
        verdicts += self._judge_clamped(sample, metrics)
        # Outputs belong to no optimizer, so their curves have no optimizer number.
        self.record(metrics, dataclasses.replace(sample.facts, optimizer=0))
        return first_of_each_kind(verdicts)

    def _judge_clamped(self, sample: Sample, metrics: dict[str, float]) -> Iterator[Verdict]:
        rows = _rows_of_kind(sample, "clamped")
        totals = {name: float(row_WK[:, StatField.AMAX].sum()) for name, row_WK in rows}
        if totals:
            metrics["clamped_values"] = sum(totals.values())
        for name, total in totals.items():
            # Counters only grow: the difference to the last sample is new.
            new, self._clamped[name] = total - self._clamped.get(name, 0.0), total
            if new > 0:
                yield Verdict("activation_clamped", new, 0, tensor=name).given(total=total)

    def _judge_kind(
        self, sample: Sample, kind: str, is_lost: bool, metrics: dict[str, float]
    ) -> Iterator[Verdict]:
        chosen = [at for at, key in enumerate(sample.context["keys"]) if key.kind == kind]
        keys = [sample.context["keys"][at] for at in chosen]
        # With the dtype if the outputs of a module have several dtypes.
        count = Counter(key.name for key in keys)
        labels = [k.name if count[k.name] == 1 else f"{k.name} ({_name(k.dtype)})" for k in keys]
        ranks, facts = sample.array[:, chosen], sample.facts
        stats = merge_ranks(labels, ranks)
        largest = np.array([torch.finfo(key.dtype).max for key in keys])
        with np.errstate(divide="ignore"):  # all zeros have inf bits
            bits = np.log2(largest) - np.log2(stats.column(StatField.AMAX))
        left = dict(zip(labels, bits.tolist(), strict=True))
        self.history.add_column(f"{kind}_headroom_bits", facts.step, left)
        self.history.add_column(f"{kind}_zero_share", facts.step, stats.zero_share)
        metrics[f"{kind}_headroom_bits"] = float(bits.min())  # inf, where all are 0, is left out
        zeros = stats.column(StatField.ZEROS).sum() / max(sum(stats.numels), 1)
        metrics[f"{kind}_zero_share"] = float(zeros)
        # A quarter of the scale leaves the two bits of headroom that `min_headroom_bits` requires.
        lower = (facts.loss_scale or 1.0) / 4
        limits = f"min_scale={lower:g}, " * (lower < 1) + f"max_scale={lower:g}"
        scaled = math.log2(facts.loss_scale or 1.0) if kind == "output_gradient" else 0.0
        # A dynamic loss scale, as that of torch, rises until gradients overflow in a single step.
        config = getattr(scaler_of(self.recorder.trainer), "config", None)
        is_dynamic = getattr(config, "dynamic", facts.loss_scale is not None)
        is_sought = kind == "output_gradient" and is_dynamic
        is_single = is_sought and facts.skipped and not is_lost and (facts.next_loss_scale or 0) > 1
        for at, (key, label) in enumerate(zip(keys, labels, strict=True)):
            # Non-finite values are a mask only if the loss is finite at the first sample.
            self._finite.setdefault(f"{kind}:{label}", is_lost or not stats.non_finite[label])
            if np.isfinite(bits[at]):
                # The trend is that of unscaled gradients, because a growing loss scale is no trend.
                self._growth.add(f"{kind}:{label}", facts.step, float(bits[at]) + scaled)
            room = math.inf if is_sought else float(bits[at])
            verdict = self._judge_tensor(key, label, stats, room, scaled)
            if verdict is not None and not (is_single and "non_finite" in verdict.kind):
                column = StatField.NON_FINITE if "non_finite" in verdict.kind else StatField.AMAX
                verdict = dataclasses.replace(verdict, rank=int(ranks[:, at, column].argmax()))
                if is_lost and kind == "output_gradient":  # a lower loss scale does not help
                    verdict = dataclasses.replace(verdict, tags=("wide",))
                yield verdict.given(limits=limits)

    def _judge_tensor(
        self, key: OutputKey, label: str, stats: TensorStats, bits: float, scaled: float
    ) -> Verdict | None:
        where = f"{key.kind}:{label}"
        found: Verdict | None = None
        # bf16 has the range of fp32, so its zeros have other causes.
        if key.dtype == torch.float16 and key.kind != "norm_input":
            found = self._rule.judge(where, stats.zero_share[label], stats.subnormal_share[label])
        # Values that are not finite at the first sample, at a finite loss, are a mask of -inf. The
        # input of a norm is the output of another module that is measured as well.
        if stats.non_finite[label] and self._finite[where] and key.kind != "norm_input":
            found = Verdict("non_finite", stats.non_finite[label], 0.0, "error")
        elif bits < self.min_headroom_bits:
            overflow = self._growth.overflow_step(where, scaled)
            also = () if overflow is None else ("forecast",)
            found = Verdict("headroom", bits, self.min_headroom_bits, also=also)
            found = found.given(largest=torch.finfo(key.dtype).max, overflow=overflow)
        if found is None:
            return None
        found = found.given(dtype=_name(key.dtype), amax=stats.amax[label])
        tags = (*found.tags, "fp16" if key.dtype == torch.float16 else "wide")
        kind = f"{key.kind}_{found.kind}"
        return dataclasses.replace(found, kind=kind, tensor=key.name, tags=tags)

    def _judge_buffers(self, sample: Sample) -> Iterator[Verdict]:
        for name, row_WK in _rows_of_kind(sample, "buffer"):
            bad_W = row_WK[:, StatField.NON_FINITE]
            was_finite = self._finite.setdefault(f"buffer:{name}", not bad_W.any())
            if bad_W.any() and was_finite:  # other buffers hold -inf on purpose, as masks
                rank = int(bad_W.argmax())
                yield Verdict("buffer_non_finite", bad_W.max(), 0, "error", name, rank=rank)
            amax = float(row_WK[:, StatField.AMAX].max())
            usual = self._usual_buffers.get(name, 0.0)
            if name.endswith("running_var") and 0 < _JUMP * usual < amax:
                yield Verdict("buffer_jump", amax, _JUMP * usual, tensor=name).given(usual=usual)
            self._usual_buffers[name] = amax

    def _judge_logits(self, sample: Sample, metrics: dict[str, float]) -> Iterator[Verdict]:
        step, limits = sample.facts.step, {"attention_logit": self.max_attention_logit}
        for kind in ("attention_logit", "attention_entropy", "output_logit", "output_log_z"):
            rows = _rows_of_kind(sample, kind)
            ranks = {name or _ROOT: row_WK[:, StatField.AMAX] for name, row_WK in rows}
            largest = {name: float(by_W.max()) for name, by_W in ranks.items()}
            for name, value in largest.items():
                found = self._logits.judge(kind, name, step, value, limits.get(kind, math.inf))
                if found is not None:
                    yield dataclasses.replace(found, rank=int(ranks[name].argmax()))
            if largest:
                is_inverse = kind == "attention_entropy"
                shown = {n: 1 / v if is_inverse else v for n, v in largest.items()}
                self.history.add_column(kind, step, shown)
                metrics[kind] = (min if is_inverse else max)(shown.values())

    def _judge_experts(self, sample: Sample, metrics: dict[str, float]) -> Iterator[Verdict]:
        chosen: dict[str, list[float]] = {}
        tokens: dict[str, float] = {}
        for name, row_WK in _rows_of_kind(sample, "expert"):
            router, row_K = name.rpartition("[")[0], row_WK.sum(axis=0)
            chosen.setdefault(router, []).append(float(row_K[StatField.SUM_OF_SQUARES]))
            tokens[router] = float(row_K[-1])
        loads: dict[str, float] = {}  # choices of each expert; 1 if all have as many
        for router, counts in chosen.items():
            even = max(sum(counts) / len(counts), 1e-30)
            loads |= {f"{router}[{at}]": count / even for at, count in enumerate(counts)}
            yield from self._experts.judge(router, tokens[router], counts)
        if loads:
            self.history.add_column("expert_load", sample.facts.step, loads)
            metrics |= {"expert_load_min": min(loads.values())}
            metrics |= {"expert_load_max": max(loads.values())}


def _rows_of_kind(sample: Sample, kind: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield name and statistics row_WK, by rank, of each row of a kind."""
    for at, key in enumerate(sample.context["keys"]):
        if key.kind == kind:
            yield key.name, sample.array[:, at]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
