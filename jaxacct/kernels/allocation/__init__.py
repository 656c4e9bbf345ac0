"""Kernels for random allocation: one record in exactly one of t batches (README.md of this folder)."""
