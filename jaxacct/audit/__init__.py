"""Audits: lower bounds on what a mechanism leaks, from runs of it, to hold against what is claimed of it."""

from jaxacct.audit.canaries import gradient_canaries, input_canary
from jaxacct.audit.canary_game import Game, Played
from jaxacct.audit.error_counts import clopper_pearson, gaussian_fit
from jaxacct.audit.known_curve import CurveTest, known_curve_p_value
from jaxacct.audit.lower_bound import LowerBound
from jaxacct.audit.report import Claim, Report, Row
from jaxacct.audit.score_thresholds import from_scores
from jaxacct.audit.selection_game import count_winners, finite, gaussian, winners
from jaxacct.audit.single_run import coin_guesses, one_run, one_run_p_value
from jaxacct.audit.winner_ranks import Cells, attack_cells, cell_audit, cell_counts, winning_ranks

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
    "known_curve_p_value",
    "one_run",
    "one_run_p_value",
    "winners",
    "winning_ranks",
]
