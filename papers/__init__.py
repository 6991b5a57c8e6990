"""Tables and figures of papers, reproduced by `python -m papers` at this machine's size."""
