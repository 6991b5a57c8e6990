"""`benchmarks/architectures.py` trains architectures of transformers under each plugin."""

import pytest

pytest.importorskip("transformers")

from benchmarks.architectures import CONFIG_MAPPING_NAMES, inputs_of, measured, summary


# HiggsAudio scatters fp32 outputs of its own norms into a half residual stream.
@pytest.mark.parametrize("name", ["bert", "vit", "higgs_audio_v2"])
def test_architecture_trains_close_to_fp32_under_each_plugin(name: str) -> None:
    if name not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {name}")
    inputs = inputs_of(name)
    assert inputs is not None
    row = measured(name, inputs)
    assert row["monitors"] == "equal"
    assert float(row["BalancedAMP bf16"]) < 0.05  # three steps of 8 bits each
    assert float(row["BalancedAMP fp16"]) < 0.01
    assert float(row["PureFP16"]) < 0.01
    assert float(row["cache"]) < 1e-12


def test_summary_counts_failures_and_names_their_reasons() -> None:
    keys = ["bf16-mixed", "BalancedAMP bf16", "BalancedAMP fp16", "PureFP16", "cache"]
    good = {"architecture": "a", "monitors": "equal"} | dict.fromkeys(keys, "1e-3")
    bad = good | {"architecture": "b", "monitors": "differs", "PureFP16": "failed: Error: no"}
    text = "\n".join(summary([good, bad]))
    assert "monitors: 1 of 2 equal" in text
    assert (
        "PureFP16: 1 of 2 run; median 1.0e-03, 95% below 1.0e-03\n    b failed: Error: no" in text
    )
    assert text.count("fails") == 1
