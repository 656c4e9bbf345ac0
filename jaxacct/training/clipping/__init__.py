"""The sum of clipped gradients: what each parameter meets in the loss, norms from that, and examples kept apart."""
