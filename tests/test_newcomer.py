"""What a newcomer meets first: examples, the README's code, the skeleton of a method, the wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import caden
from caden.cli import app

ROOT = Path(__file__).parents[1]
LONG = ("cnn", "own_loop", "transformer")  # what they show has faster tests of its own
EXAMPLES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else [])
    for path in sorted(ROOT.glob("examples/*.py"))
]
START = """
import io, os, runpy, sys
from contextlib import redirect_stdout, suppress

paths = sys.argv[1:]
sys.path.insert(0, os.path.dirname(paths[0]))
for path in paths:
    sys.argv = [path, "--help"]
    with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
        runpy.run_path(path, run_name="__main__")
    assert "usage:" in said.getvalue(), path
"""


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_run_and_are_short(path, tmp_path):
    assert len(path.read_text().splitlines()) <= 40
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_benchmarks_start(tmp_path):
    """They import what exists."""
    command = [sys.executable, "-c", START, *map(str, sorted(ROOT.glob("benchmarks/*.py")))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def code_blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_the_readme_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks("README.md")
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_a_new_method_by_the_page(tmp_path):
    """CONTRIBUTING to the letter, in a copy: lint, conformance, the textbook loop, the example."""
    for name in ("src", "tests", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    method, line, oracle, test = code_blocks("CONTRIBUTING.md")
    methods, tests = tmp_path / "src/caden/methods", tmp_path / "tests"
    (methods / "_mine.py").write_text(method)
    register = methods / "__init__.py"
    lines = register.read_text().splitlines(keepends=True)
    lines.insert(next(n for n, other in enumerate(lines) if other.startswith("from") and other > line), line)
    register.write_text("".join(lines))
    for name, addition in (("oracles.py", oracle), ("test_methods.py", test)):
        (tests / name).write_text(f"{(tests / name).read_text()}\n\n{addition}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"}

    def run(*command):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("ruff", "check", "."), run("ruff", "format", "--check", ".")
    passed = run(
        "pytest",
        "-k",
        "mine and not minim",
        "tests/test_conformance.py",
        "tests/test_methods.py",
        str(methods / "_mine.py"),
    )
    assert "mine" in run("caden", "list", "methods") and "passed" in passed.splitlines()[-1]
    assert int(passed.splitlines()[-1].split(" passed")[0].split()[-1]) >= 10


OWN = """
import torch
from caden import Graph, Method, graphs, methods, problems, solvers


def method(alpha: float) -> Method:
    return methods.gt(alpha)._replace(name="own")


def problem(agents: int = 4):
    return problems.functions([lambda x, i=i: (x - i).square().sum() for i in range(agents)], dim=2)


def graph(agents: int) -> Graph:
    return graphs.star(agents)


def solver(step: float = 0.1):
    return solvers.gd(step)
"""


@pytest.mark.parametrize("source", ["own_things", "folder/own_things.py"])
def test_own_things_by_module_or_file(tmp_path, monkeypatch, source):
    path = tmp_path / (source if source.endswith(".py") else f"{source}.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shared = {"problem.name": f"{source}:problem", "graph.name": f"{source}:graph", "problem.agents": 5}
    by_method = {"method.name": f"{source}:method", "method.alpha": 0.2}
    by_solver = {"method.name": "caden", "method.mu_z": 0.5, "method.solver": f"{source}:solver"}
    for own in (by_method, by_solver):
        command = ["run", "--json", "--set", "rounds=60", "--set", "warmup.steps=0"]
        for key, value in (shared | own).items():
            command += ["--set", f"{key}={value}"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.exception
        assert json.loads(done.stdout)["summary"]["relative_error"] < 1e-3


def test_the_wheel_builds_and_has_what_it_needs(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = next(tmp_path.glob("caden_opt-*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert "caden/py.typed" in names
    assert "caden/solvers/_lbfgs.py" in names
    assert any(name.endswith("entry_points.txt") for name in names)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(tmp_path / "site"), str(wheel)], check=True, timeout=240)
    probe = "import caden; print(caden.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    found = subprocess.run(
        [sys.executable, "-c", probe], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert str(tmp_path / "site") in found.stdout


def test_versions_agree():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{caden.__version__}"' in pyproject
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()
