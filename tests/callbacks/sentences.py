"""Every sentence that the monitors can say, with sample numbers, for `golden/*.txt`.

After a change of words run `python -m tests.callbacks.sentences` and read the difference.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_mp.callbacks._locate import finding as locator
from lightning_mp.callbacks._locate.trace import Call, Seen
from lightning_mp.callbacks._rules.records import StepFacts, Verdict
from lightning_mp.callbacks._rules.sentences import (
    MESSAGES,
    REMEDIES,
    REMEDIES_AT_THE_END,
    USAGE,
    usage,
    words_for,
)
from lightning_mp.callbacks._rules.spikes import Scene, SignalVerdict, describe

FOLDER = Path(__file__).parent / "golden"

# One for each name in the templates; counts of 1 are written as well, where there is a noun.
SHARE = {"value": 0.123, "threshold": 0.06, "usual": 0.01, "excess": 0.05}
SAMPLES: dict[str, Any] = {
    **{"in_a_row": 3, "reach": 127.9, "skipped": 12, "of": 812, "window": 1000, "scale": 512.0},
    **{"count": 2, "total": 40.0, "eps": 1e-8, "boost": 1.28, "limit": 31.6, "least": 1e-8},
    **{"most": 10.0, "undone": 120, "left_out": 80, "wanted": 100, "amax": 40000.0},
    **{"largest": 65504.0, "dtype": "float16", "lower_rate": 5e-4, "lower_scale": 256.0},
    **{"higher_scale": 4096, "owner": "layers.0.mlp", "lower_eps": 1e-11},
    **{"whose": "", "best": 1.2, "best_step": 400, "start": 3.2, "peak": 5.1, "steps": 96},
    **{
        "lowest": 0.4,
        "lowest_step": 300,
        "times": 12.5,
        "span": 128,
        "subnormal": 0.15,
        "overflow": 1700,
    },
    **{"patience": 16, "again": 64, "first_bad": 185},
    **{"rate": 1e-3, "rewinds": 1, "max_rewinds": 3, "tensor": "layers.0.mlp.weight"},
}
# Where a share would be no sample of the value and the threshold.
VALUES = {
    "loss_scale_floor": (1.0, 1.0),
    "loss_scale_low": (512.0, 1024.0),
    "skip_rate": (0.012, 0.01),
    "activation_clamped": (17.0, 0),
    "update_rms": (4.56, 2.31),
    "zero_run": (600, 500),
    "update_to_weight": (12.0, 10.0),
    "rewind_": (150, None),
    "rewind_lost": (2, None),
    "non_finite": (3.0, 0),
    "non_finite_run": (16.0, 16.0),
    "level_shift": (30.0, 1.5),
    "attention_logit": (1234.0, 1000.0),
    "headroom": (0.71, 2.0),
}
# Messages that share the remedy of another one, and remedies that share a message.
FIXES = {
    "gradient_underflow_at_once": "gradient_underflow",
    "all_gradients_underflow_at_once": "all_gradients_underflow",
    **{
        f"{kind}_headroom_forecast": f"{kind}_headroom"
        for kind in ("activation", "output_gradient", "norm_input")
    },
    "rewind_to_step_short": "rewind_to_step",
    "below_epsilon_all": "below_epsilon",
}
SAYS = {
    "loss_scale_floor_static": "loss_scale_floor",
    "gradient_underflow_wide": "gradient_underflow",
    "update_to_weight_low": "update_to_weight",
    "non_finite_run_rewind": "non_finite_run",
}


def rules() -> Iterator[str]:
    """Yield a message and a remedy of every rule."""
    pairs = {key: (key, FIXES.get(key, key)) for key in MESSAGES}
    pairs |= {fix: (says, fix) for fix, says in SAYS.items()}
    assert {fix for _, fix in pairs.values()} == set(REMEDIES)
    for key, (says, fix) in pairs.items():
        samples = {**SAMPLES, **SHARE}
        for name, (value, threshold) in VALUES.items():
            if name in key:
                samples |= {"value": value, "threshold": threshold}
        one = {**samples, "in_a_row": 1, "count": 1, "undone": 1}
        several, single = (
            words_for(Verdict(key, says=says, fix=fix, numbers=numbers))
            for numbers in (samples, one)
        )
        yield f"[{key}]\n{several[0]}\n{several[1]}\n"
        if single != several:
            yield f"[{key}, of 1]\n{single[0]}\n"
        if fix in REMEDIES_AT_THE_END:
            verdict = Verdict(key, says=says, fix=fix, numbers=samples)
            yield f"[{key}, at the end of a schedule]\n{words_for(verdict, is_ending=True)[1]}\n"


def spikes() -> Iterator[str]:
    """Yield what `SpikeGuard` says."""
    nan, inf = float("nan"), float("inf")
    fine = SignalVerdict(1.1, 1.0, 1.5, 1.2, 0.4, False, True, False)
    high = SignalVerdict(30.0, 1.0, 1.5, 1.2, 14.0, True, True, True)
    bad = SignalVerdict(nan, 1.0, 1.5, 1.2, nan, False, False, False)
    blind = SignalVerdict(inf, nan, nan, nan, nan, False, False, False)
    for action, scale, optimizer in (
        ("warn", None, 0),
        ("skip", 512.0, 0),
        ("stop", None, 1),
        ("raise", None, 0),
        ("rewind", None, 0),
    ):
        scene = Scene(
            facts=StepFacts(
                step=200,
                global_step=200,
                epoch=0,
                batch_idx=200,
                rank=0,
                optimizer=optimizer,
                optimizer_name="AdamW",
                lr=1e-3,
                largest_gradient="layers.0.mlp.weight",
                largest_gradient_norm=29.5,
                loss_scale=scale,
            ),
            first_lr=5e-4,
            clip_val=None,
            action=action,
            is_spent=False,
            window_steps=128,
            z_threshold=6.0,
        )
        pairs = ((bad, fine), (blind, fine), (fine, bad), (high, fine), (fine, high))
        found = [describe(scene, *pair) for pair in (*pairs, (high, high))]
        found += [describe(scene, high, bad)] if scale else []
        ending = replace(scene.facts, highest_lr=1.0)
        clipped = replace(scene, clip_val=1.0, facts=ending)
        found += [describe(clipped, *pair) for pair in ((fine, high), (high, fine))]
        for each in found:
            message, remedy = words_for(each)
            yield f"[{action}: {each.kind}, {each.severity}]\n{message}\n{remedy}\n"


def causes() -> Iterator[str]:
    """Yield what `NonFiniteLocator` says."""
    half, single = torch.float16, torch.float32
    nan, inf = Seen("", half, 3.0, 2, 0, 0), Seen("[0]", half, 3.0, 0, 1, 1)
    both = Seen("head.weight", single, 1.0, 1, 1, 0)
    mask, fine = Seen("['mask']", half, 0.0, 0, 4, 0), Seen("[0]", half, 64000.0, 0, 0, 0)
    mlp, head = "`layers.0.mlp` (MLP)", Call("head", nn.Linear(1, 1))
    none: dict[str, Any] = {"passed_to": None, "buffer": None, "has_submodules": False}
    says: dict[str, Any] = {
        **{"count": 3, "name": "ValueError", "text": "no", "bad": both, "root": "Model"},
        **{"at": locator.at_scale(512.0), "now": nan.kind, "before": 0.693, "scale": 256.0},
        "listed": "`up` (weight 60000); `norm` (output 9)",
    }
    yield from (
        *(f"[{key}]\n{text.format(**says)}\n" for key, text in locator.SAYS.items()),
        locator.forward_words(mlp, inf, [fine], **none) + "\n",
        locator.forward_words(mlp, nan, [fine, mask], **{**none, "has_submodules": True}) + "\n",
        locator.forward_words(mlp, nan, [fine], **{**none, "passed_to": head}) + "\n",
        locator.forward_words(mlp, nan, [], **{**none, "buffer": both}) + "\n",
        locator.outside_words("Model", nan, [fine], passed_to=None) + "\n",
        locator.outside_words("Model", inf, [], passed_to=head) + "\n",
        locator.backward_words(mlp, inf, [fine], is_parameter=False, scale=None) + "\n",
        locator.backward_words(mlp, both, [fine], is_parameter=True, scale=512.0) + "\n",
    )
    for source, more in (
        ("batch", {}),
        ("parameter", {}),
        ("forward", {"dtype": "float32"}),
        ("forward", {"dtype": "float16", "is_root": True}),
        ("forward", {"dtype": "float16", "suspects": ("up", "norm")}),
        ("backward", {"fitting_scale": 256.0}),
        ("backward", {"dtype": "float16"}),
        ("backward", {"dtype": "float32"}),
    ):
        finding = locator.Finding(source=source, name="head", sentence="", **more)  # type: ignore[arg-type]
        yield f"[{source}, {more}]\n{locator.remedy_for(finding, 'BalancedAMP')}\n"


# Of every name in the templates of `USAGE`.
USES: dict[str, Any] = {
    **{"callback": "SpikeGuard", "fitting": 32},
    **{"pattern": "re:(", "count": 2, "names": "'a', 'b'"},
    **{"peers": "SpikeGuard(action='skip'), SpikeGuard(action='warn')", "strategy": "FSDPStrategy"},
    **{"states": "state1, state2", "optimizer": "SGD", "most": 4, "size": 1000, "total": 4000},
    **{
        "page": "instability.html",
        "path": "run/step=3.pt",
        "logger": "MLFlowLogger",
        "alert": "a URL",
    },
    **{"error": OSError("no space left")},
}


def usages() -> Iterator[str]:
    """Yield errors and warnings of how callbacks are used."""
    for key in USAGE:
        yield f"[{key}]\n{usage(key, **USES)}\n"


FILES = {"rules.txt": rules, "spikes.txt": spikes, "causes.txt": causes, "usage.txt": usages}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, make in FILES.items():
        (FOLDER / file).write_text("\n".join(make()), encoding="utf-8")
