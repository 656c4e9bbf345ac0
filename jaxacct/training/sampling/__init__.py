"""Choice of the records that take part in a step, by every batch rule, on the device and on the host."""
