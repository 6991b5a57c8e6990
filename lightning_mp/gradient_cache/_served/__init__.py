"""What `GradientCache` is made of: arguments, micro-batches, outputs, replays."""
