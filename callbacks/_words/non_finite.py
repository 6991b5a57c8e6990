"""Sentences of `NonFiniteLocator`: the source of the first non-finite value, and remedies."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # these modules import torch
    from lightning_mp.callbacks._locate.finding import NonFiniteSource
    from lightning_mp.callbacks._locate.trace import Seen

__all__ = ["CAUSES", "REMEDIES", "causes", "remedy_for"]

CAUSES = {
    "bad_loss": "The loss is not finite.",
    "bad_gradients": "The loss is finite, but some gradients are not.",
    "overflow": "Gradients overflowed in this step.",
    "overflows": "Gradients overflowed in {count} consecutive steps.",
    "no_replay": "`training_step(dataloader_iter)` fetches its own batches, which cannot be "
    "replayed.",
    "failed": "The replay failed with {name}: {text}.",
    "nowhere": "The replay of the step was finite.",
    "nowhere_of": "The replay of each of the {count} accumulated batches was finite.",
    "parameter": "Parameter `{bad.path}` held {bad.kind} before the step.",
    "batch": "`{bad.path}` held {bad.kind} when it came from the data loader.",
    "outlier": "`{path}` held {amax:.4g} when it came from the data loader, but 99.9% of its "
    "values are within {usual:.4g}. With these values clamped, the step is finite. Without the "
    "clamp: {text}",
    # --- the forward -----------------------------------------------------------------------------
    "forward": "{title} made {bad.kind} in the forward.",
    "forward_output": "{title} made {bad.kind} in the forward, in `{bad.path}` of its output.",
    "forward_passed": "{title} made {bad.kind} in the forward and passed it to `{call.name}`.",
    "buffer": "Its buffer `{buffer.path}` held {buffer.kind}.",
    "inputs": "Its inputs are finite: at most {largest.amax:.5g} in {largest.dtype_name} (limit "
    "{largest.limit:g}).",
    "mask": "The -inf in its input `{mask.path}` is a mask.",
    "submodules": "None of its submodules made this value.",
    "outside": "`training_step` of the root `{root}` made a loss of {bad.kind} in the forward, "
    "outside its submodules.",
    "outside_passed": "`training_step` of the root `{root}` made {bad.kind} in the forward, "
    "outside its submodules, and passed it to `{call.name}`.",
    "outputs": "The outputs of its submodules are finite: at most {largest.amax:.5g} in "
    "{largest.dtype_name} (limit {largest.limit:g}).",
    # --- the backward ----------------------------------------------------------------------------
    "backward": "{title} made {bad.kind} in the backward.",
    "backward_scaled": "{title} made {bad.kind} in the backward at a loss scale of {scale:g}.",
    "output_gradient": "The gradient of its output is finite: at most {largest.amax:.5g} in "
    "{largest.dtype_name} (limit {largest.limit:g}).",
    "input_gradient": "The gradient of its input is not finite.",
    "own_gradient": "The gradient of `{bad.path}` is not finite.",
    "backward_of_loss": "The loss is finite, and no submodule made this gradient.",
    # --- further sentences -----------------------------------------------------------------------
    "not_exact": "The replay is not exact: its loss is {now}, but the loss of the step was "
    "{before:.4g}. A replay differs if `training_step` keeps state, changes its batch in place, "
    "or draws from a generator that is not an attribute of a module.",
    "suspects": "Before it, these modules had values near the limit: {listed}.",
    "fitting_scale": "At a loss scale of {scale:g}, all gradients of this batch are finite.",
}


def causes(keys: Sequence[str], *, near: Sequence["Seen"] = (), **fields: object) -> str:
    """Return sentences; the largest of the tensors `near`, relative to its limit, is a field."""
    largest = max(near, key=lambda s: s.amax / s.limit, default=None)
    return " ".join(CAUSES[key] for key in keys).format(largest=largest, **fields)


# --- remedies ------------------------------------------------------------------------------------

REMEDIES = {
    "batch": "Repair or remove such samples in the dataset, for example with "
    "`torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)`.",
    "outlier": "Repair or remove such samples in the dataset, or bound them with "
    "`x.clamp(-{usual:.3g}, {usual:.3g})`.",
    "parameter": "An earlier step wrote this value, and gradient clipping does not remove NaN. "
    "Resume from an earlier checkpoint, as `SpikeGuard(action='rewind')` does.",
    "parameter unchecked": "An earlier step wrote this value, and gradient clipping does not "
    "remove NaN. Resume from an earlier checkpoint, as `SpikeGuard(action='rewind')` does, with "
    "`NonFiniteLocator(check_gradients=True)`, which names the module that makes such a gradient.",
    "parameter epsilon": "Adam's eps={eps:g} is 0 in {dtype}, so Adam divides by 0. Keep the "
    "weights in fp32 with `BalancedAMP()`, or train with `PureFP16()`, which preserves epsilon.",
    "forward": "Run the module in fp32 with `{plugin}(fp32_modules=[{kept}'{name}'])`, train in "
    "bf16, which holds 3.4e38, with `{plugin}(half='bf16')`, or clamp the module's output with "
    "`{plugin}(inf_clamp=[{clamped}'{name}'])`.",
    # A clamp does not remove NaN.
    "forward nan": "Run the module in fp32 with `{plugin}(fp32_modules=[{kept}'{name}'])`, or "
    "train in bf16, which holds 3.4e38, with `{plugin}(half='bf16')`.",
    "suspects": "A lower learning rate or weight decay keeps {suspects} smaller.",
    "root": "Compute this in fp32, for example with `.float()` on its inputs, or train in "
    "bf16, which holds 3.4e38, with `{plugin}(half='bf16')`.",
    "forward wide": "Look for a division by 0, a logarithm or root of 0 or less, a softmax over a "
    "fully masked row, an overflowing exponential, or large weights. Smaller initial weights, a "
    "lower learning rate or `gradient_clip_val` keep weights small.",
    "backward": "A lower loss scale does not help. Run `{name}` in fp32 with "
    "`{plugin}(fp32_modules=[{kept}'{name}'])`, or train in bf16 with `{plugin}(half='bf16')`.",
    "backward scale": "Pass `{plugin}(loss_scale={scale:g})`, "
    "`loss_scale=LossScaleConfig(init_scale={scale:g}, max_scale={scale:g})` so that the scale "
    "may fall further, or `{plugin}(half='bf16')`, which needs no loss scale.",
    "backward wide": "Look for the derivative of a root, norm, logarithm or quotient at 0, and add "
    "a small number inside, as in `torch.sqrt(x + 1e-6)`.",
}


def remedy_for(
    finding: "NonFiniteSource",
    run: Mapping[str, Any],
    *,
    eps: float | None = None,
    checks_gradients: bool = True,
) -> str:
    """Return the remedy for a finding, with values to set.

    `run` holds the fields of `plugin_fields`. `eps` is Adam's epsilon if it is 0 in the dtype of
    the weights. `checks_gradients` tells whether the locator checks gradients before steps.
    """
    key: str = finding.source
    if key == "parameter":
        key += " epsilon" if eps else "" if checks_gradients else " unchecked"
    elif key == "backward" and finding.fitting_scale is not None:
        key += " scale"
    # No dtype has a larger range.
    elif key in ("forward", "backward") and finding.dtype != "float16":
        key += " wide"
    elif key in ("forward", "backward") and finding.is_root:  # no module to name
        key = "root"
    elif key == "forward" and finding.is_nan:
        key += " nan"
    texts = [REMEDIES.get(key, "")]
    if finding.source == "forward" and finding.suspects:
        texts.append(REMEDIES["suspects"])
    suspects = ", ".join(f"`{each}`" for each in finding.suspects)
    fields = {"name": finding.name, "scale": finding.fitting_scale or 1.0, "suspects": suspects}
    fields |= {"eps": eps, "dtype": finding.dtype, "usual": finding.usual}
    return " ".join(texts).format(**run, **fields)
