"""What `lightning-mp plan` runs: memory and time of a contrastive run, before it is rented.

`formulas` are pure functions of numbers. `tower_bytes` measures a model without running it,
`subject` is what is known about a run, `estimate` puts both together, and `table` shows them as
text and picture. `python -m papers inf-cl` of a clone holds the formulas against Inf-CL's figures.
"""
