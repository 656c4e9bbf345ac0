"""Clips the gradient of each example: finds the uses of each parameter, and computes norms and clipped sums."""
