"""The contrastive losses that are compared, each as one function of features and scale.

Shapes:
    b: batch. D: feature width. c: classes, one a row.
"""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._common import MIB
from benchmarks._inputs import DTYPES, TOY_BATCH, Case, Inputs, LossFunction
from lightning_mp import ContrastiveLoss

DENSE_MATRICES = 5  # of b x b values that the dense formula may hold at once
# Under autocast: logits both ways (2 + 2 bytes), both log-softmaxes (4 + 4), an fp32 copy (4).
AUTOCAST_BYTES = 16
# The relative difference that logits rounded to this dtype explain, near 100 by up to 0.25 in bf16.
LOGITS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}
# tf32 cuts operands to 10 bits, which shrinks a logit of 20 by up to 0.02.
TF32_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Contender:
    """One way to compute the loss.

    Args:
        name: For tables.
        loss: `loss(image_bD, text_bD, logit_scale)`.
        is_ours: Whether it is this package's.
        tolerance: The relative difference from ours that its own arithmetic explains.
        input_dtype: The only dtype that it takes; `None` takes all.
        rounded: Whether its inputs have the values of ours; otherwise they are not rounded.
    """

    name: str
    loss: LossFunction
    is_ours: bool = False
    tolerance: float = 1e-4
    input_dtype: torch.dtype | None = None
    rounded: bool = True

    def inputs(self, case: Case) -> Inputs:
        """Return new inputs of the case in the form that it takes."""
        return case.inputs(self.input_dtype, rounded=self.rounded)


def find_contenders(
    case: Case, workspaces: Sequence[int] = ()
) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that run here, ours first, and why the others do not."""
    found, skipped = find_ours(case.width, DTYPES[case.dtype], case.place, workspaces)
    for name, find in (
        ("dense", _dense),
        ("dense, bf16 autocast", _autocast_dense),
        ("torch chunked", _torch_chunked),
        ("Inf-CL, fp32 inputs", functools.partial(_inf_cl, rounded=False)),
        ("Inf-CL, rounded inputs", functools.partial(_inf_cl, rounded=True)),
    ):
        contender = find(case)
        if isinstance(contender, Contender):
            found.append(contender)
        elif contender is not None:
            skipped[name] = contender
    return found, skipped


def find_ours(
    width: int, dtype: torch.dtype, device: torch.device, workspaces: Sequence[int] = ()
) -> tuple[list[Contender], dict[str, str]]:
    """Return this package's loss with every backend that runs, the fastest first.

    The first of them is also there with each of `workspaces`, in MiB.
    """
    found: list[Contender] = []
    skipped: dict[str, str] = {}
    for backend in ("triton", "torch"):
        name = f"ours, {backend} tiles"
        try:
            Inputs.make(TOY_BATCH, width, dtype, 10.0, device).run(ContrastiveLoss(backend=backend))  # type: ignore[arg-type]
        except Exception as error:  # compilers raise what they like
            skipped[name] = _first_line(error)
            continue
        for mib in (None, *(() if found else workspaces)):
            loss = ContrastiveLoss(backend=backend, workspace_bytes=mib and mib * MIB)  # type: ignore[arg-type]
            found.append(Contender(name + (f", {mib} MiB" if mib else ""), loss, is_ours=True))
    return found, skipped


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


def autocast_bf16(loss: LossFunction) -> LossFunction:
    """Return `loss` as a bf16-mixed training step computes it: logits in bf16, softmax in fp32."""

    def mixed(image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast(image_bD.device.type, dtype=torch.bfloat16):
            return loss(image_bD, text_bD, scale)

    return mixed


def _dense(case: Case) -> Contender | str:
    dtype = DTYPES[case.dtype]
    if case.place.type == "cuda" and dtype != torch.float32:
        return "trains under autocast, where 16-bit logits get an fp32 softmax"
    name, loss = _dense_loss()
    problem = _lacks_room(DENSE_MATRICES * dtype.itemsize * case.batch**2, case.place)
    return problem or Contender(name, loss, tolerance=LOGITS_TOLERANCE[dtype])


def _autocast_dense(case: Case) -> Contender | str | None:
    if case.place.type != "cuda":
        return None
    name, loss = _dense_loss()
    tolerance = LOGITS_TOLERANCE[torch.bfloat16]
    return _lacks_room(AUTOCAST_BYTES * case.batch**2, case.place) or Contender(
        f"{name}, bf16 autocast", autocast_bf16(loss), tolerance=tolerance
    )


def _dense_loss() -> tuple[str, LossFunction]:
    try:
        package = importlib.import_module("open_clip.loss")
    except Exception:  # it imports torchvision, which fails in ways of its own
        return "dense, formula", dense_formula
    return "dense, open_clip", package.ClipLoss(cache_labels=True)


def _lacks_room(needed: int, device: torch.device) -> str | None:
    free = _free_bytes(device)
    if free is None or needed <= free:
        return None
    return f"would need {needed / 2**30:,.1f} GiB; {free / 2**30:,.1f} GiB are free"


def _torch_chunked(case: Case) -> Contender | str:
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

    return Contender("torch chunked", loss, tolerance=LOGITS_TOLERANCE[DTYPES[case.dtype]])


def _inf_cl(case: Case, *, rounded: bool) -> Contender | str | None:
    """Return Inf-CL, which takes fp32 storage only, with the values that ours get or unrounded."""
    if rounded and case.dtype == "fp32":
        return None  # the same as unrounded
    if case.place.type != "cuda":
        return "has kernels for CUDA only"
    try:
        # `cal_inf_loss` all-reduces the scale's gradient, which fails without a process group;
        # on one process it calls this.
        from inf_cl import cal_flash_loss  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        return f"does not import ({error}); `pip install inf_cl`"
    head_dim = next((dim for dim in (256, 128, 64, 32, 16) if case.width % dim == 0), None)
    if head_dim is None:
        return f"needs a width that is a multiple of 16, not {case.width}"
    if case.batch > 64 and case.batch % 64:
        return f"reads out of bounds at a batch that is no multiple of 64, such as {case.batch}"

    def loss(image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
        """Ten units; products in tf32."""
        image_loss = cal_flash_loss(image_bD, text_bD, scale=scale, head_dim=head_dim)
        text_loss = cal_flash_loss(text_bD, image_bD, scale=scale, head_dim=head_dim)
        return (image_loss.mean() + text_loss.mean()) / 2

    name = f"Inf-CL, {case.dtype}-rounded inputs" if rounded else "Inf-CL, fp32 inputs"
    return Contender(name, loss, False, TF32_TOLERANCE, torch.float32, rounded)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            facts = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(facts["MemAvailable"].split()[0]) * 1024


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
