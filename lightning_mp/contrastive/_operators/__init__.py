"""The losses of one process as operators, so that `torch.compile` keeps them whole."""
