"""A private step draws a batch, sums clipped gradients and adds noise.  `step_mechanisms` accounts for its cost."""
