"""Imports: no circle, and the arrows between the rooms, which point one way.

Every import counts, also inside a function or under `if TYPE_CHECKING`, which hides a circle but does not remove it.
Three kinds of imports are left out.  `jaxacct/__init__.py` imports every room, since it is the front door.
`import jaxacct` inside the package reads the version, or draws `profile.plot()` when a user calls that.  Lazy exports
(imports under `if TYPE_CHECKING` in a package's `__init__.py`) run when a user asks for the name, never while a module
is being imported.  One function works against the arrows: `_accounting` in `mechanisms/sampled_releases.py` imports
`jaxacct.accounting.account` by name, when a pair needs a profile.
"""

import ast
import functools
import pathlib
from collections.abc import Iterator

import jaxacct

ROOT = pathlib.Path(jaxacct.__file__).parent
FOUNDATIONS = {"core"}
"""Rooms that every room may import."""
ARROWS: dict[str, set[str]] = {
    "core": set(),
    "kernels": set(),
    "strategies": set(),
    "mechanisms": {"kernels", "strategies"},
    "engines": {"kernels", "mechanisms"},
    "accounting": {"engines", "kernels", "mechanisms"},
    "representations": {"accounting", "engines", "kernels", "mechanisms"},
    "samplers": {"accounting", "engines", "mechanisms"},
    "selection": {"accounting", "engines", "kernels", "mechanisms", "representations", "samplers"},
    "calibration": {"accounting", "engines", "kernels", "mechanisms", "selection"},
    "sweeps": {"accounting", "calibration", "engines", "mechanisms", "selection"},
    "plots": {"accounting", "mechanisms", "representations", "sweeps"},
    "verification": {"mechanisms", "strategies"},
    "interop": {"accounting", "mechanisms", "representations", "selection", "strategies"},
    "training": {"accounting", "calibration", "engines", "interop", "mechanisms", "plots", "representations"}
    | {"samplers", "selection", "strategies"},
    "tuning": {"accounting", "calibration", "mechanisms", "plots", "samplers", "selection", "training"},
    "audit": {"accounting", "engines", "mechanisms", "plots", "representations", "selection", "training"},
    "report": {"accounting", "interop", "mechanisms", "representations", "selection", "sweeps", "training"},
    "cli": {"accounting", "calibration", "engines", "interop", "mechanisms", "plots", "report", "representations"}
    | {"selection", "sweeps", "training", "verification"},
}
"""Each room with the rooms that it may import beside the foundations; a room only imports rooms above it."""


def modules() -> dict[str, pathlib.Path]:
    """Return the file of every module of the package, by dotted name. The file of a package is its `__init__.py`."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("jaxacct", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def statements(node: ast.AST, lazily: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports in a piece of source, all of them, or (lazily) all but those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # which holds no statement
            continue
        if lazily and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from statements(child, lazily)


def imports(module: str) -> set[str]:
    """The modules of the package that a module imports."""
    path, found = MODULES[module], set()
    for node in statements(ast.parse(path.read_text()), lazily=path.name == "__init__.py"):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{module} has a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return (found & set(MODULES)) - {module, "jaxacct"}


@functools.cache
def whole_graph() -> dict[str, set[str]]:
    """Each module with those that it imports. A function, so that collecting the tests reads no module."""
    return {module: imports(module) for module in MODULES if module != "jaxacct"}


def room(module: str) -> str:
    """The room that a module belongs to: its package."""
    first = module.split(".")[1]
    return "cli" if first == "__main__" else first


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of two or more nodes that all reach each other by following arrows."""
    reached = {node: set(arrows) for node, arrows in graph.items()}
    for middle in graph:
        for node in graph:
            if middle in reached[node]:
                reached[node] |= reached[middle]
    found = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph}
    return [set(nodes) for nodes in found if len(nodes) > 1]


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_no_module_imports_itself_in_a_circle():
    found = circles(whole_graph())
    assert not found, [sorted(nodes) for nodes in found]


def test_every_module_belongs_to_a_room():
    assert {room(module) for module in whole_graph()} == set(ARROWS)


def test_rooms_only_import_rooms_above_them():
    above: set[str] = set()
    for name, arrows in ARROWS.items():
        assert arrows <= above, f"{name} imports {sorted(arrows - above)}, which stands below it"
        above.add(name)


def test_the_arrows_between_the_rooms():
    wrong = {}
    for module, targets in whole_graph().items():
        here = room(module)
        allowed = ARROWS[here] | {here} | FOUNDATIONS
        for target in targets:
            if room(target) not in allowed:
                wrong.setdefault((here, room(target)), []).append(f"{module} imports {target}")
    assert not wrong, wrong
