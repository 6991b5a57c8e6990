"""What `lightning-mp reproduce` runs: tables and figures of the papers, at this machine's size."""
