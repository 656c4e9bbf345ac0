"""Names that people know from other libraries: the error says in one line what they are called here."""

import importlib
import inspect
import os
import subprocess
import sys

import pytest

import jaxacct as ja
from jaxacct.core.keywords import FRONT_DOOR, MEANINGS
from jaxacct.training import Plan

RUN = {"sampling_probability": 0.1, "steps": 3}
GOAL = {"target_epsilon": 1.0, "target_delta": 1e-5}


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("get_epsilon", "ja.epsilon"),
        ("compute_epsilon", "ja.epsilon"),
        ("eps", "ja.epsilon"),
        ("noise_multiplier", "ja.calibrate_noise_multiplier"),
        ("dpsgd", "ja.dp_sgd"),
        ("DPSGD", "ja.dp_sgd"),
        ("Plan", "jaxacct.training.Plan"),
        ("calibrate_nois_multiplier", "calibrate_noise_multiplier"),
        ("epsilom", "epsilon"),
    ],
)
def test_a_name_that_is_not_there_is_told(name, right):
    with pytest.raises(AttributeError) as refused:
        getattr(ja, name)
    assert str(refused.value) == f"module 'jaxacct' has no attribute {name!r}; did you mean {right}?"


def test_a_name_that_means_nothing_here_is_refused_as_before():
    for name in ("qwertz", "_private", "__wrapped__"):
        assert not hasattr(ja, name)
    with pytest.raises(AttributeError, match="has no attribute 'qwertz'$"):
        ja.qwertz  # noqa: B018


def test_a_package_that_is_not_imported_is_told():
    code = "import jaxacct as ja\ntry: ja.tuning\nexcept AttributeError as error: print(error, end='')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert done.stdout == "module 'jaxacct' has no attribute 'tuning'; import jaxacct.tuning first"


@pytest.mark.parametrize("target", sorted(set(FRONT_DOOR.values())))
def test_every_name_that_is_advised_is_there(target):
    package, _, name = target.replace("ja.", "jaxacct.", 1).rpartition(".")
    assert callable(getattr(importlib.import_module(package), name))


def test_no_name_of_the_front_door_is_taken_for_another():
    assert not set(FRONT_DOOR) & set(ja.__all__)


@pytest.mark.parametrize(
    ("call", "given", "wrong", "right"),
    [
        (ja.dp_sgd, RUN | {"sigma": 1.0}, "sigma", "noise_multiplier"),
        (ja.dp_sgd, {"noise_multiplier": 1.0, "q": 0.1, "steps": 3}, "q", "sampling_probability"),
        (ja.dp_sgd, {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 3}, "sample_rate", "sampling_probability"),
        (ja.dp_sgd, {"noise_multiplier": 1.0, "sampling_probability": 0.1, "num_steps": 3}, "num_steps", "steps"),
        (ja.dp_sgd, RUN | {"noise_multiplyer": 1.0}, "noise_multiplyer", "noise_multiplier"),
        (ja.epsilon, {"mechanism": ja.Gaussian(1.0), "target_delta": 1e-5}, "target_delta", "delta"),
        (ja.delta, {"mechanism": ja.Gaussian(1.0), "eps": 1.0}, "eps", "epsilon"),
        (ja.calibrate_noise_multiplier, RUN | {"target_epsilon": 1.0, "delta": 1e-5}, "delta", "target_delta"),
        (ja.calibrate_noise_multiplier, RUN | {"target_delta": 1e-5, "epsilon": 1.0}, "epsilon", "target_epsilon"),
        (ja.calibrate_steps, GOAL | {"sigma": 1.0, "sampling_probability": 0.1}, "sigma", "noise_multiplier"),
        (ja.calibrate_sampling_probability, GOAL | {"noise_multiplier": 1.0, "T": 5}, "T", "steps"),
        (ja.Gaussian, {"sigma": 1.0}, "sigma", "noise_multiplier"),
        (ja.Laplace, {"sigma": 1.0}, "sigma", "scale"),
        (Plan, GOAL | {"q": 0.1, "dataset_size": 100, "steps": 3}, "q", "sampling_probability"),
        (Plan, {"epsilon": 1.0, "target_delta": 1e-5}, "epsilon", "target_epsilon"),
        (Plan, GOAL | {"lot_size": 10}, "lot_size", "batch_size"),
        (Plan, GOAL | {"bands": 8}, "bands", "noise"),
    ],
)
def test_a_keyword_from_elsewhere_is_told(call, given, wrong, right):
    with pytest.raises(TypeError) as refused:
        call(**given)
    assert str(refused.value) == f"{call.__name__}() has no keyword {wrong!r}; did you mean {right!r}?"


def test_a_keyword_that_means_nothing_here_gets_the_list():
    words = (
        "noise_multiplier, sampling_probability, steps, batch_size, dataset_size, slots, epochs, sampling, cap, bands, "
        "groups, group"
    )
    with pytest.raises(TypeError, match=rf"use {words}$"):
        ja.dp_sgd(xyz=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'noise_multiplier'"):
        ja.dp_sgd()
    with pytest.raises(TypeError, match="positional"):
        ja.dp_sgd(1.0, 0.1, 3, 4)


def test_signatures_and_help_stay_what_they_are():
    assert list(inspect.signature(ja.dp_sgd).parameters) == [
        "noise_multiplier", "sampling_probability", "steps", "batch_size", "dataset_size", "slots", "epochs",
        "sampling", "cap", "bands", "groups", "group",
    ]  # fmt: skip
    assert inspect.signature(ja.Gaussian).parameters.keys() == {"noise_multiplier"}
    assert inspect.signature(Plan).parameters["sampling"].default == "poisson"
    assert ja.epsilon.__doc__.startswith("Return the smallest epsilon")
    assert ja.epsilon.__module__ == "jaxacct.accounting.account"


def test_no_meaning_is_the_word_itself_alone():
    assert all(set(names) - {word} for word, names in MEANINGS.items())


def test_nothing_is_looked_up_before_an_error_happens():
    code = "import sys, jaxacct; jaxacct.__version__; assert 'jaxacct.core.keywords' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
