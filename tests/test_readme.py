"""The README's Python runs as it stands, one block after the other."""

import pathlib
import re

import pytest

import jaxacct

BLOCKS = re.findall(
    r"```python\n(.*?)```", (pathlib.Path(jaxacct.__file__).parents[1] / "README.md").read_text(), re.DOTALL
)


def test_the_first_block_runs_and_keeps_its_promises():
    names = {}
    exec(compile(BLOCKS[0], "README.md", "exec"), names)
    assert names["c"].ok and names["c"].epsilon.upper <= 2.0 and names["b"].ok.all()


@pytest.mark.slow
def test_every_block_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert names["state"].epsilon.upper <= 3.0 and names["best"].epsilon.upper <= 3.0
    assert (tmp_path / "run.jsonl").exists()
