"""Who takes part in a step, and the mechanism that accounts for it."""
