"""The split contour: delta where few steps matter; a glossary and a figure are in README.md of the kernels."""
