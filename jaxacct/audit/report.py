"""Reports of lower bounds beside claims: a table, JSON, a picture, and a flag on every claim that a run has refuted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.audit.error_counts import UNCONDITIONAL, LowerBound
from jaxacct.audit.single_run import CurveTest
from jaxacct.core.bounds import Bounds
from jaxacct.core.text import aligned, exact, outward, unusual
from jaxacct.core.types import Leaf
from jaxacct.core.validation import RELATIONS, InputError, choice, covers

REFUTED_MARK = "!!"
"""Flag that the report prints after a refuted claim or curve."""
CURVE = "trade-off curve"
"""Kind of a claim that is a whole trade-off curve. The table's column of p-values has this heading, too."""


@dataclass(frozen=True)
class Claim:
    """Claim of (epsilon, delta)-DP.

    Parameters
    ----------
    name : name of the claim, as the report shows it.
    epsilon : a number, or the Bounds of `ja.epsilon`, whose upper end and kind the claim then takes.
    delta : float
    kind : kind of statement, such as "bound".
    relation : neighbouring relation of the claim.

    >>> Claim("RDP", 2.31, 1e-5, kind="bound")
    Claim(name='RDP', epsilon=2.31, delta=1e-05, kind='bound', relation='add_or_remove_one')
    """

    name: str
    epsilon: Leaf
    delta: float
    kind: str = "bound"
    relation: str = RELATIONS[0]

    def __post_init__(self) -> None:
        choice("relation", self.relation, RELATIONS)
        if isinstance(self.epsilon, Bounds):
            object.__setattr__(self, "kind", str(self.epsilon.kind))
            object.__setattr__(self, "epsilon", self.epsilon.upper)
        if np.ndim(self.epsilon) or not float(self.epsilon) >= 0.0:
            raise InputError(f"epsilon = {self.epsilon!r:.40} of claim {self.name!r} must be one number of 0 or more")
        object.__setattr__(self, "epsilon", float(self.epsilon))


@dataclass(frozen=True)
class Row:
    """Audit of one mechanism at one delta: the mechanism's name, the lower bound, and claims that it can refute.

    Parameters
    ----------
    name, found, claims : str, LowerBound and tuple of Claim

    >>> found = LowerBound(1.4, 1e-5, 0.99, 60_000_000, "clopper_pearson")
    >>> row = Row("worst score", found, (Claim("RDP", 2.31, 1e-5), Claim("too low", 1.0, 1e-5)))
    >>> [claim.name for claim in row.refuted]
    ['too low']
    """

    name: str
    found: LowerBound
    claims: tuple[Claim, ...]

    def __post_init__(self) -> None:
        if np.ndim(self.found.epsilon):
            raise InputError(f"the lower bound of {self.name!r} is a batch; make a row of every element")
        for claim in self.claims:
            if claim.delta != self.found.delta:
                raise InputError(
                    f"claim {claim.name!r} is at delta {claim.delta!r} and the lower bound at {self.found.delta!r}; "
                    "compare them at one delta"
                )
            if not covers(claim.relation, self.found.relation):
                raise InputError(
                    f"claim {claim.name!r} is for {claim.relation}, and the lower bound for {self.found.relation} "
                    "cannot refute it; give the relation of the claim, or a bound for it"
                )

    @property
    def refuted(self) -> tuple[Claim, ...]:
        """Claims below the bound. It refutes them at its confidence, if the conditions of bound and claim hold."""
        return tuple(claim for claim in self.claims if self.found.epsilon > claim.epsilon)


@dataclass(frozen=True)
class Report:
    """Rows of audits, in which every number stands with its kind, its confidence and its trials.

    Parameters
    ----------
    rows : iterable of Row

    >>> found = LowerBound(1.4, 1e-5, 0.99, 60_000_000, "clopper_pearson")
    >>> claim = Claim("Algorithm 3", 1.144, 1e-5, "conditional: monotone score")
    >>> print(Report([Row("worst score", found, (claim,))]))
    audit        delta  lower bound  confidence      trials  method           Algorithm 3
    worst score  1e-05       1.3999        0.99  60,000,000  clopper_pearson    1.1440 !!
    Algorithm 3: conditional: monotone score
    1 claims are below a lower bound, marked !!
    """

    rows: tuple[Row, ...]

    def __init__(self, rows: Iterable[Row]) -> None:
        object.__setattr__(self, "rows", tuple(rows))

    @property
    def refuted(self) -> list[tuple[Row, Claim]]:
        """Claims that a lower bound exceeds, each with its row."""
        return [(row, claim) for row in self.rows for claim in row.refuted]

    @property
    def refuted_curves(self) -> list[Row]:
        """Rows whose run has refuted the claimed trade-off curve."""
        return [row for row in self.rows if isinstance(row.found, CurveTest) and row.found.refuted]

    def records(self) -> list[dict[str, Any]]:
        """Return one record for each claim of each row; the record of a claimed curve has a p-value and no epsilon."""
        records: list[dict[str, Any]] = []
        for row in self.rows:
            found = row.found
            audit = {
                "audit": row.name,
                "delta": float(found.delta),
                "lower_bound": float(found.epsilon),
                "lower_bound_kind": found.kind,
                "relation": found.relation,
                "confidence": found.confidence,
                "trials": int(found.trials),
                "method": found.method,
            }
            refuted = row.refuted
            held: list[Any] = [(one.name, one.epsilon, one.kind, None, one in refuted) for one in row.claims]
            if isinstance(found, CurveTest):
                held.append((found.claim, None, CURVE, float(found.p_value), bool(found.refuted)))
            names = ("claim", "epsilon", "kind", "p_value", "refuted")
            records += [audit | dict(zip(names, claim, strict=True)) for claim in held]
        return records

    def __str__(self) -> str:
        """Return a table of audits (rows) and claims (columns), the claims' kinds, and the number of refuted claims."""
        names = list(dict.fromkeys(claim.name for row in self.rows for claim in row.claims))
        curves = [CURVE] if any(isinstance(row.found, CurveTest) for row in self.rows) else []
        lines = [("audit", "delta", "lower bound", "confidence", "trials", "method", *names, *curves)]
        for row in self.rows:
            found, claims = row.found, {claim.name: claim for claim in row.claims}
            method = found.method + (f" ({found.kind})" if found.kind != UNCONDITIONAL else "")
            method += unusual(found.relation)
            bound, sure = outward(found.epsilon, ".4f", up=False), exact(found.confidence)
            test = "-"
            if isinstance(found, CurveTest):
                test = f"p = {outward(found.p_value, '.2g', up=True)}" + (f" {REFUTED_MARK}" if found.refuted else "")
            cells = [_shown(claims.get(name), row) for name in names] + [test for _ in curves]
            lines.append((row.name, exact(found.delta), bound, sure, f"{found.trials:,}", method, *cells))
        table = [line.rstrip() for line in aligned(lines, left=(0, 5))]
        notes = [f"{claim.name}: {claim.kind}{unusual(claim.relation)}" for row in self.rows for claim in row.claims]
        tests = [row.found for row in self.rows if isinstance(row.found, CurveTest)]
        notes += [f"{CURVE}: p-value of the {test.claim}" for test in tests]
        flagged, wrong = len(self.refuted), len(self.refuted_curves)
        said = [f"{flagged} claims are below a lower bound, marked {REFUTED_MARK}"] if flagged else []
        said += [f"{wrong} claimed curves are refuted, marked {REFUTED_MARK}"] if wrong else []
        return "\n".join([*table, *dict.fromkeys(notes), *(said or ["no claim is refuted"])])

    def to_json(self) -> str:
        """Return the records as JSON; an infinite claim is null."""
        finite = lambda value: None if isinstance(value, float) and math.isinf(value) else value
        clean = [{name: finite(value) for name, value in record.items()} for record in self.records()]
        return json.dumps({"rows": clean, "refuted": sum(r["refuted"] for r in clean)}, indent=1, allow_nan=False)

    def plot(self, path: str | os.PathLike[str], *, title: str = "") -> None:
        """Draw a bar from 0 to each lower bound and a mark for each claim, a cross if refuted (.png, .svg, .pdf)."""
        from jaxacct.plots import style

        target = Path(path)
        style.check_picture(target)
        names = list(dict.fromkeys(claim.name for row in self.rows for claim in row.claims))
        colour = dict(zip(names, style.colours(names), strict=True))
        with style.settings():
            canvas, axes = style.figure(False)
            canvas.set_size_inches(7.0, 1.5 + 0.32 * len(self.rows))
            for place, row in enumerate(self.rows):
                axes.barh(
                    place, row.found.epsilon, height=0.5, color="0.75", label="" if place else "audit, lower bound"
                )
                for claim in row.claims:
                    wrong = claim in row.refuted
                    mark = "x" if wrong else "|"
                    axes.plot(claim.epsilon, place, mark, color=colour[claim.name], ms=13, mew=3.5 if wrong else 2.5)
            for name in names:
                axes.plot([], [], "|", color=colour[name], ms=11, mew=2.5, label=f"claim: {name}")
            if self.refuted:
                axes.plot([], [], "kx", ms=9, mew=2.5, label="claim below its lower bound")
            wrong_curve = lambda row: " (curve refuted)" if row in self.refuted_curves else ""
            labels = [row.name + unusual(row.found.relation) + wrong_curve(row) for row in self.rows]
            axes.set(yticks=range(len(self.rows)), yticklabels=labels, xlim=(0, None))
            axes.set_xlabel(style.MEANING["epsilon"])
            axes.invert_yaxis()
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
            style.title(axes, title)
            style.save(canvas, target)


def _shown(claim: Claim | None, row: Row) -> str:
    """Return the text of a claim's cell in the table, with a mark if the claim is refuted; "-" for no claim."""
    if claim is None:
        return "-"
    return outward(claim.epsilon, ".4f", up=True) + (f" {REFUTED_MARK}" if claim in row.refuted else "")
