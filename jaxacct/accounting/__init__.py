"""Answers questions about epsilon, delta, the gradient of epsilon and risks. It picks the engine for each question."""

from jaxacct.accounting import mechanism_engines  # noqa: F401  # puts its engines in the list
