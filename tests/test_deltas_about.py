"""Several deltas of one run on one contour: held against the lattice, delta one by one, and theorems."""

import itertools

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accounting.risk_readings import deltas_about
from jaxacct.engines import contour
from jaxacct.mechanisms import components

NOISE = np.array([1.0, 0.8, 0.45, 1.0, 3.0])
RATE = np.array([0.01, 0.05, 3e-4, 1.0, 0.0])
STEPS = np.array([1000, 500, 60_000, 3, 10])
EPSILON = np.array([0.9, 1.0, 1.15])[:, None] * np.ones(NOISE.size)


@pytest.mark.parametrize("relation", ("add_or_remove_one", "remove_one", "add_one"))
def test_the_brackets_meet_those_of_single_deltas(relation):
    run = ja.dp_sgd(NOISE, RATE, STEPS)
    for epsilon in (EPSILON[::2], EPSILON[::2] - 1.0):  # negative ones follow from the reverse direction
        found = deltas_about(run, epsilon, relation, 1e-4)
        assert np.all(found.upper - found.lower <= 1e-4 * found.upper)
        if np.all(epsilon >= 0):
            one = ja.delta(run, epsilon, relation=relation)
            assert np.all(found.lower <= one.upper) and np.all(one.lower <= found.upper)
        else:  # H_{e^-x}(P||Q) = 1 - e^-x + e^-x H_{e^x}(Q||P)
            back = {"remove_one": "add_one", "add_one": "remove_one"}.get(relation, relation)
            one = ja.delta(run, -np.minimum(epsilon, 0.0), relation=back)
            ends = [1.0 - np.exp(epsilon) + np.exp(epsilon) * end for end in (one.lower, one.upper)]
            below = epsilon < 0
            assert np.all((found.lower <= ends[1] * (1 + 1e-14))[below])
            assert np.all((ends[0] <= found.upper * (1 + 1e-14))[below])


def test_the_brackets_meet_those_of_the_lattice():
    run = ja.dp_sgd(NOISE[:1], RATE[:1], STEPS[:1])
    found = deltas_about(run, EPSILON[:, :1], "remove_one", 1e-4)
    other = ja.delta(run, EPSILON[:, :1], relation="remove_one", engine="lattice", rtol=1e-2)
    assert np.all(found.lower <= other.upper) and np.all(other.lower <= found.upper)
    assert np.all(found.upper - found.lower <= 1e-5 * found.upper)


def test_few_sampled_steps_share_a_contour_too():
    run, epsilon = ja.dp_sgd(np.array([1.0, 0.8]), np.array([0.05, 0.1]), np.array([40, 10])), np.linspace(6.8, 7.2, 7)
    at = epsilon * np.ones((2, 1))
    found = contour.delta_about(components(run, "remove_one", "remove"), at, np.zeros((2, 7)), 1e-4, 1e-8)
    one = ja.delta(run, at.T, relation="remove_one")
    assert np.all(found.upper - found.lower <= 1e-4 * found.upper)
    assert np.all(found.lower <= one.upper.T) and np.all(found.upper >= one.lower.T)


def asked():
    run = ja.dp_sgd(NOISE[:3], RATE[:3], STEPS[:3])
    return components(run, "remove_one", "remove"), EPSILON[:, :3].T, np.zeros((3, 3)), 1e-4, 1e-6


@pytest.mark.parametrize("wrong", (np.nan, np.inf, -np.inf, -60.0, -1e-9))
def test_what_a_kernel_gets_wrong_claims_nothing(monkeypatch, wrong):
    # log delta = -60 is far below the lower bound by hypothesis tests for little noise (0.3). log delta = -1e-9 is far
    # above the upper bound for much noise (100), which holds even without sampling
    run = ja.dp_sgd(100.0 if wrong == -1e-9 else 0.3, 0.5, np.array([10, 20]))
    parts = components(run, "remove_one", "remove")

    def lies(kernel, arguments, size, chunk, **static):
        log = np.full((size, 3), wrong)
        return [log, log, log, np.full((size, 3), True), np.full((size, 1, 2), 1.0)]

    monkeypatch.setattr(contour, "evaluate", lies)
    found = contour.delta_about(parts, EPSILON[:, :2].T, np.zeros((2, 3)), 1e-4, 1e-6)
    assert np.all(found.lower == 0.0) and np.all(found.upper == 1.0) and np.all(found.estimate == 1.0)


def test_ends_of_two_rungs_that_contradict_each_other_are_not_used(monkeypatch):
    logs = itertools.chain([(-9.0, -8.0), (-7.0, -6.0)], itertools.repeat((-np.inf, np.inf)))

    def changes(kernel, arguments, size, chunk, **static):
        low, high = (np.full((size, 3), end) for end in next(logs))
        return [low, low, high, np.isfinite(low), np.full((size, 1, 2), 1.0)]

    monkeypatch.setattr(contour, "evaluate", changes)
    monkeypatch.setattr(contour.quick_bounds, "limits", lambda *_: (0.0, 1.0))
    found = contour.delta_about(*asked())
    assert np.all(found.lower == 0.0) and np.all(found.upper == 1.0)


@pytest.mark.parametrize("sigma, rate, most", [(100.0, 1e-3, 1), (10.0, 1e-6, 2)])
def test_no_finer_rung_is_tried_where_rounding_makes_a_bracket_wide(monkeypatch, sigma, rate, most):
    """Over 1e9 steps the old code evaluated all six rungs. Its last brackets were wider than the first."""
    sizes, original = [], contour.evaluate
    monkeypatch.setattr(contour, "evaluate", lambda *a, **b: sizes.append(b["points"]) or original(*a, **b))
    found = ja.delta(ja.dp_sgd(sigma, rate, 1e9), 0.0, relation="remove_one")
    assert found.status == "ok" and found.upper - found.lower < 6e-5 * found.upper and len(sizes) <= most
