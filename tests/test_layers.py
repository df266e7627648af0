"""The rooms of the package: imports go down the list only, and no cycle hides inside a function."""

import ast
from pathlib import Path

import pytest

import caden

ROOT = Path(caden.__file__).parent
# From the ground up. A room may import what stands above it in this list, and itself.
ROOMS = ["_version", "errors", "launcher", "registry", "_tensor", "graphs", "draws", "schedules", "core", "curvature"]
ROOMS += ["data", "solvers", "problems", "theory", "methods"]
ROOMS += ["networks", "engine", "report", "experiments", "own_loop", "reproduce", "arena", "cli", "__main__"]


def module_of(path):
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(path): path for path in ROOT.rglob("*.py")}


def imports(path):
    """Modules of this package that a file names anywhere, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "caden")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "caden":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else node.module


def room(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


@pytest.mark.parametrize("module", sorted(set(FILES) - {"caden"}))
def test_no_import_goes_up(module):
    here = ROOMS.index(room(module))
    for name in imports(FILES[module]):
        assert room(name) is not None, f"{module} imports the whole package"
        assert ROOMS.index(room(name)) <= here, f"{module} imports {name}"


def test_every_file_has_a_room_and_every_room_a_file():
    assert {room(module) for module in FILES} - {None} == set(ROOMS)


def test_there_is_no_cycle_between_files():
    graph = {module: {n for n in imports(path) if n != module} for module, path in FILES.items() if module != "caden"}
    # A package's own `__init__` collects its files: they may name each other, but not it.
    done, left = set(), dict(graph)
    while left:
        free = [m for m, needs in left.items() if not (needs - done) & set(left)]
        assert free, f"a cycle among {sorted(left)}"
        done |= set(free)
        left = {m: needs for m, needs in left.items() if m not in done}
