"""The parts of `GradientCache`: arguments, micro-batches, outputs, replays."""
