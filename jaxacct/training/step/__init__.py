"""Steps: batches, clipped sums, noise and keys of one private step, and the mechanism that accounts for it."""
