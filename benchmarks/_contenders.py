"""The contrastive losses that are compared, each as one function of features and scale.

Shapes:
    b: batch. D: feature width. c: classes, one a row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._peak_memory import Passes
from lightning_mp import ContrastiveLoss

__all__ = ["DTYPES", "Contender", "Inputs", "find_contenders", "memory_passes"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Without a loss scale, the gradients of fp16 features at b = 8192 are below fp16's smallest number.
FP16_LOSS_SCALE = 8192.0
POSITIVE_COSINE = 0.2
DENSE_MATRICES = 5  # of b x b values that the dense formula may hold at once
_TOY_BATCH = 64

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """One way to compute the loss.

    Args:
        name: For tables.
        loss: `loss(image_bD, text_bD, logit_scale)`.
        is_ours: Whether it is this package's.
        tolerance: The relative difference from ours that its own arithmetic explains, in fp32.
        input_dtype: The only dtype that it takes; `None` takes all.
    """

    name: str
    loss: LossFunction
    is_ours: bool = False
    tolerance: float = 1e-4
    input_dtype: torch.dtype | None = None


@dataclass
class Inputs:
    """Pairs of unit features and a scale, all of which need gradients."""

    image_bD: Tensor
    text_bD: Tensor
    scale: Tensor
    loss_scale: float = 1.0

    @classmethod
    def make(
        cls, batch: int, width: int, dtype: torch.dtype, scale: float, device: torch.device
    ) -> Inputs:
        """Draw pairs with a cosine of about 0.2; then no loss vanishes, even at scale 100."""
        generator = torch.Generator().manual_seed(0)
        image_bD, noise_bD = (
            F.normalize(torch.randn(batch, width, generator=generator), dim=1) for _ in range(2)
        )
        noise_bD.mul_((1 - POSITIVE_COSINE**2) ** 0.5).add_(image_bD, alpha=POSITIVE_COSINE)
        text_bD = F.normalize(noise_bD, dim=1)
        leaves = [
            value.to(device=device, dtype=dtype).requires_grad_() for value in (image_bD, text_bD)
        ]
        scale_leaf = torch.tensor(scale, device=device, requires_grad=True)
        return cls(*leaves, scale_leaf, FP16_LOSS_SCALE if dtype == torch.float16 else 1.0)

    def to(self, dtype: torch.dtype | None) -> Inputs:
        """Return new leaves of the same values in `dtype`, or these inputs themselves."""
        if dtype is None or dtype == self.image_bD.dtype:
            return self
        leaves = [
            value.detach().to(dtype).requires_grad_() for value in (self.image_bD, self.text_bD)
        ]
        return replace(
            self,
            image_bD=leaves[0],
            text_bD=leaves[1],
            scale=self.scale.detach().clone().requires_grad_(),
        )

    def run(self, loss: LossFunction) -> Tensor:
        """Run forward and backward; the gradients stay on the inputs."""
        self.image_bD.grad = self.text_bD.grad = self.scale.grad = None
        value = loss(self.image_bD, self.text_bD, self.scale)
        value.backward(torch.full_like(value, self.loss_scale))
        return value.detach()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients."""
        return sum(leaf.nbytes for leaf in (self.image_bD, self.text_bD, self.scale))


def find_contenders(
    batch: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that run here, ours first, and why the others do not."""
    found: list[Contender] = []
    skipped: dict[str, str] = {}
    for name, find in (
        ("ours, triton tiles", lambda: _ours("triton", width, dtype, device)),
        ("ours, torch tiles", lambda: _ours("torch", width, dtype, device)),
        ("dense", lambda: _dense(batch, dtype, device)),
        ("torch chunked", _torch_chunked),
        ("Inf-CL", lambda: _inf_cl(batch, width, device)),
    ):
        contender = find()
        if isinstance(contender, Contender):
            found.append(contender)
        elif contender is not None:
            skipped[name] = contender
    return found, skipped


def _ours(
    backend: Any, width: int, dtype: torch.dtype, device: torch.device
) -> Contender | str | None:
    try:
        loss = ContrastiveLoss(backend=backend)
    except ValueError:
        return None  # this version has no such backend
    try:
        Inputs.make(_TOY_BATCH, width, dtype, 10.0, device).run(loss)
    except (ValueError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return Contender(f"ours, {backend} tiles", loss, is_ours=True)


def _dense(batch: int, dtype: torch.dtype, device: torch.device) -> Contender | str:
    needed, free = DENSE_MATRICES * batch**2 * dtype.itemsize, _free_bytes(device)
    if free is not None and needed > free:
        return f"would need {needed / 2**30:,.1f} GiB; {free / 2**30:,.1f} GiB are free"
    try:
        package = importlib.import_module("open_clip.loss")
    except Exception:  # it imports torchvision, which fails in ways of its own
        return Contender("dense, formula", dense_formula)
    return Contender("dense, open_clip", package.ClipLoss(cache_labels=True))


def dense_formula(image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
    """Return the loss as OpenCLIP defines it on one process: logits both ways, two cross entropies.

    `L = (CE(s I T^T, diag) + CE(s T I^T, diag)) / 2`, six units of 2 b^2 D FLOP with the backward.

    References:
        - CLIP, https://arxiv.org/abs/2103.00020, figure 3
    """
    labels_b = torch.arange(len(image_bD), device=image_bD.device)
    image_logits_bb = scale * image_bD @ text_bD.T
    text_logits_bb = scale * text_bD @ image_bD.T
    image_loss = F.cross_entropy(image_logits_bb, labels_b)
    text_loss = F.cross_entropy(text_logits_bb, labels_b)
    return (image_loss + text_loss) / 2


def _torch_chunked() -> Contender | str:
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None or not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no chunked `linear_cross_entropy`"

    def loss(image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
        """Take the other side's features as the classes; six units with the backward."""
        labels_b = torch.arange(len(image_bD), device=image_bD.device)
        image_loss, text_loss = (
            F.linear_cross_entropy(scale * rows_bD, classes_cD, labels_b, options=options())
            for rows_bD, classes_cD in ((image_bD, text_bD), (text_bD, image_bD))
        )
        return (image_loss + text_loss) / 2

    return Contender("torch chunked", loss)


def _inf_cl(batch: int, width: int, device: torch.device) -> Contender | str:
    if device.type != "cuda":
        return "has kernels for CUDA only"
    try:
        # `cal_inf_loss` all-reduces the scale's gradient, which fails without a process group;
        # on one process it calls this.
        from inf_cl import cal_flash_loss  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        return f"does not import ({error}); `pip install inf_cl`"
    head_dim = next((dim for dim in (256, 128, 64, 32, 16) if width % dim == 0), None)
    if head_dim is None:
        return f"needs a width that is a multiple of 16, not {width}"
    if batch > 64 and batch % 64:
        return f"reads out of bounds at a batch that is no multiple of 64, such as {batch}"

    def loss(image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
        """Ten units; products in tf32."""
        image_loss = cal_flash_loss(image_bD, text_bD, scale=scale, head_dim=head_dim)
        text_loss = cal_flash_loss(text_bD, image_bD, scale=scale, head_dim=head_dim)
        return (image_loss.mean() + text_loss.mean()) / 2

    return Contender("Inf-CL", loss, tolerance=2e-2, input_dtype=torch.float32)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            facts = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(facts["MemAvailable"].split()[0]) * 1024


def memory_passes(
    *, name: str, batch: int, width: int, dtype: str, scale: float, device: str, threads: int
) -> Passes:
    """Return what is weighed for the contender `name`: forward and backward, gradients aside."""
    torch.set_num_threads(threads)
    place = torch.device(device)
    contenders, _ = find_contenders(batch, width, DTYPES[dtype], place)
    contender = next(contender for contender in contenders if contender.name == name)
    toy, inputs = (
        Inputs.make(rows, width, DTYPES[dtype], scale, place).to(contender.input_dtype)
        for rows in (_TOY_BATCH, batch)
    )
    return Passes(
        warm_up=lambda: toy.run(contender.loss),
        run=lambda: inputs.run(contender.loss),
        returned_bytes=inputs.gradient_bytes,
    )
