"""Invalid pair options raise on one process and on all ranks."""

import inspect
import math
from typing import Any

import pytest
import torch

from lightning_mp import ContrastiveLoss, SigmoidContrastiveLoss
from tests.processes import run_ranks

GUIDED = {"false_negatives": "absolute"}
GUIDES = {"guide_image": torch.ones(4, 3), "guide_text": torch.ones(5, 3)}


@pytest.mark.parametrize(
    ("setup", "call", "said"),
    [
        ({}, {"weights": [1.0] * 4}, r"`weights` of type list.*torch.tensor\(weights\)"),
        ({}, {"weights": torch.ones(3)}, r"shape \[3\] with images of shape \[4, 2\]"),
        ({}, {"weights": torch.ones(4) > 0}, r"dtype torch.bool.*mask.float\(\)"),
        ({}, {"weights": torch.ones(4, requires_grad=True)}, r"`weights.detach\(\)`"),
        (
            {"false_negatives": "absolute"},
            {"positives": torch.tensor([0, 1, 1, 2])},
            "compares with the one positive of each row and column",
        ),
        ({}, GUIDES, r"`guide_image` and `guide_text` to .*false_negatives='keep'"),
        (GUIDED, {"guide_text": torch.ones(5, 3)}, r"`guide_text` to .*Pass both"),
        (
            GUIDED,
            GUIDES | {"negatives": torch.ones(4, 1, 2)},
            "`negatives` of an image have no guide features",
        ),
        (GUIDED, GUIDES | {"guide_image": torch.ones(5, 3)}, r"`guide_image` of shape \[5, 3\]"),
        (GUIDED, GUIDES | {"guide_text": [1.0]}, r"`guide_text` of type list"),
        (GUIDED, GUIDES | {"guide_text": torch.ones(5, 3).long()}, r"of dtype torch.int64"),
        (GUIDED, GUIDES | {"guide_text": torch.ones(5, 4)}, "Both must have one width"),
        ({}, {"negatives": torch.ones(4, 2)}, r"shape \[4, 2\].*\[4, negatives of each image, 2\]"),
        ({}, {"negatives": torch.ones(4, 1, 2).int()}, r"dtype torch.int32.*the encoder's output"),
        ({}, {"negatives": [1.0]}, r"type list.*torch.stack\(negatives, 1\)"),
        (
            {"directions": "text_to_image"},
            {"negatives": torch.ones(4, 1, 2)},
            "which this direction does not use",
        ),
        ({}, {"positives": [0, 1, 2, 3]}, r"type list.*torch.tensor\(positives\)"),
        ({}, {"positives": torch.arange(5)}, r"shape \[5\] with images of shape \[4, 2\]"),
        ({}, {"positives": torch.arange(2, 6)}, "from 2 to 5 with 5 texts on this rank"),
        ({}, {"positives": torch.arange(4) - 2}, "from -2 to 1 with 5 texts.*-1 for none"),
        (
            {},
            {"positives": torch.tensor([0, 1, 1, 2]), "ids": torch.arange(5)},
            "it is ambiguous which pairs of equal ids are negatives",
        ),
        (
            {"duplicates": "multi_positive"},
            {"positives": torch.arange(4), "ids": torch.arange(5)},
            r"duplicates='multi_positive'\)`, where `ids` define.*Pass one of the two",
        ),
        ({"duplicates": "multi_positive"}, {}, r"duplicates='multi_positive'\)` without `ids`"),
    ],
)
def test_invalid_pair_arguments_raise(
    setup: dict[str, Any], call: dict[str, Any], said: str
) -> None:
    image, text = torch.randn(4, 2), torch.randn(5, 2)
    with pytest.raises(ValueError, match=said):
        ContrastiveLoss(**setup)(image, text, 1.0, **call)


def test_sigmoid_loss_raises_for_softmax_arguments() -> None:
    of_softmax = inspect.signature(ContrastiveLoss).parameters
    of_sigmoid = inspect.signature(SigmoidContrastiveLoss).parameters
    for name in of_softmax.keys() - of_sigmoid.keys() - {"directions"}:
        with pytest.raises(TypeError, match=f"no `{name}`. Only a softmax loss takes it"):
            SigmoidContrastiveLoss(**{name: 1})
        assert name in repr(ContrastiveLoss())
        assert name not in repr(SigmoidContrastiveLoss())


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ({"duplicates": "all"}, r"duplicates='all'.*'mask', 'multi_positive'"),
        ({"false_negatives": "all"}, r"false_negatives='all'.*'keep', 'absolute', 'relative'"),
        ({"margin": 0.1}, r"margin=0.1.*`margin` applies to `false_negatives` only"),
        ({"false_negatives": "absolute", "margin": math.nan}, "must be a finite number"),
        (
            {"false_negatives": "absolute", "label_smoothing": 0.1},
            r"false_negatives='absolute'.*label_smoothing=0.1\)`. A masked pair",
        ),
        ({"label_smoothing": 1.5}, r"label_smoothing=1.5.*from 0 to 1"),
        ({"label_smoothing": "0.1"}, r"label_smoothing='0.1'.*from 0 to 1"),
        ({"false_negatives": "absolute", "margin": "0.1"}, "must be a finite number"),
    ],
)
def test_error_for_invalid_constructor_argument_lists_accepted_values(
    setup: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ContrastiveLoss(**setup)


def _messages(rank: int) -> list[str]:
    image, text = torch.randn(3, 4), torch.randn(3, 4)
    ids, said = torch.arange(3), []
    for setup, call in (
        ({}, {"weights": torch.ones(3)} if rank else {}),
        ({"duplicates": "multi_positive" if rank else "mask"}, {"ids": ids}),
        ({}, {"ids": ids}),
    ):
        loss_class = SigmoidContrastiveLoss if rank and len(said) == 2 else ContrastiveLoss
        with pytest.raises(ValueError) as error:  # noqa: PT011
            loss_class(**setup)(image, text, 1.0, **call)
        said.append(str(error.value))
    return said


@pytest.mark.distributed
def test_different_options_raise_on_all_ranks() -> None:
    for weights, duplicates, loss_class in run_ranks(_messages, 2):
        assert "Called a loss whose class or" in loss_class
        assert "Passed `weights` to `ContrastiveLoss` on ranks [1] of 2 only" in weights
        assert "margin or partition or within or hardness differs between ranks" in duplicates


def test_positives_of_unsigned_integers_are_row_numbers() -> None:
    image, text, positives = torch.randn(4, 2), torch.randn(5, 2), torch.tensor([3, 0, 4, 1])
    losses = [
        ContrastiveLoss()(image, text, 1.0, positives=positives.to(dtype))
        for dtype in (torch.int64, torch.uint16, torch.uint64)
    ]
    assert losses[0] == losses[1] == losses[2]
