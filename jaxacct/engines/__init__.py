"""Engines compute brackets of epsilon and delta from the components of mechanisms, for batches of configurations."""
