"""`lightning-mp plan`: memory and time of a contrastive run, predicted without a GPU.

`formulas` are functions of numbers. `dry_run` makes the model and a batch of a `config`, and
`sources` a model by name; `tower_bytes` measures them on tensors without memory. `subject`
describes a run, `estimate` applies the formulas to it, and `table` prints the result. In a clone,
`python -m papers inf-cl` compares the formulas with the figures of Inf-CL's paper.
"""
