"""Pure functions of arrays. They know nothing of mechanisms."""
