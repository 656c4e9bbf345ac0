"""What every room may use: brackets, checks of input, text, files, progress, optional packages, random bits."""
