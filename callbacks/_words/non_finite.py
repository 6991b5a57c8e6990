"""Sentences of `NonFiniteLocator`: the source of the first non-finite value, and remedies.

Keys are those of `sentences.py`.
"""

__all__ = ["MESSAGES", "REMEDIES", "SENTENCES", "SHARED"]

_WIDE = (
    "Look for a division by 0 (as of a cross-entropy without labels), a logarithm or root of 0 or "
    "less, a softmax over a fully masked row, an overflowing exponential, or large weights."
)
# What has failed; sentences about the source follow.
MESSAGES = {
    "non_finite": "The loss is not finite.",
    "non_finite, gradients": "The loss is finite, but some gradients are not.",
    "non_finite, overflow": "Gradients overflowed in this step.",
    "non_finite, overflows": "Gradients overflowed in {skips} consecutive steps.",
}
SENTENCES = {
    "no_replay": "`training_step(dataloader_iter)` fetches its own batches, which cannot be "
    "replayed.",
    "failed": "The replay failed with {name}: {text}.",
    "nowhere": "The replay of the step was finite.",
    "nowhere_of": "The replay of each of the {batches} accumulated batches was finite.",
    "parameter": "Parameter `{bad.path}` held {bad.kind} before the step.",
    "batch": "`{bad.path}` held {bad.kind} when it came from the data loader.",
    "row": "The first such value is in row {row:.0f} of the batch, counted from 0.",
    "outlier": "`{path}` held {amax:.4g} when it came from the data loader, but 99.9% of its "
    "values are within {usual:.4g}. With these values clamped, the step is finite. Without the "
    "clamp:",
    # --- the forward -----------------------------------------------------------------------------
    "forward": "{title} made {bad.kind} in the forward.",
    "forward_output": "{title} made {bad.kind} in the forward, in `{bad.path}` of its output.",
    "forward_passed": "{title} made {bad.kind} in the forward and passed it to `{call}`.",
    "buffer": "Its buffer `{buffer.path}` held {buffer.kind}.",
    "inputs": "Its inputs are finite: at most {largest.amax:.5g} in {largest.dtype_name} (limit "
    "{largest.limit:g}).",
    "narrow": "These values are in {bad.dtype_name} (limit {bad.limit:g}).",
    "huge": "Squares of such values overflow.",
    "mask": "The -inf in its input `{mask.path}` is a mask.",
    "submodules": "None of its submodules made this value.",
    "outside": "`training_step` of the root `{root}` made a loss of {bad.kind} in the forward, "
    "outside its submodules.",
    "outside_passed": "`training_step` of the root `{root}` made {bad.kind} in the forward, "
    "outside its submodules, and passed it to `{call}`.",
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
    "fitting_scale": "At a loss scale of {fitting:g}, all gradients of this batch are finite.",
}
SHARED = {
    "keep_smaller": "",
    "keep_smaller, suspects": " A lower learning rate or weight decay keeps {suspects} smaller.",
}
# Of several keys with equally many tags, the first is used.
REMEDIES = {
    "non_finite": "",
    "non_finite, batch": "Repair or remove such samples in the dataset, for example with "
    "`torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)`.",
    "non_finite, outlier": "Repair or remove such samples in the dataset, or bound them with "
    "`x.clamp(-{usual:.3g}, {usual:.3g})`.",
    "non_finite, parameter": "An earlier step wrote this value, and gradient clipping does not "
    "remove NaN. Resume from an earlier checkpoint, as `SpikeGuard(action='rewind')` does.",
    "non_finite, parameter, epsilon": "Adam's eps={eps:g} is 0 in {dtype}, so Adam divides by 0. "
    "Keep the weights in fp32 with `BalancedAMP()`, or train with `PureFP16()`, which preserves "
    "epsilon.",
    "non_finite, parameter, epsilon, zero": "Adam's eps is 0, so Adam divides 0 by 0 where a "
    "gradient is 0. Pass `eps=1e-8` to the optimizer.",
    "non_finite, parameter, unchecked": "An earlier step wrote this value, and gradient clipping "
    "does not remove NaN. Resume from an earlier checkpoint, as `SpikeGuard(action='rewind')` "
    "does, with `NonFiniteLocator(check_gradients=True)`, which names the module that makes such "
    "a gradient.",
    "non_finite, root": "Compute this in fp32, for example with `.float()` on its inputs, or "
    "train in bf16, which holds 3.4e38, with `{plugin}(half='bf16')`.{keep_smaller}",
    "non_finite, forward": "Run the module in fp32 with "
    "`{plugin}(fp32_modules=[{kept}'{tensor}'])`, train in bf16, which holds 3.4e38, with "
    "`{plugin}(half='bf16')`, or clamp the module's output with "
    "`{plugin}(inf_clamp=[{clamped}'{tensor}'])`.{keep_smaller}",
    "non_finite, forward, wide": f"{_WIDE} Smaller initial weights, a lower learning rate or "
    "`gradient_clip_val` keep weights small.{keep_smaller}",
    "non_finite, forward, wide, half": f"{_WIDE} Sums and products of fp16 outputs in this code "
    "overflow at 65504: convert the outputs with `.float()` first.{keep_smaller}",
    "non_finite, forward, wide, huge": "Smaller initial weights, a lower learning rate or "
    "`gradient_clip_val` keep weights small. Check the scale of the data, too.{keep_smaller}",
    # A clamp does not remove NaN.
    "non_finite, forward, nan": "Run the module in fp32 with "
    "`{plugin}(fp32_modules=[{kept}'{tensor}'])`, or train in bf16, which holds 3.4e38, with "
    "`{plugin}(half='bf16')`.{keep_smaller}",
    "non_finite, backward": "A lower loss scale does not help. Run `{tensor}` in fp32 with "
    "`{plugin}(fp32_modules=[{kept}'{tensor}'])`, or train in bf16 with `{plugin}(half='bf16')`.",
    "non_finite, backward, scale": "Pass `{plugin}(loss_scale={fitting:g})`, "
    "`loss_scale=LossScaleConfig(init_scale={fitting:g}, max_scale={fitting:g})` so that the "
    "scale may fall further, or `{plugin}(half='bf16')`, which needs no loss scale.",
    "non_finite, backward, wide": "Look for the derivative of a root, norm, logarithm or quotient "
    "at 0, also in terms of the loss that use a parameter directly, and add a small number "
    "inside, as in `torch.sqrt(x + 1e-6)`.",
}
