"""Reports: every number with its kind, confidence and trials, and refuted claims flagged."""

import json

import pytest

import jaxacct as ja
from jaxacct.audit import Claim, LowerBound, Report, Row
from jaxacct.audit.error_counts import RELATIONS
from jaxacct.core.validation import InputError

FOUND = LowerBound(1.4, 1e-5, 0.99, 60_000, "clopper_pearson")
FITTED = LowerBound(0.9, 1e-5, 0.95, 2_000, "gaussian_fit", "conditional: Gaussian DP", 0.24)
OURS = Claim("ours", ja.Bounds(1.5, 1.53, 1.54, "certified"), 1e-5)
OTHER = Claim("Algorithm 3", 1.144, 1e-5, "conditional: monotone score")
REPORT = Report(
    [Row("worst score", FOUND, (OURS, OTHER)), Row("fit", FITTED, (OURS, Claim("inf", float("inf"), 1e-5)))]
)


def test_a_claim_below_a_lower_bound_is_flagged_and_no_other():
    assert (OURS.epsilon, OURS.kind) == (1.54, "certified")
    assert [(row.name, claim.name) for row, claim in REPORT.refuted] == [("worst score", "Algorithm 3")]
    assert Report([Row("equal", FOUND, (Claim("tight", 1.4, 1e-5),))]).refuted == []


def test_the_table_says_what_every_number_is():
    lines = str(REPORT).splitlines()
    assert "1.1440 !!" in lines[1] and "!!" not in lines[2] and "60,000" in lines[1] and "0.99" in lines[1]
    assert "gaussian_fit (conditional: Gaussian DP)" in lines[2] and "inf" in lines[2] and lines[2].count(" -") == 1
    assert "ours: certified" in lines and "Algorithm 3: conditional: monotone score" in lines
    assert lines[-1].startswith("1 claims are below")
    assert str(Report([Row("fit", FITTED, (OURS,))])).endswith("no claim is refuted")


def test_a_bound_is_compared_only_with_claims_that_it_can_refute():
    """A guarantee for adding and for removing is one for each alone; nothing else follows from another relation."""
    for known in RELATIONS:
        for claimed in (*RELATIONS, "replace_one"):
            found = LowerBound(1.4, 1e-5, 0.99, 60_000, "clopper_pearson", relation=known)
            claim = Claim("c", 1.0, 1e-5, relation=claimed)
            if known == claimed or (claimed, known) in (RELATIONS[::3], RELATIONS[::2]):
                assert Row("r", found, (claim,)).refuted == (claim,)
            else:
                with pytest.raises(InputError, match=f"is for {claimed}, and the lower bound for {known} cannot"):
                    Row("r", found, (claim,))


def test_the_report_says_for_which_relation(tmp_path):
    found = LowerBound(1.4, 1 / 7000, 0.9999999, 60_000, "clopper_pearson", relation="zero_out")
    report = Report([Row("r", found, (Claim("c", 1.5, 1 / 7000, relation="zero_out"),))])
    _, row, claim, _ = str(report).splitlines()
    assert "clopper_pearson, zero_out " in row and claim == "c: bound, zero_out"
    assert "0.00014285714285714287 " in row and " 0.9999999 " in row
    assert report.records()[0]["relation"] == "zero_out"


def test_json_holds_the_same_records():
    document = json.loads(REPORT.to_json())
    assert document["refuted"] == 1 and len(document["rows"]) == 4
    first, last = document["rows"][1], document["rows"][-1]
    assert first["refuted"] and first["lower_bound"] == 1.4 and first["epsilon"] == 1.144
    assert {"confidence", "trials", "method", "kind", "lower_bound_kind", "delta"} <= first.keys()
    assert last["epsilon"] is None and last["lower_bound_kind"] == "conditional: Gaussian DP"


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    REPORT.plot(tmp_path / "audit.png", title="two audits")
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="must end in .png"):
        REPORT.plot(tmp_path / "audit.txt")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Claim("c", -1.0, 1e-5), "epsilon = -1.0 of claim 'c' must be one number"),
        (lambda: Claim("c", [1.0, 2.0], 1e-5), "must be one number"),
        (lambda: Claim("c", 1.0, 1e-5, relation="x"), "relation = 'x' is not known"),
        (lambda: Row("r", FOUND, (Claim("c", 1.0, 1e-6),)), "compare them at one delta"),
        (lambda: Row("r", LowerBound([1.0], 1e-5, 0.9, 3, "one_run"), ()), "is a batch"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()
