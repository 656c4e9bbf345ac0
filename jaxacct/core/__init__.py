"""What all packages share: brackets, checks of input, text, files, progress, optional packages and random bits."""
