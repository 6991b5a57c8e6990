"""Which modules and ops compute in which format."""
