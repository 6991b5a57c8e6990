"""The step of `SafeAdamW`: its arguments, and what computes it in plain torch and in Triton."""
