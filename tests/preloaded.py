"""What the fork server of `processes.py` imports and computes once for all ranks.

A forked rank otherwise spends time on imports, and on copies of the memory pages to which a first
look-up in a table or a first garbage collection writes.
"""

import collections.abc
import functools
import gc
import importlib

_IMPORTED_IN_A_STEP = (
    "lightning.pytorch.cli",
    "lightning_mp.callbacks._step.recorder",
    "pytest",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.utils.serialization",
)


def _import_all() -> None:
    for name in _IMPORTED_IN_A_STEP:
        importlib.import_module(name)
    for name in ("lightning_mp", "lightning_mp.callbacks", "lightning_mp.strategies"):
        package = importlib.import_module(name)
        for public in package.__all__:
            getattr(package, public)


def _fill_tables() -> None:
    import torch
    from lightning.fabric.utilities import registry

    import lightning_mp

    # Each Trainer reads the metadata of all packages.
    registry.entry_points = functools.cache(registry.entry_points)
    registry._load_external_callbacks("lightning.pytorch.callbacks_factory")
    torch.overrides.get_testing_overrides()
    torch.overrides.get_ignored_functions()
    with lightning_mp.BalancedAMP().forward_context():  # makes the rules of all operations
        pass
    # The first answer for a class visits all subclasses.
    for value in (torch.ones(1), 0.5, 1, "", (), None):
        for kind in ("Mapping", "MutableMapping", "MutableSequence", "Sequence"):
            isinstance(value, getattr(collections.abc, kind))


gc.disable()  # during imports, which create many permanent objects and little garbage
_import_all()
_fill_tables()
gc.collect()
gc.freeze()  # so that collections in ranks write to no page of these objects
gc.enable()
