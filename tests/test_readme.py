"""Each Python snippet of the README runs by itself, in a fresh process, and the one that trains runs twice."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = dict(zip(("first", "training", "tuning"), re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL), strict=True))


def run(block, folder, check):
    """Run a snippet and a check after it."""
    return run_script(f"{BLOCKS[block]}\n{check}\n", folder)


def run_script(text, folder):
    """Run a Python script in a process of its own and return what it prints."""
    script = folder / "snippet.py"
    script.write_text(text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_snippet_keeps_its_promises(tmp_path):
    run("first", tmp_path, "assert c.ok and c.epsilon.upper <= 2.0 and b.ok.all()")


def test_training_run_twice_gives_the_same_model(tmp_path):
    check = (
        "assert state.epsilon.upper <= 3.0 and state.step == plan.steps\n"
        "kernels = [x.tobytes().hex() for x in (params['params']['layers_0']['kernel'], "
        "np.asarray(state.params['params']['layers_0']['kernel']))]\n"
        "assert kernels[0] == kernels[1]\n"
        "print(kernels[0], state.epsilon)"
    )
    (tmp_path / "once.py").write_text(f"{BLOCKS['training']}\n{check}\n")
    twice = (
        "import pathlib\n"
        "for _ in range(2):\n"
        "    exec(pathlib.Path('once.py').read_text(), {'__name__': '__main__'})\n"
        "    print(pathlib.Path('run.jsonl').read_bytes().hex())\n"
    )
    lines = run_script(twice, tmp_path).splitlines()
    assert len(lines) == 4 and lines[:2] == lines[2:]


@pytest.mark.slow
def test_tuning_stays_within_its_budget(tmp_path):
    run("tuning", tmp_path, "assert best.epsilon.upper <= 3.0")


def test_what_the_readme_promises_about_itself():
    assert len(TEXT.split()) <= 1000
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    table = TEXT[TEXT.index("| extra |") : TEXT.index("## The first number")]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)))) <= extras
    for page in (ROOT / "examples" / "tutorials").glob("*.md"):
        assert f"(examples/tutorials/{page.name})" in TEXT, page
