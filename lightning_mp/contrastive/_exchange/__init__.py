"""The exchange of features and per-column sums between ranks."""
