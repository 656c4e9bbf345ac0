"""A private early stop: what it costs, when it ends a run, and that no reader claims less than was released."""

import dataclasses
import functools
import json
import math
import random

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusal
from scipy import stats
from training_runs import KEY, keyed, linear, sgd, still_trainer

import jaxacct as ja
from jaxacct import cli
from jaxacct.core.validation import InputError
from jaxacct.training import EarlyStop, Ledger, Plan, Trainer
from jaxacct.training.plan.early_stop import UNITS
from jaxacct.training.plan.solver import PlanRequest
from jaxacct.training.run.checkpoints import Store
from jaxacct.training.run.evaluations import UNIT_BITS

DATA = np.eye(20, 2, dtype=np.float32)
VALIDATION = np.linspace(0.0, 1.0, 400, dtype=np.float32)
GIVEN = {"target_epsilon": 2.0, "target_delta": 1e-5, "dataset_size": 20, "sampling_probability": 1.0, "steps": 40}
RULE = EarlyStop(1.0, every=4, patience=2, gain=200.0)
"""A score that does not rise ends a run on every machine: noise of 200, which the machine decides, has chance e^-33."""


def plan_of(rule=RULE, **more):
    return Plan(**GIVEN | {"early_stop": rule} | more)


@functools.cache
def trainer_of(rule=RULE, **more):
    return still_trainer(plan_of(rule, **more), step=keyed)


def score(params, x):
    """A score that never rises, whatever the noise is: the run should end after patience + 1 scores."""
    return jnp.float32(0.5) + 0.0 * params[0] * x


def fit(trainer=None, path=None, state=None, **more):
    trainer = trainer or trainer_of()
    state = trainer.init(np.zeros(2, np.float32), KEY) if state is None else state
    given = {"score": score, "validation": VALIDATION} | more
    return trainer.fit(state, given.pop("data", DATA), ledger=path, progress=False, **given)


def upper(path, **more):
    return float(Ledger.read(path).epsilon(1e-5, **more).upper)


# The plan


def test_the_plan_pays_for_it():
    plain, plan = Plan(**GIVEN), plan_of()
    steps = ja.repeat(ja.PoissonSampled(ja.Gaussian(plan.noise_multiplier), 1.0), 40)
    both = ja.epsilon(ja.compose(steps, ja.AboveThreshold(2.0, 4.0)), 1e-5)
    assert float(plan.epsilon.upper) == pytest.approx(float(both.upper), rel=1e-6) and 1.99 < both.upper <= 2.0
    assert float(ja.epsilon(steps, 1e-5).upper) < 1.8 and plan.noise_multiplier > plain.noise_multiplier
    assert ja.verify(plan.mechanism, plan.epsilon, delta=1e-5).status == "verified"
    curve = plan.epsilon_curve(4)[1].upper
    assert np.all(curve >= [float(plan.epsilon_after(step).upper) * (1 - 1e-9) for step in (10, 20, 30, 40)])
    assert plan.epsilon_after(0).upper == 0.0
    assert plan.epsilon_after(1).upper > ja.epsilon(ja.AboveThreshold(2.0, 4.0), 1e-5).upper


@pytest.mark.parametrize("open_setting", ["steps", pytest.param("sampling_probability", marks=pytest.mark.slow)])
def test_whatever_is_solved_for(open_setting):
    given = {**GIVEN, "noise_multiplier": 11.0, "early_stop": RULE} | {open_setting: None}
    plan = Plan(**given)
    assert 1.9 < float(plan.epsilon.upper) <= 2.0
    found = {open_setting: getattr(plan, open_setting)}
    assert (
        Plan(**given | found | {"early_stop": None, "target_epsilon": None}).epsilon.upper < 1.8
    )  # without the early stop, the budget would allow more


def test_documents_and_recalibration_keep_it():
    plan = plan_of(EarlyStop(np.float64(0.25), every=np.int64(7), gain=2))
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.early_stop == EarlyStop(0.25, 7, 3, 2.0)
    later = plan.recalibrate(10, steps=80)
    assert later.early_stop == plan.early_stop and float(later.epsilon.upper) <= 2.0
    assert Plan.from_json(Plan(**GIVEN).to_json()).early_stop is None
    for bad in ([1.0, 4, 2], [1.0, 4, 2, -1.0], [1.0, 4.5, 2, 0.0], [True, 4, 2, 0.0], {"epsilon": 1.0}, 3):
        node = json.loads(plan.to_json()) | {"early_stop": bad}
        with pytest.raises(InputError):
            Plan.from_document(node)


def test_what_is_refused():
    assert "small part" in refusal(lambda: plan_of(EarlyStop(2.0, every=4)))
    assert "EarlyStop" in refusal(lambda: plan_of(0.3))
    assert "data_dependent" in refusal(lambda: plan_of(data_dependent=True))
    assert "unit" in refusal(lambda: plan_of(unit="user"))
    law = {"repetitions": ja.selection.PointMass(2), "noise_multiplier": 5.0, "target_epsilon": None}
    assert "repetitions" in refusal(lambda: plan_of(**law))
    for bad in (
        {"epsilon": 0.0},
        {"epsilon": 5e-324},
        {"epsilon": 1e11},
        {"every": 0},
        {"patience": 0},
        {"gain": -1.0},
        {"every": 1.5},
    ):
        assert next(iter(bad)) in refusal(lambda bad=bad: EarlyStop(**{"epsilon": 1.0, "every": 4} | bad))
    assert "is missing" in refusal(lambda: fit(score=None))
    assert "is missing" in refusal(lambda: fit(validation=None))
    assert "early stop" in refusal(lambda: fit(still_trainer(Plan(**GIVEN))))
    assert "first axes" in refusal(lambda: fit(validation=np.float32(1.0)))
    rows = np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)
    wide = {"state": trainer_of().init(np.zeros(16, np.float32)), "data": rows}
    assert "closes over" in refusal(lambda: fit(score=lambda p, x: jnp.sum(jnp.asarray(rows) @ p) * x, **wide))
    trainer = Trainer(linear, sgd(0.1), plan_of(), 1.0, mesh=__import__("jax").make_mesh((1,), ("d",)))
    assert "mesh" in refusal(lambda: fit(trainer))


# The run


def test_a_run_that_ends_early_claims_its_plan_everywhere(path, capsys, tmp_path):
    log = tmp_path / "log.jsonl"
    state = fit(path=path, log=log)
    assert state.stopped == "early_stop" and state.step == 12 and state.seen
    assert "stopped: early_stop" in repr(state)
    whole = float(plan_of().epsilon.upper)
    assert float(state.epsilon.upper) == upper(path) == pytest.approx(whole, rel=1e-6) and whole <= 2.0
    assert float(fit().epsilon.upper) == pytest.approx(whole, rel=1e-6)  # without a ledger
    end = json.loads(log.read_text().splitlines()[-1])
    assert end["ended"] == "early_stop" and end["epsilon"]["upper"] == pytest.approx(whole, rel=1e-6)
    assert cli.main(["ledger", "show", str(path)]) == 0 and "early stop of the plan" in capsys.readouterr().out
    assert cli.main(["verify", str(path)]) == 0 and "verified  1" in capsys.readouterr().out
    assert fit(path=path, state=state).step == state.step  # it has ended
    other = trainer_of(steps=60)
    assert "looked at its outputs" in refusal(lambda: fit(other, path, state))
    rule = EarlyStop(0.5, every=4)
    assert "early_stop must be the same" in refusal(lambda: fit(trainer_of(rule), path, state))
    again = fit(path=path)  # from the beginning: exactly the same steps, up to the same end
    assert (again.step, again.stopped, upper(path)) == (state.step, "early_stop", float(state.epsilon.upper))
    assert np.array_equal(again.params, state.params)
    later = dataclasses.replace(state, stopped="finished")
    assert "has ended this run after step" in refusal(lambda: fit(path=path, state=later))
    lone = trainer_of(steps=8)  # another run gets what is left of the budget, which is nothing
    assert "none of" in refusal(lambda: fit(lone, path, lone.init(np.zeros(2, np.float32))))


def test_the_claim_includes_the_answers_before_the_run_ends(path):
    """With and without a ledger, the claim is exactly that of the steps and the answers.  A log claims no less."""
    found, records = [], []
    watch = lambda state: found.append(float(state.epsilon.upper)) or state.step >= 6
    rule = EarlyStop(0.5, every=4, patience=5)
    trainer, plan = trainer_of(rule), plan_of(rule)
    expected = [float(plan.epsilon_after(step).upper) for step in range(1, 7)]
    for ledger in (None, path):
        found.clear(), records.clear()
        fit(trainer, ledger, callbacks=[watch], log=records.append)
        assert found == pytest.approx(expected, rel=1e-5)
        told = [record["epsilon"]["upper"] for record in records if record["event"] == "step"]
        assert all(a >= b * (1 - 1e-6) for a, b in zip(told, expected, strict=True))
    other = Plan(**GIVEN)
    with Ledger.open(path) as ledger:
        ledger.begin(other, "next")
        assert not other.allows(ledger, 0)  # the first run has promised all its steps


def test_a_ledger_with_other_releases_counts_them_beside_the_answers(path):
    with Ledger.create(path, plan_of(target_epsilon=1.5)) as ledger:
        ledger.spend(ja.PureDP(0.4), "statistics")
    with pytest.warns(UserWarning, match="of 40 steps fit"):
        state = fit(path=path, score=lambda p, x: x)
    assert state.stopped in ("budget", "early_stop") and upper(path) <= 2.0
    noted = Ledger.read(path).runs[Ledger.read(path).run].noted
    assert noted[0].mechanism == RULE.mechanism


def moving(params, x):
    """A score that depends on the parameters, and so on the noise of the run."""
    return (jnp.sin(7.0 * params[0]) > x).astype(jnp.float32)


@pytest.mark.parametrize("with_ledger", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_at_the_same_step(tmp_path, with_ledger):
    rule = EarlyStop(0.3, every=2, patience=6)
    trainer = trainer_of(rule)
    straight = fit(trainer, score=moving)
    assert straight.stopped == "early_stop"

    def cut(state):
        if state.step == straight.step - 3:
            raise KeyboardInterrupt

    path = tmp_path / "run.jsonl" if with_ledger else None
    more = {"score": moving, "checkpoints": tmp_path / "folder", "checkpoint_every": 5}
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, path, callbacks=[cut], **more)
    state = fit(trainer, path, **more)
    assert (state.step, state.stopped) == (straight.step, "early_stop")
    assert np.array_equal(state.params, straight.params) and state.scores.values == straight.scores.values
    assert fit(trainer, path, **more).step == straight.step
    assert float(state.epsilon.upper) == pytest.approx(float(plan_of(rule).epsilon.upper), rel=1e-6)


def test_a_process_killed_while_it_ends_leaves_no_smaller_claim(tmp_path, monkeypatch):
    """A kill before or after the last checkpoint is written leaves the claim of the whole plan."""
    path, folder, real = tmp_path / "run.jsonl", tmp_path / "folder", Store.save
    whole = pytest.approx(float(plan_of().epsilon.upper), rel=1e-6)

    def killed(store, found, after=False):
        if found.stopped == "early_stop" and not after:
            raise KeyboardInterrupt
        real(store, found)
        if found.stopped == "early_stop":
            raise KeyboardInterrupt

    for after in (False, True):
        monkeypatch.setattr(Store, "save", functools.partialmethod(killed, after=after))
        with pytest.raises(KeyboardInterrupt):
            fit(path=path, checkpoints=folder)
        assert upper(path) == whole
    monkeypatch.setattr(Store, "save", real)
    state = fit(path=path, checkpoints=folder)
    assert (state.stopped, upper(path)) == ("early_stop", whole) and "stopped early" in path.read_text()
    assert fit(path=path, checkpoints=folder).step == state.step


def test_a_run_that_was_killed_at_its_end_is_not_asked_again_by_another_program(tmp_path, monkeypatch):
    """Another program draws other noise.  The ledger already shows the answer "end"; a second one would cost again."""
    path, folder, real = tmp_path / "run.jsonl", tmp_path / "folder", Store.save

    def killed(store, found):
        if found.stopped == "early_stop":
            raise KeyboardInterrupt
        real(store, found)

    monkeypatch.setattr(Store, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(path=path, checkpoints=folder, checkpoint_every=5)
    monkeypatch.setattr(Store, "save", real)
    ended = Ledger.read(path).runs.popitem()[1].ended
    monkeypatch.setattr(EarlyStop, "ends", lambda *given: pytest.fail("the rule was asked again"))

    def moved(*given):
        after, seen = keyed(*given)
        return after._replace(params=after.params + 1.0), seen

    state = fit(still_trainer(plan_of(), step=moved), path, checkpoints=folder)
    assert (state.step, state.stopped) == (ended, "early_stop") and Ledger.read(path).runs.popitem()[1].again > 0


def test_scores_are_exact_and_clipped():
    values = np.array([-3.0, 0.25, 7.0, np.nan, 1.0] * 100, np.float32)
    state = fit(score=lambda p, x: x, validation=values)
    assert set(state.scores.values) == {round((0.25 + 1.0 + 1.0) * 100 * UNITS)}
    assert "scores" not in repr(state) and "Scores" not in repr(vars(state)["scores"])


# The noise


def bits(rng):
    return rng.randbytes(32)


def test_answers_have_the_stated_law():
    """The first answer is yes with Pr[L - M >= rise], for Laplace L and M of scales 4/epsilon and 2/epsilon."""
    rng, rule = random.Random(5), EarlyStop(1.0, every=1, patience=1)
    for rise in (-3.0, 0.0, 4.0, 9.0):
        scores = [0, round(rise * UNITS)]
        yes = sum(rule.ends(scores, bits(rng), bits(rng)) for _ in range(400))
        a, b, x = 4.0, 2.0, abs(rise)
        tail = (a * a * math.exp(-x / a) - b * b * math.exp(-x / b)) / (2.0 * (a * a - b * b))
        assert stats.binomtest(yes, 400, tail if rise >= 0 else 1.0 - tail).pvalue > 1e-6


def test_noise_is_that_of_the_question():
    """The same question of the same step has the same answer.  A run has one noisy threshold for all its questions."""
    rng = random.Random(6)
    rule, key, chain = EarlyStop(1.0, every=1, patience=1), bits(rng), bits(rng)
    ask = lambda rise, chain: rule.ends([0, rise], key, chain)
    assert len({ask(0, chain) for _ in range(20)}) == 1
    assert len({ask(rise, chain) for rise in range(40)}) == 2  # a unit is 2^-20 record: only the noise differs
    assert len({ask(0, bits(rng)) for _ in range(40)}) == 2
    assert not rule.ends([5], key, chain)


# False claims


def runs(rule, scores, shift, noise, steps, count, seed):
    """(step after which each run ended, sum of its outputs): a record moves each output by `shift`."""
    rng, normal = random.Random(seed), np.random.default_rng(seed)
    found = []
    for _ in range(count):
        key, ended = bits(rng), steps
        for step in range(1, steps):
            if rule.ends(scores[: step + 1], key, bits(rng)):
                ended = step
                break
        found.append((ended, float(np.sum(shift + noise * normal.standard_normal(ended)))))
    return found


def refuted(one, other, epsilon, delta, events):
    """The number of events whose frequencies show, at level 1e-4 for all together, that no such claim holds."""
    count, level = len(one), 1e-4 / (4 * len(events))
    wrong = 0
    for event in events:
        for left, right in ((one, other), (other, one)):
            k, j = sum(map(event, left)), sum(map(event, right))
            low = stats.beta.ppf(level, k, count - k + 1) if k else 0.0
            high = stats.beta.ppf(1.0 - level, j + 1, count - j) if j < count else 1.0
            wrong += low > math.exp(epsilon) * high + delta
    return wrong


@pytest.mark.slow
def test_no_false_claim_in_two_thousand_runs():
    """No event refutes the claim for neighbours whose record is in the training data and in the validation data."""
    rule, steps, noise, delta = EarlyStop(4.0, every=1, patience=1), 6, 30.0, 1e-3
    without = [UNITS * k for k in (10, 13, 16, 16, 16, 16, 16)]
    with_it = [score + UNITS * (step > 2) for step, score in enumerate(without)]  # the record scores from step 3 on
    one, other = runs(rule, with_it, 1.0, noise, steps, 2000, 1), runs(rule, without, 0.0, noise, steps, 2000, 2)
    events = [lambda run, at=at, c=c: run[0] == at and run[1] > c for at in range(1, steps + 1) for c in (-999, 3)]
    events += [lambda run, at=at: run[0] <= at for at in range(1, steps)]
    plan = Plan(None, delta, 20, 1.0, noise_multiplier=noise, steps=steps, early_stop=rule)
    assert refuted(one, other, float(plan.epsilon.upper), delta, events) == 0
    # the same events refute what the steps alone would claim
    taken = float(ja.epsilon(ja.repeat(ja.Gaussian(noise), steps), delta).upper)
    assert refuted(one, other, taken, delta, events) > 0
    # the events also refute a rule's claim for runs with a tenth of that rule's noise
    loud, quiet = EarlyStop(15.0, every=1, patience=1), EarlyStop(1.5, every=1, patience=1)
    one, other = runs(loud, with_it, 1.0, noise, steps, 2000, 3), runs(loud, without, 0.0, noise, steps, 2000, 4)
    claimed = Plan(None, delta, 20, 1.0, noise_multiplier=noise, steps=steps, early_stop=quiet).epsilon.upper
    assert refuted(one, other, float(claimed), delta, events) > 0


def test_scores_are_counted_in_the_same_units_everywhere():
    assert UNITS == 2**UNIT_BITS  # a larger value of one record would overflow the sums of `evaluations.units`


def test_every_setting_of_a_plan_is_known_to_go_with_an_early_stop_or_is_refused():
    """The steps of these settings are one mechanism, with which the answers compose.  A new setting needs a proof."""
    composes = {
        *("target_epsilon", "target_delta", "dataset_size", "sampling_probability", "expected_batch_size"),
        *("noise_multiplier", "steps", "epochs", "sampling", "relation", "noise_schedule", "batch_schedule"),
        *("slots", "cap", "noise", "groups", "early_stop", "candidates", "sampling_rates", "rates_digest"),
    }
    refused = {"repetitions": ja.selection.Geometric(0.5), "data_dependent": True, "unit": "user"}
    asked = {"target_epsilon": 3.0, "target_delta": 1e-5, "dataset_size": 64, "sampling_probability": 0.5, "steps": 20}
    for name, value in refused.items():
        with pytest.raises(InputError, match=f"early_stop has no accounting with {name}"):
            Plan(**asked, early_stop=EarlyStop(0.2, every=2), **{name: value})
    assert {field.name for field in dataclasses.fields(PlanRequest)} == composes | set(refused)
