"""Chooses the records that take part in a step, by each batch rule, on the device or on the host."""
