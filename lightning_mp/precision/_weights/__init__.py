"""Half weights: half-precision copies of fp32 weights, and weights with residuals (`PureFP16`)."""
