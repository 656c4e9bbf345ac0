"""Clipping: the uses of each parameter in the loss, norms and sums of clipped gradients, and examples kept apart."""
