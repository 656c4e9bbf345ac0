"""Picks an engine for each question about a mechanism, and answers the question.

The questions are about epsilon, delta, the gradient of epsilon, and risks.
"""

from jaxacct.accounting import mechanism_engines  # noqa: F401  # the import registers the module's engines
