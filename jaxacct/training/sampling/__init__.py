"""Chooses the records that take part in a step, on the device or on the host.  Each batch rule has its own function."""
