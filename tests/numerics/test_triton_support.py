"""Triton is probed once per device; without Triton, its users fall back with a reason."""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive._call.request import tiles_for
from lightning_mp.contrastive._tiles.torch_tiles import TorchTiles
from lightning_mp.numerics import triton_support
from lightning_mp.numerics.triton_support import triton_problem

GPU = torch.device("cuda", 0)


class Machine:
    """A simulated GPU with a compute capability and an error of its launches."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.capability, self.error, self.launches = (9, 0), None, 0
        patch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        patch.setattr(triton_support, "_launch_probe", self.launch)

    def launch(self, device: torch.device) -> None:
        self.launches += 1
        if self.error is not None:
            raise self.error


class _Probe(NamedTuple):
    kernel: str = "probe_kernel"
    arch: int = 80


def test_probe_compiles_for_the_first_capability_and_stores_one_value(
    pytestconfig: pytest.Config,
) -> None:
    from tests.contrastive.triton_tiles.compiling import compiler

    def launch(_: object) -> None:
        triton_support._launch_probe(torch.device("cpu"))

    with compiler(pytestconfig, launch) as compiled:
        kernel = compiled(_Probe())
    assert kernel.count("STG") == 1
    assert not kernel.is_spilled


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    triton_problem.cache_clear()
    yield Machine(monkeypatch)
    triton_problem.cache_clear()


@pytest.mark.parametrize(
    ("capability", "can"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)]
)
def test_capability_of_8_is_needed(
    machine: Machine, capability: tuple[int, int], can: bool
) -> None:
    machine.capability = capability
    problem = triton_problem(GPU)
    assert machine.launches == can
    assert (problem is None) == can
    assert can or "compute capability 7.5" in str(problem)


def test_device_is_probed_once(machine: Machine) -> None:
    assert [triton_problem(GPU) for _ in range(3)] == [None] * 3
    assert machine.launches == 1


def test_failed_launch_warns_once_and_torch_is_used(machine: Machine) -> None:
    machine.error = RuntimeError("Failed to find C compiler.\nSet CC.")
    with pytest.warns(UserWarning, match="RuntimeError: Failed to find C compiler") as caught:
        assert isinstance(tiles_for(GPU, torch.bfloat16), TorchTiles)
    assert "Triton needs a C compiler" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(tiles_for(GPU, torch.bfloat16), TorchTiles)
        with pytest.raises(ValueError, match=r"backend='triton'.*Failed to find C compiler"):
            tiles_for(GPU, torch.bfloat16, "triton")
    assert machine.launches == 1


def test_amd_gpu_gets_no_configurations_of_hopper(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in str(triton_problem(GPU))
    assert machine.launches == 0
    assert isinstance(tiles_for(GPU, torch.bfloat16), TorchTiles)


def test_error_names_missing_triton(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert triton_problem(GPU) == "Triton is not installed"
    with pytest.raises(ValueError, match="Triton is not installed"):
        tiles_for(GPU, torch.bfloat16, "triton")


def test_cpu_is_not_a_cuda_device() -> None:
    assert triton_problem(torch.device("cpu")) == "the device is not a CUDA device"
    features = torch.randn(4, 8)
    with pytest.raises(ValueError, match="the device is not a CUDA device"):
        ContrastiveLoss(backend="triton")(features, features, 5.0)
