"""An engine that is wrong: theorems and the other engine stand, no exception ends the batch, and the status says so."""

import jax
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accounting import dispatch
from jaxacct.engines import lattice, protocol, quick_bounds
from jaxacct.engines.contour import Contour
from jaxacct.engines.lattice import LatticeAnswer
from jaxacct.engines.protocol import Answer
from jaxacct.mechanisms import Mechanism, Repeated, components

DELTA, EPS = 1e-5, 1.0
WRONG = {
    "too low": (1e-9, 2e-9),
    "too high": (1e7, 2e7),
    "negative": (-3.0, -2.0),
    "nothing": (np.nan, np.nan),
    "half of nothing": (np.nan, 1e-9),
    "turned round": (3.0, 1.0),
    "infinite": (np.inf, np.inf),
}
RAISED = [ArithmeticError("numbers"), ValueError("values"), ZeroDivisionError("zero"), RuntimeError("compiler")]


KNOWN = {}


@pytest.fixture(autouse=True)
def theorems_once(monkeypatch):
    """What theorems say of a run is computed once: no engine changes it."""

    def once(name, theorems):
        def known(quantity, question):
            arrays = jax.tree.leaves((question.parts, question.target, question.slack))
            key = name, quantity, *(np.asarray(array).tobytes() for array in arrays)
            if key not in KNOWN:
                KNOWN[key] = theorems(quantity, question)
            return KNOWN[key]

        return known

    for name in ("limits_by_theorems", "upper_by_moments"):
        monkeypatch.setattr(dispatch, name, once(name, getattr(dispatch, name)))


@pytest.fixture
def broken(monkeypatch):
    """Both engines answer as told: (lower, upper), an exception, or "none" for a bracket that says nothing."""

    def breaking(by_contour, by_lattice):
        def raised_or(value):
            if isinstance(value, Exception):
                raise value
            return (-np.inf, np.inf) if value == "none" else value

        def of_contour(self, question):
            low, high = raised_or(by_contour)
            size = question.target.size
            return Answer(np.full(size, low), np.full(size, 0.5 * (low + high)), np.full(size, high))

        def of_lattice(*others, **options):
            low, high = raised_or(by_lattice)
            return LatticeAnswer(low, 0.5 * (low + high), high, "ok")

        monkeypatch.setattr(Contour, "epsilon", of_contour)
        monkeypatch.setattr(Contour, "delta", of_contour)
        monkeypatch.setattr(lattice, "epsilon", of_lattice)
        monkeypatch.setattr(lattice, "deltas", lambda p, rows, *a, **k: [of_lattice() for _ in rows])

    return breaking


RUN = ja.dp_sgd(1.0, 0.01, 1000)
THEIRS = 1.8282436461194622, 0.002612496806356864
"""Epsilon at DELTA and delta at EPS by dp_accounting's PLDAccountant, intervals of 1e-4."""


def contains(bounds, low, high):
    return bool(np.all(bounds.lower <= high) and np.all(bounds.upper >= low))


@pytest.fixture(scope="module")
def truth():
    """A bracket of the true epsilon and one of the true delta, from dp_accounting's numbers."""
    return (0.98 * THEIRS[0], 1.001 * THEIRS[0]), (0.95 * THEIRS[1], 1.001 * THEIRS[1])


@pytest.mark.slow
def test_the_numbers_of_another_accountant():
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    event = dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.0)), 1000)
    accountant = PLDAccountant(value_discretization_interval=1e-4).compose(event)
    assert (accountant.get_epsilon(DELTA), accountant.get_delta(EPS)) == pytest.approx(THEIRS, rel=1e-9)


@pytest.mark.parametrize("case", sorted(WRONG))
@pytest.mark.parametrize("where", ["contour", "lattice", "both"])
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_bracket_is_not_the_answer(broken, truth, where, case):
    wrong = WRONG[case]
    broken(wrong if where != "lattice" else "none", wrong if where != "contour" else "none")
    engine = "lattice" if where == "lattice" else "auto"
    bounds = ja.epsilon(RUN, DELTA, engine=engine, relation="remove_one")
    assert contains(bounds, *truth[0]), bounds
    assert bounds.status in ("contradiction", "width")
    assert bounds.lower >= 0 and np.isfinite(bounds.upper)
    if case in ("too low", "too high", "negative"):
        assert bounds.status == "contradiction"
    found = ja.delta(RUN, EPS, engine=engine, relation="remove_one")
    assert contains(found, *truth[1]) and found.status in ("contradiction", "width")
    assert 0 <= found.lower <= found.upper <= 1


@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
@pytest.mark.filterwarnings("ignore")
def test_an_engine_that_fails_ends_nothing(broken, truth, error):
    for by_contour, by_lattice, ask, at, true in (
        (error, "none", ja.epsilon, DELTA, truth[0]),
        ("none", error, ja.delta, EPS, truth[1]),
    ):
        broken(by_contour, by_lattice)
        found = ask(RUN, at, relation="remove_one")
        assert contains(found, *true) and (found.status, found.engine) == ("width", "theorem")


@pytest.mark.filterwarnings("ignore")
def test_of_two_engines_that_contradict_neither_is_used(broken, truth):
    low, high = truth[0]
    # both within the theorems' limits, so that nothing else speaks against them; the first is wide, so the second runs
    broken((0.2 * low, 0.7 * low), (0.9 * low, 0.95 * low))
    bounds = ja.epsilon(RUN, DELTA)
    assert bounds.status == "contradiction" and contains(bounds, low, high)
    assert bounds.engine == "theorem"


@pytest.mark.filterwarnings("ignore")
def test_other_rows_are_not_touched(monkeypatch):
    sigma = np.array([1.0, 2.0, 4.0])
    steps, q = 50, 0.5
    right = ja.epsilon(ja.dp_sgd(sigma, q, steps), DELTA, relation="remove_one")
    real = Contour.epsilon

    def wrong_once(self, question):
        answer = Answer(*(np.array(x, float) for x in real(self, question)))
        bad = question.parts.gauss_sigma[:, 0] == 2.0
        for end, value in zip(answer, (1e6, 1.5e6, 2e6), strict=True):
            end[bad] = value
        return answer

    monkeypatch.setattr(Contour, "epsilon", wrong_once)
    monkeypatch.setattr(lattice, "epsilon", lambda *a, **k: LatticeAnswer(np.nan, np.nan, np.nan, "width"))
    bounds = ja.epsilon(ja.dp_sgd(sigma, q, steps), DELTA, relation="remove_one")
    assert bounds.status.tolist() == ["ok", "contradiction", "ok"]
    for end in ("lower", "upper"):
        assert np.array_equal(getattr(bounds, end)[[0, 2]], getattr(right, end)[[0, 2]])
    assert bounds.lower[1] <= right.lower[1] and bounds.upper[1] >= right.upper[1]
    assert np.isfinite(bounds.upper[1]) and bounds.engine[1] == "theorem"


@pytest.mark.filterwarnings("ignore")
def test_a_row_on_which_the_lattice_fails_leaves_the_others(broken, monkeypatch):
    broken("none", "none")

    def fails_on_one(parts, row, *others, **options):
        if parts.gauss_sigma[row, 0] == 2.0:
            raise FloatingPointError("this one")
        return LatticeAnswer(0.0, 1.0, 1e4, "width")

    monkeypatch.setattr(lattice, "epsilon", fails_on_one)
    with pytest.warns(UserWarning, match="failed on configuration 1"):
        bounds = ja.epsilon(ja.dp_sgd([1.0, 2.0], 0.5, 50), DELTA, relation="remove_one")
    assert np.all(np.isfinite(bounds.upper)) and set(bounds.status) == {"width"}


class Told(dispatch.Engine):
    """An engine that answers as told."""

    name, cost = "told", 1.0

    def __init__(self, *ends):
        self.answer = Answer(*(np.array(end) for end in ends))

    def supports(self, question):
        return np.ones(question.target.shape, bool)

    def epsilon(self, question):
        return self.answer

    delta = epsilon


def asked(size):
    """A question that asks for one epsilon `size` times: by theorems above 0.39 and below 8, in truth about 0.8."""
    parts = components(ja.Gaussian(4.0), "add_or_remove_one", "remove").take(np.zeros(size, int))
    nothing = np.zeros(size)
    return dispatch.Question(parts, dispatch.kinds_of(parts), np.full(size, 1e-5), nothing, nothing - np.inf, None)


def sides(lower, upper):
    size = len(lower)
    answer = Answer(np.array(lower), np.full(size, np.nan), np.array(upper))
    return dispatch.Side(answer, np.full(size, "first", "<U32"), np.zeros(size, bool))


def test_brackets_that_are_held_against_each_other():
    side = sides([0.0, 0.4, 0.4, 0.4], [2.0, 0.6, 2.0, 2.0])
    told = Told([0.5, 0.8, np.nan, 0.5], np.full(4, 0.9), [3.0, 1.4, 1.5, np.nan])
    dispatch._ask(told, "epsilon", asked(4), np.arange(4), side)
    assert side.contradicted.tolist() == [False, True, False, False]
    assert side.answer.lower.tolist() == [0.5, -np.inf, 0.4, 0.5]
    assert side.answer.upper.tolist() == [2.0, np.inf, 1.5, 2.0]
    side = sides([0.0, 0.0, 0.0, 2.0], [9.0, 1.0, 9.0, 2.4])
    dispatch._narrow_by_theorems(side, np.arange(4), np.array([0.0, 5.0, np.nan, 2.5]), np.full(4, 9.0))
    assert side.contradicted.tolist() == [False, True, True, True]
    assert side.answer.lower.tolist()[1:] == [5.0, -np.inf, 2.5] and side.answer.upper.tolist() == [9.0] * 4


def test_an_answer_that_contradicts_a_theorem_leaves_those_before_it():
    least, most = quick_bounds.limits("epsilon", *asked(1)[:1], np.full(1, 1e-5), np.zeros(1))
    assert 0.0 < least[0] < most[0]
    for low, high in ((0.0, 0.5 * least[0]), (2.0 * most[0], 3.0 * most[0])):
        side = sides([least[0]], [most[0]])
        dispatch._ask(Told([low], [low], [high]), "epsilon", asked(1), np.arange(1), side)
        assert side.contradicted[0] and side.engine[0] == "first" and np.isnan(side.answer.estimate[0])
        assert (side.answer.lower[0], side.answer.upper[0]) == (least[0], most[0])


def test_an_upper_end_below_zero_contradicts_nothing():
    """Where delta(0) is below the target, epsilon is 0, and the contour's upper end is negative until it is clipped."""
    bounds = ja.epsilon(
        ja.dp_sgd([5.0, 1427141.3321317164], [1e-3, 0.0011638808717497767], [100, 37695771171123]),
        0.012,
        engine="contour",
    )
    assert bounds.upper.tolist() == [0.0, 0.0] and bounds.status.tolist() == ["zero", "zero"]
    assert set(bounds.engine.tolist()) <= {"contour", "closed_form"}


@pytest.mark.parametrize("classes", [(Repeated,), (Mechanism,)])
def test_an_engine_for_compositions_is_asked_about_a_step_that_runs_once(monkeypatch, classes):
    """The old code asked the engine about the step alone, for which this engine has no answer."""

    class OfRuns(protocol.MechanismEngine):
        name = "of_runs"

        def supports(self, question):
            return isinstance(question.mechanism, Repeated)

        def bracket(self, question):
            return ja.Bounds(0.0, 1.0, 1.0, "bound", engine=self.name)

    OfRuns.classes = classes
    monkeypatch.setattr(dispatch, "ENGINES", [OfRuns(), *protocol.ENGINES])
    assert ja.epsilon(ja.repeat(ja.Laplace(1.0), 1), 1e-5).engine == "of_runs"
    assert ja.epsilon(ja.Laplace(1.0), 1e-5).engine != "of_runs"
