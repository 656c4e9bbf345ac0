"""Epsilon, delta, their gradient, and readings of them: from the question, by directions and engines, to the answer."""

from jaxacct.accounting import mechanism_engines  # noqa: F401  # puts its engines in the list
