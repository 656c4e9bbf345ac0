"""Representations of a mechanism's privacy and conversions between them: profile, trade-off function, RDP, GDP."""
