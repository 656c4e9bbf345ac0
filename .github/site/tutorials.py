"""Tutorials: Markdown whose code is run; the output and the figures of a block are put below it.

A block of Python is run; the page shows what the block prints, and the value of its last line.  The blocks of one page
share their names.  A block of bash is run as well; `jaxacct` is then the command of this checkout.  A block that
begins with `python not run` or `bash not run` is only shown.  A comment `<!-- check: EXPRESSION -->` is evaluated in
its place: it checks the numbers in the prose, and the page fails if the expression is false.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```(python|bash)( not run)?\n(.*?)^```$|^<!-- check: (.*?) -->\n?", re.MULTILINE | re.DOTALL)
LIMIT_SECONDS = 300
"""Time limit of a tutorial.  It should take less than 20 seconds; if it trains a model, less than 40."""


class TutorialError(Exception):
    """A tutorial raised, or one of its checks is false; the message names the page and the block."""


def run(page: Path, pictures: Path, root: Path) -> str:
    """Return the page with the outputs of its code, which runs in a new process in an empty folder.

    The figures go to the folder `pictures`.  `root` is the checkout.
    """
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        result, work = Path(folder) / "result.md", Path(folder) / "work"
        work.mkdir()
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        settings: dict[str, Any] = {"cwd": work, "timeout": LIMIT_SECONDS, "capture_output": True, "text": True}
        settings["env"] = os.environ | {"PYTHONPATH": path, "MPLBACKEND": "Agg", "JAXACCT_QUIET": "1"}
        command = [sys.executable, __file__, str(page), str(pictures), str(result)]
        try:
            done = subprocess.run(command, check=False, **settings)
        except subprocess.TimeoutExpired:
            raise TutorialError(f"{page.name} has run for more than {LIMIT_SECONDS} seconds") from None
        if done.returncode or not result.exists():
            raise TutorialError(f"{page.name}: {done.stderr.strip() or f'exit status {done.returncode}'}")
        return result.read_text()


def filled(page: Path, pictures: Path) -> str:
    """Return the page with its outputs; run it in this process, in the current folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0

    def answer(match: re.Match[str]) -> str:
        nonlocal count
        language, not_run, code, check = match.groups()
        count += 1
        where = f"block {count}, line {page.read_text()[: match.start()].count(chr(10)) + 1}"
        if check:
            if not eval(check, names):
                raise TutorialError(f"{where}: the check is false: {check}")
            return ""
        shown = f"```{language}\n{code}```"
        if not_run:
            return shown
        try:
            text = python(code, names) if language == "python" else bash(code)
        except Exception as error:
            raise TutorialError(f"{where}: {type(error).__name__}: {error}\n{code}") from error
        lines = text.rstrip().splitlines()
        if len(lines) > 60:
            lines = [*lines[:60], f"... {len(lines) - 60} more lines"]
        output = ["\n".join(["```{code-block} text\n:class: output\n", *lines, "```"])] if lines else []
        return "\n\n".join([shown, *output, *drawn(page.stem, count, pictures)])

    return BLOCK.sub(answer, page.read_text())


def python(code: str, names: dict[str, Any]) -> str:
    """Run a block; return its output and the value of its last line, unless that is None or part of a figure."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(compile(tree, "<tutorial>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<tutorial>", "eval"), names)
            if value is not None and not type(value).__module__.startswith("matplotlib"):
                print(repr(value))
    return text.getvalue()


def bash(code: str) -> str:
    """Run a block and return its standard output."""
    command = f'jaxacct() {{ "{sys.executable}" -m jaxacct "$@"; }}\n{code}'
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TutorialError(f"exit status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def drawn(stem: str, count: int, pictures: Path) -> list[str]:
    """Return links to the figures of a block: open figures of pyplot, and .png files in the current folder."""
    found = []
    if "matplotlib.pyplot" in sys.modules:
        from matplotlib import pyplot

        for number in pyplot.get_fignums():
            name = f"{stem}-{count}-{number}.png"
            pyplot.figure(number).savefig(pictures / name, dpi=150, bbox_inches="tight")
            found.append(name)
        pyplot.close("all")
    for path in sorted(Path().glob("*.png")):
        name = f"{stem}-{path.name}"
        path.replace(pictures / name)
        found.append(name)
    return [f"![a picture drawn by the code above]({pictures.name}/{name})" for name in found]


if __name__ == "__main__":
    source, folder, result = map(Path, sys.argv[1:])
    try:
        result.write_text(filled(source, folder))
    except TutorialError as error:
        sys.exit(str(error))
