"""The examples of private choice and query release run, print numbers, draw figures, and agree with the theory."""

import importlib.util
import pathlib

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["private_voting", "small_db", "private_multiplicative_weights"])
def test_counts_below_one_are_refused_in_words(name, capsys):
    with pytest.raises(SystemExit):
        example(name).main(["--trials", "0"])
    assert "--trials must be 1 or more" in capsys.readouterr().err


def test_private_voting(tmp_path, capsys):
    drawn = tmp_path / "voting.png"
    curves = example("private_voting").main(["--trials", "20", "--out", str(drawn)])
    assert drawn.stat().st_size > 1000 and "any number of names" in capsys.readouterr().out
    for (title, name), shares in curves.items():
        assert shares[-1] > shares[0]
        if name.startswith("noisy max"):
            assert shares[-1] > 0.9
        elif title == "any number of names":
            assert shares[-1] < 0.7  # the counts need noise for every name on a ballot


def test_small_db(tmp_path, capsys):
    drawn = tmp_path / "small_db.png"
    arguments = ["--records", "100", "1000", "--bits", "2", "--queries", "4", "--trials", "30", "--out", str(drawn)]
    columns = example("small_db").main(arguments)
    assert drawn.stat().st_size > 1000 and "databases of" in capsys.readouterr().out
    for best, reached, theorem in zip(*list(columns.values())[:3], strict=True):
        assert best <= reached <= theorem


def test_private_multiplicative_weights(tmp_path, capsys):
    drawn = tmp_path / "release.png"
    module = example("private_multiplicative_weights")
    arguments = ["--records", "20000", "--bits", "6", "--queries", "20", "2000", "--delta", "0", "--out", str(drawn)]
    table = module.main(arguments)
    assert drawn.stat().st_size > 1000 and "largest error" in capsys.readouterr().out
    answers, data, weights = (table[0.0, name] for name in module.METHODS)
    assert answers[1] > weights[1]  # many queries exhaust what noisy answers can spend on each
    assert answers[1] > 20 * answers[0] and data[1] < 2 * data[0] + 0.01


def test_the_parts_of_a_budget_meet_it():
    import jaxacct as ja

    module = example("private_multiplicative_weights")
    for parts, delta in ((50, 0.0), (500, 1e-6)):
        each = module.part_epsilon(parts, 1.0, delta)
        assert 1.0 / parts * 0.999 < each and ja.epsilon(ja.repeat(ja.PureDP(each), parts), delta).upper <= 1.0
    assert each > 3 / 500


@pytest.mark.slow  # tests/test_interop_jax_privacy.py has the same questions
def test_jax_privacy_calibrates_with_the_certified_accountant(capsys):
    pytest.importorskip("jax_privacy")
    example("jax_privacy_calibration").main()
    lines = {line[:16].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    assert float(lines["jaxacct"][-1]) <= 2.0
    assert float(lines["jaxacct"][-3]) <= float(lines["jax_privacy RDP"][-3])
