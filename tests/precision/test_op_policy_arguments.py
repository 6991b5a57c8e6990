"""Arguments, comparison and description of `OpPolicy`."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp.precision._choice.op_tables import GROUPS
from lightning_mp.precision.op_policy import OpPolicy


def dtypes_of_gelu_and_softmax(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    return F.gelu(x).dtype, x.softmax(-1).dtype


def test_policies_compare_by_value() -> None:
    policy = OpPolicy(fp32_ops=["torch.nn.functional.gelu", "aten::gelu"], half_ops=["softmax"])
    assert policy.fp32_ops == ("gelu",)
    for other in (
        OpPolicy(fp32_ops=("gelu",), half_ops=("F.softmax",)),
        pickle.loads(pickle.dumps(policy)),
        copy.deepcopy(policy),
    ):
        assert other == policy
        assert hash(other) == hash(policy)
        with other.context("cpu", torch.float16):
            assert dtypes_of_gelu_and_softmax(torch.rand(2, 2).half()) == (
                torch.float32,
                torch.float16,
            )
    assert policy != OpPolicy()


def test_class_of_includes_moved_ops() -> None:
    policy = OpPolicy(fp32_ops=("gelu",), half_ops=("softmax",))
    names = ["gelu", "aten::_softmax", "linear", "rms_norm", "exp", "addcmul", "relu"]
    expected = ["fp32", "half", "half", "norm", "fp32", "promote", "given"]
    assert [policy.class_of(name) for name in names] == expected
    assert OpPolicy().class_of("softmax") == "fp32"


def test_describe_lists_every_op_once_with_its_reason() -> None:
    text = OpPolicy(fp32_ops=("gelu",), half_ops=("softmax",)).describe()
    half, rest = text.split("FP32: ")
    assert "moved (`half_ops`)\n      softmax\n" in half
    assert "matrix products (default, tensor cores" in half
    assert "moved (`fp32_ops`)\n      gelu\n" in rest
    listed = [line.strip(" ,").split(", ") for line in text.splitlines() if line[:6].isspace()]
    expected = ["gelu", *(op for group in GROUPS for op in group.ops)]
    assert sorted(op for line in listed for op in line) == sorted(expected)
    assert "the output has the dtype of its input" in text
    assert "the output has the dtype of fp32" in OpPolicy(norm_output="fp32").describe()
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fp32_ops": ("sofmax",)}, r"Passed the op 'sofmax'.* Similar names: \['softmax'"),
        (
            {"half_ops": "softmax"},
            r"Passed `OpPolicy\(half_ops='softmax'\)`.*list.*`half_ops=\['softmax'\]`",
        ),
        ({"half_ops": (torch.softmax,)}, "half_ops=.<built-in.*such as 'softmax'"),
        (
            {"fp32_ops": ("exp",), "half_ops": ("torch.exp",)},
            r"fp32_ops=\('exp',\), half_ops=\('exp',\).*Remove \['exp'\] from one",
        ),
        ({"norm_output": "half"}, "norm_output='half'.*must be one of 'input', 'fp32'"),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpPolicy(**arguments)
