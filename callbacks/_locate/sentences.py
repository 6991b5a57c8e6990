"""What `NonFiniteLocator` says: where values that are not finite were made, and what to set."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_mp.callbacks._locate.trace import Call, Seen, Trace

if TYPE_CHECKING:
    from lightning_mp.callbacks._locate.finding import Finding

NO_REPLAY = "`training_step(dataloader_iter)` fetches its batches, which cannot be run again"
BAD_LOSS = "The loss is not finite"
BAD_GRADIENTS = "The loss is finite, gradients are not"


def overflowed(skipped_in_a_row: int) -> str:
    """Return why the replay was made, where a loss scale skipped steps."""
    steps = f"{skipped_in_a_row} steps in a row" if skipped_in_a_row > 1 else "this step"
    return f"Gradients overflowed in {steps}"


def nowhere(batches: int) -> str:
    """Return that the replay was finite."""
    if batches > 1:
        return f"each of the {batches} accumulated batches is finite by itself"
    return "the step came out finite when it was run again"


def not_exact(before: float, loss: Seen) -> str:
    """Return that a replay gave another loss than the step."""
    now = f"{loss.amax:.4g}" if loss.is_finite else kind_of(loss)
    return (
        f"; the replay is not exact, with a loss of {now} where the step had {before:.4g}: "
        "`training_step` keeps state, changes its batch in place or draws from a generator that "
        "is no attribute of a module"
    )


def failed(error: Exception) -> str:
    """Return that the replay raised."""
    first = (str(error).splitlines() or [""])[0]
    return f"the replay failed with {type(error).__name__}: {first[:200]}"


def parameter(bad: Seen) -> str:
    """Return that a parameter was bad from the start."""
    return f"parameter `{bad.path}` held {kind_of(bad)} before the step"


def batch(bad: Seen) -> str:
    """Return that a tensor of the batch was."""
    return f"`{bad.path}` held {kind_of(bad)} when it came from the data loader"


def forward(
    title: str,
    bad: Seen,
    inputs: Sequence[Seen],
    *,
    passed_to: Call | None,
    buffer: Seen | None,
    has_submodules: bool,
) -> str:
    """Return that a module made it in the forward."""
    where = f" (`{bad.path}` of its output)" if bad.path else ""
    where = f", which it passed to `{passed_to.name}`" if passed_to else where
    if buffer is not None:
        why = f"its buffer `{buffer.path}` held {kind_of(buffer)}"
    else:
        why = f"its inputs are finite{_up_to([s for s in inputs if not s.is_mask])}"
        masks = [s.path for s in inputs if s.is_masked]
        why += f", but for a mask of -inf, `{masks[0]}`" if masks else ""
        why += ", and none of its submodules made it" if has_submodules else ""
    return f"{title} made {kind_of(bad)} in the forward{where}: {why}"


def outside(root: str, bad: Seen, outputs: Sequence[Seen], *, passed_to: Call | None) -> str:
    """Return that code of `training_step` made it, between its modules or after them."""
    what = f"a loss of {kind_of(bad)}"
    what = f"{kind_of(bad)}, which it passed to `{passed_to.name}`" if passed_to else what
    return (
        f"`training_step` of the root `{root}` made {what} in the forward, outside of any "
        f"submodule: what submodules gave it is finite{_up_to(outputs)}"
    )


def backward_of_loss(root: str, bad: Seen, scale: float | None) -> str:
    """Return that the loss computation made it in the backward."""
    return (
        f"the loss computation in `training_step` of the root `{root}` made {kind_of(bad)} in "
        f"the backward{_at(scale)}: no submodule did, and the loss is finite"
    )


def backward(
    title: str, bad: Seen, came: Sequence[Seen], *, is_parameter: bool, scale: float | None
) -> str:
    """Return that a module made it in the backward."""
    what = f"that of `{bad.path}`" if is_parameter else "that of its input"
    return (
        f"{title} made {kind_of(bad)} in the backward{_at(scale)}: the gradient of its output is "
        f"finite{_up_to(came)}, {what} is not"
    )


def with_suspects(sentence: str, suspects: Sequence[tuple[str, str]]) -> str:
    """Return a sentence that also names suspects."""
    if not suspects:
        return sentence
    listed = "; ".join(f"`{name}` ({words})" for name, words in suspects)
    return f"{sentence}; near the limit before it: {listed}"


def with_fitting_scale(sentence: str, fitting: float) -> str:
    """Return a sentence that also says which loss scale cures it."""
    return f"{sentence}; at a loss scale of {fitting:g} all gradients of this batch are finite"


def title_of(trace: Trace, call: Call) -> str:
    """Return how a module is called."""
    if not call.name:
        return f"the root `{type(trace.root).__name__}` itself"
    return f"`{call.name}` ({type(call.module).__name__})"


def kind_of(seen: Seen) -> str:
    """Return what is in a tensor that is not finite."""
    if seen.nan and seen.inf:
        return "NaN and inf"
    return "NaN" if seen.nan else "inf"


def _at(scale: float | None) -> str:
    return "" if scale is None else f" at a loss scale of {scale:g}"


def _up_to(seen: Sequence[Seen]) -> str:
    if not seen:
        return ""
    largest = max(seen, key=lambda s: s.amax / s.limit)
    return f" (up to {largest.amax:.5g} in {largest.dtype_name}, limit {largest.limit:g})"


# --- remedies ------------------------------------------------------------------------------------


def remedy_for(finding: "Finding", plugin: str) -> str:
    """Return sentences with values to set, for the precision plugin of a name."""
    if finding.source == "batch":
        return (
            "Repair or leave out such samples in the data set, as by "
            "`torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)`."
        )
    if finding.source == "parameter":
        return (
            "An earlier step wrote it, and clipping does nothing for NaN. Go on from a checkpoint "
            "before it, as `SpikeGuard(action='rewind')` does, with "
            "`NonFiniteLocator(check_gradients=True)`, which names the module that makes such a "
            "gradient before the step; where gradients are finite, look at the optimizer's states "
            "and its epsilon."
        )
    if finding.source == "backward":
        return _for_backward(finding, plugin)
    return _for_forward(finding, plugin) if finding.source == "forward" else ""


def _for_forward(finding: "Finding", plugin: str) -> str:
    bf16 = f"train in bf16, which holds 3.4e38, with `{plugin}(half='bf16')`"
    if finding.dtype != "float16":
        return (
            "Look there for a division by 0, a logarithm or root of 0 or less, a softmax of a row "
            "that is masked as a whole, an overflowing exponential, or large weights: initialise "
            "them smaller, or keep them small by a lower learning rate or `gradient_clip_val`."
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


def _for_backward(finding: "Finding", plugin: str) -> str:
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
