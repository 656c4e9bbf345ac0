"""Shared by all packages: brackets, checks of input, text, files, progress, optional packages, random bits."""
