"""The rooms of jaxacct.training: no import circle, arrows one way, and plans that nobody writes to from outside."""

import ast
import functools
import graphlib
import pathlib

import pytest

import jaxacct

PACKAGE = "jaxacct.training"
FOLDER = pathlib.Path(jaxacct.__file__).parent / "training"
MAY_IMPORT = {
    "clipping": (),
    "sampling": (),
    "step": ("clipping", "sampling"),
    "sharding": ("clipping", "sampling", "step"),
    "plan": ("step.step_mechanisms",),
    "ledger": ("plan", "step.step_mechanisms"),
    "source": (),
    "run": ("plan", "ledger", "clipping", "sampling", "step", "sharding", "source"),
    "trainer": ("plan", "ledger", "clipping", "sampling", "step", "sharding", "source", "run"),
}
"""For each room the rooms, or the modules of them, that it may import; jaxacct/training/README.md says why."""
WRITERS = {("plan.plan", "self"), ("run.state", "view")}
"""(module, object) of what is written through vars(): a plan by its own class, a state for callbacks as it is made."""


@functools.cache
def modules(folder):
    """{name within the package: tree}; a package is under its own name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def imported(tree, known):
    """The modules of the package that a module imports: anywhere in it, in functions and for type checkers as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == PACKAGE or name.startswith(f"{PACKAGE}."):
                inner = name.removeprefix(PACKAGE).lstrip(".")
                while inner not in known:  # the last part is a name in a module
                    inner = inner.rpartition(".")[0]
                yield inner


@functools.cache
def graph(folder):
    known = modules(folder)
    # the front door names everything, for type checkers alone
    return {name: set(imported(tree, known)) for name, tree in known.items() if name}


def circle(imports):
    """A circle of modules, or None."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def wrong_arrows(imports):
    """(module, what it imports) of every import between rooms that is not stated."""
    for name, others in imports.items():
        room = name.partition(".")[0]
        for other in others:
            allowed = (room, *MAY_IMPORT.get(room, ()))
            if not any(other == each or other.startswith(f"{each}.") for each in allowed):
                yield name, other


def written(folder):
    """(module, object) of every `vars(object)[...] = `, `vars(object).update(...)` and the like."""
    for name, tree in modules(folder).items():
        for node in ast.walk(tree):
            target = None
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                target = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("update", "setdefault", "pop", "popitem", "clear", "__setitem__"):
                    target = node.func.value
                elif node.func.attr == "__setattr__":
                    yield name, ast.unparse(node.args[0])
            if isinstance(target, ast.Call) and ast.unparse(target.func) == "vars":
                yield name, ast.unparse(target.args[0])
            elif isinstance(target, ast.Attribute) and target.attr == "__dict__":
                yield name, ast.unparse(target.value)


def test_every_module_is_in_a_room():
    rooms = {name.partition(".")[0] for name in modules(FOLDER)} - {""}
    assert rooms == set(MAY_IMPORT)


def test_no_import_circle():
    assert circle(graph(FOLDER)) is None


def test_arrows_between_rooms_are_the_stated_ones():
    assert not list(wrong_arrows(graph(FOLDER)))


def test_plans_are_written_by_their_own_class_alone():
    assert set(written(FOLDER)) == WRITERS


# The checks themselves, on a package that breaks each rule


@pytest.fixture
def broken(tmp_path):
    (tmp_path / "plan").mkdir()
    (tmp_path / "ledger").mkdir()
    (tmp_path / "plan/plan.py").write_text("def allows():\n    from jaxacct.training.ledger.ledger import Ledger\n")
    (tmp_path / "ledger/ledger.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jaxacct.training.plan import plan\n"
        "vars(plan)['epsilon'] = 1\nvars(plan).update(steps=2)\nobject.__setattr__(other, 'x', 1)\n"
    )
    return tmp_path


def test_what_breaks_the_rules_is_found(broken):
    imports = graph(broken)
    assert set(circle(imports)) == {"plan.plan", "ledger.ledger"}
    assert list(wrong_arrows(imports)) == [("plan.plan", "ledger.ledger")]
    assert list(written(broken)) == [("ledger.ledger", name) for name in ("plan", "plan", "other")]
