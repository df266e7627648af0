"""What a run will take, against what it takes."""

import subprocess
import sys

import pytest
import torch

from caden.errors import CadenError
from caden.experiments import forecast
from caden.experiments.config import Experiment, experiment
from caden.graphs import ring

LARGE = ["problem.name=logistic", "problem.agents=6", "problem.samples=2", "graph.name=ring", "warmup.steps=0"]
LARGE += ["method.mu_z=1.0", "method.solver.name=lbfgs", "dtype=float32", "rounds=4"]

RUN = """
import sys
from caden.experiments import forecast
from caden.experiments.config import experiment
from caden.experiments.forecast import largest
small, large = (experiment(None, [*sys.argv[1:], f"problem.dim={dim}"]) for dim in (10, 1_000_000))
small.run()
before = largest()
large.run()
print(largest() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["method.solver.memory=3"], ["participation=0.5"]])
def test_the_peak_is_foretold(more):
    found, _ = forecast.forecast(experiment(None, [*LARGE, *more, "problem.dim=1000000"]))
    done = subprocess.run([sys.executable, "-c", RUN, *LARGE, *more], capture_output=True, text=True, check=True)
    assert 0.7 < (found.state + found.problem) / int(done.stdout) < 1.4


def test_what_cannot_fit_is_refused_with_what_would():
    config = experiment(None, [*LARGE, "method.solver.memory=12"])
    one = 10**9  # bytes of a vector of all agents
    base = forecast.Forecast(44, 44 * one, 2 * one, 60 * one, 1.0)
    forecast.refuse(base, config)
    with pytest.raises(CadenError, match=r"method\.solver\.memory = 9"):
        forecast.refuse(base._replace(available=40 * one), config)
    with pytest.raises(CadenError, match=r"0\.22 times the size"):
        forecast.refuse(base._replace(available=10 * one), config)
    half = experiment(None, [*LARGE, "method.solver.memory=12", "method.solver.storage=bfloat16"])
    with pytest.raises(CadenError, match=r"method\.solver\.memory = 6"):
        forecast.refuse(base._replace(available=40 * one), half)
    tracking = experiment(None, [*LARGE[:-4], "method.name=gt"])
    with pytest.raises(CadenError, match=r"0\.87 times the size"):
        forecast.refuse(base._replace(available=40 * one), tracking)


OWN = """
import functools
import torch
from torch import nn
from caden.problems import quadratic

@functools.cache
def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Linear(3, 10))

def problem(agents: int = 4, size: int = 3, dtype=torch.float64):
    return quadratic(agents, size)
"""


@pytest.mark.parametrize(
    ("settings", "by_file"),
    [
        ([], True),
        (["problem.hidden=7", "dtype=float64"], True),
        (["problem.model=linear", "problem.agents=5", "graph.name=ring"], True),
        (["problem.model=own:network"], False),
        (["problem.name=logistic", "problem.agents=3", "problem.dim=6", "graph.name=ring"], True),
        (["problem.name=quadratic"], True),
        (["problem.name=own:problem", "problem.agents=4", "graph.name=ring"], False),
    ],
)
def test_the_size_is_known_without_building(settings, by_file, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    config = experiment(None, settings)
    size, built = forecast._size_or_build(config, None)
    assert (built is None) == by_file
    problem = config.build()[1]
    assert size[:3] == (problem.agents, problem.dim, problem.dtype)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("problem.hidden=0", "`hidden`"),
        ("problem.model.name=a:b", "`model` must be"),
        ("problem.data=nothing", "nothing"),
        ("problem.agents=-3", "`agents`"),
        ("dtype=float16", "float16"),
        ("method.solver.memory=abc", "`memory`"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_as_without_a_forecast(setting, message):
    with pytest.raises(CadenError, match=message):
        forecast.refuse_if_too_large(experiment(None, [setting]))


@pytest.mark.parametrize("setting", ["participation=2.0", "local_steps=-1", "graph.edges=999"])
def test_a_forecast_says_what_is_wrong_before_it_measures(setting, monkeypatch):
    monkeypatch.setattr(forecast, "vectors", lambda *_: pytest.fail("was measured"))
    with pytest.raises(CadenError, match=setting.partition("=")[0].removeprefix("graph.")):
        forecast.forecast(experiment(None, [setting]))


@pytest.mark.parametrize("solver", ["method.solver=lbfgs", "method.solver.memory=10", "method.mu_z=1.0"])
def test_fewer_pairs_are_advised_however_the_solver_is_named(solver):
    with pytest.raises(CadenError, match=r"method\.solver\.memory = 9"):
        forecast.refuse(forecast.Forecast(44, 44, 0, 42, 1.0), experiment(None, [solver]))


@pytest.mark.parametrize(
    "settings",
    [
        ["problem.hidden=3000000000", "problem.agents=8", "graph.name=ring"],
        ["problem.name=quadratic", "problem.dim=200000"],
        ["problem.name=logistic", "problem.dim=1000", "problem.samples=100000000"],
    ],
)
def test_what_is_too_large_is_refused_before_anything_of_its_size_is_made(settings, monkeypatch):
    monkeypatch.setattr(forecast, "vectors", lambda *_: 20.0)
    monkeypatch.setattr(Experiment, "build", lambda *_: pytest.fail("was built"))
    with pytest.raises(CadenError, match=r"needs about [\d.]+ GiB of memory"):
        forecast.refuse_if_too_large(experiment(None, settings))


def test_what_is_small_is_neither_built_nor_looked_at(monkeypatch):
    monkeypatch.setattr(Experiment, "build", lambda *_: pytest.fail("was built"))
    monkeypatch.setattr(forecast, "vectors", lambda *_: pytest.fail("was looked at"))
    assert forecast.refuse_if_too_large(experiment()) is None


@pytest.mark.slow
def test_a_method_that_diverges_on_the_miniature_is_counted_all_the_same(monkeypatch):
    monkeypatch.setattr(forecast, "_BYTES", 2e6)
    config = experiment(None, ["method.name=gt", "method.alpha=1e6"])
    count = forecast.vectors(config, ring(4), forecast.Size(4, 100_000, torch.float32))
    assert 5 < count < 30


def test_a_run_in_doubt_is_built_once(monkeypatch):
    config = experiment(None, ["problem.hidden=8", "problem.agents=4", "graph.name=ring", "rounds=1", "warmup.steps=0"])
    monkeypatch.setattr(forecast, "_available", lambda: 100_000)
    monkeypatch.setattr(forecast, "vectors", lambda *_: 1.0)
    monkeypatch.setattr(forecast, "largest", lambda: 0)
    problem, graph = forecast.refuse_if_too_large(config)
    assert config.run(built=(problem, graph), progress=False).summary()["round"] == 1
    assert forecast.refuse_if_too_large(config, (problem, graph)) == (problem, graph)
    monkeypatch.setattr(forecast, "vectors", lambda *_: 100.0)
    with pytest.raises(CadenError, match="GiB"):
        forecast.refuse_if_too_large(config, (problem, graph))
    monkeypatch.setattr(sys, "platform", "darwin")  # where nothing is known of memory
    assert forecast.refuse_if_too_large(config, (problem, graph)) == (problem, graph)


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "_CONTAINER", tmp_path)
    outside = forecast._available()
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert forecast._available() == pytest.approx(outside, rel=0.2)
    (tmp_path / "memory.max").write_text("5000000\n")
    assert forecast._available() == 2_000_000
