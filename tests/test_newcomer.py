"""What a newcomer meets first: examples, the README's code, the skeleton of a method, the wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import caden

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
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


def code_blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_the_readme_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks("README.md")
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_the_method_skeleton_works():
    names: dict = {}
    exec(compile(code_blocks("CONTRIBUTING.md")[0], "CONTRIBUTING.md", "exec"), names)
    problem = caden.problems.quadratic(5, 3)
    result = caden.simulate(names["mine"](0.1), problem, caden.graphs.ring(5), rounds=200, participation=0.7)
    assert 1e-6 < float((result.mean - problem.solution).norm()) < 0.5  # decentralised gradient descent: near, biased


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
