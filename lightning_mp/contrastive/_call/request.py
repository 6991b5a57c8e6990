"""`Request`: everything that one call of a loss says, in one flat value.

The schema of the operators and the number by which ranks compare what they were asked for are made
from its fields, so that an argument is declared in one place.

Shapes:
    b: images of this rank. n: its texts. k: negatives, or most positives, of an image. D: feature
    width. G: guide width.
"""

import dataclasses
import typing
import zlib
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d

from lightning_mp.contrastive._tiles.backends import triton_problem, triton_tiles
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
    """The optional arguments of a call; `ContrastiveLoss.forward` explains them."""

    ids: Tensor | None
    weights: Tensor | None
    positives: Tensor | None
    negatives: Tensor | None
    guide_image: Tensor | None
    guide_text: Tensor | None


class Configured(Protocol):
    """A loss, whose constructor has said the rest; the names are those of `Request`."""

    process_group: dist.ProcessGroup | None
    _is_softmax: bool


# Not a named tuple: under `torch.compile`, torch 2.10 traces no property of one.
@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What a call of a loss says, features in one dtype.

    Attributes:
        image, text, scale, bias: What is compared. Scale and bias may be numbers until `flat()`.
        negatives, ids, weights, positives, guide_image, guide_text: What the call says of pairs.
        directions, duplicates, label_smoothing, false_negatives, margin, partition, within,
            hardness: What the constructor of `ContrastiveLoss` says of pairs.
        is_softmax: Whether the loss is `ContrastiveLoss`; else it is `SigmoidContrastiveLoss`.
        statistics: Whether the call returns `LossStatistics`.
        widths, width_weights, normalize: The prefixes of `MatryoshkaLoss`; none are the features.
        backend, tile_dtype, workspace_bytes, autotune: Which code multiplies tiles, and how.
        stores_tiles: Whether tiles of the first sweep are kept for the second where they fit.
        exchange: How texts travel.
        group: The name of the process group, by which torch finds it; `""` is the default one.
        owner: The class that was called, for errors.
        read_scale, read_call: The scale that the host has read from a CUDA device last, and at
            which call of several ranks it was passed; 0 before. See `FirstInputs`.
        needs_grad: Whether image, text, scale, bias and negatives need a gradient.
    """

    image: Tensor
    text: Tensor
    scale: Tensor
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
    is_softmax: bool = True
    statistics: bool = False
    widths: tuple[int, ...] = ()
    width_weights: tuple[float, ...] = ()
    normalize: bool = False
    backend: Backend = "auto"
    tile_dtype: TileDtype = "auto"
    workspace_bytes: int | None = None
    autotune: bool = False
    stores_tiles: bool = True
    exchange: ExchangeName = "slices"
    group: str = ""
    owner: str = "ContrastiveLoss"
    read_scale: float = 0.0
    read_call: int = 0
    needs_grad: tuple[bool, ...] = (False,) * 5

    @classmethod
    def of(
        cls,
        loss: Configured,
        image: Tensor,
        text: Tensor,
        scale: Tensor | float,
        bias: Tensor | float | None,
        *,
        owner: str | None = None,
        **said: Any,
    ) -> "Request":
        """Return what a call of a loss says, with what its constructor has said.

        Raises:
            RuntimeError: In forward-mode AD or inside a transform of `torch.func`.
        """
        owner = type(loss).__name__ if owner is None else owner
        if not torch.compiler.is_compiling():  # no compiler can look into them
            _check_derivatives(owner, image, text, scale)
        # What is no float is left to the checks, which refuse it on all ranks.
        are_floats = isinstance(image, Tensor) and isinstance(text, Tensor)
        if (
            are_floats
            and image.dtype != text.dtype
            and {image.dtype, text.dtype} <= {*FLOAT_DTYPES}
        ):
            # Each gets its gradient in its own.
            dtype = torch.promote_types(image.dtype, text.dtype)
            image, text = image.to(dtype), text.to(dtype)
        group = "" if loss.process_group is None else loss.process_group.group_name
        constructed: Any = {name: getattr(loss, name) for name in _CONSTRUCTED}
        return cls(
            image, text, scale, bias, **constructed, **said,  # type: ignore[arg-type]
            is_softmax=loss._is_softmax, group=group, owner=owner,
        )  # fmt: skip

    def checked(self) -> "Request":
        """Return a request whose checks have passed, ready to be flattened: scalars as tensors."""
        scale = _as_tensor(self.scale, self.image)
        bias = None if self.bias is None else _as_tensor(self.bias, self.image)
        inputs = (self.image, self.text, scale, bias, self.negatives)
        # Where no backward can come, one product of four is enough. Said here: inside a compiled
        # graph no tensor tells.
        trains = torch.is_grad_enabled()
        needs = tuple(trains and x is not None and x.requires_grad for x in inputs)
        return self._changed(scale=scale, bias=bias, needs_grad=needs)

    def flat(self) -> list[Any]:
        """Return the values of all fields, as the operators take them: see `SCHEMA`."""
        values = [getattr(self, name) for name in _NAMES]
        return [list(value) if isinstance(value, tuple) else value for value in values]

    @classmethod
    def from_flat(cls, values: typing.Sequence[Any]) -> "Request":
        """Return the request that `flat` has flattened."""
        return cls(*values)

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
        """Which of `GIVEN` there are, a bit each; all ranks have the same."""
        return sum((getattr(self, name) is not None) << at for at, name in enumerate(GIVEN))

    @property
    def masked_ids(self) -> Tensor | None:
        """The ids whose equal pairs the tiles leave out, int64."""
        return self._ids if self.duplicates == "mask" else None

    @property
    def grouped_ids(self) -> Tensor | None:
        """The ids whose equal pairs are positives, int64."""
        return None if self.duplicates == "mask" else self._ids

    @property
    def _ids(self) -> Tensor | None:
        # They travel, and ranks do not tell each other in which dtype theirs came.
        return None if self.ids is None else self.ids.long().contiguous()

    @property
    def guides(self) -> tuple[Tensor, Tensor] | None:
        """The features that judge similarities, if these are not the model's."""
        if self.guide_image is None or self.guide_text is None:
            return None
        return self.guide_image, self.guide_text

    @property
    def is_plain(self) -> bool:
        """Whether the sweeps alone make the loss: one positive a row, all rows alike."""
        is_given = any(x is not None for x in (self.weights, self.positives, self.negatives))
        is_one = self.duplicates == "mask" and not self.label_smoothing and not self.is_combined
        return not is_given and is_one

    @property
    def is_combined(self) -> bool:
        """Whether directions share a softmax, or negatives are weighted."""
        return self.partition == "joint" or bool(self.hardness)

    @property
    def checksum(self) -> int:
        """A number that is another one where ranks have another loss or other arguments of it."""
        # The class of the loss as well: ranks with different ones would wait for each other.
        rules: list[Any] = [list(value) if isinstance(value, tuple) else value
                            for value in (getattr(self, name) for name in _COMPARED)]  # fmt: skip
        if self.guide_text is not None:
            rules += [self.guide_text.shape[1], self.guide_text.dtype]
        # Not `hash`, which Python salts for strings: every process would have another.
        return zlib.crc32(repr(rules).encode())

    def tiles(self, workspace_bytes: int | None) -> TileBackend:
        """Return what multiplies tiles in a workspace, see `tiles_for`."""
        # Triton's kernels of the sigmoid weigh all rows alike.
        is_weighted = self.weights is not None and not self.is_softmax
        backend = "torch" if is_weighted else self.backend
        return tiles_for(
            self.image.device, self.image.dtype, backend, self.tile_dtype, workspace_bytes,
            self.autotune,
        )  # fmt: skip

    def _changed(self, **values: Any) -> "Request":
        # Not `dataclasses.replace`, which no compiler traces.
        return Request(**{**{name: getattr(self, name) for name in _NAMES}, **values})


_NAMES = tuple(field.name for field in dataclasses.fields(Request))
_CALLED = _NAMES[:10]
DIFFERENTIABLE = 5
"""How many of the first fields may have a gradient."""
GIVEN = tuple(PairArguments.__annotations__)
"""The arguments of a call that all ranks pass, or none."""
RULES = (
    "directions", "duplicates", "label_smoothing", "false_negatives", "margin", "partition",
    "within", "hardness",
)  # fmt: skip
"""The arguments of a constructor that say what belongs to what."""
_COMPARED = (*RULES, "widths", "width_weights", "normalize", "is_softmax")
_CONSTRUCTED = (*RULES, "backend", "tile_dtype", "workspace_bytes", "autotune", "exchange")
_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    # A number of a schema may be symbolic.
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
    # A literal is one of some strings.
    f"{_TYPES.get(field.type, 'str')} {field.name}"
    for field in dataclasses.fields(Request)
)
"""The arguments of an operator that takes what `Request.flat` returns."""


def tiles_for(
    device: torch.device,
    dtype: torch.dtype,
    backend: Backend = "auto",
    tile_dtype: TileDtype = "auto",
    workspace_bytes: int | None = None,
    autotune: bool = False,
) -> TileBackend:
    """Return what multiplies tiles of features on a device.

    Raises:
        ValueError: `backend="triton"` cannot run there.
    """
    # Triton's interpreter is for tests that ask for it: in bf16 it is wrong without repairs.
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return TorchTiles(workspace_bytes)
    problem = triton_problem(device, dtype)
    if problem is None:
        return triton_tiles(workspace_bytes, tile_dtype, autotune)
    if backend == "auto":
        return TorchTiles(workspace_bytes)
    raise ValueError(problem)


def ranks_of(group: dist.ProcessGroup | None, owner: str = "ContrastiveLoss") -> int:
    """Return how many ranks share the batch; 1 without `torch.distributed`.

    Raises:
        ValueError: This rank is not a member.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    size = dist.get_world_size(group)
    # torch says -1 to a rank that is no member.
    if size < 1:
        raise ValueError(
            f"This rank is not a member of the `process_group` passed to `{owner}`. Pass the group "
            "that this rank belongs to."
        )
    return size


def group_named(name: str) -> dist.ProcessGroup | None:
    """Return the process group of a name; the default one has none here."""
    # Private to torch, whose own modules find groups by it.
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(name) if name else None


def _as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a tensor on the device of `like`; a parameter elsewhere still gets its gradient."""
    if isinstance(value, Tensor):
        return value.to(like.device)
    if isinstance(value, np.ndarray):
        # numpy deprecates `float()` of an array of shape (1,).
        value = value.item()
    # A fill: `torch.tensor` would copy pageable memory, which waits, and which no graph can hold.
    return torch.full((), float(value), dtype=ACCUMULATION_DTYPES[like.dtype], device=like.device)


def _check_derivatives(owner: str, *inputs: object) -> None:
    """Refuse derivatives that would silently be zero, in the name of a loss."""
    is_dual = any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    )
    if is_dual or torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"Called `{owner}` in forward-mode AD or inside a transform of `torch.func`. It has a "
            "plain backward only. Take its gradient with `backward()` or `torch.autograd.grad`."
        )
