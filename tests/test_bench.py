"""The benchmark itself: its gates hold and can fail, its history shows what was before."""

import json

import pytest
import torch
from typer.testing import CliRunner

from caden import graphs, methods, problems, solvers
from caden._tensor import compiled
from caden.cli import app
from caden.cli.study import BENCHMARKS
from caden.errors import RunError
from caden.experiments import bench
from caden.experiments.bench import _many, _networks, _small


def test_small_cases_pass_their_gates_and_give_ratios(monkeypatch):
    cases = {"logistic": (_small._logistic, (4, 5, 3), "> 0"), "network": (_small._network, (4, 60, 6, 8), "> 0")}
    monkeypatch.setattr(_small, "CASES", cases)
    found = list(_small.small(2))
    assert [len(m.ratios) for m in found] == [2, 2]
    assert all(m.met and min(m.ratios) > 0 for m in found)


def test_the_command_names_every_part():
    assert set(BENCHMARKS) == set(bench.PARTS)


@pytest.mark.parametrize("condition", _many.CONDITIONS)
def test_many_agents_are_measured(condition, monkeypatch):
    monkeypatch.setattr(_many, "keep_freed_memory", lambda: None)  # for a process of its own
    monkeypatch.setattr(_many.torch, "set_num_threads", lambda count: None)
    started, memory, seconds = _many._huge(60, 4, _many.CONDITIONS[condition], 2, 1)
    assert started > 0 and memory >= 0 and len(seconds) == 2 and min(seconds) > 0


@pytest.mark.skipif(not compiled.installed(), reason="needs numba")
def test_compiled_loops_are_measured_against_torch():
    found = list(_small.against_torch(1))
    assert len(found) >= 2 and all(min(m.ratios) > 0 for m in found)


def test_a_gate_notices_another_function():
    case = _small._logistic(4, 5, 3)
    wrong = case._replace(losses=[lambda x, f=f: 1.01 * f(x) for f in case.losses])
    _small._gate("right", case, graphs.ring(4))
    with pytest.raises(RunError, match="gradient descent differs"):
        _small._gate("wrong", wrong, graphs.ring(4))


def test_plain_loops_take_the_steps_of_local_training():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(60, 1, 8, 8, generator=generator), torch.randint(3, (60,), generator=generator)
    model = problems.cnn(1, 8, 3, hidden=4)
    problem = problems.classification(model, data, agents=3, batch_size=8)
    method = methods.local(solver=solvers.torch_optim(torch.optim.AdamW, lr=1e-3))
    library, loops = bench.Rounds(method, problem, graphs.ring(3)), _networks.PlainLoops(model, problem, 8)
    for round in range(3):
        library(), loops(round)
    rows = [torch.cat([p.detach().flatten() for p in one.parameters()]) for one in loops._models]
    torch.testing.assert_close(library.x, torch.stack(rows), rtol=1e-3, atol=1e-5)
    assert (library.x - problem.start).abs().max() > 0.01


def test_shifted_images_are_read_as_the_library_reads_them():
    """The plain loop of a Dataset reads the samples of the same batch; shifts do not change these images."""
    images, labels = torch.arange(60.0).view(60, 1, 1, 1).expand(60, 1, 4, 4), torch.arange(60) % 3
    dataset = _networks.Shifted(images, labels)
    problem = problems.classification(problems.cnn(1, 4, 3, hidden=4), dataset, agents=3, batch_size=8)
    loops = _networks.PlainLoops(problems.cnn(1, 4, 3, hidden=4), problem, 8, dataset)
    for got, expected in zip(loops._batch(1, 2, 3), problem.at(2).redraw(3).batch(1)):
        assert torch.equal(got, expected)


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
