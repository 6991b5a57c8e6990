"""Half weights: working copies of fp32 ones, and those of `PureFP16` with what rounding takes."""
