"""How ranks agree on a loss, bring each other their features, and take sums back home."""
