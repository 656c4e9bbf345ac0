"""Searches for a parameter that meets a target: noise, sampling probability, steps, or any other parameter."""
