"""`lightning-mp doctor`: what is wrong with the configuration of a run, before its first batch."""
