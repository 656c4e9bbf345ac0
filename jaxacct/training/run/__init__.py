"""Runs: the state that a trainer carries from step to step, and from one process to the next."""
