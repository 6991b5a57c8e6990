"""What `python -m papers` runs: tables and figures of the papers, at this machine's size."""
