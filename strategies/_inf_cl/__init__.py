"""The parts that both strategies share."""
