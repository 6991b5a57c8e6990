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
from lightning_mp.numerics.tensor_stats import first_non_finite, stored_values

__all__ = ["LossScaleConfig", "LossScaler", "all_reduce_found_inf"]

# Within these, a scale and its inverse are both normal fp32 numbers: no inverse overflows to inf,
# as that of 2^-128 does, and none is a subnormal that a GPU may flush to zero.
_LOWEST_SCALE, _HIGHEST_SCALE = 2.0**-126, 2.0**126

_Named: TypeAlias = Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """How the loss scale starts, moves and gives up.

    torch's `GradScaler` has no floor: 17 overflowing steps in a row take its scale from 2^16 below
    1, 166 to 0.0, and on the way, at 2^-128, it starts to write inf into weights as if nothing had
    happened. The defaults here are its rule with a floor of 1 and a ceiling of 2^24.

    Args:
        init_scale: The scale of the first step.
        growth_factor: Multiplies the scale after `growth_interval` good steps; above 1. Powers of
            two keep every unscaled gradient exact.
        backoff_factor: Multiplies the scale after an overflowing step; between 0 and 1.
        growth_interval: Good steps in a row between two growths.
        warmup_interval: The same until the first overflow, while the largest gradient is not yet
            known and the scale can only be too low; `None` for `growth_interval`.
        min_scale: The floor. At least 2^-126, as the fp32 inverse of 2^-128 is inf.
        max_scale: The ceiling.
        hysteresis: Overflowing steps that it takes to lower the scale. The first `hysteresis - 1`
            of them after the start or after a growth are skipped at an unchanged scale; every later
            one lowers it, until the next growth refills the allowance. They need not be adjacent
            and good steps do not refill, as in Megatron, which like DeepSpeed uses 2. At the
            ceiling, `growth_interval` good steps refill all the same.
        patience: Skipped steps in a row at the floor until `FloatingPointError`: there no lower
            scale is left to cure them.
        dynamic: `False` keeps `init_scale` for good, whatever the limits: overflowing steps are
            still skipped, and every one counts for `patience`.

    Raises:
        ValueError: If a value is out of range, or `min_scale <= init_scale <= max_scale` is not so.

    References:
        Mixed Precision Training, arXiv:1710.03740.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    warmup_interval: int | None = None
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    hysteresis: int = 1
    patience: int = 20
    dynamic: bool = True

    def __post_init__(self) -> None:
        for name in ("init_scale", "min_scale", "max_scale"):
            if not _is_within(getattr(self, name), _LOWEST_SCALE, _HIGHEST_SCALE):
                self._refuse(name, "a number from 2**-126 to 2**126", "a power of two such as 1024")
        if not _is_within(self.growth_factor, math.nextafter(1, 2), _HIGHEST_SCALE):
            self._refuse("growth_factor", "a finite number above 1", "2")
        if not _is_within(self.backoff_factor, _LOWEST_SCALE, math.nextafter(1, 0)):
            self._refuse("backoff_factor", "a number between 0 and 1", "0.5")
        for name in ("growth_interval", "warmup_interval", "hysteresis", "patience"):
            value = getattr(self, name)
            is_count = type(value) is int and value >= 1
            if not is_count and (name, value) != ("warmup_interval", None):
                self._refuse(name, "an integer of at least 1", "1 or more steps")
        if not isinstance(self.dynamic, bool):
            self._refuse("dynamic", "True or False", "False for a static scale")
        if self.dynamic and not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"Passed `LossScaleConfig(init_scale={self.init_scale!r}, "
                f"min_scale={self.min_scale!r}, max_scale={self.max_scale!r})`. A dynamic scale "
                "starts within its limits. Move `init_scale`, or the limit that it crosses."
            )

    @classmethod
    def parse(
        cls,
        loss_scale: "str | float | LossScaleConfig",
        gradients_dtype: torch.dtype = torch.float32,
    ) -> "LossScaleConfig":
        """Make the configuration that a plugin's `loss_scale` argument stands for.

        Gradients that rest in fp16, as those of fp16 weights do, overflow where |g| * scale is
        above 65504. At 2^16 they hold |g| < 1 and no more, and every halving on the way down would
        cost a skipped step. "dynamic" therefore starts them at 2^10, which holds |g| < 64 and still
        keeps |g| > 2.9e-11: of gradients drawn from N(0, 1e-7), 0.02% vanish, against 23.4% without
        a scale. Then it doubles every 20 good steps up to the first overflow: 2^16 after 120 steps
        and the ceiling of 2^24 after 280, for the one skipped step that ends it.

        Args:
            loss_scale: "dynamic"; a positive number for a static scale; or a configuration.
            gradients_dtype: The dtype that gradients rest in between backward and optimizer.

        Raises:
            ValueError: If `loss_scale` is something else.
        """
        if isinstance(loss_scale, LossScaleConfig):
            return loss_scale
        if loss_scale == "dynamic":
            if gradients_dtype == torch.float16:
                return cls(init_scale=2.0**10, warmup_interval=20)
            return cls()
        if _is_within(loss_scale, _LOWEST_SCALE, _HIGHEST_SCALE):
            return cls(init_scale=float(loss_scale), dynamic=False)
        raise ValueError(
            f"Passed `loss_scale={loss_scale!r}`. `loss_scale` must be 'dynamic', a number from "
            "2**-126 to 2**126, or a LossScaleConfig. Write `loss_scale='dynamic'`."
        )

    def _refuse(self, name: str, accepted: str, fix: str) -> None:
        raise ValueError(
            f"Passed `LossScaleConfig({name}={getattr(self, name)!r})`. `{name}` must be "
            f"{accepted}. Pass {fix}."
        )


@dataclass
class _State:
    scale: float
    hysteresis_left: int
    good_steps_in_a_row: int = 0
    skipped_steps: int = 0
    skips_at_floor: int = 0
    warming_up: bool = True
    recorded: bool = False  # since the last update
    last_step_skipped: bool = False


class LossScaler:
    """Scales losses, unscales fp32 gradients, and decides which steps to skip.

    Every optimizer of a training step decides by its own gradients, and the scale changes once,
    when all are done: after a change in between, the gradients of the next optimizer would be
    unscaled by a scale that they were not made with, to half their size after a growth.

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
        self.config = config
        self._state = _State(float(config.init_scale), config.hysteresis)

    @property
    def scale(self) -> float:
        """The scale of the losses of this training step."""
        return self._state.scale

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
        """Return `loss * scale` in fp32 at least: an fp16 loss of 1 at scale 2^16 would be inf.

        The gradient of an fp16 loss is the scale itself, rounded to fp16. It is inf from 65520 on,
        so an fp16 loss holds the scale below 2^16. Compute losses in fp32.

        Args:
            loss: Of any shape and floating-point dtype.

        Returns:
            The scaled loss: float64 for float64, else fp32.
        """
        return loss.to(accumulation_dtype(loss.dtype)) * self.scale

    @torch.no_grad()
    def unscale_(
        self, gradients: Sequence[Tensor], *, device: torch.device | None = None
    ) -> Tensor:
        """Divide gradients by the scale in place, and look for values that are not finite.

        One multi-tensor pass for each device and dtype, without a host sync where all gradients
        are on one device. Gradients in fp16 are refused: of N(0, 1e-7), unscaled from 2^16 in
        fp16, 23.4% become zero; in fp32 it is less than 0.001%.

        Args:
            gradients: fp32 or float64, dense or sparse, in the scale of now. Of a DTensor pass the
                local shard, and reduce what returns with `all_reduce_found_inf`.
            device: Where the result goes; by default to that of the first gradient, else the CPU.

        Returns:
            found_inf: fp32 of shape []; 1 if a gradient is NaN or inf after division, else 0.

        Raises:
            ValueError: If a gradient is neither fp32 nor float64.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            if gradient.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"Passed a gradient of {gradient.dtype} and shape {list(gradient.shape)} to "
                    "`LossScaler.unscale_`. It must be fp32 or float64: in fp16, 23.4% of "
                    "N(0, 1e-7) become zero, in fp32 less than 0.001%. Pass `gradient.float()`."
                )
            values = stored_values(gradient)
            groups[values.device, values.dtype].append(values)
        places = [place for place, _ in groups] or [torch.device("cpu")]
        target = device or places[0]
        found = [self._unscale_group_(tensors).to(target) for tensors in groups.values()]
        return torch.stack([torch.zeros((), dtype=torch.float32, device=target), *found]).amax()

    def _unscale_group_(self, tensors: list[Tensor]) -> Tensor:
        found_inf = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
        inverse = torch.ones_like(found_inf)
        if tensors[0].dtype == torch.float32 and self.scale >= 1:
            inverse.fill_(1 / self.scale)
        else:
            # torch's kernel judges values before it multiplies them, so a product that overflows
            # passes unseen where the inverse is above 1; and its inverse is fp32, which would take
            # 29 bits from float64. Here it only judges, after the multiplication.
            torch._foreach_mul_(tensors, 1 / self.scale)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)
        return found_inf

    def record(self, found_inf: Tensor, *, named_gradients: _Named | None = None) -> bool:
        """Decide for one optimizer whether it steps, and remember that for `update`.

        Costs one host sync. Call it for every optimizer that is about to step.

        Args:
            found_inf: That of the optimizer's own gradients, agreed over ranks; 0 means step.
            named_gradients: Returns names and gradients, scaled or not; called only to name the
                first bad one in the error.

        Returns:
            Whether to step: `False` where a gradient is NaN or inf.

        Raises:
            FloatingPointError: At the floor, on the `patience`-th skipped step in a row.
        """
        state = self._state
        overflowed = found_inf.item() != 0
        state.last_step_skipped = overflowed or (state.recorded and state.last_step_skipped)
        state.recorded = True
        is_last_try = state.skips_at_floor + 1 >= self.config.patience
        if overflowed and self._is_at_floor and is_last_try:
            raise FloatingPointError(self._give_up(named_gradients))
        return not overflowed

    def update(self) -> float:
        """Move the scale, once a training step, by what was recorded since the last update.

        A training step counts as skipped if one of its optimizers skipped. Without a record since
        the last update, nothing happens.

        Returns:
            New scale / old scale. Gradients that wait for their optimizer, made in the old scale,
            are in the new one when multiplied by it.
        """
        state, old_scale = self._state, self.scale
        if state.recorded and state.last_step_skipped:
            self._count_skip()
        elif state.recorded:
            self._count_good_step()
        state.recorded = False
        return self.scale / old_scale

    @property
    def _is_at_floor(self) -> bool:
        return not self.config.dynamic or self.scale <= self.config.min_scale

    def _count_skip(self) -> None:
        state, config = self._state, self.config
        state.skipped_steps += 1
        state.skips_at_floor = state.skips_at_floor + 1 if self._is_at_floor else 0
        state.good_steps_in_a_row = 0
        state.warming_up = False
        state.hysteresis_left = max(state.hysteresis_left - 1, 0)
        if config.dynamic and state.hysteresis_left == 0:
            state.scale = max(state.scale * config.backoff_factor, config.min_scale)

    def _count_good_step(self) -> None:
        state, config = self._state, self.config
        state.skips_at_floor = 0
        state.good_steps_in_a_row += 1
        interval = (state.warming_up and config.warmup_interval) or config.growth_interval
        if config.dynamic and state.good_steps_in_a_row % interval == 0:
            state.scale = min(state.scale * config.growth_factor, config.max_scale)
            state.hysteresis_left = config.hysteresis

    def _give_up(self, named_gradients: _Named | None) -> str:
        config, where = self.config, ""
        if named_gradients is not None:
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
        """Return what a resumed run needs to go on exactly, as plain numbers.

        The configuration is not part of it: that of the resumed run counts.
        """
        return asdict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict`, or from one of torch's `GradScaler`.

        A scale outside the limits of the configuration moves to the nearest, such as the 0.0 that
        torch falls to after 166 overflows; a static scale stays. Of a `GradScaler`, the scale and
        the good steps in a row are taken, its factors and interval are not, and warm-up is over.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: If keys are missing, or a value cannot be one of `state_dict`.
        """
        config = self.config
        fresh = asdict(_State(float(config.init_scale), config.hysteresis))
        names = ["scale", "_growth_tracker"] if "_growth_tracker" in state else list(fresh)
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(
                f"Passed a state with the keys {sorted(state)} to `LossScaler.load_state_dict`. It "
                f"lacks {missing}. Pass what its or `GradScaler`'s `state_dict()` returned."
            )
        for name in names:
            key, value = name.replace("_growth_tracker", "good_steps_in_a_row"), state[name]
            kinds = (int, float) if key == "scale" else (type(fresh[key]),)
            if type(value) not in kinds or not 0 <= value < math.inf:
                raise ValueError(
                    f"Passed a state with `{name}={value!r}` to `LossScaler.load_state_dict`. It "
                    f"must be a finite {kinds[-1].__name__} of at least 0. Load another."
                )
            fresh[key] = value
        fresh["warming_up"] &= "_growth_tracker" not in state
        fresh["hysteresis_left"] = min(fresh["hysteresis_left"], config.hysteresis)
        scale = min(max(fresh["scale"], config.min_scale), config.max_scale)
        fresh["scale"] = float(scale if config.dynamic else config.init_scale)
        self._state = _State(**fresh)


def all_reduce_found_inf(
    found_inf: Tensor, process_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Let ranks skip together: where one found a value that is not finite, all return 1.

    Needed where ranks hold different gradients, as with sharded parameters; not under DDP.

    Args:
        found_inf: What `unscale_` returned, where the group's backend can use it; changed in place.
        process_group: The ranks; `None` for all of them.

    Returns:
        `found_inf`, the largest of the ranks'; as it was where nothing is distributed.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=process_group)
    return found_inf


def _is_within(value: Any, lowest: float, highest: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and lowest <= value <= highest
