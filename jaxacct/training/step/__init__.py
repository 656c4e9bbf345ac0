"""One private step: it draws a batch, clips and sums gradients, and adds noise; a mechanism accounts for it."""
