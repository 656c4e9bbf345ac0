"""Pure functions of arrays: nothing here knows what a mechanism is."""
