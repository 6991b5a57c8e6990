"""Every sentence of the callbacks with sample numbers, for `golden/*.txt`.

After a change of words run `python -m tests.callbacks.sentences` and read the difference.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_mp.callbacks._locate.trace import Seen
from lightning_mp.callbacks._rules.records import Verdict
from lightning_mp.callbacks._words import non_finite as locator
from lightning_mp.callbacks._words.sentences import MESSAGES, REMEDIES, SENTENCES, SHARED
from lightning_mp.callbacks._words.usage import USAGE, usage
from lightning_mp.callbacks._words.wording import words_for

FOLDER = Path(__file__).parent / "golden"

PLUGIN = {"plugin": "BalancedAMP", "kept": "'norm', ", "clamped": ""}
# A value for each field of the templates; sentences with a noun are also written for a count of 1.
SAMPLES: dict[str, Any] = {
    **{"usual": 0.01, "excess": 0.05, "clip": 1.0, "norm": 29.5},
    **{"in_a_row": 3, "reach": 127.9, "skipped": 12, "of": 812, "window": 1000, "scale": 512.0},
    **{"count": 2, "total": 40.0, "eps": 1e-8, "boost": 1.28, "limit": 31.6, "least": 1e-8},
    **{"most": 10.0, "undone": 120, "left_out": 80, "wanted": 100, "amax": 40000.0},
    **{"largest": 65504.0, "dtype": "float16", "lower_rate": 5e-4, "limits": "init_scale=256"},
    **{"owner": "layers.0.mlp", "lower_eps": 1e-11, "norm_limit": 4.0, "start_rate": 5e-4},
    **{"of_optimizer": "", "best": 1.2, "best_step": 400, "start": 3.2, "peak": 5.1, "steps": 96},
    **{"lowest": 0.4, "lowest_step": 300, "times": 12.5, "span": 128, "subnormal": 0.15},
    **{"overflow": 1700, "patience": 16, "again": 64, "first_bad": 185, "median": 1.0, "z": 14.0},
    **{"rate": 1e-3, "rewinds": 1, "max_rewinds": 3, "z_threshold": 6.0, "largest_norm": 29.5},
    **{"step": 200, "longer": 400, "fitting_rate": 5e-4, "clip_val": 1.2, "located": "layers.3"},
    **{"tensor": "layers.0.mlp"},
    **PLUGIN,
    **{"clipper": "Trainer(", "by_norm": ""},
    **{"located_step": 190, "strange": 4, "samples": 5, "even": 0.125, "other": "image"},
}
# Value and threshold of kinds that are not judged by a share.
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
    "non_finite_loss": (float("nan"), None),
    "non_finite_run": (16.0, 16.0),
    "spike": (30.0, 1.5),
    "level_shift": (30.0, 1.5),
    "attention_logit": (1234.0, 1000.0),
    "attention_entropy": (55.8, 50.0),
    "output_lo": (133.5, 50.0),
    "expert_dead": (0.0004, 0.00125),
    "expert_overloaded": (0.99, 0.9),
    "tower_unchanged": (1.5, 2.5),
    "headroom": (0.71, 2.0),
    "no_gradient": (0.93, 0.1),
    "unchanged_weights": (1.0, 0.1),
    "not_optimized": (2, 0),
    "frozen_weights": (0.93, None),
    "vanishing_gradients": (3e-12, 1e-8),
    "weight_": (0.001, 0.002),
    "feature_collapse": (0.028, 0.1),
    "feature_rank": (1.4, 4.0),
    "temperature_clamped": (100.0, None),
}


def rules() -> Iterator[str]:
    """Yield every message and remedy of a rule, and all further sentences."""
    for key in dict.fromkeys([*MESSAGES, *REMEDIES]):
        kind, *tags = key.split(", ")
        value, threshold = 0.123, 0.06
        for name, pair in VALUES.items():
            if name in kind:
                value, threshold = pair  # type: ignore[assignment]
        # If the message contains no count, a count above 1 would append the same sentence to all.
        has_count = "{count" in MESSAGES.get(key, "")
        many = SAMPLES if has_count else {**SAMPLES, "count": 1}
        one = {**SAMPLES, "in_a_row": 1, "count": 1, "undone": 1}
        made = [
            words_for(Verdict(kind, value, threshold, tensor="layers.0.mlp", numbers=n), tags)
            for n in (many, one)
        ]
        said = [made[0][0] if key in MESSAGES else "", made[0][1] if key in REMEDIES else ""]
        single = [made[1][0]] if made[0][0] != made[1][0] and key in MESSAGES else []
        yield "\n".join([f"[{key}]", *filter(None, [*said, *single]), ""])
    for key, text in {**SENTENCES, **SHARED}.items():
        yield f"[{key}]\n{text.format(**SAMPLES)}\n"


def causes() -> Iterator[str]:
    """Yield the sentences of `NonFiniteLocator`."""
    half, single = torch.float16, torch.float32
    nan, inf = Seen("", half, 3.0, 2, 0, 0), Seen("[0]", half, 3.0, 0, 1, 1)
    both = Seen("head.weight", single, 1.0, 1, 1, 0)
    mask, fine = Seen("['mask']", half, 0.0, 0, 4, 0), Seen("[0]", half, 64000.0, 0, 0, 0)
    loss = "The loss computation in `training_step` of the root `Model`"
    says: dict[str, Any] = {
        **{"batches": 3, "skips": 3, "name": "ValueError", "text": "no such key"},
        **{"bad": both, "root": "Model", "now": nan.kind, "before": 0.693},
        **{"scale": 256.0, "fitting": 256.0, "title": "`layers.0.mlp` (MLP)", "call": "head"},
        **{"buffer": both, "largest": fine, "mask": mask, "path": "batch[0]", "amax": 1e6},
        **{"usual": 3.1, "eps": 1e-8, "dtype": "float16", "suspects": "`up`, `norm`", "row": 5},
        "listed": "`up` (weight 60000); `norm` (output 9)",
    }

    def words(also: Sequence[str] = (), tags: Sequence[str] = (), **more: Any) -> tuple[str, str]:
        found = Verdict("non_finite", 3.0, 65504.0, "error", "head", tuple(tags), tuple(also))
        return words_for(found.given(**says, **more), (), **PLUGIN)

    for key in locator.MESSAGES:
        yield f"[{key}]\n{words((), key.split(', ')[1:])[0]}\n"
    for key in locator.SENTENCES:
        after = ("forward",) * (key == "outlier")
        yield f"[{key}]\n{words((key, *after))[0].partition('. ')[2]}\n"
    more: Any
    for keys, more in (
        (("forward_output", "inputs"), {"bad": inf}),
        (("forward", "inputs", "mask", "submodules"), {"bad": nan}),
        (("forward_passed", "inputs"), {"bad": nan}),
        (("forward", "buffer"), {"bad": nan}),
        (("outside", "outputs"), {"bad": nan}),
        (("outside_passed",), {"bad": inf}),
        (("backward", "output_gradient", "input_gradient"), {"bad": inf}),
        (("backward_scaled", "output_gradient", "own_gradient"), {"bad": both, "scale": 512.0}),
        (("backward_scaled", "backward_of_loss"), {"bad": nan, "scale": 512.0, "title": loss}),
    ):
        says |= more
        yield words(keys)[0] + "\n"
    for tags in (
        *(["batch"], ["outlier"], ["parameter"], ["parameter", "epsilon", "unchecked"]),
        *(["parameter", "unchecked"], ["forward", "wide"], ["forward", "wide", "root"]),
        *(["forward"], ["forward", "root"], ["forward", "nan"], ["forward", "suspects"]),
        *(["parameter", "epsilon", "zero"], ["forward", "wide", "huge"]),
        ["forward", "wide", "root", "half"],
        *(["backward", "wide", "scale"], ["backward"], ["backward", "root"]),
        ["backward", "wide", "root"],
    ):
        yield f"[{', '.join(tags)}]\n{words((), tags)[1]}\n"


# A value for each field of the templates in `USAGE`.
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
    **{"error": OSError("no space left"), "precision": "32-true", "name": "KeyError"},
    **{"text": "'scores'", "loss": float("inf")},
}


def usages() -> Iterator[str]:
    """Yield errors and warnings about the use of callbacks."""
    for key in USAGE:
        yield f"[{key}]\n{usage(key, **USES)}\n"


FILES = {"rules.txt": rules, "causes.txt": causes, "usage.txt": usages}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, make in FILES.items():
        (FOLDER / file).write_text("\n".join(make()), encoding="utf-8")
