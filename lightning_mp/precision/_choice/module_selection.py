"""Selection of modules by group, class name or dotted path, as in `fp32_modules`."""

import difflib
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["as_written", "class_names", "find_modules", "select_modules", "select_norms"]

# Layers with statistics, and with weights near 1 whose updates half precision would round away.
_NORM_TYPES = (
    nn.modules.batchnorm._NormBase,  # BatchNorm, SyncBatchNorm, InstanceNorm
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)
# Parts of class names of similar layers: T5LayerNorm, LlamaRMSNorm, FusedLayerNorm, ...
_NORM_NAMES = [
    *("batchnorm", "groupnorm", "instancenorm", "layernorm"),
    *("responsenorm", "rmsnorm", "scalenorm"),
]
# Path components that wrappers insert and users do not write.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def select_modules(
    root: nn.Module, names: Sequence[str], *, strict: bool = True
) -> dict[str, nn.Module]:
    """Return the modules selected by `names`, including their submodules, by dotted path.

    A name is "norm" (all normalization layers, possibly none, and a submodule `norm`), the name of
    a class or base class ("LayerNorm", "MyBlock"), or a dotted path relative to `root`. An unknown
    name raises `ValueError`, unless `strict` is false. A shared module is returned under its first
    path.
    """
    return _with_submodules(root, (m for n in names for m in find_modules(root, n, strict=strict)))


def select_norms(root: nn.Module) -> dict[str, nn.Module]:
    """Return the normalization layers, including their submodules, by dotted path."""
    return _with_submodules(root, filter(_is_norm, root.modules()))


def _with_submodules(root: nn.Module, modules: Iterable[nn.Module]) -> dict[str, nn.Module]:
    chosen = {inner for module in modules for inner in module.modules()}
    return {path: module for path, module in root.named_modules() if module in chosen}


def find_modules(root: nn.Module, name: str, *, strict: bool = True) -> list[nn.Module]:
    """Return the modules selected by one name, without their submodules."""
    if name == "norm":
        named = [module for path, module in root.named_children() if path == "norm"]
        return [*named, *(module for module in root.modules() if _is_norm(module))]
    found = [module for module in root.modules() if name in class_names(module)]
    # With duplicates, because a shared module may be named by any of its paths.
    paths = [(as_written(path), m) for path, m in root.named_modules(remove_duplicate=False)]
    found += [module for path, module in paths if path == name and name][:1]
    if not found and strict:
        raise ValueError(_unknown(root, [path for path, _ in paths], name))
    return found


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, _NORM_TYPES):
        return True
    names = [name.lower() for name in class_names(module)]
    if not any(norm in name for norm in _NORM_NAMES for name in names):
        return False
    # The name is not enough: an `AdaLayerNorm` contains a linear layer, and a `LayerNormLSTM` is no
    # norm. A norm has only vectors as parameters, and only norms as children with parameters.
    own = module.parameters(recurse=False)
    vectors = all(is_lazy(p) or sum(size > 1 for size in p.shape) <= 1 for p in own)
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    return vectors and all(_is_norm(child) for child in children)


def class_names(module: nn.Module) -> list[str]:
    """Return the names of the class and its bases, without `Module` and `object`."""
    bases = type(module).__mro__
    return [cls.__name__ for cls in bases if cls not in (nn.Module, object)]


def as_written(path: str) -> str:
    """Return a dotted path without the components that wrappers insert."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _unknown(root: nn.Module, paths: list[str], name: str) -> str:
    classes = {each for module in root.modules() for each in class_names(module)}
    candidates = ["norm", *sorted(classes), *(path for path in paths if path)]
    near = difflib.get_close_matches(name, candidates, n=5, cutoff=0.5)
    children = [child for child, _ in root.named_children()]
    return (
        f"Passed the module {name!r}, but {type(root).__name__} has no such class or submodule. "
        + (f"Similar names: {near}." if near else f"Its submodules: {children}.")
        + " Pass 'norm' for all normalization layers, the name of a class such as 'LayerNorm', "
        "or a dotted path such as 'encoder.head'."
    )
