"""The files and functions of jaxacct that run between a warm question and its answer, and how many they are.

    python benchmarks/path_of_a_number.py                      # this checkout
    python benchmarks/path_of_a_number.py --base ../old        # and another one to compare with

Each question is asked twice in a fresh process, and the second call is traced.  On NumPy the functions of the kernels
are Python and counted too; what runs inside a compiled program is not.  A function counts once however often it is
called; a comprehension belongs to the function that holds it; a lambda is a function.  A function is said to
only pass its arguments on if its body, beside a docstring and imports, is one call whose arguments are parameters of
the function, attributes of them, or literals.
"""

import argparse
import ast
import json
import os
import pathlib
import subprocess
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUESTIONS = {
    "ja.delta(ja.dp_sgd(1.0, 0.01, 1000), 2.0), XLA": lambda ja: ja.delta(
        ja.dp_sgd(1.0, 0.01, 1000), 2.0, backend="xla"
    ),
    "ja.epsilon(ja.dp_sgd(1.0, 0.01, 1000), 1e-5), NumPy": lambda ja: ja.epsilon(
        ja.dp_sgd(1.0, 0.01, 1000), 1e-5, backend="numpy"
    ),
    "ja.calibrate_noise_multiplier(2.0, 1e-5, 0.01, 1000), NumPy": lambda ja: ja.calibrate_noise_multiplier(
        2.0, 1e-5, 0.01, 1000, backend="numpy"
    ),
}
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
"""Names of code that Python runs in a frame of its own although nobody wrote a function."""
WARM_UPS = 1
"""Calls before the one that is traced: the first compiles, imports and fills caches."""


def trace(question, package):
    """The package's code that a call runs, in the order of the first call: {code: number of calls}."""
    found = {}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and code.co_name not in COMPREHENSIONS:
            found[code] = found.get(code, 0) + 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        question()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def passes_on(tree, line):
    """Whether the function that begins at `line` does nothing but pass its arguments on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and node.lineno == line:
            return _is_plain_call(node.body, node.args)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == line:
                body = [each for each in node.body if not _is_idle(each)]
                alone = len(body) == 1 and isinstance(body[0], ast.Return | ast.Expr)
                return alone and _is_plain_call(body[0].value, node.args)
    return False


def _is_idle(statement):
    docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return docstring or isinstance(statement, ast.Import | ast.ImportFrom)


def _is_plain_call(node, parameters):
    if not isinstance(node, ast.Call):
        return False
    own = {each.arg for each in ast.walk(parameters) if isinstance(each, ast.arg)}
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    return isinstance(_root(node.func), ast.Name) and all(_is_passed(_root(each), own) for each in given)


def _root(node):
    """What an expression of attributes and stars stands on: `x` of `*x.y.z`."""
    while isinstance(node, ast.Attribute | ast.Starred):
        node = node.value
    return node


def _is_passed(node, own):
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in own)


def report():
    """{question: [function]} for the jaxacct that is imported here."""
    import jaxacct

    package = pathlib.Path(jaxacct.__file__).parent
    trees, answer = {}, {}
    for name, question in QUESTIONS.items():
        for _ in range(WARM_UPS):
            question(jaxacct)
        rows = []
        for code, calls in trace(lambda asked=question: asked(jaxacct), str(package)).items():
            path = pathlib.Path(code.co_filename)
            tree = trees.setdefault(path, ast.parse(path.read_text()))
            rows.append(
                {
                    "file": str(path.relative_to(package)),
                    "line": code.co_firstlineno,
                    "function": code.co_qualname,
                    "calls": calls,
                    "passes_on": passes_on(tree, code.co_firstlineno),
                }
            )
        answer[name] = rows
    return answer


def measure(folder):
    """`report` of the checkout in a folder, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(folder).resolve())}
    done = subprocess.run(
        [sys.executable, __file__, "--report"], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def totals(rows):
    """A line with the numbers of files, of functions, and of functions that only pass their arguments on."""
    files = len({row["file"] for row in rows})
    idle = sum(row["passes_on"] for row in rows)
    return f"{files} files, {len(rows)} functions, {idle} that only pass their arguments on"


def main():
    """Print the way of each number, and its length in another checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", metavar="FOLDER", help="another checkout to compare with")
    parser.add_argument("--report", action="store_true", help="write the jaxacct that is imported as JSON, and stop")
    given = parser.parse_args()
    if given.report:
        print(json.dumps(report()))
        return
    here, base = measure(ROOT), measure(given.base) if given.base else None
    for question, rows in here.items():
        print(question)
        file = None
        for row in rows:
            if row["file"] != file:
                file = row["file"]
                print(f"  {file}")
            print(f"    {row['line']:>4} {row['function']} x{row['calls']}{'  <- passes on' * row['passes_on']}")
        print(f"  in all: {totals(rows)}")
        if base:
            print(f"  {given.base}: {totals(base[question])}")


if __name__ == "__main__":
    main()
