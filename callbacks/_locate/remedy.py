"""What to set against values that are not finite."""

import lightning.pytorch as pl

from lightning_mp.callbacks._locate.finding import Finding
from lightning_mp.precision.scaled_precision import ScaledPrecision

__all__ = ["remedy_for"]


def remedy_for(finding: Finding, trainer: pl.Trainer) -> str:
    """Return sentences with values to set.

    Args:
        finding: What was found.
        trainer: The trainer, whose precision plugin the values are for.
    """
    plugin = trainer.precision_plugin
    name = type(plugin).__name__ if isinstance(plugin, ScaledPrecision) else "BalancedAMP"
    if finding.source == "batch":
        return (
            "Repair or leave out such samples in the data set, as by "
            "`torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)`."
        )
    if finding.source == "parameter":
        return (
            "An earlier step wrote it: go on from a checkpoint before it, with a lower learning "
            "rate or `Trainer(gradient_clip_val=1.0)`; with fp16, under a plugin that skips such "
            "steps, as `BalancedAMP()` does."
        )
    if finding.source == "backward":
        return _for_backward(finding, name)
    if finding.source == "forward":
        return _for_forward(finding, name)
    return ""


def _for_forward(finding: Finding, plugin: str) -> str:
    bf16 = f"train in bf16, which holds 3.4e38, with `{plugin}(half='bf16')`"
    if finding.dtype != "float16":
        return (
            "Look there for a division by 0, a logarithm or root of 0 or less, an overflowing "
            "exponential, or weights that a high learning rate has grown."
        )
    if finding.is_root:
        return f"Compute it in fp32 there, as by `.float()` on what goes in; or {bf16}."
    clamp = f"Pass `{plugin}(inf_clamp=['{finding.name}'])`, which clamps its output"
    island = f"compute it in fp32, with `BalancedAMP(fp32_modules=['norm', '{finding.name}'])`"
    fixed = f"{clamp}; or {island}; or {bf16}."
    if finding.suspects:
        listed = ", ".join(f"`{each}`" for each in finding.suspects)
        fixed += f" A lower learning rate or weight decay keeps {listed} smaller."
    return fixed


def _for_backward(finding: Finding, plugin: str) -> str:
    if finding.fitting_scale is not None:
        scale = f"{finding.fitting_scale:g}"
        return (
            f"Pass `{plugin}(loss_scale={scale})`, or "
            f"`loss_scale=LossScaleConfig(init_scale={scale}, max_scale={scale})` to let it fall "
            f"further; or `{plugin}(half='bf16')`, which needs no loss scale."
        )
    if finding.dtype == "float16":
        return (
            f"A lower loss scale does not help: compute `{finding.name}` in fp32, with "
            f"`BalancedAMP(fp32_modules=['norm', '{finding.name}'])`, or train in bf16 with "
            f"`{plugin}(half='bf16')`."
        )
    return (
        "Look there for the derivative of a root, norm, logarithm or quotient at 0: add a small "
        "number inside, as in `torch.sqrt(x + 1e-6)`."
    )
