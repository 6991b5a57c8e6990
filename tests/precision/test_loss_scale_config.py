"""Accepted values of `LossScaleConfig`, and defaults that depend on the plugin."""

import math
import re
from typing import Any

import pytest
import torch

from lightning_mp import (
    BalancedAMP,
    FSDPBalancedAMP,
    LossScaleConfig,
    ModelParallelBalancedAMP,
    PureFP16,
)
from lightning_mp.precision.loss_scaler import LossScaler

FP16 = LossScaleConfig.parse("dynamic", torch.float16)  # for gradients that are computed in fp16


def test_config_values_out_of_range_raise() -> None:
    for name, values in {
        "init_scale": [0, -1.0, math.nan, math.inf, 2.0**127, 2.0**-127, True, "65536"],
        "min_scale": [0.0, -1, math.nan, 2.0**-128],
        "max_scale": [math.inf, math.nan, 2.0**127],
        "growth_factor": [1, 1.0, 0.5, math.inf, math.nan, "2"],
        "backoff_factor": [0, 0.0, 1, 1.0, 2.0, -0.5, math.nan, False],
        "warmup_interval": [0, -1, 20.0, True],
        "dynamic": [1, None, "yes"],
        **dict.fromkeys(("growth_interval", "hysteresis", "patience"), [0, -1, 2.0, True, None]),
    }.items():
        for value in values:
            quoted = re.escape(f"Passed `LossScaleConfig({name}={value!r})`. `{name}` must be ")
            with pytest.raises(ValueError, match=rf"^{quoted}.+\. Leave it out .+\.$"):
                LossScaleConfig(**{name: value})
    for limits in ({"init_scale": 0.5}, {"init_scale": 2.0**25}, {"min_scale": 4, "max_scale": 2}):
        with pytest.raises(ValueError, match=r"^Passed `LossScaleConfig\(init_scale=.*be between"):
            LossScaleConfig(**limits)
        LossScaleConfig(**limits, dynamic=False)  # a static scale has no limits


def test_parse_accepts_dynamic_numbers_and_configs_only() -> None:
    parse = LossScaleConfig.parse
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert parse("dynamic", dtype) == parse("dynamic")
    assert parse("dynamic") == LossScaleConfig(init_scale=2.0**16, warmup_interval=2000)
    assert LossScaleConfig(init_scale=2.0**10, warmup_interval=20) == FP16
    assert parse(FP16) == FP16
    for value in (1, 128, 0.25, 2.0**30):
        static = parse(value, torch.float16)
        assert static == LossScaleConfig(init_scale=value, warmup_interval=20, dynamic=False)
        assert type(static.init_scale) is float
    accepted = "`loss_scale` must be 'dynamic', a number from 2**-126 to 2**126 or a `LossScaleCon"
    for wrong in ("static", "1024", 0, -8.0, math.nan, math.inf, True, None):
        message = re.escape(f"Passed `LossScaleConfig.parse(loss_scale={wrong!r})`. {accepted}")
        with pytest.raises(ValueError, match=f"^{message}"):
            parse(wrong)


@pytest.mark.parametrize(
    ("given", "half", "full"),
    [
        ({}, (2.0**10, 20), (2.0**16, 2000)),
        ({"growth_interval": 5}, (2.0**10, 5), (2.0**16, 5)),
        ({"growth_interval": 50}, (2.0**10, 20), (2.0**16, 50)),
        ({"max_scale": 2.0**8}, (2.0**8, 20), (2.0**8, 2000)),
        ({"min_scale": 2.0**12}, (2.0**12, 20), (2.0**16, 2000)),
        ({"init_scale": 8.0}, (8.0, 20), (8.0, 2000)),
        ({"warmup_interval": 2000}, (2.0**10, 2000), (2.0**16, 2000)),
    ],
    ids=str,
)
def test_defaults_of_the_config_depend_on_the_dtype_of_gradients(
    given: Any, half: Any, full: Any
) -> None:
    config = LossScaleConfig(**given)
    found = {}
    for plugin in (PureFP16, BalancedAMP, FSDPBalancedAMP, ModelParallelBalancedAMP):
        found[plugin.__name__] = plugin(loss_scale=config)
    found["reduced in half"] = BalancedAMP(weights="full", reduce_dtype="half", loss_scale=config)
    expected = dict.fromkeys(found, half) | {"full": full, "LossScaler": full}
    scalers = {name: plugin.scaler for name, plugin in found.items()}
    scalers["full"] = BalancedAMP(weights="full", loss_scale=config).scaler
    scalers["LossScaler"] = LossScaler(config)
    ends = {name: (s.scale, s.config.warmup_interval) for name, s in scalers.items()}
    assert ends == expected
