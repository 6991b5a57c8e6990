"""Number formats and tensor statistics; usable from any training loop."""

from lightning_mp.numerics.floats import FLOAT_DTYPES, accumulation_dtype, state_dtype

__all__ = ["FLOAT_DTYPES", "accumulation_dtype", "state_dtype"]
