"""Finds the modules that carry and write the residual stream of a transformer."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from lightning_mp.precision._choice.module_selection import as_written, class_names

__all__ = ["ResidualStream", "find_residual_stream"]

# Names of the last layer of an attention or feed-forward block; whole path components, any case.
_WRITERS = (
    *("wo", "o", "o_proj", "out_proj", "c_proj", "down_proj", "fc2", "linear2", "lin2", "out_lin"),
    *("dense_4h_to_h", "pwconv2", "to_out", "to_out.0", "feed_forward.w2", "attn.proj", "mlp.proj"),
    *("output.dense", "attention.dense", "self_attention.dense", "self_attn.dense"),
)
_NORMS = ("layernorm", "rmsnorm")  # batch and group norms belong to convolutional networks
_DROPPERS = ("dropout", "droppath", "stochasticdepth")  # divide by 1 - p in training
_OTHER_DROPOUTS = ("att", "act", "layer")  # attention weights, activations, whole layers
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class ResidualStream(NamedTuple):
    """The modules around a residual stream."""

    # Last layers of attention and feed-forward blocks, whose outputs are added to the stream, with
    # the probability of the functional dropout that follows (0 if none is found).
    writers: dict[nn.Module, float]
    droppers: set[nn.Module]  # dropouts between a writer and the sum, which scale up in training
    norms: set[nn.Module]  # layer and RMS norms, most of which read the stream
    blocks: set[nn.Module]  # innermost members of lists of blocks, most of which return the stream


def find_residual_stream(root: nn.Module) -> ResidualStream:
    """Find the residual streams of the transformers in a model.

    A *writer* is identified by its path (`wo`, `o_proj`, `c_proj`, `fc2`, `output.dense`, ...), or
    is an `nn.MultiheadAttention`. A *dropper* is a dropout, DropPath or StochasticDepth that is a
    sibling of a writer or of a module that contains a writer. A *norm* is identified by the name of
    its class or a base class. A *block* is a member of an `nn.ModuleList`, `nn.ModuleDict` or
    `nn.Sequential` that contains a writer and a norm, but no other block.
    """
    writers = _writers(root)
    if not writers:
        return ResidualStream({}, set(), set(), set())
    norms = {module for module in root.modules() if _has_class(module, _NORMS)}
    members = {
        member
        for module in root.modules()
        if isinstance(module, _LISTS)
        for member in module.children()
        if _holds(member, writers) and _holds(member, norms)
    }
    blocks = {
        member
        for member in members
        if not isinstance(member, nn.ModuleList | nn.ModuleDict)  # never called
        and not any(inner in members for inner in member.modules() if inner is not member)
    }
    dropout = {module: _dropout_of(block) for block in blocks for module in block.modules()}
    followed = {writer: dropout.get(writer, 0.0) for writer in writers}
    return ResidualStream(followed, set(_droppers(root, writers)), norms, blocks)


def _writers(root: nn.Module) -> set[nn.Module]:
    # `nn.MultiheadAttention` never calls its `out_proj`, so a hook there would not run.
    attentions = {m for m in root.modules() if isinstance(m, nn.MultiheadAttention)}
    inside = {inner for m in attentions for inner in m.modules() if inner is not m}
    # The dot matches whole path components: `fc2`, but not `myfc2`.
    endings = tuple(f".{name}" for name in _WRITERS)
    return attentions | {
        module
        for path, module in root.named_modules()
        if f".{as_written(path)}".lower().endswith(endings)
        and not isinstance(module, nn.ModuleList)
        and module not in inside
    }


def _droppers(root: nn.Module, writers: set[nn.Module]) -> Iterator[nn.Module]:
    for parent in root.modules():
        if any(_holds(child, writers) for child in parent.children()):
            yield from (child for child in parent.children() if _has_class(child, _DROPPERS))


def _dropout_of(block: nn.Module) -> float:
    """Return the probability of a functional dropout, as in BART."""
    numbers = [
        value
        for name, value in vars(block).items()
        if "drop" in name and not any(other in name for other in _OTHER_DROPOUTS)
        if isinstance(value, float) and 0 < value < 1
    ]
    # The largest rate gives a bound that holds for all rates.
    return max(numbers, default=0.0)


def _holds(module: nn.Module, wanted: set[nn.Module]) -> bool:
    return not wanted.isdisjoint(module.modules())


def _has_class(module: nn.Module, parts: tuple[str, ...]) -> bool:
    names = [name.lower() for name in class_names(module)]
    return any(part in name for part in parts for name in names)
