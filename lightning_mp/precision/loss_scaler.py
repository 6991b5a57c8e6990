"""Loss scaling with floor, ceiling, hysteresis and a report of skipped steps; for any loop."""

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
    recorded: bool = False  # whether `record` was called since the last update
    is_empty: bool = False  # whether all gradients recorded since were 0 when a growth was due
    last_step_skipped: bool = False


class LossScaler:
    """Scales losses, unscales fp32 gradients, and decides which steps to skip.

    Every optimizer of a training step decides by its own gradients. The scale changes once at the
    end of the training step, because the gradients of all its optimizers carry the same scale.

        scaler.scale_loss(loss).backward()
        for optimizer, gradients in ...:
            found_inf = scaler.unscale_(gradients)
            if scaler.record(found_inf):
                optimizer.step()
        scaler.update()
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config.resolve()
        self._state = self._fresh_state()

    def _fresh_state(self) -> _State:
        return _State(float(self.config.init_scale or 0), self.config.hysteresis)

    @property
    def scale(self) -> float:
        """The loss scale of the current training step."""
        return self._state.scale

    def get_scale(self) -> float:
        """Return the loss scale; same name as in `torch.amp.GradScaler`."""
        return self.scale

    @property
    def is_growth_due(self) -> bool:
        """Whether the scale grows after the next good step."""
        state, config = self._state, self.config
        interval = (state.warming_up and config.warmup_interval) or config.growth_interval
        # A growth does not reset the count, which is the number of steps since the last skip.
        return config.dynamic and (state.good_steps_in_a_row + 1) % interval == 0

    @property
    def last_step_skipped(self) -> bool:
        """Whether an optimizer skipped the latest training step; valid after `record`."""
        return self._state.last_step_skipped

    @property
    def skipped_steps(self) -> int:
        """Number of training steps in which an optimizer skipped; counted by `update`."""
        return self._state.skipped_steps

    @property
    def good_steps_in_a_row(self) -> int:
        """Number of training steps since the last skipped step; counted by `update`."""
        return self._state.good_steps_in_a_row

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return `loss * scale` in fp32 (float64 for a float64 loss).

        In fp16 the product overflows: 1 * 2^16 is inf. The gradient of an fp16 loss is the scale
        rounded to fp16, which is inf for scales of 65520 and more, so compute losses in fp32.
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
        """Divide gradients by the scale in place and check for non-finite values.

        Takes one multi-tensor pass per device and dtype, without a host sync.

        Args:
            gradients: Dense or sparse tensors in fp32 or float64, or complex tensors of these. Of
                a DTensor only the local shard is read: reduce the result over the ranks with
                `all_reduce_found_inf`.
            device: Device of the result, by default that of the first gradient.
            scale: Loss scale of the gradients, by default the current scale.

        Returns:
            found_inf: fp32 of shape []; 1 if a gradient is NaN or inf after division, else 0.

        Raises:
            ValueError: A gradient is neither fp32 nor float64.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            values = stored_values(local_shard(gradient))
            if values.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"Passed a gradient of {gradient.dtype} and shape {list(gradient.shape)} to "
                    "`LossScaler.unscale_`. Gradients must be fp32 or float64: unscaling "
                    "gradients drawn from N(0, 1e-7) flushes 23.4% to zero in fp16 and less than "
                    "0.001% in fp32. Pass `gradient.float()`."
                )
            groups[values.device, values.dtype].append(values)
        places = [place for place, _ in groups] or [torch.device("cpu")]
        target = device or places[0]
        divisor = self.scale if scale is None else scale
        found = [_divide_group_(tensors, divisor).to(target) for tensors in groups.values()]
        # The zero avoids an empty stack for an optimizer without gradients.
        return torch.stack([torch.zeros((), dtype=torch.float32, device=target), *found]).amax()

    def record(
        self,
        found_inf: Tensor,
        *,
        named_gradients: _Named | None = None,
        has_gradient: Callable[[], bool] | None = None,
    ) -> bool:
        """Record an optimizer's `found_inf` and return whether it may step, with one host sync.

        Args:
            found_inf: Flag of the optimizer's gradients, reduced over ranks; 0 means step.
            named_gradients: Returns names and gradients; called only to name the first non-finite
                gradient in an error.
            has_gradient: Returns whether any gradient value is nonzero; called only if a growth is
                due, because all-zero gradients do not show whether a larger scale overflows.

        Raises:
            FloatingPointError: This is the `patience`-th consecutive skipped step at the floor.
        """
        state = self._state
        overflowed = found_inf.item() != 0
        # A training step is skipped if any optimizer skips, and empty if none has a gradient.
        state.last_step_skipped = overflowed or (state.recorded and state.last_step_skipped)
        is_empty = has_gradient is not None and self.is_growth_due and not has_gradient()
        state.is_empty = is_empty and (state.is_empty or not state.recorded)
        state.recorded = True
        is_last_try = state.skips_at_floor + 1 >= self.config.patience
        # Raised here rather than in `update` because the gradients are available to be named.
        if overflowed and self._is_at_floor and is_last_try:
            raise FloatingPointError(self._give_up(named_gradients))
        return not overflowed

    def update(self) -> float:
        """Update the scale once per training step, by the calls of `record` since the last call.

        Returns new scale / old scale, the factor for scaled gradients that are kept for later.
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
        # Judged by the scale that overflowed: the skip that lowers the scale to the floor is not
        # counted as a skip at the floor.
        state.skips_at_floor = state.skips_at_floor + 1 if self._is_at_floor else 0
        state.good_steps_in_a_row = 0
        # The first overflow has found the limit, so fast doubling ends.
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
            # Only a growth restores the hysteresis, as in Megatron.
            state.hysteresis_left = config.hysteresis

    def _give_up(self, named_gradients: _Named | None) -> str:
        config, where = self.config, ""
        if named_gradients is not None:
            # `found_inf` is reduced over ranks, so the gradient may be on another rank.
            first = first_non_finite(named_gradients()) or "on another rank"
            where = f" The first non-finite gradient is {first}."
        kind, fix = "the lowest loss scale", "lower `LossScaleConfig(min_scale=...)`"
        if not config.dynamic:
            kind, fix = "the static loss scale", "pass `loss_scale='dynamic'` or a lower number"
        return (
            f"Gradients were NaN or inf in {config.patience} consecutive training steps at "
            f"{kind} of {self.scale:g}.{where} A lower scale helps only if the loss is finite: "
            "check the data and the loss for NaN first. Then lower the learning rate, keep the "
            f"module that overflows in fp32, or {fix}."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers; the configuration is not included."""
        return asdict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `LossScaler` or of `torch.amp.GradScaler`.

        The scale is clipped to the limits of the configuration; a static scale is kept. From a
        `GradScaler` state only the scale and the growth tracker are loaded, and warm-up ends.
        """
        config = self.config
        fresh = asdict(self._fresh_state())
        names = ["scale", "_growth_tracker"] if "_growth_tracker" in state else list(fresh)
        for name in names:
            key, value = name.replace("_growth_tracker", "good_steps_in_a_row"), state.get(name)
            # Not `isinstance`, because `True` is an instance of `int`.
            kinds = (int, float) if key == "scale" else (type(fresh[key]),)
            if type(value) not in kinds or not 0 <= value < math.inf:  # type: ignore[operator]
                raise ValueError(
                    f"Passed a state with `{name}={value!r}` and the keys {sorted(state)} to "
                    f"`LossScaler.load_state_dict`. `{name}` must be a finite {kinds[-1].__name__} "
                    "of at least 0. Pass the `state_dict()` of a `LossScaler` or a `GradScaler`."
                )
            fresh[key] = value
        # A `GradScaler` state does not tell whether an overflow has occurred.
        fresh["warming_up"] &= "_growth_tracker" not in state
        # The state may come from another configuration.
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
        # torch's kernel checks values before it multiplies, so it misses a product that overflows
        # for an inverse above 1, and its fp32 inverse would lose 29 bits of float64. So multiply
        # first, and let the kernel only check.
        torch._foreach_mul_(tensors, 1 / scale)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)
    return found_inf


def all_reduce_found_inf(
    found_inf: Tensor, process_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Reduce `found_inf` over ranks in place, so that all ranks skip a step together.

    Needed where ranks hold different gradients, as with sharded parameters, but not with DDP.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=process_group)
    return found_inf
