"""The Triton tiles on a GPU equal float64 on the same device."""

import dataclasses
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mp import ContrastiveLoss
from lightning_mp.contrastive._call.request import tiles_for
from lightning_mp.contrastive._tiles.triton_tiles import tiles as tiles_module
from tests.contrastive.visible import loss_on

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
# Relative errors in the Euclidean norm; gradients are rounded to the dtype of the features.
LOSS_TOLERANCE = 1.5e-5  # fp32 logits near 100 are 7.6e-6 apart
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
# Tensor cores truncate a sum once for every 16 values of the width.
TOLERATED_WIDTH = 512


@dataclasses.dataclass
class Result:
    loss: Tensor
    d_image: Tensor
    d_text: Tensor
    d_scale: Tensor

    def distance(self, other: "Result") -> dict[str, float]:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        names = (field.name for field in dataclasses.fields(self))
        return {
            name: float((mine.double() - theirs.double()).norm() / theirs.double().norm())
            for name, (mine, theirs) in zip(names, pairs, strict=True)
        }


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def features(b: int, width: int, dtype: torch.dtype, closeness: float = 0.2) -> list[Tensor]:
    image, noise = (torch.randn(b, width, device="cuda") for _ in range(2))
    text = closeness * image + (1 - closeness) * noise
    return [F.normalize(x, dim=1).to(dtype) for x in (image, text)]


def run(
    image: Tensor, text: Tensor, scale: float, gain: float = 1.0, guides: tuple = (), **options
) -> Result:
    leaves = [image.detach().requires_grad_(), text.detach().requires_grad_()]
    scale_leaf = torch.tensor(scale, device="cuda", requires_grad=True)
    call = dict(zip(("guide_image", "guide_text"), guides, strict=False))
    loss = ContrastiveLoss(**options)(*leaves, scale_leaf, **call)
    (loss * gain).backward()
    grads = (leaf.grad.double() / gain for leaf in (*leaves, scale_leaf))
    return Result(loss.detach(), *grads)


def expected(image: Tensor, text: Tensor, scale: float, **options) -> Result:
    """Return the results of torch's tiles in float64, which other tests compare with formulas."""
    return run(image.double(), text.double(), scale, backend="torch", **options)


def gain_for(dtype: torch.dtype, b: int) -> float:
    """Return a loss scale; without a scale, gradients of 1/b underflow in fp16."""
    return float(b) if dtype == torch.float16 else 1.0


@pytest.mark.parametrize("host_bound", [0, 2**62], ids=["both twins", "the wide one"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("b", "width"), [(1, 8), (65, 72), (193, 130), (2048, 512), (3001, 768), (4097, 1024)]
)
def test_loss_and_gradients_equal_float64(
    b: int, width: int, dtype: torch.dtype, host_bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles_module, "_HOST_BOUND", host_bound)
    inputs = features(b, width, dtype)
    result = run(*inputs, 100.0, gain_for(dtype, b), backend="triton")
    if b == 1:
        assert all(float(x.norm()) == 0 for x in dataclasses.astuple(result))
        return
    error = result.distance(expected(*inputs, 100.0))
    assert error["loss"] < LOSS_TOLERANCE
    tolerance = max(1.0, width / TOLERATED_WIDTH) * GRADIENT_TOLERANCE[dtype]
    assert max(error["d_image"], error["d_text"]) < tolerance
    assert error["d_scale"] < 10 * tolerance


def distance_to_limits(image: Tensor, text: Tensor, margin: float) -> float:
    """Return the smallest distance of a negative's similarity to a false-negative threshold."""
    similarities = image.double() @ text.double().T
    limits = similarities.diag() - margin
    gaps = torch.minimum(*((similarities - x).abs() for x in (limits, limits[:, None])))
    return float(gaps.fill_diagonal_(torch.inf).amin())


@pytest.mark.parametrize("guide", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_false_negatives_are_masked_as_in_float64(
    dtype: torch.dtype, guide: torch.dtype | None
) -> None:
    inputs, options = features(193, 130, dtype), {"false_negatives": "absolute", "margin": 0.1}
    options["guides"] = () if guide is None else features(193, 72, guide)
    # Rounding must not decide whether a negative is masked.
    while distance_to_limits(*(options["guides"] or inputs), margin=0.1) < 1e-6:
        if guide is None:
            inputs = features(193, 130, dtype)
        else:
            options["guides"] = features(193, 72, guide)
    result = run(*inputs, 100.0, gain_for(dtype, 193), backend="triton", **options)
    error = result.distance(expected(*inputs, 100.0, **options))
    assert error["loss"] < LOSS_TOLERANCE
    assert max(error["d_image"], error["d_text"]) < GRADIENT_TOLERANCE[dtype]
    assert error["d_scale"] < 10 * GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_kernels_with_and_without_stored_products_equal_float64(
    dtype: torch.dtype, arch: int
) -> None:
    if arch == 90 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the copy engine of these kernels is Hopper's")
    tiles = tiles_for(torch.device("cuda"), dtype, "triton", "fp32", 2**22)
    tiles = dataclasses.replace(tiles, arch=arch)
    image, text = (x.requires_grad_() for x in features(1500, 200, dtype))
    loss = loss_on(tiles, image, text, torch.tensor(-50.0, device="cuda"))
    (loss * gain_for(dtype, 1500)).backward()
    reference = expected(image, text, -50.0)
    result = Result(loss.detach(), image.grad, text.grad, reference.d_scale)
    reference.d_image *= gain_for(dtype, 1500)
    reference.d_text *= gain_for(dtype, 1500)
    error = result.distance(reference)
    assert error["loss"] < LOSS_TOLERANCE
    assert max(error["d_image"], error["d_text"]) < GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("tile_dtype", ["bf16", "fp16", "tf32", "fp32"])
def test_tile_dtypes_have_their_documented_precision(tile_dtype: str) -> None:
    inputs = features(1000, 96, torch.float32)
    error = run(*inputs, 20.0, backend="triton", tile_dtype=tile_dtype).distance(
        expected(*inputs, 20.0)
    )
    promised = {"bf16": 2e-2, "fp16": 2e-3, "tf32": 4e-3, "fp32": 1e-5}
    assert max(error["d_image"], error["d_text"]) < promised[tile_dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_of_large_logits_are_recomputed_accurately(dtype: torch.dtype) -> None:
    inputs = [torch.randn(700, 256, device="cuda").to(dtype) for _ in range(2)]
    result = run(*inputs, 150.0, backend="triton")  # logits of +-1e4
    error = result.distance(expected(*inputs, 150.0))
    assert error["loss"] < 1e-5
    assert max(error["d_image"], error["d_text"]) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_converged_pairs_keep_relative_precision(dtype: torch.dtype) -> None:
    image = F.normalize(torch.randn(500, 512, device="cuda"), dim=1).to(dtype)
    error = run(image, image, 60.0, backend="triton").distance(expected(image, image, 60.0))
    assert error["loss"] < 1e-4
    assert max(error["d_image"], error["d_text"]) < max(1e-4, GRADIENT_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_results_are_bitwise_reproducible(dtype: torch.dtype) -> None:
    inputs = features(3000, 512, dtype)
    first, second = (run(*inputs, 100.0, backend="triton") for _ in range(2))
    assert all(
        torch.equal(*pair)
        for pair in zip(dataclasses.astuple(first), dataclasses.astuple(second), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_loss_does_not_synchronize(dtype: torch.dtype) -> None:
    inputs = features(2000, 512, dtype)
    run(*inputs, 100.0, backend="triton")  # compiles
    leaves = [x.requires_grad_() for x in inputs]
    scale = torch.tensor(100.0, device="cuda", requires_grad=True)
    loss_fn = ContrastiveLoss(backend="triton")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        loss_fn(*leaves, scale).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"backend": "torch"}], ids=str)
@pytest.mark.parametrize("b", [256, 4096])
def test_cuda_graph_of_a_step_equals_eager(b: int, options: dict[str, str]) -> None:
    steps = [features(b, 512, torch.bfloat16) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in steps[0]]
    scale = torch.tensor(50.0, device="cuda", requires_grad=True)
    loss_fn = ContrastiveLoss(**options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and tunes before the capture
        loss_fn(*leaves, scale).backward()
    torch.cuda.current_stream().wait_stream(side)
    for leaf in (*leaves, scale):
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = loss_fn(*leaves, scale)
        loss.backward()
    for step in steps:
        with torch.no_grad():
            for leaf, x in zip(leaves, step, strict=True):
                leaf.copy_(x)
        graph.replay()
        replayed = Result(loss.detach(), *(leaf.grad.double() for leaf in (*leaves, scale)))
        eager = run(*step, 50.0, **options)
        assert max(replayed.distance(eager).values()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_is_at_most_eight_times_the_fp32_features(dtype: torch.dtype) -> None:
    b, width = 65_536, 512
    leaves = [x.requires_grad_() for x in features(b, width, dtype)]
    scale = torch.tensor(100.0, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ContrastiveLoss(backend="triton")(*leaves, scale).backward()
    assert torch.cuda.max_memory_allocated() - before <= 8 * b * width * 4


def test_auto_selects_triton_and_torch_for_float64() -> None:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    names = [
        type(tiles_for(device, dtype)).__name__
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    ]
    assert names == ["TritonTiles", "TritonTiles", "TorchTiles"]


def test_autotuned_loss_equals_float64() -> None:
    inputs = features(2048, 512, torch.bfloat16)
    error = run(*inputs, 100.0, backend="triton", autotune=True).distance(expected(*inputs, 100.0))
    assert error["loss"] < LOSS_TOLERANCE
    assert error["d_image"] < GRADIENT_TOLERANCE[torch.bfloat16]


def test_compiled_loss_equals_eager() -> None:
    image, text = (x.requires_grad_() for x in features(300, 64, torch.bfloat16))
    loss_fn = ContrastiveLoss(backend="triton")

    def step(image: Tensor, text: Tensor) -> Tensor:
        return loss_fn(F.normalize(image, dim=1), F.normalize(text, dim=1), 30.0)

    compiled = torch.compile(step, fullgraph=True)
    gradients = [torch.autograd.grad(f(image, text), image)[0] for f in (step, compiled)]
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-2
