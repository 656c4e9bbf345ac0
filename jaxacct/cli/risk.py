"""`jaxacct risk`: the table of readings of one configuration, or of several."""

from __future__ import annotations

import argparse

import numpy as np

from jaxacct.cli import output
from jaxacct.cli.arguments import CONFIGURATION, QUESTION
from jaxacct.core.validation import InputError
from jaxacct.mechanisms.base import element
from jaxacct.mechanisms.dp_sgd_run import LENGTHS, RATES, usual_relation
from jaxacct.representations.risk_table import risk
from jaxacct.sweeps import samplings
from jaxacct.sweeps.grid import expand

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Print the readings; lists of configurations are put side by side."""
    fields = {name: getattr(options, name) for name in CONFIGURATION if getattr(options, name) is not None}
    if options.sampling != "poisson":
        fields["sampling"] = options.sampling
    if np.ndim(options.above_fpr or 0):
        raise InputError("above_fpr must be one number, not a list")
    for names in (("noise_multiplier",), RATES, LENGTHS):
        if not set(names) & set(fields):
            raise InputError(f"{names[0]} is missing; give --{names[0].replace('_', '-')}")
    # a delta makes the configuration complete; it is not read
    inputs = expand(fields | {"delta": 0.5}, mode="zip", quantity="epsilon").inputs
    batch = any(np.ndim(value) for value in fields.values())
    kinds = list(samplings.alike(inputs))
    if len(kinds) > 1:
        raise InputError("group must be one number, not a list; ask for one size at a time")
    run_ = samplings.run(inputs, kinds[0][0])
    run_ = run_ if batch else element(run_, (0,))
    given = {name: getattr(options, name) for name in QUESTION["risk"] if getattr(options, name) is not None}
    relation = options.relation or usual_relation(kinds[0][0]["sampling"])
    table = risk(run_, **given, relation=relation, rtol=options.rtol, backend=options.backend)
    print(output.dumps(table.to_dict()) if options.json else table)
    return 0
