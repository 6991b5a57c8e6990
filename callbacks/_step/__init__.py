"""What a training step was, and how it is sampled, skipped or taken back."""
