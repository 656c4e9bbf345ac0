"""Picks an engine for each question about a mechanism (epsilon, delta, gradient, risks), and answers the question."""

from jaxacct.accounting import mechanism_engines  # noqa: F401  # the import registers the module's engines
