"""Sentences of alarms: a message and a remedy for each kind.

A key is the kind of an alarm. Tags behind the kind mark a sentence for cases in which all of these
tags hold: tags of the verdict or of the run (`tags_of`). `tests/callbacks/golden/` holds every
sentence with sample numbers.
"""

__all__ = ["MESSAGES", "REMEDIES", "SENTENCES", "SHARED"]

MESSAGES = {
    # --- LossScaleMonitor ------------------------------------------------------------------------
    "loss_scale_floor": "A step was skipped at the lowest loss scale, {value:g}; it is the "
    "{in_a_row:th} skipped step in a row.",
    "loss_scale_low": "The loss scale fell to {value:g}, below {threshold:g}, after "
    "{in_a_row:count skipped step} in a row. At this scale, gradients above {reach:.3g} overflow.",
    "loss_scale_low, forward": "The loss scale fell to {value:g}, below {threshold:g}, after "
    "{in_a_row:count skipped step} in a row. The loss itself is not finite, so no loss scale "
    "helps.",
    "skip_rate": "{skipped} of the last {of:count step} were skipped for overflow, more than "
    "{threshold:.1%} of {window}; the loss scale is {scale:g}.",
    # --- GradientUnderflowMonitor ----------------------------------------------------------------
    "gradient_underflow": "{value:.1%} of the gradient of `{tensor}` is exactly zero. At the start "
    "it was at most {usual:.1%}; {excess:.0%} more is the limit.",
    "gradient_underflow, all": "{value:.1%} of all gradients is exactly zero. At the start it was "
    "at most {usual:.1%}; {excess:.0%} more is the limit.",
    "gradient_underflow, at once": "{value:.1%} of the gradient of `{tensor}` is exactly zero, "
    "and {subnormal:.1%} is subnormal: the gradient is too small for its dtype.",
    "gradient_underflow, all, at once": "{value:.1%} of all gradients is exactly zero, and "
    "{subnormal:.1%} is subnormal: gradients are too small for their dtype.",
    # --- ActivationRangeMonitor ------------------------------------------------------------------
    "activation_headroom": "The output of `{tensor}` reaches {amax:.4g}, {value:.2f} bits below "
    "{largest:g}, the largest {dtype} number. The limit is {threshold:g} bits.",
    "output_gradient_headroom": "The gradient of the output of `{tensor}` reaches {amax:.4g}, "
    "{value:.2f} bits below {largest:g}, the largest {dtype} number. The limit is {threshold:g} "
    "bits.",
    "norm_input_headroom": "The input of `{tensor}` reaches {amax:.4g}, {value:.2f} bits below "
    "{largest:g}, the largest {dtype} number. The limit is {threshold:g} bits.",
    "activation_non_finite": "The output of `{tensor}` in {dtype} has {value:count value} that "
    "{value:is} NaN or inf.",
    "output_gradient_non_finite": "The gradient of the output of `{tensor}` in {dtype} has "
    "{value:count value} that {value:is} NaN or inf.",
    "activation_underflow": "{value:.1%} of the output of `{tensor}` in {dtype} is exactly zero, "
    "and a similar share is nearly zero. At the start it was at most {usual:.1%}; {excess:.0%} "
    "more is the limit.",
    "output_gradient_underflow": "{value:.1%} of the gradient of the output of `{tensor}` in "
    "{dtype} is exactly zero, and a similar share is nearly zero. At the start it was at most "
    "{usual:.1%}; {excess:.0%} more is the limit.",
    "activation_clamped": "`InfClamp` clamped {value:count value} of `{tensor}` since the last "
    "sample, {total:.0f} in total. A healthy run has no clamped values.",
    "attention_logit": "The logits of attention in `{tensor}` reach {value:.4g}, above "
    "{threshold:g}. The softmax of such logits is one-hot, so queries and keys stop learning.",
    "attention_logit, growing": "The logits of attention in `{tensor}` reach {value:.4g} and "
    "grow; at the start, they reached {usual:.4g}. At several hundred, the softmax is one-hot, so "
    "queries and keys stop learning.",
    "attention_entropy": "The softmax of attention in `{tensor}` becomes one-hot: the maximum "
    "entropy is {value:.4g} times its entropy, was {usual:.4g} times at the start, and the ratio "
    "grows. Queries and keys of a one-hot softmax stop learning.",
    "output_logit": "The output logits in `{tensor}` reach {value:.4g} and grow; at the start, "
    "they reached {usual:.4g}. Half precision rounds large logits coarsely.",
    "output_log_z": "The log Z (RMS) of the output logits in `{tensor}` has grown from "
    "{usual:.4g} at the start to {value:.4g}. A constant that is added to all logits does not "
    "change the cross-entropy, so nothing stops this drift, and half precision rounds large "
    "logits coarsely.",
    "expert_dead": "The router sends {value:.2%} of the tokens to the expert `{tensor}`; an even "
    "share is {even:.1%}. The number of experts with less than 1% of an even share is {count} of "
    "{of}.",
    "expert_overloaded": "The router sends {value:.0%} of the tokens to the expert `{tensor}`; an "
    "even share is {even:.1%}.",
    "buffer_jump": "The buffer `{tensor}` has jumped from {usual:.4g} to {value:.4g} since the "
    "last sample. Evaluation divides by its root, so results are wrong until the jump has decayed.",
    "buffer_non_finite": "The buffer `{tensor}` contains NaN or inf but was finite before. "
    "Evaluation uses it even if training does not, as with the running statistics of a norm.",
    # --- AdamStateMonitor ------------------------------------------------------------------------
    "update_rms": "The RMS of the gradient of `{tensor}`, relative to the root of Adam's second "
    "moment, is {value:.3g}, above {threshold:.3g}.",
    "below_epsilon": "For {value:.1%} of `{tensor}`, the root of Adam's second moment is below "
    "eps={eps:g}, more than {excess:.0%} above the usual {usual:.1%}. Epsilon dominates these "
    "updates and makes them smaller.",
    "below_epsilon, all": "For {value:.1%} of `{tensor}`, the root of Adam's second moment is "
    "below eps={eps:g}. Epsilon dominates the updates, so Adam does not adapt them.",
    "optimizer_state_non_finite": "Adam's moments of `{tensor}` contain NaN or inf, although its "
    "gradient and weights are finite. A weight whose second moment is inf never changes again.",
    "zero_run": "The gradient of `{tensor}` has been zero in every sample for {value:count step}; "
    "the limit is {threshold:.0f}. If the same gradient returns, its first update is {boost:.3g} "
    "times as large as before; after a longer run, up to {limit:.3g} times.",
    "update_to_weight": "The next update of `{tensor}` has {value:.3g} times the norm of its "
    "weights, outside [{least:g}, {most:g}].",
    "stagnant_weights": "The next update does not change {value:.0%} of the weights in half "
    "precision, because it is below half a unit in the last place. `{tensor}` has the most such "
    "weights.",
    # --- ParameterMonitor ------------------------------------------------------------------------
    "no_gradient": "{count} of {of} parameters, {value:.0%} of the values that the optimizer "
    "trains, have had no gradient for {steps:count step}. The first of them is `{tensor}`.",
    "unchanged_weights": "{count} of {of} parameters, {value:.0%} of the values that the "
    "optimizer trains, have not changed for {steps:count step} at a learning rate of "
    "{rate:.3g}, although they have gradients. The first of them is `{tensor}`.",
    "unchanged_weights, unknown rate": "{count} of {of} parameters, {value:.0%} of the values that "
    "the optimizer trains, have not changed for {steps:count step}, although they have gradients. "
    "The first of them is `{tensor}`.",
    "not_optimized": "{count:count parameter} with a gradient {count:is} in no optimizer. The "
    "first of them is `{tensor}`.",
    "not_optimized, strange": "The optimizer holds {strange:count tensor} that {strange:is} not "
    "among the model's parameters, while {count:count parameter} of the model with a gradient "
    "{count:is} in no optimizer. The first of them is `{tensor}`.",
    "frozen_weights": "The optimizer holds {count:count parameter}, {value:.0%} of its values, "
    "with `requires_grad=False`. The first of them is `{tensor}`.",
    "vanishing_gradients": "The gradient of `{tensor}`, divided by the norm of its weights, is "
    "{value:.2g} times that of `{largest}`, below {threshold:g}.",
    "weight_collapse": "The RMS of `{tensor}` has fallen from {usual:.3g} to {value:.3g}.",
    "weight_growth": "The RMS of `{tensor}` has grown from {usual:.3g} to {value:.3g}, more than "
    "{threshold:.3g}.",
    # --- RepresentationMonitor -------------------------------------------------------------------
    "feature_collapse": "The features of `{tensor}` have collapsed: their spread is {value:.3g}, "
    "below {threshold:g}, and was {usual:.3g} at its highest. A spread of 0 means that all samples "
    "have the same direction.",
    "feature_collapse, from start": "The features of `{tensor}` have had a spread below "
    "{threshold:g} since the start; {value:.3g} now. A spread of 0 means that all samples have the "
    "same direction.",
    "feature_rank": "The effective rank of the features of `{tensor}` has fallen from {usual:.1f} "
    "to {value:.1f}, below {threshold:.1f}.",
    "tower_unchanged": "The features of `{tensor}` do not change, while the features of `{other}` "
    "do: relative to the sampling error, the squared distance from the first sample is "
    "{value:.2g} for `{tensor}` and {times:.3g} for `{other}`.",
    "temperature_clamped": "The logit scale of `{tensor}` has been {value:.4g} in the last "
    "{samples} samples. It has reached its limit.",
    # --- SpikeGuard ------------------------------------------------------------------------------
    "divergence": "The median loss{of_optimizer} over {window} steps has risen to {value:.4g} "
    "from its best of {best:.4g} around step {best_step:.0f}. It exceeds {threshold:.4g}, which "
    "noise does not explain, and more than half of the improvement since the start is lost.",
    "divergence, from start": "The median loss{of_optimizer} over {window} steps has risen to "
    "{value:.4g} from {best:.4g} at the start, and was never below its start. Noise explains at "
    "most {threshold:.4g}.",
    "stalled_loss": "The loss{of_optimizer} rose from {start:.4g} to {peak:.4g} in the first "
    "steps. After {steps:count step}, it is {value:.4g} and was never clearly below its start.",
    "stalled_loss, long": "The loss{of_optimizer} is {value:.4g} after {steps:count step} and was "
    "never clearly below its start, {start:.4g}.",
    "gradient_trend": "The median gradient norm{of_optimizer} over {window} steps has risen to "
    "{value:.4g}, {times:.1f} times its minimum of {lowest:.4g} around step {lowest_step:.0f}. It "
    "has been rising for {span} steps, while the loss is above its best.",
    "level_shift": "The {tensor}{of_optimizer} was above its limit of {threshold:.4g} for "
    "{patience} steps in a row. The guard accepts its value, {value:.4g}, as the new level. "
    "Spikes are reported again after {again} steps.",
    "non_finite_run": "No step{of_optimizer} was finite for {value:.0f} steps in a row, so "
    "weights or optimizer states are probably lost.",
    "non_finite_run, skipped": "No step{of_optimizer} was finite for {value:.0f} steps in a row. "
    "The loss scaler skipped all of them, so weights and optimizer states are unchanged.",
    "non_finite_run, lost": "No step{of_optimizer} was finite for {value:.0f} steps in a row, and "
    "weights are not finite. Training stops, because every later step would be skipped.",
    "rewind_to_step": "Training rewound by {undone:count step} to the checkpoint before step "
    "{value:.0f}, and skipped {left_out} more batches.",
    "rewind_failed": "No checkpoint could be read, so training continues without a rewind.",
    "rewind_failed, changed": "Optimizers or their parameters have changed since the last "
    "checkpoint for a rewind, so training continues without a rewind.",
    "rewind_lost": "{value:.0f} of the checkpoints for a rewind could not be read.",
    "non_finite_loss": "The loss{of_optimizer} is {value}.",
    "non_finite_gradient": "The gradient norm{of_optimizer} is {value}, although the loss is "
    "finite. One of the non-finite gradients is that of `{tensor}`.",
    "loss_spike": "The loss{of_optimizer} is {value:.4g}, its median over the last {window} "
    "healthy steps is {median:.4g}, and the limit of {threshold:.4g} is exceeded (z = {z:.1f}, "
    "threshold {z_threshold:g}).",
    "gradient_spike": "The gradient norm{of_optimizer} is {value:.4g}, its median over the last "
    "{window} healthy steps is {median:.4g}, and the limit of {threshold:.4g} is exceeded (z = "
    "{z:.1f}, threshold {z_threshold:g}). The largest gradient is that of `{tensor}`, "
    "{largest_norm:.4g}.",
}
# Sentences that follow a message (`Verdict.also`), or its remedies (`Verdict.remedies`).
SENTENCES = {
    "count": "There are {count} such tensors.",
    "forecast": "At this rate of growth it overflows by about step {overflow:.0f}.",
    "median before": "Its median before was {median:.4g}.",
    "no mark": "There was no checkpoint from {wanted} steps before.",
    # --- what is done about it -------------------------------------------------------------------
    "skip": "The step was skipped.",
    "stop": "Training stops before this step.",
    "raise": "Training ends before this step.",
    "rewind": "Training rewinds.",
    "rewinds spent": "All rewinds are used up, so training continues.",
    "scaler skips": "The loss scaler skips the step.",
    "overflow too": "The scaled gradients overflow, so the loss scaler skips the step.",
    "clipped": "It is clipped to {clip:g}.",
    "usual norm": "The gradient norm is as usual.",
    "norm too": "The gradient norm is {norm:.4g} and also exceeds its limit of {norm_limit:.4g}; "
    "the largest gradient is that of `{largest}`.",
    # --- what to do ------------------------------------------------------------------------------
    "one at a time": "Try these remedies one at a time.",
    "locate": "Add `NonFiniteLocator()` to find the module at fault.",
    "locate, locator": "See the alarm of `NonFiniteLocator`.",
    "clip": "Set `{clipper}gradient_clip_val={clip_val:.2g}{by_norm})`.",
    "safe adam": "Clip updates with `SafeAdamW(clip_update_rms=1.0)`.",
    "warm up": "Lengthen the warm-up from {step} steps or more to {longer} steps.",
    "lower rate": "Lower the learning rate from {rate:.3g} to {fitting_rate:.2g}.",
    "leave out": "Skip such batches with `SpikeGuard(action='skip')`.",
    "rare": "A rare overflow of the scaled gradient needs no remedy.",
    "nothing": "This needs no remedy.",
    "follows": "It is a consequence of the alarm of `NonFiniteLocator` at step {located_step} "
    "about `{located}`.",
}

# Sentences that several remedies contain, under the name of a field.
SHARED = {
    "keep_named": "Add `NonFiniteLocator()`, keep the module that it names in fp32 by "
    "`{plugin}(fp32_modules=[...])`, or train with `{plugin}(half='bf16')`.",
    "keep_named, locator": "Keep the module that `NonFiniteLocator` names in fp32 by "
    "`{plugin}(fp32_modules=[...])`, or train with `{plugin}(half='bf16')`.",
    "keep_tensor": "Keep the module in fp32 by `{plugin}(fp32_modules=[{kept}'{tensor}'])`, or "
    "train with `{plugin}(half='bf16')`.",
    "set_limits": "Pass `{plugin}(loss_scale=LossScaleConfig({limits}))`, or "
    "train with `{plugin}(half='bf16')`.",
    "find_source": "Add `NonFiniteLocator()` to find the source of these values.",
    "find_source, locator": "Look for a division by 0, a logarithm of 0, or a softmax over a fully "
    "masked row.",
}
# Of several keys with equally many tags, the first is used.
REMEDIES = {
    "loss_scale_floor": "Check loss and data for NaN and for values far out of range. {keep_named}",
    "loss_scale_floor, static": "Pass `{plugin}(loss_scale='dynamic')`. {keep_named}",
    "loss_scale_low": "Lower the learning rate to {lower_rate:.3g} or double its warm-up. "
    "{keep_named}",
    "loss_scale_low, forward": "{keep_named}",
    "loss_scale_low, ending": "{keep_named}",
    "skip_rate": "Lower the learning rate to {lower_rate:.3g}, or pass "
    "`{plugin}(loss_scale=LossScaleConfig(max_scale={scale:g}, growth_interval=4000))`.",
    "skip_rate, ending": "Pass "
    "`{plugin}(loss_scale=LossScaleConfig(max_scale={scale:g}, growth_interval=4000))`.",
    "gradient_underflow": "Raise the loss scale by "
    "`{plugin}(loss_scale=LossScaleConfig({limits}))`, keep the module in fp32 by "
    "`{plugin}(fp32_modules=[{kept}'{owner}'])`, or train with `{plugin}(half='bf16')`.",
    "gradient_underflow, wide": "No gradient reaches the parameter. Check that its branch is used, "
    "and lower the learning rate if its activations have died.",
    # `fp32_modules` takes modules, and neither all of them nor a parameter of the root.
    "gradient_underflow, all": "{set_limits}",
    "activation_non_finite": "{keep_tensor} {find_source}",
    "activation_non_finite, wide": "{find_source}",
    "activation_non_finite, locator": "{keep_tensor}",
    "activation_headroom": "{keep_tensor}",
    "activation_headroom, wide": "Put a norm before the module, or lower the learning rate to "
    "{lower_rate:.3g}.",
    "activation_headroom, wide, ending": "Put a norm before the module.",
    "norm_input_headroom": "Keep the residual stream in fp32 if the plugin can, or train with "
    "`{plugin}(half='bf16')`.",
    "norm_input_headroom, wide": "Put a norm after each branch of the residual stream, or lower "
    "the learning rate to {lower_rate:.3g}.",
    "norm_input_headroom, wide, ending": "Put a norm after each branch of the residual stream.",
    "attention_logit": "Normalize queries and keys, or lower the learning rate to "
    "{lower_rate:.3g}.",
    "attention_logit, ending": "Normalize queries and keys.",
    "attention_entropy": "Normalize queries and keys, or lower the learning rate to "
    "{lower_rate:.3g}.",
    "attention_entropy, ending": "Normalize queries and keys.",
    "output_logit": "Lower the learning rate to {lower_rate:.3g}, or set a `weight_decay` for the "
    "last layer.",
    "output_logit, ending": "Set a `weight_decay` for the last layer.",
    "output_log_z": "Add a z-loss to the loss, `1e-4 * logits.logsumexp(dim=-1).square().mean()`, "
    "with a larger factor if log Z still grows.",
    "expert_dead": "Raise the weight of the load-balancing loss, or add one: the number of experts "
    "times the sum over experts of token share times mean probability.",
    "expert_overloaded": "Raise the weight of the load-balancing loss, or add one: the number of "
    "experts times the sum over experts of token share times mean probability.",
    "buffer_jump": "Remove values far out of range from the batch, and reset the buffer, for "
    "example with `reset_running_stats()`.",
    "buffer_non_finite": "Remove values that are not finite or far out of range from the batch, "
    "and reset the buffer, for example with `reset_running_stats()`.",
    "activation_underflow": "{keep_tensor}",
    "activation_clamped": "Keep the module in fp32 by `{plugin}(fp32_modules=[{kept}"
    "'{tensor}'])`, or lower the learning rate to {lower_rate:.3g}.",
    "activation_clamped, ending": "{keep_tensor}",
    "output_gradient_non_finite": "{set_limits}",
    "output_gradient_non_finite, wide": "{find_source}",
    "output_gradient_headroom": "{set_limits}",
    "output_gradient_headroom, wide": "Set `{clipper}gradient_clip_val=1.0{by_norm})`, or lower "
    "the learning rate to {lower_rate:.3g}.",
    "output_gradient_headroom, wide, ending": "Set `{clipper}gradient_clip_val=1.0{by_norm})`.",
    "output_gradient_underflow": "{keep_tensor}",
    "update_rms": "Use `SafeAdamW(clip_update_rms=1.0)`, or Adam with `betas=(0.9, 0.95)`.",
    "below_epsilon": "Lower epsilon to {lower_eps:g} with states in fp32, or use "
    "`SafeAdamW(rule='atan2')`.",
    "optimizer_state_non_finite": "Resume from an earlier checkpoint, or reset these states with "
    "`optimizer.state.pop(parameter)`.",
    "zero_run": "Use `SafeAdamW(clip_update_rms=1.0)`, or freeze the parameter. If its units have "
    "died, put a norm before them; if its gradients underflow, raise the loss scale.",
    "zero_run, wide": "Use `SafeAdamW(clip_update_rms=1.0)`, or freeze the parameter. If its "
    "units have died, put a norm before them.",
    "update_to_weight": "Lower the learning rate to {lower_rate:.3g}, or lengthen its warm-up.",
    "update_to_weight, ending": "The schedule is lowering the learning rate already.",
    "update_to_weight, low": "Raise the learning rate of its group, or lower epsilon.",
    "stagnant_weights": "Keep weights in fp32 by `Trainer(plugins=BalancedAMP(half='bf16'))` "
    "without `precision`, or use `SafeAdamW`, which keeps the rounding errors of updates.",
    "no_gradient": "Look for `.detach()`, `torch.no_grad()` or an unused output between "
    "`{tensor}` and the loss. Freeze parameters that are not meant to train: "
    "`parameter.requires_grad_(False)`.",
    "unchanged_weights": "Raise the learning rate: changes of the weights are below half a unit "
    "in the last place.",
    "unchanged_weights, no rate": "Give their group in `configure_optimizers` a learning rate "
    "above 0, and check the schedule. Freeze parameters that are not meant to train: "
    "`parameter.requires_grad_(False)`.",
    "not_optimized": "Pass them to an optimizer in `configure_optimizers`, or freeze them by "
    "`parameter.requires_grad_(False)`, which saves their gradients.",
    "not_optimized, strange": "Make the optimizer in `configure_optimizers` from "
    "`self.parameters()`, after modules have been copied or replaced.",
    "frozen_weights": "If they are meant to train, call `parameter.requires_grad_(True)`. "
    "Otherwise leave them out of the optimizer.",
    "vanishing_gradients": "Add a norm or a residual connection to each layer, or use an "
    "activation that does not saturate, such as GELU.",
    "weight_collapse": "Lower `weight_decay`, or move the parameter to a group with "
    "`weight_decay=0`.",
    "weight_growth": "Lower the learning rate to {lower_rate:.3g}, or set a `weight_decay`.",
    "weight_growth, ending": "Set a `weight_decay`.",
    "feature_collapse": "Check that the loss has negatives, or a term for the variance, and that "
    "inputs differ. Then lower the learning rate to {lower_rate:.3g} or lengthen the warm-up, and "
    "resume from an earlier checkpoint.",
    "feature_collapse, from start": "Check that inputs differ and that features are projected "
    "without an activation after the projection. Then raise the learning rate of the tower.",
    "feature_collapse, ending": "Check that the loss has negatives, or a term for the variance, "
    "and that inputs differ. Then resume from an earlier checkpoint.",
    "feature_rank": "Enlarge the batch, or lower the learning rate to {lower_rate:.3g}. A loss "
    "with more negatives, or a term for the covariance, spreads features over more directions.",
    "feature_rank, ending": "Enlarge the batch. A loss with more negatives, or a term for the "
    "covariance, spreads features over more directions.",
    "tower_unchanged": "Check that an optimizer holds the parameters of this tower with a "
    "learning rate above 0, and that there is no `.detach()` or `torch.no_grad()` between its "
    "features and the loss. Freeze a tower that is locked on purpose: "
    "`tower.requires_grad_(False)`.",
    "temperature_clamped": "If the loss still falls, this needs no remedy. Otherwise remove noisy "
    "pairs, or lower the learning rate of the logit scale.",
    "level_shift": "If no change of the learning rate or of the data explains it, resume from a "
    "checkpoint before step {first_bad:.0f}.",
    "non_finite_run": "Resume from a checkpoint before step {first_bad:.0f}, or pass "
    "`SpikeGuard(action='rewind')`.",
    "non_finite_run, skipped": "Check the data from step {first_bad:.0f} on. {keep_named}",
    "non_finite_run, rewinding": "Resume from a checkpoint before step {first_bad:.0f}.",
    "rewind_failed": "Resume from a checkpoint of your own, and pass `rewind_storage='memory'` or "
    "a `dirpath` on another disk.",
    "rewind_failed, changed": "Resume from a checkpoint of your own.",
    "rewind_lost": "Pass `rewind_storage='memory'` or a `dirpath` on another disk.",
    "rewind_to_step": "The learning rate is {rate:.3g} now. This was rewind {rewinds} of "
    "{max_rewinds}.",
    "rewind_to_step, no rate": "This was rewind {rewinds} of {max_rewinds}.",
    "divergence": "Resume from a checkpoint of about step {best_step:.0f}, and lower the learning "
    "rate from there on, to {lower_rate:.3g} or less.",
    "divergence, ending": "Resume from a checkpoint of about step {best_step:.0f}, and halve the "
    "learning rates of the schedule from there on.",
    "divergence, from start": "Restart with a learning rate of {start_rate:.3g} or less, or with "
    "a longer warm-up.",
    "divergence, from start, ending": "Restart with a lower learning rate, or with a longer "
    "warm-up.",
    "stalled_loss": "Restart with a learning rate of {start_rate:.3g} or less, or with a longer "
    "warm-up.",
    "stalled_loss, long": "If the loss should have fallen by now, compare runs at a tenth of and "
    "at ten times the learning rate, and check that targets belong to their inputs.",
    "stalled_loss, ending": "Restart with a lower learning rate, or with a longer warm-up.",
    "gradient_trend": "Set `{clipper}gradient_clip_val={lowest:.2g}{by_norm})`, or lower the "
    "learning rate to {lower_rate:.3g}.",
    "gradient_trend, clipped": "Lower the learning rate to {lower_rate:.3g}.",
    "gradient_trend, clipped, ending": "Set a lower `gradient_clip_val`.",
    "gradient_trend, ending": "Set `{clipper}gradient_clip_val={lowest:.2g}{by_norm})`.",
    "loss_spike": "Halve the learning rate.",
    "gradient_spike": "Halve the learning rate.",
    "non_finite_loss": "See the alarm of `NonFiniteLocator`.",
    "non_finite_gradient": "See the alarm of `NonFiniteLocator`.",
}
