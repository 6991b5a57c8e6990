"""Valid but implausible inputs warn once, without a host sync."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_mp import ContrastiveLoss, MatryoshkaLoss
from tests.fake_cuda import FakeCuda

BATCH, WIDTH = 40, 24


def pair(batch: int = BATCH, width: int = WIDTH, norm: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(batch, width, generator=generator) for _ in range(2)]
    return [norm * F.normalize(x, dim=1) for x in rows]


def said(loss: torch.nn.Module, features: list[Tensor], scale: Any, calls: int = 4) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            loss(*features, scale)
    return [str(one.message) for one in caught]


WRONG: dict[str, tuple[list[Tensor], float, str]] = {
    "scale": (pair(), -2.0, "logit_scale=-2`. With a negative scale"),
    "norms": (
        pair(norm=3.0),
        100.0,
        "norm 3 (images) and 3 (texts) with `logit_scale",
    ),
    "transposed": ([x.T for x in pair()], 100.0, "24, 40] whose columns have norm 1"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_probable_mistake_warns_once(name: str, as_tensor: bool) -> None:
    features, scale, message = WRONG[name]
    loss = ContrastiveLoss()
    (warning,) = said(loss, features, torch.tensor(scale) if as_tensor else scale)
    assert message in warning
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert len(said(other, features, scale)) == 1


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_inputs_of_matryoshka_are_checked_like_features(name: str, normalize: bool) -> None:
    """Norms are not checked if the loss normalizes the features."""
    features, scale, message = WRONG[name]
    warned = said(MatryoshkaLoss(widths=[WIDTH, 4], normalize=normalize), features, scale)
    assert [message in one for one in warned] == ([] if normalize and name == "norms" else [True])


@pytest.mark.parametrize(
    ("features", "scale"),
    [
        (pair(), 100.0),
        ([x.half() for x in pair()], 100.0),
        ([x.bfloat16() for x in pair()], 100.0),
        (pair(norm=30.0), 1.0),  # inner products, without a temperature
        (pair(norm=1.5), 14.0),
        (pair(batch=1), 100.0),
        (pair(batch=WIDTH), 100.0),  # square
        ([torch.full((BATCH, WIDTH), torch.nan)] * 2, 100.0),
    ],
)
def test_plausible_inputs_do_not_warn(features: list[Tensor], scale: float) -> None:
    assert said(ContrastiveLoss(), features, scale) == []


def test_scale_that_becomes_negative_warns() -> None:
    loss = ContrastiveLoss()
    assert said(loss, pair(), 1.0, calls=5) == []
    assert said(loss, pair(), -1.0, calls=2) == []  # calls 6 and 7
    assert len(said(loss, pair(), -1.0, calls=1)) == 1


def test_warning_on_cuda_comes_with_a_later_call_without_a_sync(gpu: FakeCuda) -> None:
    for features, scale, message in WRONG.values():
        loss = ContrastiveLoss()
        features = [x.to("cuda") for x in features]
        waited = gpu.syncs, gpu.waits
        assert said(loss, features, scale, calls=1) == []
        gpu.time += 1.0
        launches = sum(gpu.launches.values())
        (warning,) = said(loss, features, scale, calls=1)
        second = sum(gpu.launches.values()) - launches
        assert message in warning
        assert (gpu.syncs, gpu.waits) == waited
        launches = sum(gpu.launches.values())
        said(loss, features, scale, calls=1)  # the third call is not checked
        assert sum(gpu.launches.values()) - launches < second


@pytest.mark.parametrize("place", range(3))
def test_dtensors_are_refused_with_the_call_that_gathers_them(place: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        inputs = [*pair(), torch.tensor(10.0)]
        mesh = init_device_mesh("cpu", (1,))
        inputs[place] = distribute_tensor(inputs[place], mesh, [Replicate()])
        name = ("image_features", "text_features", "logit_scale")[place]
        with pytest.raises(ValueError, match=rf"`{name}` as a DTensor.*`{name}\.full_tensor\(\)`"):
            ContrastiveLoss()(*inputs)
    finally:
        dist.destroy_process_group()
