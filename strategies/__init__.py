"""Strategies for large contrastive batches; imported as `lightning_mp.strategies`."""

if __name__ != "lightning_mp.strategies":
    raise ImportError(
        f"Passed `import {__name__}`. This folder is installed as `lightning_mp.strategies`: "
        "write `import lightning_mp.strategies`."
    )

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mp.strategies.inf_cl import InfCLStrategy

__all__ = ["InfCLStrategy"]

StrategyRegistry.register(
    "inf_cl",
    InfCLStrategy,
    description="DDP with gradient-cached towers for near-infinite contrastive batches",
    override=True,  # the package may be imported anew, as in a notebook
)
