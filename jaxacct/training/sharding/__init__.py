"""A step on the devices of a mesh, in one process or several."""
