"""Implementation of `SafeAdamW`: argument checks, the step in plain torch, the step in Triton."""
