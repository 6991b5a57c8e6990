"""Strategies for large contrastive batches; imported as `lightning_mp.strategies`."""

# Imported under a second name, the files would define second classes, which break `isinstance`.
if __name__ != "lightning_mp.strategies":
    raise ImportError(
        f"Passed `import {__name__}`. This folder is installed as `lightning_mp.strategies`: "
        "write `import lightning_mp.strategies`."
    )

from lightning_mp.strategies.inf_cl import InfCLStrategy
from lightning_mp.strategies.inf_cl_model_parallel import InfCLModelParallelStrategy

__all__ = ["InfCLModelParallelStrategy", "InfCLStrategy"]
