"""Epsilon, delta, their gradient, and readings of them: from the question, by directions and engines, to the answer."""
