"""Engines: components in, brackets out, on batches of configurations."""
