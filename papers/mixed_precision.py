"""Well-known figures about mixed-precision training, drawn from runs of small models.

Training curves with and without master weights, the histogram of gradients in the range of fp16,
the loss scale over time, T5's overflow, Adam after zero gradients, and the share of zero gradients
in a run that fails.

References:
    - Mixed Precision Training, https://arxiv.org/abs/1710.03740, figures 2 and 3
    - T5's clamp, transformers#9295
    - StableAdamW, https://arxiv.org/abs/2304.13013
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import BalancedAMP, InfClamp, LossScaleConfig, PureFP16, SafeAdamW
from lightning_mp.numerics.floats import largest_flushed, smallest_overflowing
from papers._fit import scale_of, train
from papers.output import COMPUTED, MEASURED, Output, Row

__all__ = ["PARTS"]

FP16 = torch.float16
_TINY, _HUGE = torch.finfo(FP16).tiny, torch.finfo(FP16).max


class _Regression(pl.LightningModule):
    """A perceptron that learns `sin(sum(x))` and records losses, loss scales and gradients."""

    def __init__(
        self,
        optimizer: Callable[[Any], Optimizer],
        *,
        depth: int = 1,  # hidden layers
        weight: float = 1.0,  # factor of the loss, and therefore of all gradients
        outliers: int = 0,  # interval of steps whose targets are a thousand times as large
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(depth - 1)]
        self.network = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), *hidden, nn.Linear(64, 1))
        self.make, self.weight, self.outliers = optimizer, weight, outliers
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.zero_shares: list[float] = []
        self.logs: list[Tensor] = []  # log2 of gradient magnitudes, one tensor a step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        hard = self.outliers and (self.global_step + 1) % self.outliers == 0
        # In fp32: the square of an error of a thousand is inf in fp16.
        error = self.network(x).float() - y.float() * (1e3 if hard else 1.0)
        loss: Tensor = error.square().mean()
        self.losses.append(float(loss.detach()))
        # Recorded without the weight, so that runs with different weights are comparable.
        return loss * self.weight

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        # Gradients are unscaled by now.
        flat = torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None])
        self.zero_shares.append(float((flat == 0).double().mean()))
        # Zeros are left out, because their logarithm is -inf.
        self.logs.append(flat[flat != 0].abs().log2())

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(scale_of(self.trainer.precision_plugin) or 1.0)  # the next step's

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.parameters())


def _trained(model: _Regression, precision: Precision | None, steps: int) -> _Regression:
    """Train on a single batch, the whole data set."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=generator)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=64)
    # One batch is an epoch: only the steps end the run.
    train(model, data, accelerator="cpu", max_steps=steps, max_epochs=-1, plugins=precision)
    return model


def curves(out: Output) -> None:
    """Train in fp32, in fp16 with master weights, and in fp16 alone."""
    steps = 40 if out.fast else 1500
    precisions: dict[str, Precision | None] = {
        "fp32": None,
        "fp16, fp32 master weights (BalancedAMP)": BalancedAMP(half="fp16"),
        "fp16 and residual (PureFP16)": PureFP16(),
        "fp16, no master weights": PureFP16(write_back="nearest"),
    }
    runs = {}
    for name, precision in out.progress(precisions.items(), "curves"):
        # Updates are below 2^-12 of most weights, so fp16 alone rounds them away.
        model = _Regression(lambda params: torch.optim.SGD(params, lr=3e-3))
        runs[name] = _trained(model, precision, steps).losses
    reference = runs["fp32"][-1]
    rows: list[Row] = []
    for name, losses in runs.items():
        last = {"loss": losses[-1], "of_fp32": losses[-1] / reference - 1}
        rows.append({"weights": name, "steps": steps, **last, "kind": MEASURED})
    out.table("curves", rows, "Three curves: the last loss, and how far it is from fp32's")
    with out.picture("curves", 1, "Small updates need master weights or a residual") as (axes,):
        styles = ("-", "--", ":", "-")
        for (name, losses), style in zip(runs.items(), styles, strict=True):
            axes.plot(losses, style, label=name, linewidth=2)
        axes.set(xlabel="step", ylabel="loss", yscale="log")
        axes.legend()


def histogram(out: Output) -> None:
    """Show the gradients in the range of fp16, and the scale that moves them into it."""
    steps = 20 if out.fast else 400
    model = _Regression(lambda params: AdamW(params, lr=1e-3), depth=6, weight=1e-4)
    logs = torch.cat(_trained(model, None, steps).logs)
    flushed, overflow = math.log2(largest_flushed(FP16)), math.log2(smallest_overflowing(FP16))
    headroom = overflow - 1 - float(logs.max())  # one bit for larger gradients later in training
    scale = 2.0 ** math.floor(headroom)
    rows: list[Row] = []
    for name, shift in (("as they are", 0.0), ("times the suggested scale", math.log2(scale))):
        moved = logs + shift
        shares = {
            "zero_in_fp16": float((moved <= flushed).double().mean()),
            "subnormal": float(((moved > flushed) & (moved < math.log2(_TINY))).double().mean()),
            "overflowing": float((moved >= overflow).double().mean()),
        }
        rows.append({"gradients": name, "scale": 2.0**shift, **shares, "kind": MEASURED})
    out.table("histogram", rows, "Shares of gradients that fp16 cannot represent in full")
    with out.picture("histogram", 1, "Gradients and the range of fp16") as (axes,):
        bins = range(math.floor(float(logs.min())) - 1, math.ceil(overflow) + 2)
        for row, color in zip(rows, ("tab:blue", "tab:orange"), strict=True):
            shift = math.log2(row["scale"])
            label = f"{row['gradients']} (2^{shift:g})"
            axes.hist((logs + shift).numpy(), bins=[*bins], alpha=0.55, label=label, color=color)
        axes.axvspan(axes.get_xlim()[0], flushed, color="0.8", zorder=0, label="zero in fp16")
        axes.axvspan(flushed, math.log2(_TINY), color="0.92", zorder=0, label="subnormal")
        axes.axvline(math.log2(_HUGE), color="tab:red", label="fp16's largest")
        axes.set(xlabel="log2 |g|", ylabel="gradients", yscale="log")
        axes.set_ylim(0.5, 1e4 * axes.get_ylim()[1])  # room for the legend
        axes.legend(fontsize="small", loc="upper left")


def scale(out: Output) -> None:
    """Show the loss scale of a run: halved by overflows, doubled after finite steps."""
    steps, interval = (60, 10) if out.fast else (600, 50)
    start = 2.0**24
    config = LossScaleConfig(init_scale=start, growth_interval=interval)
    model = _Regression(lambda params: AdamW(params, lr=1e-3), outliers=steps // 4)
    _trained(model, BalancedAMP(half="fp16", loss_scale=config), steps)
    scales = [start, *model.scales]
    falls = [i for i in range(1, len(scales)) if scales[i] < scales[i - 1]]
    row: Row = {"steps": len(model.scales), "skipped": len(falls), "first": scales[0]}
    row |= {"lowest": min(scales), "highest": max(scales), "last": scales[-1], "kind": MEASURED}
    out.table("scale", [row], f"Loss scale, doubled after {interval} steps without overflow")
    with out.picture("scale", 1, "Dynamic loss scale over time") as (axes,):
        axes.step(range(len(scales)), scales, where="post", label="loss scale")
        axes.plot(falls, [scales[i] for i in falls], "v", color="tab:red", label="step skipped")
        axes.set(xlabel="step", ylabel="loss scale", yscale="log")
        axes.set_yscale("log", base=2)
        axes.legend()


class _T5Block(nn.Module):
    """T5's feed-forward block: RMS norm, `wi`, ReLU, `wo`, added to the input."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.wi, self.wo = nn.Linear(width, 256, bias=False), nn.Linear(256, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.wo(self.wi(self.norm(x)).relu())
        return y


def t5(out: Output) -> None:
    """Scale up `wo` until fp16 overflows, in fp16 and under autocast, with and without clamp."""
    torch.manual_seed(0)
    base, x = nn.Sequential(_T5Block(), _T5Block()), torch.randn(8, 16, 64)
    exponents = (14, 18) if out.fast else range(14, 21)
    rows = []
    for exponent in exponents:
        for mode in ("fp16", "autocast"):
            for clamped in (False, True):
                # Copies of the same blocks: runs differ only in exponent, mode and clamp.
                blocks = copy.deepcopy(base)
                with torch.no_grad():
                    blocks.get_parameter("0.wo.weight").mul_(2.0**exponent)
                blocks = blocks.half() if mode == "fp16" else blocks
                clamp = InfClamp(["auto"]).attach(blocks) if clamped else None
                y = x.half() if mode == "fp16" else x
                with torch.no_grad(), torch.autocast("cpu", FP16, enabled=mode == "autocast"):
                    y = blocks(y)
                bad = float((~y.isfinite()).any(-1).double().mean())
                row = {"wo_times": 2.0**exponent, "mode": mode, "clamp": clamped}
                row |= {"clamped_values": sum(clamp.counted().values()) if clamp else 0}
                rows.append({**row, "tokens_lost": bad, "kind": MEASURED})
    out.table("t5", rows, "Tokens with a NaN or inf after two of T5's feed-forward blocks")
    with out.picture("t5", 2, "T5's overflow, without and with InfClamp") as panels:
        for axes, mode in zip(panels, ("fp16", "autocast"), strict=True):
            for clamped, style in ((False, "o-"), (True, "s--")):
                points = [r for r in rows if (r["mode"], r["clamp"]) == (mode, clamped)]
                label = "with InfClamp" if clamped else "without"
                shares = [r["tokens_lost"] for r in points]
                axes.plot([r["wo_times"] for r in points], shares, style, label=label)
            axes.set(title=mode, ylabel="share of tokens lost", ylim=(-0.05, 1.05))
            axes.set_xlabel("factor of the weights of the first block's `wo`")
            axes.set_xscale("log", base=2)
            axes.legend()


def adam(out: Output) -> None:
    """Measure Adam's update by the first gradient after a number of zero gradients."""
    pauses = (0, 10, 100) if out.fast else (0, 10, 100, 300, 1000, 3000, 10_000)
    options: dict[str, Any] = {"lr": 1e-6, "betas": (0.9, 0.999), "weight_decay": 0.0}
    makers: dict[str, Callable[[list[Tensor]], Optimizer]] = {
        "torch.optim.AdamW": lambda params: AdamW(params, **options),
        "SafeAdamW(clip_update_rms=1.0)": lambda params: SafeAdamW(
            params, clip_update_rms=1.0, **options
        ),
    }
    rows: list[Row] = []
    for name, make in makers.items():
        weight = torch.zeros(64, requires_grad=True)
        optimizer = make([weight])
        # The first step creates the states that are overwritten below.
        _step(optimizer, weight, 1e-3)
        # The state after a million steps with this gradient, when bias correction has ended.
        known = {"step": 1e6, "exp_avg": 1e-3, "exp_avg_sq": 1e-6}
        for key, value in known.items():
            optimizer.state[weight][key].fill_(value)
        taken = 0
        for pause in out.progress(pauses, name):
            for _ in range(pause - taken):
                _step(optimizer, weight, 0.0)
            taken = pause
            # A deep copy, because the trial step writes to the tensors of `state_dict`.
            weights, states = weight.detach().clone(), copy.deepcopy(optimizer.state_dict())
            moved = _step(optimizer, weight, 1e-3) / options["lr"]
            with torch.no_grad():
                # Undo the trial step, so that the zero gradients continue.
                weight.copy_(weights)
            optimizer.load_state_dict(states)
            rows.append({"optimizer": name, "zeros": pause, "update": moved, "kind": MEASURED})
    for pause in pauses:
        first, second = 0.9 ** (pause + 1) + 0.1, 0.999 ** (pause + 1) + 0.001
        update = first / math.sqrt(second)
        rows.append({"optimizer": "formula", "zeros": pause, "update": update, "kind": COMPUTED})
    out.table("adam", rows, "The first step after zero gradients, in units of the learning rate")
    with out.picture("adam", 1, "Zero gradients starve the second moment") as (axes,):
        for name in (*makers, "formula"):
            points = [(r["zeros"], r["update"]) for r in rows if r["optimizer"] == name]
            axes.plot(*zip(*points, strict=True), "--" if name == "formula" else "o-", label=name)
        axes.set(xlabel="zero gradients in a row", ylabel="update over learning rate")
        axes.set_xscale("symlog", linthresh=10)
        axes.legend()


def _step(optimizer: Optimizer, weight: Tensor, gradient: float) -> float:
    """Step once; return the change of the first element."""
    before = float(weight.detach()[0])
    weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    return abs(float(weight.detach()[0]) - before)


def zeros(out: Output) -> None:
    """Train without a loss scale until gradients are zero, and with a dynamic one."""
    steps = 40 if out.fast else 300
    scales: dict[str, Any] = {"loss scale 1": 1.0, "dynamic loss scale": "dynamic"}
    runs: dict[str, _Regression] = {}
    for name, loss_scale in out.progress(scales.items(), "zeros"):
        # The weight is so low that most gradients underflow in fp16 without a loss scale.
        model = _Regression(lambda params: AdamW(params, lr=1e-3), depth=4, weight=1e-5)
        runs[name] = _trained(model, BalancedAMP(half="fp16", loss_scale=loss_scale), steps)
    rows: list[Row] = []
    for name, run in runs.items():
        shares = {"first_zero_share": run.zero_shares[0], "last_zero_share": run.zero_shares[-1]}
        losses = {"first_loss": run.losses[0], "last_loss": run.losses[-1]}
        rows.append({"run": name, "steps": steps, **shares, **losses, "kind": MEASURED})
    out.table("zeros", rows, "Share of gradients that are exactly 0")
    title = "Without a loss scale most gradients are zero, and the loss falls slowly"
    with out.picture("zeros", 2, title) as panels:
        for name, run in runs.items():
            panels[0].plot(run.zero_shares, label=name)
            panels[1].plot(run.losses, label=name)
        panels[0].axhline(0.05, color="tab:red", linestyle=":", label="5%: failure is near")
        panels[0].set(xlabel="step", ylabel="share of zero gradients")
        panels[1].set(xlabel="step", ylabel="loss", yscale="log")
        panels[0].legend(loc="lower left", bbox_to_anchor=(0, 0.12))  # between the lines
        panels[1].legend()


PARTS = {part.__name__: part for part in (curves, histogram, scale, t5, adam, zeros)}
