"""Audits run a mechanism, bound its privacy loss from below, and compare the bounds with claims about the mechanism."""

from jaxacct.audit.canary_game import Game, Played, gradient_canaries, input_canary
from jaxacct.audit.error_counts import LowerBound, clopper_pearson, from_scores, gaussian_fit
from jaxacct.audit.report import Claim, Report, Row
from jaxacct.audit.selection_game import (
    Cells,
    attack_cells,
    cell_audit,
    cell_counts,
    count_winners,
    finite,
    gaussian,
    winners,
    winning_ranks,
)
from jaxacct.audit.single_run import CurveTest, coin_guesses, one_run, one_run_p_value

__all__ = [
    "Cells",
    "Claim",
    "CurveTest",
    "Game",
    "LowerBound",
    "Played",
    "Report",
    "Row",
    "attack_cells",
    "cell_audit",
    "cell_counts",
    "clopper_pearson",
    "coin_guesses",
    "count_winners",
    "finite",
    "from_scores",
    "gaussian",
    "gaussian_fit",
    "gradient_canaries",
    "input_canary",
    "one_run",
    "one_run_p_value",
    "winners",
    "winning_ranks",
]
