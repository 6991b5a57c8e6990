"""Loss scaling with a floor, a ceiling and an honest report of skipped steps; for any loop."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.numerics.floats import accumulation_dtype
from lightning_mp.numerics.tensor_stats import first_non_finite, local_shard, stored_values
from lightning_mp.precision.loss_scale_config import LossScaleConfig

__all__ = ["LossScaleConfig", "LossScaler", "all_reduce_found_inf"]

_Named: TypeAlias = Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass
class _State:
    scale: float
    hysteresis_left: int
    good_steps_in_a_row: int = 0
    skipped_steps: int = 0
    skips_at_floor: int = 0
    warming_up: bool = True
    recorded: bool = False  # since the last update
    is_empty: bool = False  # all gradients that were recorded since were 0, at a growth
    last_step_skipped: bool = False


class LossScaler:
    """Scales losses, unscales fp32 gradients, and decides which steps to skip.

    Every optimizer of a training step decides by its own gradients, and the scale changes once,
    when all are done: the gradients of the next optimizer were made with the old one.

        scaler.scale_loss(loss).backward()
        for optimizer, gradients in ...:
            found_inf = scaler.unscale_(gradients)
            if scaler.record(found_inf):
                optimizer.step()
        scaler.update()

    Args:
        config: How the scale starts, moves and gives up.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config.resolve()
        self._state = self._fresh_state()

    def _fresh_state(self) -> _State:
        return _State(float(self.config.init_scale or 0), self.config.hysteresis)

    @property
    def scale(self) -> float:
        """The scale of the losses of this training step."""
        return self._state.scale

    def get_scale(self) -> float:
        """Return the scale, as `torch.amp.GradScaler` has it."""
        return self.scale

    @property
    def is_growth_due(self) -> bool:
        """Whether the next good step makes the scale grow."""
        state, config = self._state, self.config
        interval = (state.warming_up and config.warmup_interval) or config.growth_interval
        # By the remainder, as a growth does not end the count: it says how long ago the last skip
        # was.
        return config.dynamic and (state.good_steps_in_a_row + 1) % interval == 0

    @property
    def last_step_skipped(self) -> bool:
        """Whether an optimizer was told to skip the newest training step; known from `record`."""
        return self._state.last_step_skipped

    @property
    def skipped_steps(self) -> int:
        """Training steps in which an optimizer was told to skip, since the start; by `update`."""
        return self._state.skipped_steps

    @property
    def good_steps_in_a_row(self) -> int:
        """Training steps since the last one in which an optimizer skipped; by `update`."""
        return self._state.good_steps_in_a_row

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return `loss * scale` in fp32, or float64 for float64: in fp16, 1 * 2^16 would be inf.

        The gradient of an fp16 loss is the scale itself, rounded to fp16, and inf from 65520 on.
        Compute losses in fp32.
        """
        return loss.to(accumulation_dtype(loss.dtype)) * self.scale

    @torch.no_grad()
    def unscale_(
        self,
        gradients: Sequence[Tensor],
        *,
        device: torch.device | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Divide gradients by the scale in place, and look for values that are not finite.

        One multi-tensor pass for each device and dtype, without a host sync on one device.

        Args:
            gradients: fp32 or float64, complex ones of these included, dense or sparse, at the
                current scale. A DTensor stands for its local shard: reduce what returns with
                `all_reduce_found_inf`.
            device: Where the result goes; by default to that of the first gradient, else the CPU.
            scale: Theirs, where it is another: 1 of gradients that are unscaled.

        Returns:
            found_inf: fp32 of shape []; 1 if a gradient is NaN or inf after division, else 0.

        Raises:
            ValueError: If a gradient is neither fp32 nor float64.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            values = stored_values(local_shard(gradient))
            if values.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"Passed a gradient of {gradient.dtype} and shape {list(gradient.shape)} to "
                    "`LossScaler.unscale_`. It must be fp32 or float64: in fp16, 23.4% of "
                    "N(0, 1e-7) become zero, in fp32 less than 0.001%. Pass `gradient.float()`."
                )
            groups[values.device, values.dtype].append(values)
        places = [place for place, _ in groups] or [torch.device("cpu")]
        target = device or places[0]
        divisor = self.scale if scale is None else scale
        found = [_divide_group_(tensors, divisor).to(target) for tensors in groups.values()]
        # The zero keeps an optimizer without gradients from an empty stack.
        return torch.stack([torch.zeros((), dtype=torch.float32, device=target), *found]).amax()

    def record(
        self,
        found_inf: Tensor,
        *,
        named_gradients: _Named | None = None,
        has_gradient: Callable[[], bool] | None = None,
    ) -> bool:
        """Return whether an optimizer that is about to step does so, and remember that.

        Costs one host sync.

        Args:
            found_inf: That of the optimizer's own gradients, agreed over ranks; 0 means step.
            named_gradients: Returns names and gradients; called only to name the first bad one.
            has_gradient: Tells whether any value of the gradients is not 0; called only where a
                growth is due, as steps without a gradient say nothing of the room above.

        Raises:
            FloatingPointError: At the floor, on the `patience`-th skipped step in a row.
        """
        state = self._state
        overflowed = found_inf.item() != 0
        # One of several optimizers that skips makes the step a skipped one; it is empty only if
        # none has a gradient.
        state.last_step_skipped = overflowed or (state.recorded and state.last_step_skipped)
        is_empty = has_gradient is not None and self.is_growth_due and not has_gradient()
        state.is_empty = is_empty and (state.is_empty or not state.recorded)
        state.recorded = True
        is_last_try = state.skips_at_floor + 1 >= self.config.patience
        # Here and not in `update`: the gradients are at hand to name the first bad one.
        if overflowed and self._is_at_floor and is_last_try:
            raise FloatingPointError(self._give_up(named_gradients))
        return not overflowed

    def update(self) -> float:
        """Move the scale, once a training step, by what was recorded since the last update, if any.

        A training step counts as skipped if one of its optimizers skipped.

        Returns:
            New scale / old scale: gradients that wait for their optimizer are to be multiplied by.
        """
        state, old_scale = self._state, self.scale
        if state.recorded and state.last_step_skipped:
            self._count_skip()
        elif state.recorded and not state.is_empty:
            self._count_good_step()
        state.recorded = False
        return self.scale / old_scale

    @property
    def _is_at_floor(self) -> bool:
        return not self.config.dynamic or self.scale <= self.config.min_scale

    def _count_skip(self) -> None:
        state, config = self._state, self.config
        state.skipped_steps += 1
        # By the scale that overflowed: the skip that lowers it to the floor is not yet one there.
        state.skips_at_floor = state.skips_at_floor + 1 if self._is_at_floor else 0
        state.good_steps_in_a_row = 0
        # The first overflow has found the limit: fast doubling would only run into it again.
        state.warming_up = False
        state.hysteresis_left = max(state.hysteresis_left - 1, 0)
        if config.dynamic and state.hysteresis_left == 0:
            state.scale = max(state.scale * config.backoff_factor, config.min_scale)

    def _count_good_step(self) -> None:
        state, config = self._state, self.config
        state.skips_at_floor = 0
        is_growing = self.is_growth_due  # before the step is counted
        state.good_steps_in_a_row += 1
        if is_growing:
            state.scale = min(state.scale * config.growth_factor, config.max_scale)
            # By a growth alone, as in Megatron: good steps in between do not refill it.
            state.hysteresis_left = config.hysteresis

    def _give_up(self, named_gradients: _Named | None) -> str:
        config, where = self.config, ""
        if named_gradients is not None:
            # With shards the value may be another rank's, since all ranks agree on `found_inf`.
            first = first_non_finite(named_gradients()) or "that of another rank"
            where = f" The first bad gradient is {first}."
        kind, fix = "the lowest loss scale", "lower `LossScaleConfig(min_scale=...)`"
        if not config.dynamic:
            kind, fix = "the static loss scale", "pass `loss_scale='dynamic'` or a lower number"
        return (
            f"Gradients were NaN or inf in {config.patience} training steps in a row at {kind} of "
            f"{self.scale:g}.{where} A lower scale helps only where the loss is finite: check the "
            "data and the loss for NaN first. Then lower the learning rate, keep the module that "
            f"overflows in fp32, or {fix}."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on exactly, as plain numbers, by its own config."""
        return asdict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict`, or from one of torch's `GradScaler`.

        A scale outside the limits of the configuration moves to the nearest, such as the 0.0 that
        torch falls to after 166 overflows; a static scale stays. Of a `GradScaler`, the scale and
        the good steps in a row are taken, its factors and interval are not, and warm-up is over.

        Raises:
            ValueError: If keys are missing, or a value cannot be one of `state_dict`.
        """
        config = self.config
        fresh = asdict(self._fresh_state())
        names = ["scale", "_growth_tracker"] if "_growth_tracker" in state else list(fresh)
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(
                f"Passed a state with the keys {sorted(state)} to `LossScaler.load_state_dict`. It "
                f"lacks {missing}. Pass what its or `GradScaler`'s `state_dict()` returned."
            )
        for name in names:
            key, value = name.replace("_growth_tracker", "good_steps_in_a_row"), state[name]
            # By `type`, as `True` is an integer to `isinstance`.
            kinds = (int, float) if key == "scale" else (type(fresh[key]),)
            if type(value) not in kinds or not 0 <= value < math.inf:
                raise ValueError(
                    f"Passed a state with `{name}={value!r}` to `LossScaler.load_state_dict`. It "
                    f"must be a finite {kinds[-1].__name__} of at least 0. Load another."
                )
            fresh[key] = value
        # A `GradScaler` does not say whether it has ever overflowed.
        fresh["warming_up"] &= "_growth_tracker" not in state
        # The configuration may be another than the one that wrote the state.
        fresh["hysteresis_left"] = min(fresh["hysteresis_left"], config.hysteresis)
        scale = min(max(fresh["scale"], config.min_scale), config.max_scale)
        fresh["scale"] = float(scale) if config.dynamic else self._fresh_state().scale
        self._state = _State(**fresh)


def _divide_group_(tensors: list[Tensor], scale: float) -> Tensor:
    found_inf = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    inverse = torch.ones_like(found_inf)
    if tensors[0].dtype == torch.float32 and scale >= 1:
        inverse.fill_(1 / scale)
    else:
        # torch's kernel judges values before it multiplies them, so a product that overflows
        # passes unseen where the inverse is above 1; and its inverse is fp32, which would take
        # 29 bits from float64. Here it only judges, after the multiplication.
        torch._foreach_mul_(tensors, 1 / scale)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)
    return found_inf


def all_reduce_found_inf(
    found_inf: Tensor, process_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Let ranks skip together: where one found a value that is not finite, all return 1.

    Needed where ranks hold different gradients, as with sharded parameters; not under DDP.

    Args:
        found_inf: What `unscale_` returned; changed in place, and returned.
        process_group: The ranks; `None` for all of them.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=process_group)
    return found_inf
