"""The benchmark itself: its gates hold and can fail, its history shows what was before."""

import json

import pytest
from typer.testing import CliRunner

from caden._tensor import compiled
from caden.cli import app
from caden.cli.study import BENCHMARKS
from caden.errors import RunError
from caden.experiments import bench


def test_small_cases_pass_their_gates_and_give_ratios(monkeypatch):
    cases = {"logistic": (bench._logistic, (4, 5, 3), "> 0"), "network": (bench._network, (4, 60, 6, 8), "> 0")}
    monkeypatch.setattr(bench, "CASES", cases)
    found = list(bench.small(2))
    assert [len(m.ratios) for m in found] == [2, 2]
    assert all(m.met and min(m.ratios) > 0 for m in found)


def test_the_command_names_every_part():
    assert set(BENCHMARKS) == set(bench.PARTS)


@pytest.mark.parametrize("condition", bench.CONDITIONS)
def test_many_agents_are_measured(condition, monkeypatch):
    monkeypatch.setattr(bench, "keep_freed_memory", lambda: None)  # for a process of its own
    monkeypatch.setattr(bench.torch, "set_num_threads", lambda count: None)
    started, memory, seconds = bench._huge(60, 4, bench.CONDITIONS[condition], 2, 1)
    assert started > 0 and memory >= 0 and len(seconds) == 2 and min(seconds) > 0


@pytest.mark.skipif(not compiled.installed(), reason="needs numba")
def test_compiled_loops_are_measured_against_torch():
    found = list(bench.against_torch(1))
    assert len(found) >= 2 and all(min(m.ratios) > 0 for m in found)


def test_a_gate_notices_another_function():
    case = bench._logistic(4, 5, 3)
    wrong = case._replace(losses=[lambda x, f=f: 1.01 * f(x) for f in case.losses])
    bench._gate("right", case, bench.graphs.ring(4))
    with pytest.raises(RunError, match="gradient descent differs"):
        bench._gate("wrong", wrong, bench.graphs.ring(4))


def test_the_command_keeps_a_history_and_shows_the_last_value(monkeypatch, tmp_path):
    values = iter([[1.0, 3.0], [4.0, 4.0]])
    monkeypatch.setattr(bench, "PARTS", {"many": lambda repeats: iter([bench.Measure("a ratio", next(values), "> 3")])})
    file = tmp_path / "history.jsonl"
    first = CliRunner().invoke(app, ["bench", "many", "--history", str(file), "--json"])
    assert json.loads(first.stdout) == {"a ratio": {"ratios": [1.0, 3.0], "goal": "> 3", "met": False}}
    second = CliRunner().invoke(app, ["bench", "many", "--history", str(file)])
    line = next(line for line in second.stdout.splitlines() if "a ratio" in line)
    assert "> 3 met" in line and line.rstrip("│ ").endswith("2")
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(entries) == 2 and entries[0]["torch"] and entries[1]["ratios"] == {"a ratio": [4.0, 4.0]}
    assert "part" in str(CliRunner().invoke(app, ["bench", "often"]).exception)
