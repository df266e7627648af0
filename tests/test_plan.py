"""Plans: found again by content, resumed, and tuning with equal budgets."""

import math
import shutil

import numpy as np
import pytest

from caden.engine import run_directory
from caden.errors import CadenError, Interrupted
from caden.experiments.config import experiment
from caden.experiments.store import RunStore, digest
from caden.experiments.tune import held_out, points, score, space_of, tune
from caden.methods import CARDS

SMALL = ["problem.hidden=8", "problem.agents=6", "graph.edges=8", "graph.p=0.5", "warmup.steps=3", "target=0.5"]


def small(*settings):
    return experiment(None, [*SMALL, *settings])


def test_a_finished_run_is_not_run_again_and_a_changed_one_is(tmp_path):
    store = RunStore(tmp_path)
    first = store.run("t", {"a": small("rounds=3")})["a"]
    written = {p.name: p.stat().st_mtime_ns for p in first.path.iterdir()}
    again = RunStore(tmp_path).run("t", {"a": small("rounds=3", "checkpoint_every=7")})["a"]
    assert again.path == first.path
    assert again.rows == first.rows
    assert {p.name: p.stat().st_mtime_ns for p in first.path.iterdir()} == written
    other = store.run("t", {"a": small("rounds=3", "method.relax=0.7")})["a"]
    assert other.path != first.path
    assert digest(small("rounds=3")) == digest(small("rounds=3"))


def test_records_say_what_the_result_said(tmp_path):
    config = small("rounds=4")
    record = RunStore(tmp_path).run("t", {"a": config})["a"]
    result = config.run()
    assert [r["accuracy"] for r in record.rows] == [r["accuracy"] for r in result.rows]
    assert record.summary["best_accuracy"] == result.summary()["best_accuracy"]
    assert record.config["method"]["relax"] == 0.5  # defaults are written down
    assert record.versions["torch"]


def test_an_interrupted_run_goes_on_in_the_same_bytes(tmp_path, monkeypatch):
    config = small("rounds=6", "checkpoint_every=2", "problem.execution=loop")
    whole = RunStore(tmp_path / "whole").run("t", {"a": config})["a"]
    store, calls = RunStore(tmp_path / "part"), []
    append = run_directory.RunDirectory.append

    def fail(self, row):
        calls.append(row)
        if len(calls) == 6:
            raise Interrupted("as if the power went")
        append(self, row)

    monkeypatch.setattr(run_directory.RunDirectory, "append", fail)
    with pytest.raises(Interrupted):
        store.run("t", {"a": config})
    monkeypatch.undo()
    assert store.find(config) is None
    record = store.run("t", {"a": config})["a"]
    strip = [{k: v for k, v in row.items() if k != "seconds"} for row in record.rows]
    assert strip == [{k: v for k, v in row.items() if k != "seconds"} for row in whole.rows]
    assert (record.path / "weights.safetensors").read_bytes() == (whole.path / "weights.safetensors").read_bytes()


def test_a_run_that_diverges_is_kept_and_not_repeated(tmp_path):
    config = small("rounds=60", "method.name=gt", "method.alpha=1e6")
    record = RunStore(tmp_path).run("t", {"a": config})["a"]
    assert record.summary["stopped"] == "diverged"
    assert score(record) == (math.inf, math.inf)
    again = RunStore(tmp_path).find(config)
    assert again is not None and again.rows == record.rows


def test_damaged_directories_are_one_clear_line(tmp_path):
    record = RunStore(tmp_path).run("t", {"a": small("rounds=1")})["a"]
    (record.path / "versions.json").write_text("{")
    with pytest.raises(CadenError, match="damaged"):
        run_directory.RunDirectory(record.path).record()
    shutil.rmtree(record.path)
    with pytest.raises(CadenError, match="not a run directory"):
        run_directory.RunDirectory(record.path).record()


def test_several_processes_leave_the_same_runs(tmp_path):
    plans = {str(n): small("rounds=2", "problem.execution=loop", f"seed={n}") for n in range(3)}
    plans["broken"] = small("rounds=40", "problem.execution=loop", "method.name=gt", "method.alpha=1e6")
    alone = RunStore(tmp_path / "alone").run("t", plans)
    shared = RunStore(tmp_path / "shared", jobs=2).run("t", plans)
    for name in plans:
        assert shared[name].path.name == alone[name].path.name
        ours, theirs = ([{**row, "seconds": 0} for row in r[name].rows] for r in (shared, alone))
        assert str(ours) == str(theirs)  # a broken one has nan


@pytest.mark.slow
def test_bad_input_in_one_of_several_processes_is_one_clear_line(tmp_path):
    with pytest.raises(CadenError, match="edges"):
        RunStore(tmp_path / "bad", jobs=2).run("t", {str(n): small("graph.edges=99", f"seed={n}") for n in range(2)})


def test_two_names_for_one_run_cost_one_run(tmp_path):
    found = RunStore(tmp_path).run("t", {"a": small("rounds=2"), "b": small("rounds=2")})
    assert found["a"].path == found["b"].path
    assert len(list(tmp_path.iterdir())) == 1


def test_every_round_until_the_target_is_recorded_and_then_every_few():
    config = small("rounds=20", "record_every=10", "target=0.9", "problem.hidden=32", "warmup.steps=1")
    rows = config.run().rows
    rounds = [r["round"] for r in rows]
    first = next(r["round"] for r in rows if r["accuracy"] >= 0.9)
    assert 1 < first < 10  # else the test says nothing
    assert rounds == [*range(first + 1), 10, 20]


# Tuning.


def test_points_cover_the_space_and_are_the_same_every_time():
    space = {"alpha": {"low": 0.03, "high": 30.0, "unit": "1/L"}, "form": ["a", "b", "c"]}
    found = points(space, 27, curvature=4.0)
    values = np.log10([p["alpha"] * 4 / 0.03 for p in found])
    assert values.min() >= -1e-2 and values.max() <= 3.01
    assert (np.histogram(values, bins=9, range=(-0.01, 3.01))[0] >= 2).all()  # three per bin on average
    assert {p["form"] for p in found} == {"a", "b", "c"}
    assert found == points(space, 27, curvature=4.0)


def test_all_methods_have_spaces_of_one_size():
    spaces = {name: card.space for name, card in CARDS.items()}
    for name, space in spaces.items():
        ranges = [v for v in space.values() if isinstance(v, dict)]
        assert len(ranges) == 1 and ranges[0]["high"] == pytest.approx(1000 * ranges[0]["low"])
        assert all(2 <= len(v) <= 3 for v in space.values() if isinstance(v, list))
        space_of(name)


def test_tuning_keeps_thirds_and_counts_the_same_rounds(tmp_path):
    config = small("target=0.99", "tune.dgd.alpha={low=0.001, high=1.0}", "tune.gt.alpha={low=0.001, high=1.0}")
    for method in ("dgd", "gt"):
        found = tune(RunStore(tmp_path), config, method, trials=9, rounds=2)
        rungs = found.trials.groupby("rung").agg({"trial": "count", "round": "max"})
        assert rungs["trial"].tolist() == [9, 3, 1]
        assert rungs["round"].tolist() == [2, 6, 18]
        kept = found.trials[found.trials.rung == 1].nlargest(3, "best_accuracy").trial
        assert set(found.trials[found.trials.rung == 2].trial) == set(kept)
        last = found.trials[found.trials.rung == 3].iloc[0]
        assert found.parameters == {"alpha": last.alpha}


def test_tuning_finds_the_step_that_a_grid_finds(tmp_path):
    config = experiment(
        None, ["problem.name=quadratic", "problem.dim=4", "problem.agents=5", "graph.name=ring", "warmup={}"]
    ).model_copy(update={"warmup": {}, "target": None, "tune": {"gt": {"alpha": [1e-4, 1e-3, 1e-2, 0.1, 1e9]}}})
    found = tune(RunStore(tmp_path), config, "gt", trials=15, rounds=4)
    ends = {}
    for alpha in (1e-4, 1e-3, 1e-2, 0.1):
        plan = config.model_copy(update={"method": {"name": "gt", "alpha": alpha}, "rounds": 36, "tune": {}})
        ends[alpha] = plan.run().rows[-1]["relative_error"]
    assert found.parameters["alpha"] == min(ends, key=ends.get)
    assert "diverged" in set(found.trials.stopped)


def test_tuning_never_looks_at_the_test_set(tmp_path):
    config = held_out(small())
    problem = config.build()[1]
    from caden import data

    (train, _), _ = data.load("digits")
    assert len(problem.test[0]) == len(train) // 6
    assert bool((problem.test[0] == train[-len(problem.test[0]) :]).all())
    shards = np.concatenate([x.flatten(1).numpy() for x, _ in problem.shards])
    assert len(shards) == len(train) - len(problem.test[0])
    held = {row.tobytes() for row in problem.test[0].flatten(1).numpy()}
    assert not held & {row.tobytes() for row in shards}
    assert held_out(config) == config


def test_tuning_a_second_time_runs_nothing(tmp_path, monkeypatch):
    config = small("tune.dgd.alpha=[0.01, 0.1]")
    first = tune(RunStore(tmp_path), config, "dgd", trials=2, rounds=1)
    monkeypatch.setattr(RunStore, "one", lambda *_: pytest.fail("ran again"))
    again = tune(RunStore(tmp_path), config, "dgd", trials=2, rounds=1)
    assert again.parameters == first.parameters
    assert again.trials.equals(first.trials)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("tune.gt.alfa=[1.0]", "alpha"),
        ("tune.gt.alpha={low=1.0}", "takes `low`"),
        ("tune.gt.alpha={low=2.0, high=1.0}", "above `high`"),
        ("tune.gt.alpha={low=-2.0, high=1.0}", "positive"),
        ("tune.gt.alpha=0.1", "or a list"),
        ("tune.gt.alpha=[]", "or a list"),
    ],
)
def test_bad_spaces_are_one_clear_line(setting, words):
    config = small(setting)
    with pytest.raises(CadenError, match=words):
        space_of("gt", config.tune["gt"])


def test_methods_without_a_space_get_three_decades_around_a_default():
    own = space_of("caden.methods:dgd")  # a function of the user's, which no register knows
    assert own == {"alpha": {"low": pytest.approx(0.01), "high": pytest.approx(9.0)}}
    with pytest.raises(CadenError, match="no search space"):
        space_of("caden.methods:accelerated")
