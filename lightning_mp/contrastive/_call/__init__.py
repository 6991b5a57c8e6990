"""The arguments of a call of a loss: brought into one form and checked before any computation."""
