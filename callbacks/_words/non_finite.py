"""What `NonFiniteLocator` says: where values that are not finite began, and what to do about it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which need torch
    from lightning_mp.callbacks._locate.finding import Finding
    from lightning_mp.callbacks._locate.trace import Seen, TracedCall

__all__ = [
    "REMEDIES",
    "SAYS",
    "at_scale",
    "backward_words",
    "forward_words",
    "outside_words",
    "remedy_for",
]

SAYS = {
    "bad_loss": "The loss is not finite",
    "bad_gradients": "The loss is finite, gradients are not",
    "overflow": "Gradients overflowed in this step",
    "overflows": "Gradients overflowed in {count} steps in a row",
    "no_replay": "`training_step(dataloader_iter)` fetches its batches, which cannot be run again",
    "failed": "the replay failed with {name}: {text}",
    "nowhere": "the step came out finite when it was run again",
    "nowhere_of": "each of the {count} accumulated batches is finite by itself",
    "parameter": "parameter `{bad.path}` held {bad.kind} before the step",
    "batch": "`{bad.path}` held {bad.kind} when it came from the data loader",
    "outlier": "`{path}` held {amax:.4g} when it came from the data loader, where 99.9% of its "
    "values are within {usual:.4g}: with such values clamped the step is finite, and without that "
    "{sentence}",
    "backward_of_loss": "the loss computation in `training_step` of the root `{root}` made "
    "{bad.kind} in the backward{at}: no submodule did, and the loss is finite",
    # --- what may stand behind one of these ------------------------------------------------------
    "not_exact": "; the replay is not exact, with a loss of {now} where the step had "
    "{before:.4g}: `training_step` keeps state, changes its batch in place or draws from a "
    "generator that is no attribute of a module",
    "suspects": "; near the limit before it: {listed}",
    "fitting_scale": "; at a loss scale of {scale:g} all gradients of this batch are finite",
}


def forward_words(
    title: str,
    bad: "Seen",
    inputs: Sequence["Seen"],
    *,
    passed_to: "TracedCall | None",
    buffer: "Seen | None",
    has_submodules: bool,
) -> str:
    where = f" (`{bad.path}` of its output)" if bad.path else ""
    where = f", which it passed to `{passed_to.name}`" if passed_to else where
    if buffer is not None:
        why = f"its buffer `{buffer.path}` held {buffer.kind}"
    else:
        why = f"its inputs are finite{_up_to([s for s in inputs if not s.is_mask])}"
        masks = [s.path for s in inputs if s.is_masked]
        why += f", but for a mask of -inf, `{masks[0]}`" if masks else ""
        why += ", and none of its submodules made it" if has_submodules else ""
    return f"{title} made {bad.kind} in the forward{where}: {why}"


def outside_words(
    root: str, bad: "Seen", outputs: Sequence["Seen"], *, passed_to: "TracedCall | None"
) -> str:
    what = f"a loss of {bad.kind}"
    what = f"{bad.kind}, which it passed to `{passed_to.name}`" if passed_to else what
    return (
        f"`training_step` of the root `{root}` made {what} in the forward, outside of any "
        f"submodule: what submodules gave it is finite{_up_to(outputs)}"
    )


def backward_words(
    title: str, bad: "Seen", came: Sequence["Seen"], *, is_parameter: bool, scale: float | None
) -> str:
    what = f"that of `{bad.path}`" if is_parameter else "that of its input"
    return (
        f"{title} made {bad.kind} in the backward{at_scale(scale)}: the gradient of its output is "
        f"finite{_up_to(came)}, {what} is not"
    )


def at_scale(scale: float | None) -> str:
    """Return at which loss scale a backward was run."""
    return "" if scale is None else f" at a loss scale of {scale:g}"


def _up_to(seen: Sequence["Seen"]) -> str:
    if not seen:
        return ""
    largest = max(seen, key=lambda s: s.amax / s.limit)
    return f" (up to {largest.amax:.5g} in {largest.dtype_name}, limit {largest.limit:g})"


# --- remedies ------------------------------------------------------------------------------------

_BF16 = "train in bf16, which holds 3.4e38, with `{plugin}(half='bf16')`."
_ISLAND = "`{plugin}(fp32_modules=['norm', '{name}'])`"

REMEDIES = {
    "batch": "Repair or leave out such samples in the data set, as by "
    "`torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)`.",
    "outlier": "Repair or leave out such samples in the data set, or bound them by "
    "`x.clamp(-{usual:.3g}, {usual:.3g})`.",
    "parameter": "An earlier step wrote it, and clipping does nothing for NaN. Go on from a "
    "checkpoint before it, as `SpikeGuard(action='rewind')` does.",
    "parameter unchecked": "An earlier step wrote it, and clipping does nothing for NaN. Go on "
    "from a checkpoint before it, as `SpikeGuard(action='rewind')` does, with "
    "`NonFiniteLocator(check_gradients=True)`, which names the module that makes such a gradient.",
    "parameter epsilon": "Adam's eps={eps:g} is 0 in {dtype}, so that it divides by 0. Keep the "
    "weights in fp32 with `BalancedAMP()`, or train with `PureFP16()`, which keeps epsilon.",
    "forward": f"Compute it in fp32, with {_ISLAND}; or {_BF16} Or clamp its output by "
    "`{plugin}(inf_clamp=['{name}'])`.",
    # A clamp lets NaN pass.
    "forward nan": f"Compute it in fp32, with {_ISLAND}; or {_BF16}",
    "suspects": "A lower learning rate or weight decay keeps {suspects} smaller.",
    "forward root": f"Compute it in fp32 there, as by `.float()` on what goes in; or {_BF16}",
    "forward wide": "Look there for a division by 0, a logarithm or root of 0 or less, a softmax "
    "of a row that is masked as a whole, an overflowing exponential, or large weights: initialise "
    "them smaller, or keep them small by a lower learning rate or `gradient_clip_val`.",
    "backward": f"A lower loss scale does not help: compute `{{name}}` in fp32, with {_ISLAND}, or "
    "train in bf16 with `{plugin}(half='bf16')`.",
    "backward scale": "Pass `{plugin}(loss_scale={scale:g})`, or "
    "`loss_scale=LossScaleConfig(init_scale={scale:g}, max_scale={scale:g})` to let it fall "
    "further; or `{plugin}(half='bf16')`, which needs no loss scale.",
    "backward wide": "Look there for the derivative of a root, norm, logarithm or quotient at 0: "
    "add a small number inside, as in `torch.sqrt(x + 1e-6)`.",
}


def remedy_for(
    finding: "Finding", plugin: str, *, eps: float | None = None, checks_gradients: bool = True
) -> str:
    """Return sentences with values to set.

    Args:
        finding: What was found.
        plugin: The precision plugin to name.
        eps: Adam's, where it is 0 in the dtype of the weights.
        checks_gradients: Whether the locator looks at gradients before steps.
    """
    key: str = finding.source
    if key == "parameter":
        key += " epsilon" if eps else "" if checks_gradients else " unchecked"
    elif key == "backward" and finding.fitting_scale is not None:
        key += " scale"
    elif key in ("forward", "backward") and not finding.is_half:  # no wider format helps
        key += " wide"
    elif key == "forward":
        key += " root" if finding.is_root else " nan" if finding.is_nan else ""
    texts = [REMEDIES.get(key, "")]
    if finding.source == "forward" and finding.suspects:
        texts.append(REMEDIES["suspects"])
    suspects = ", ".join(f"`{each}`" for each in finding.suspects)
    fields = {"name": finding.name, "scale": finding.fitting_scale or 1.0, "suspects": suspects}
    fields |= {"eps": eps, "dtype": finding.dtype, "usual": finding.usual}
    return " ".join(texts).format(plugin=plugin, **fields)
