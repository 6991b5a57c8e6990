"""`lightning-mp doctor` and `preflight`: find problems of a run before it trains."""
