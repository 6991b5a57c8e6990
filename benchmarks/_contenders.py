"""The contrastive losses that are compared: functions of normalized features and a logit scale.

Shapes:
    b: batch. D: feature width. c: classes, or texts of one block.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _common as common
from lightning_mp import ContrastiveLoss, SigmoidContrastiveLoss

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POSITIVE_COSINE = 0.2
UNITS = 4  # products of 2 b^2 D FLOP: the logits twice, and two gradients
# Without a loss scale, the gradients of fp16 features underflow at b = 8192.
FP16_LOSS_SCALE = 8192.0

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

BACKENDS = "triton", "torch"
BIAS = -10.0  # SigLIP's initial bias
BLOCKS = 8  # blocks of texts, as from 8 ranks
# Relative differences that the rounding of logits explains. bf16 changes logits near 100 by up to
# 0.25, and logits near SigLIP's 10 by up to 0.03; sigmoids are rounded as well. tf32 cuts operands
# to 10 bits, which changes a logit of 20 by up to 0.02.
TOLERANCES = {
    "softmax": {"fp32": 1e-4, "bf16": 0.2, "fp16": 0.05, "tf32": 0.05},
    "sigmoid": {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2},
}


class Inputs(NamedTuple):
    """Normalized features of pairs and a logit scale, all of which need gradients."""

    image_bD: Tensor
    text_bD: Tensor
    scale: Tensor
    loss_scale: float

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that get gradients."""
        return self[:3]

    def run(self, loss: LossFunction) -> Tensor:
        """Run forward and backward; the gradients stay in the inputs' `grad`."""
        for leaf in self.leaves:
            # `None` rather than zeros, which gradients would be added to.
            leaf.grad = None
        value = loss(*self.leaves)
        # The loss scale is the cotangent, because an fp16 loss of 9 times 8192 would be inf.
        value.backward(torch.full_like(value, self.loss_scale))
        return value.detach()


@dataclass(frozen=True)
class Case:
    """One problem that all contenders solve."""

    batch: int
    width: int
    dtype: str
    scale: float
    device: torch.device
    objective: str = "softmax"

    def inputs(self, storage: torch.dtype | None = None) -> Inputs:
        """Return new leaves, whose values are those of the case's dtype in any storage dtype.

        Pairs have a cosine of about 0.2, so that no loss vanishes at scale 100.
        """
        dtype, random = DTYPES[self.dtype], torch.Generator(self.device).manual_seed(0)
        shape = 2, self.batch, self.width
        image_bD, text_bD = torch.randn(shape, generator=random, device=self.device)
        image_bD, text_bD = F.normalize(image_bD, dim=1), F.normalize(text_bD, dim=1)
        text_bD.mul_((1 - POSITIVE_COSINE**2) ** 0.5).add_(image_bD, alpha=POSITIVE_COSINE)
        sides = (F.normalize(side_bD, dim=1).to(dtype) for side_bD in (image_bD, text_bD))
        # Already rounded to the case's dtype, so that all contenders get the same values.
        image_bD, text_bD = (side_bD.to(storage or dtype).requires_grad_() for side_bD in sides)
        scale = torch.tensor(self.scale, device=self.device, requires_grad=True)
        return Inputs(image_bD, text_bD, scale, FP16_LOSS_SCALE if dtype == torch.float16 else 1.0)


@dataclass(frozen=True)
class Contender:
    """One way to compute the loss."""

    name: str
    loss: LossFunction
    is_ours: bool = False
    tolerance: float = 1e-4  # relative difference from ours that its arithmetic explains
    storage: torch.dtype | None = None  # the only dtype that it takes


class Peer(NamedTuple):
    """A loss of another package; `logits` is the dtype of its logits, by default the case's."""

    make: Callable[[Case], LossFunction]
    logits: str | None = None
    storage: torch.dtype | None = None  # the only dtype that it takes
    needs_cuda: bool = False


def find_contenders(
    case: Case, workspaces: Sequence[int] = ()
) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that run here, ours first, and why others do not.

    `workspaces` are further workspaces for ours, in MiB.
    """
    ours = {f"ours, {backend} tiles": partial(_ours, backend, None) for backend in BACKENDS}
    best = BACKENDS[case.device.type != "cuda"]
    ours |= {f"ours, {best} tiles, {mib} MiB": partial(_ours, best, mib) for mib in workspaces}
    peers = {name: partial(_peer, peer) for name, peer in PEERS[case.objective].items()}
    asked = {name: partial(make, name, case) for name, make in (ours | peers).items()}
    found, skipped = common.take_turns(asked)
    return [contender for (contender,) in found.values()], skipped


def _peer(peer: Peer, name: str, case: Case) -> Contender:
    if peer.needs_cuda and case.device.type != "cuda":
        raise common.LeftOut("is for CUDA only")
    tolerance = TOLERANCES[case.objective][peer.logits or case.dtype]
    return Contender(name, peer.make(case), tolerance=tolerance, storage=peer.storage)


def _ours(backend: Any, mib: int | None, name: str, case: Case) -> Contender:
    options: Any = {"backend": backend, "workspace_bytes": mib and mib * common.MIB}
    loss: LossFunction = ContrastiveLoss(**options)
    if case.objective == "sigmoid":
        loss = _with_bias(SigmoidContrastiveLoss(**options), case)
    replace(case, batch=64, scale=10.0).inputs().run(loss)  # a loss that fails here is left out
    return Contender(name, loss, is_ours=True)


def dense_formula(image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
    """Return OpenCLIP's loss on one process: logits both ways, two cross entropies.

    `L = (CE(s I T^T, diag) + CE(s T I^T, diag)) / 2`, six products of 2 b^2 D FLOP with the
    backward.

    References:
        - CLIP, https://arxiv.org/abs/2103.00020, figure 3
    """
    labels_b = torch.arange(len(image_bD), device=image_bD.device)
    image_logits_bb = scale * image_bD @ text_bD.T
    text_logits_bb = scale * text_bD @ image_bD.T
    image_loss = F.cross_entropy(image_logits_bb, labels_b)
    text_loss = F.cross_entropy(text_logits_bb, labels_b)
    return (image_loss + text_loss) / 2


def autocast_formula(image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
    """Return the loss of a bf16-mixed training step: logits in bf16, softmax in fp32."""
    with torch.autocast(image_bD.device.type, dtype=torch.bfloat16):
        return dense_formula(image_bD, text_bD, scale)


def _dense(case: Case) -> LossFunction:
    if case.device.type == "cuda" and case.dtype != "fp32":
        raise common.LeftOut("trains under autocast, where 16-bit logits get an fp32 softmax")
    needed = 5 * DTYPES[case.dtype].itemsize * case.batch**2  # this many b x b matrices at a time
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if case.device.type == "cpu" and needed > 0.8 * memory:  # the system would kill the process
        raise common.LeftOut(f"needs {needed / 2**30:,.1f} of {memory / 2**30:,.1f} GiB")
    return dense_formula


def chunked_loss(image_bD: Tensor, text_bD: Tensor, scale: Tensor, options: Any) -> Tensor:
    """Classify each tower's features by the other tower's; six products with the backward."""
    labels_b = torch.arange(len(image_bD), device=image_bD.device)
    image_loss, text_loss = (
        F.linear_cross_entropy(scale * rows_bD, classes_cD, labels_b, options=options)
        for rows_bD, classes_cD in ((image_bD, text_bD), (text_bD, image_bD))
    )
    return (image_loss + text_loss) / 2


def _inf_cl(case: Case) -> LossFunction:
    # `cal_inf_loss` calls this on one process, but all-reduces the gradient of the scale, which
    # fails without a process group.
    from inf_cl import cal_flash_loss

    # Its kernel splits D into heads, whose width is a power of two.
    head_dim = next((dim for dim in (256, 128, 64, 32, 16) if case.width % dim == 0), None)
    if head_dim is None:
        raise common.LeftOut(f"needs a width that is a multiple of 16, not {case.width}")
    # Its gradient of the texts would be NaN, without an error.
    if case.batch > 64 and case.batch % 64:
        raise common.LeftOut(f"reads out of bounds at {case.batch}, which is no multiple of 64")

    def loss(image_bD: Tensor, text_bD: Tensor, scale: Tensor) -> Tensor:
        """Ten products of 2 b^2 D FLOP, in tf32."""
        image_loss = cal_flash_loss(image_bD, text_bD, scale=scale, head_dim=head_dim)
        text_loss = cal_flash_loss(text_bD, image_bD, scale=scale, head_dim=head_dim)
        return (image_loss.mean() + text_loss.mean()) / 2

    return loss


def sigmoid_formula(
    image_bD: Tensor, text_bD: Tensor, scale: Tensor, bias: Tensor, blocks: int = BLOCKS
) -> Tensor:
    """Return `-1/b sum_ij log sigmoid(z_ij (s <i_i, t_j> + bias))`, one block of texts at a time.

    This is SigLIP's algorithm as open_clip documents it: the texts of one rank after the other meet
    the images; `z` is 1 for positives and -1 for negatives.

    References:
        - SigLIP, https://arxiv.org/abs/2303.15343, section 3.3 and figure 1
        - open_clip, https://github.com/mlfoundations/open_clip, `SigLipLoss`
    """
    loss = image_bD.new_zeros((), dtype=torch.float32)
    for text_cD in text_bD.chunk(blocks):
        logits_bc = scale * image_bD @ text_cD.T + bias
        # In fp32, because a sum of b^2 terms in 16 bits would stop growing.
        loss = loss - F.logsigmoid(-logits_bc).sum(dtype=torch.float32)
    # Positives were summed as negatives: log sigmoid(x) - log sigmoid(-x) = x.
    own_b = scale * (image_bD * text_bD).sum(1) + bias
    return (loss - own_b.sum(dtype=torch.float32)) / len(image_bD)


def _siglip_kernel(case: Case) -> LossFunction:
    from siglip_kernel import fused_siglip_loss

    # Its argument is the logarithm of the scale.
    return _with_bias(lambda i, t, scale, bias: fused_siglip_loss(i, t, scale.log(), bias), case)


def _with_bias(loss: Callable[..., Any], case: Case) -> LossFunction:
    """Return a function of features and scale, with a bias that needs a gradient as well."""
    bias = torch.tensor(BIAS, device=case.device, requires_grad=True)
    return lambda image_bD, text_bD, scale: loss(image_bD, text_bD, scale, bias)


PEERS = {
    "softmax": {
        "dense, formula": Peer(_dense),
        "dense, formula, bf16 autocast": Peer(lambda _: autocast_formula, "bf16", needs_cuda=True),
        "torch chunked": Peer(  # left out where torch is too old
            lambda _: partial(chunked_loss, options=torch.nn.LinearCrossEntropyOptions())
        ),
        # The values are the same as for all others.
        "Inf-CL": Peer(_inf_cl, "tf32", torch.float32, needs_cuda=True),
    },
    "sigmoid": {
        "open_clip's formula": Peer(partial(_with_bias, partial(sigmoid_formula, blocks=1))),
        f"the same in {BLOCKS} blocks": Peer(partial(_with_bias, sigmoid_formula)),
        "siglip-kernel": Peer(_siglip_kernel, needs_cuda=True),
    },
}
