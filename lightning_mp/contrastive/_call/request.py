"""`Request`: all arguments of one call of a loss, in one flat value.

The schema of the operators and the checksum that ranks compare are derived from its fields, so that
an argument is declared in one place.
"""

import dataclasses
import zlib
from typing import Any, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d

from lightning_mp.contrastive._tiles.backends import tiles_problem, triton_tiles
from lightning_mp.contrastive._tiles.literals import (
    Backend,
    Directions,
    Duplicates,
    ExchangeName,
    FalseNegatives,
    Partition,
    TileDtype,
    Within,
)
from lightning_mp.contrastive._tiles.tile_backend import TileBackend
from lightning_mp.contrastive._tiles.torch_tiles import TorchTiles
from lightning_mp.numerics.floats import ACCUMULATION_DTYPES, FLOAT_DTYPES

__all__ = [
    "DIFFERENTIABLE",
    "GIVEN",
    "RULES",
    "SCHEMA",
    "PairArguments",
    "Request",
    "group_named",
    "ranks_of",
    "tiles_for",
]


class PairArguments(TypedDict, total=False):
    """The optional arguments of a call; see `ContrastiveLoss.forward`."""

    ids: Tensor | None
    weights: Tensor | None
    positives: Tensor | None
    negatives: Tensor | None
    guide_image: Tensor | None
    guide_text: Tensor | None


# Not a named tuple, whose properties `torch.compile` in torch 2.10 cannot trace.
@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The arguments of a call of a loss, and those of its constructor."""

    image: Tensor
    text: Tensor  # of the dtype of the images
    scale: Tensor  # may be a Python number until `checked()`, as may the bias
    bias: Tensor | None = None
    negatives: Tensor | None = None
    ids: Tensor | None = None
    weights: Tensor | None = None
    positives: Tensor | None = None
    guide_image: Tensor | None = None
    guide_text: Tensor | None = None
    directions: Directions = "both"
    duplicates: Duplicates = "mask"
    label_smoothing: float = 0.0
    false_negatives: FalseNegatives = "keep"
    margin: float = 0.0
    partition: Partition = "each"
    within: Within = "none"
    hardness: float = 0.0
    is_softmax: bool = True  # False for `SigmoidContrastiveLoss`
    statistics: bool = False
    # The prefixes of `MatryoshkaLoss`; empty for other losses.
    widths: tuple[int, ...] = ()
    width_weights: tuple[float, ...] = ()
    normalize: bool = False
    backend: Backend = "auto"
    tile_dtype: TileDtype = "auto"
    workspace_bytes: int | None = None
    autotune: bool = False
    stores_tiles: bool = True  # whether the first sweep stores tiles for the second
    exchange: ExchangeName = "slices"
    group: str = ""  # name of the process group, by which torch finds it; `""`: the default group
    owner: str = "ContrastiveLoss"  # class name of the loss, for error messages
    # The last scale that the host read from a CUDA device, and the call it was passed to; 0 before
    # the first. See `FirstInputs`.
    read_scale: float = 0.0
    read_call: int = 0
    needs_grad: tuple[bool, ...] = (False,) * 5  # of image, text, scale, bias and negatives

    @classmethod
    def of(
        cls,
        loss: Any,
        image: Tensor,
        text: Tensor,
        scale: Tensor | float,
        bias: Tensor | float | None,
        *,
        owner: str | None = None,
        **fields: Any,
    ) -> "Request":
        """Return the request of a call: its arguments and those of the constructor of `loss`."""
        owner = type(loss).__name__ if owner is None else owner
        if not torch.compiler.is_compiling():  # Dynamo cannot trace the check
            _check_derivatives(owner, image, text, scale)
        # Other dtypes are left to the checks, which refuse them on all ranks.
        are_tensors = isinstance(image, Tensor) and isinstance(text, Tensor)
        is_mixed = are_tensors and image.dtype != text.dtype
        if is_mixed and {image.dtype, text.dtype} <= {*FLOAT_DTYPES}:
            # Gradients still have the dtypes of the inputs.
            dtype = torch.promote_types(image.dtype, text.dtype)
            image, text = image.to(dtype), text.to(dtype)
        group = "" if loss.process_group is None else loss.process_group.group_name
        constructed: Any = {name: getattr(loss, name) for name in _CONSTRUCTED}
        return cls(
            image, text, scale, bias, **constructed, **fields,  # type: ignore[arg-type]
            is_softmax=loss._is_softmax, group=group, owner=owner,
        )  # fmt: skip

    def checked(self) -> "Request":
        """Return the request with scale and bias as tensors, after its checks have passed."""
        scale = _as_tensor(self.scale, self.image)
        bias = None if self.bias is None else _as_tensor(self.bias, self.image)
        inputs = (self.image, self.text, scale, bias, self.negatives)
        # Without a backward, one product of four is enough. This is decided here, because tensors
        # inside a compiled graph do not say whether they require a gradient.
        trains = torch.is_grad_enabled()
        needs = tuple(trains and x is not None and x.requires_grad for x in inputs)
        # Dynamo cannot trace `dataclasses.replace`.
        fields = {name: getattr(self, name) for name in _NAMES}
        return Request(**fields | {"scale": scale, "bias": bias, "needs_grad": needs})

    def flat(self) -> list[Any]:
        """Return the values of all fields, in order, as arguments of the operators."""
        values = [getattr(self, name) for name in _NAMES]
        return [list(value) if isinstance(value, tuple) else value for value in values]

    @property
    def signature(self) -> list[Any]:
        """Everything that the checks depend on; calls with equal signatures have equal results."""
        group = group_named(self.group)
        # A group may be created, or have another backend, after the first call.
        backend = str(dist.get_backend_config(group)) if ranks_of(group, self.owner) > 1 else ""
        return [backend, *(
            (x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor)
            else type(x) if name in _CALLED
            else x
            for name, x in zip(_NAMES, self.flat(), strict=True)
        )]  # fmt: skip

    @property
    def given(self) -> int:
        """A bit for each argument of `GIVEN` that was passed; must be equal on all ranks."""
        return sum((getattr(self, name) is not None) << at for at, name in enumerate(GIVEN))

    @property
    def is_plain(self) -> bool:
        """Whether the loss is plain InfoNCE: one positive per row, equal weights, no smoothing."""
        is_given = any(x is not None for x in (self.weights, self.positives, self.negatives))
        is_one = self.duplicates == "mask" and not self.label_smoothing and not self.is_combined
        return not is_given and is_one

    @property
    def is_combined(self) -> bool:
        """Whether `partition="joint"` or `hardness` is used."""
        return self.partition == "joint" or bool(self.hardness)

    @property
    def checksum(self) -> int:
        """A checksum of the loss class and its options, compared across ranks."""
        values = zip(_NAMES, self.flat(), strict=True)
        rules = [value for name, value in values if name in _COMPARED]
        if self.guide_text is not None:
            rules += [self.guide_text.shape[1], self.guide_text.dtype]
        # Python salts `hash` of strings differently in every process.
        return zlib.crc32(repr(rules).encode())

    def products(self, ranks: int) -> int:
        """Return the number of multiplications of pairs, assuming equal batches of all ranks.

        There is one product of `b n D` for each matrix of logits, one for the gradient of each
        tower and, for a softmax, one for logits that were not stored. Split operands multiply three
        times.
        """
        (b, width), n = self.image.shape, len(self.text) * ranks
        gradients = sum(self.needs_grad[:2]) or int(any(self.needs_grad[2:4]))
        widths, pairs = list(self.widths) or [width], b * n
        if self.is_combined:
            is_hard = self.hardness > 0 and self.directions == "both"
            pairs *= 1 + is_hard + (self.within in ("text", "both"))
            pairs += b * b * ranks * (self.within in ("image", "both"))
        recomputed = pairs if self.is_softmax and gradients else 0
        stores = self.stores_tiles and self.false_negatives == "keep" and not self.is_combined
        if recomputed and stores:
            tiles = self.tiles(self.workspace_bytes)
            features = (self.image.dtype, self.image.device)
            stored = tiles.stored_values(b, len(widths) * n, *features)
            recomputed = tiles.multiplied_twice(b, n, widths[0], *features, stored)
        guides = 0 if self.guide_image is None else self.guide_image.shape[1]
        of_logits: int = sum(widths) * (recomputed + (1 + gradients) * pairs)
        return of_logits + guides * (2 if gradients else 1) * pairs

    def tiles(self, workspace_bytes: int | None) -> TileBackend:
        # Triton's sigmoid kernel does not support weights.
        is_weighted = self.weights is not None and not self.is_softmax
        backend = "torch" if is_weighted else self.backend
        return tiles_for(
            self.image.device, self.image.dtype, backend, self.tile_dtype, workspace_bytes,
            self.autotune,
        )  # fmt: skip


_NAMES = tuple(field.name for field in dataclasses.fields(Request))
_CALLED = _NAMES[:10]
DIFFERENTIABLE = 5
"""Number of the first fields that may have a gradient."""
GIVEN = tuple(PairArguments.__annotations__)
"""The arguments of a call that either all ranks pass or none."""
RULES = (
    "directions", "duplicates", "label_smoothing", "false_negatives", "margin", "partition",
    "within", "hardness",
)  # fmt: skip
"""The constructor arguments that define the loss, and must be equal on all ranks."""
_COMPARED = (*RULES, "widths", "width_weights", "normalize", "is_softmax")
_CONSTRUCTED = (*RULES, "backend", "tile_dtype", "workspace_bytes", "autotune", "exchange")
_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    # Integers may be symbolic under `torch.compile`.
    int | None: "SymInt?",
    tuple[int, ...]: "SymInt[]",
    tuple[float, ...]: "float[]",
    tuple[bool, ...]: "bool[]",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
}
SCHEMA = ", ".join(
    # A `Literal` of strings.
    f"{_TYPES.get(field.type, 'str')} {field.name}"
    for field in dataclasses.fields(Request)
)
"""The schema of an operator that takes the values of `Request.flat`."""


def tiles_for(
    device: torch.device,
    dtype: torch.dtype,
    backend: Backend = "auto",
    tile_dtype: TileDtype = "auto",
    workspace_bytes: int | None = None,
    autotune: bool = False,
) -> TileBackend:
    """Return the tile backend for features on a device."""
    # Triton's interpreter is for tests; without their patches it is wrong in bf16.
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return TorchTiles(workspace_bytes)
    problem = tiles_problem(device, dtype)
    if problem is None:
        return triton_tiles(workspace_bytes, tile_dtype, autotune)
    if backend == "auto":
        return TorchTiles(workspace_bytes)
    raise ValueError(problem)


def ranks_of(group: dist.ProcessGroup | None, owner: str = "ContrastiveLoss") -> int:
    """Return the number of ranks that share the batch; 1 without `torch.distributed`."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    size = dist.get_world_size(group)
    # torch returns -1 on ranks that are not members.
    if size < 1:
        raise ValueError(
            f"This rank is not a member of the `process_group` passed to `{owner}`. Pass the group "
            "that this rank belongs to."
        )
    return size


def group_named(name: str) -> dist.ProcessGroup | None:
    """Return the process group of a name; `None`, the default group, for an empty name."""
    # Private, but the function that functional collectives use.
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(name) if name else None


def _as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """Return the value as a tensor on the device of `like`; gradients flow back to its device."""
    if isinstance(value, Tensor):
        return value.to(like.device)
    if isinstance(value, np.ndarray):
        # numpy deprecates `float()` of an array of shape (1,).
        value = value.item()
    # `torch.tensor` would copy from pageable memory, which synchronizes and breaks CUDA graphs.
    return torch.full((), float(value), dtype=ACCUMULATION_DTYPES[like.dtype], device=like.device)


def _check_derivatives(owner: str, *inputs: object) -> None:
    """Raise for kinds of derivatives that would silently be zero."""
    is_dual = any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    )
    if is_dual or torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"Called `{owner}` in forward-mode AD or inside a transform of `torch.func`. It "
            "supports plain backward only. Compute its gradient with `backward()` or "
            "`torch.autograd.grad`."
        )
