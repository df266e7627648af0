"""The arena: its statistics against closed forms, its suite, and a small tournament from the command line."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import caden
from browser import Browser, needs_chromium
from caden import CadenError, arena
from caden.arena import _outcomes
from caden.arena._statistics import Pair, holm
from caden.arena._suite import excluded
from caden.cli import app
from caden.engine.statistics import median
from caden.experiments.tune import points, space_of
from caden.methods import CARDS, METHODS

INF = math.inf


def test_the_interval_of_a_median_of_three_is_that_of_the_binomial_law():
    """A resample of three has median a (the smallest) if it holds a at least twice: 7 of 27, which is above 2.5 %."""
    assert median([5.0, 1.0, 9.0]) == (5.0, 1.0, 9.0, 3)
    medians = [sorted(draw)[1] for draw in itertools.product([1.0, 5.0, 9.0], repeat=3)]
    assert medians.count(1.0) == 7
    assert median([2.0]) == (2.0, 2.0, 2.0, 1)


def test_a_run_that_failed_is_infinitely_expensive():
    assert median([4.0, INF, 2.0]) == (4.0, 2.0, None, 3)
    assert median([INF, INF, 2.0]).median is None
    assert median([INF, 1.0]).median is None  # the mean of the middle two


def test_the_interval_agrees_with_scipy():
    data = np.random.default_rng(1).exponential(size=40)
    found = median(data.tolist())
    theirs = stats.bootstrap(
        (data,), np.median, method="percentile", n_resamples=4000, random_state=2
    ).confidence_interval
    spacing = np.diff(np.sort(data)).max()
    assert found.median == np.median(data)
    np.testing.assert_allclose((found.low, found.high), theirs, atol=spacing)


def test_profiles_are_ratios_to_the_best_and_the_winner_has_one():
    rng = np.random.default_rng(0)
    costs = {m: {f"p{i}": float(rng.integers(1, 50)) for i in range(30)} for m in "abc"}
    costs["a"]["p3"] = INF
    found = arena.profile(costs)
    for i in range(30):
        best = min(costs[m][f"p{i}"] for m in "abc")
        assert any(costs[m][f"p{i}"] / best in found[m] for m in "abc")
    assert found["a"].count(INF) == 1
    assert sum(ratios.count(1.0) for ratios in found.values()) >= 30


def test_paired_tests_count_only_what_both_took_part_in_and_someone_solved():
    costs = {
        "a": {"p/1": 1.0, "p/2": 1.0, "q": 2.0, "r": INF, "s": 3.0},
        "b": {"p/1": 2.0, "p/2": 2.0, "q": INF, "r": INF},
        "c": {"p/1": 1.0, "s": 1.0},
    }
    by = {pair.other: pair for pair in arena.paired(costs, "a")}
    assert (by["b"].wins, by["b"].losses, by["b"].ties) == (3, 0, 0)
    assert (by["b"].problems_won, by["b"].problems_lost) == (2, 0)  # two cells of one problem are one vote
    assert (by["c"].wins, by["c"].losses, by["c"].ties) == (0, 1, 1)
    assert by["b"].p == stats.binomtest(2, 2).pvalue


def test_holm_multiplies_the_smallest_p_by_their_number():
    pairs = holm([Pair(name, 0, 0, 0, 0, 0, p, p) for name, p in (("x", 0.04), ("y", 0.01), ("z", 0.03))])
    assert [(pair.other, round(pair.corrected, 9)) for pair in pairs] == [("y", 0.03), ("z", 0.06), ("x", 0.06)]


def test_every_cell_is_a_valid_experiment_for_every_method():
    suite = arena.load_suite()
    for cell in suite.everything():
        config = suite.experiment(cell, "caden")
        assert (config.target is None) != (config.tolerance is None), cell
        assert config.local_steps == 5 and config.clock
    for name in METHODS:
        suite.experiment(arena.Cell("quadratic_10", "ring", "half"), name)
    assert set(suite.cells(suite.slices["quick"])) <= set(suite.everything())
    committed = suite.cells(suite.slices["committed"])
    assert {c.problem for c in committed} == set(suite.problems)
    assert {c.graph for c in committed} == set(suite.graphs)
    assert {c.condition for c in committed} == set(suite.conditions)


def test_all_methods_have_a_search_space():
    assert all(CARDS[name].space for name in METHODS)


def test_a_method_waits_for_stragglers_if_it_does_not_survive_sleep():
    suite, cell = arena.load_suite(), arena.Cell("quadratic_10", "ring", "stragglers")
    assert suite.experiment(cell, "caden").clock["mode"] == "deadline"
    assert "mode" not in suite.experiment(cell, "dgd").clock
    assert len(suite.experiment(cell, "dgd").clock["compute"]) == 20


def test_methods_take_part_where_they_stay_exact_or_are_biased_anyway():
    suite = arena.load_suite()
    for condition, out in {"half": {"esom", "newton_tracking"}, "loss": {"gt", "adapd", "extra"}}.items():
        cell = arena.Cell("logistic_random", "ring", condition)
        admitted = {name for name in METHODS if not excluded(suite.experiment(cell, name))}
        assert {"caden", "radmm", "dpsgd", "qg_dsgdm", "local"} <= admitted and not admitted & out


def test_local_solvers_of_mini_batches_take_the_place_of_learning_rates():
    suite = arena.load_suite()
    assert suite.space("digits_iid", "dpsgd") == CARDS["dpsgd"].space
    assert set(suite.space("cnn", "dpsgd")) == {"solver"}
    assert set(suite.space("cnn", "caden")) == {"mu_z", "relax", "solver"}
    assert suite.space("cnn", "gt") == CARDS["gt"].space  # it has no local solver
    for table in suite.space("cnn", "caden")["solver"]:
        caden.methods.caden(mu_z=0.1, solver=table)


def test_a_run_ends_when_it_has_computed_twice_its_local_steps(outcomes):
    """Newton tracking takes conjugate gradients on Hessian-vector products, of which each counts as two gradients."""
    suite = arena.load_suite()._replace(local_steps=1)
    config = suite.experiment(arena.Cell("quadratic_1000", "ring", "awake"), "newton_tracking")
    (outcome,) = outcomes.run([config], lambda config: None)
    limit = 2 * config.rounds * 20
    assert outcome.stopped == "callback" and not outcome.reached and outcome.rounds < config.rounds
    assert limit < outcome.efforts["gradients"] < 1.1 * limit


def test_methods_with_a_server_are_entries_without_a_rank(tmp_path, outcomes):
    suite = arena.load_suite()._replace(trials=1, seeds=[0])
    cells = suite.cells(["quadratic_10/random/awake"])
    standings = arena.hold(suite, cells, ["caden", "fedadmm"], outcomes)
    assert [entry.table()["server"] for entry in standings.entries] == [False, True]
    assert [entry.method for entry, _ in standings.ranking(cells[0])] == ["caden"]
    assert set(standings.costs()) == {"caden"}
    arena.write(standings, suite, tmp_path)
    assert (tmp_path / "profiles.png").exists()
    assert "fedadmm" in (tmp_path / "tables" / "entries.csv").read_text()


def test_a_cell_must_exist():
    suite = arena.load_suite()
    with pytest.raises(CadenError, match="quadratic_10"):
        suite.cells(["quadratic_1/ring/half"])
    with pytest.raises(CadenError, match="problem/graph/condition"):
        suite.cells(["pca/ring"])


@pytest.fixture
def outcomes(tmp_path):
    with arena.Outcomes(tmp_path / "outcomes") as folder:
        yield folder


@pytest.fixture(scope="module")
def tournament(tmp_path_factory):
    out = tmp_path_factory.mktemp("arena")
    source = out / "mine.py"
    source.write_text("from caden.methods import gt\n\ndef mine(alpha: float = 0.1):\n    return gt(alpha=alpha)\n")
    words = ["arena", "--quick", "--only", "caden,gt,dgd", "--problems", "quadratic_10", "--jobs", "1"]
    words += ["--graphs", "random", "--method", f"{source}:mine", "--out", str(out), "--json"]
    return out, words, CliRunner().invoke(app, words)


def test_a_tournament_ranks_methods_and_says_who_did_not_reach_the_goal(tournament):
    out, _, result = tournament
    assert result.exit_code == 0, result.output
    cells = {cell["method"]: cell for cell in json.loads(result.stdout.splitlines()[-1])["cells"]}
    assert set(cells) == {"caden", "gt", "dgd", "mine"}
    assert cells["caden"]["reached"] and not cells["dgd"]["reached"]  # with a fixed step DGD is biased
    assert cells["dgd"]["communications"] is None
    found = cells["caden"]["communications"]
    assert found["low"] <= found["median"] <= found["high"] and found["n"] == 3
    if cells["gt"]["reached"]:
        assert found["median"] < cells["gt"]["communications"]["median"]
    table = pd.read_csv(out / "tables" / "winners_communications.csv")
    assert "place of mine" in table.columns and table["place of mine"].notna().all()
    data = pd.read_csv(out / "tables" / "data_profiles.csv").set_index("method")
    for method, cell in cells.items():
        for budget in (5, 10, 20, 50, 100, 200):
            found, most = cell["communications"] or {"low": INF, "high": INF}, budget * 74  # 37 edges, both directions
            high = INF if found["high"] is None else found["high"]
            if not found["low"] <= most < high:  # all three seeds are on one side
                assert data.loc[method, f"within {budget}"] == ("100%" if high <= most else "0%")
    assert data.loc["dgd", "solved"] == "0%" and set(data["n"]) == {3}
    for name in ("entries", "excluded", "pairs", "winners_time", "profiles_bytes", "data_profiles"):
        for kind in ("csv", "tex", "md"):
            assert (out / "tables" / f"{name}.{kind}").exists()


def test_a_second_tournament_runs_nothing_and_a_killed_one_continues(tournament, monkeypatch):
    out, words, result = tournament
    runs = sorted((out / "runs").glob("*.json"))
    stamps = [path.stat().st_mtime_ns for path in runs]
    runs[3].unlink()
    runs[5].write_text(runs[5].read_text()[:20])  # cut off by a kill
    again = CliRunner().invoke(app, words)
    assert again.stdout.splitlines()[-1] == result.stdout.splitlines()[-1]
    assert sorted((out / "runs").glob("*.json")) == runs
    changed = [n for n, path in enumerate(runs) if path.stat().st_mtime_ns != stamps[n]]
    assert changed == [3, 5]


def test_conditions_exclude_methods_with_a_reason(outcomes):
    suite = arena.load_suite()._replace(trials=1, seeds=[0])
    suite.problems["quadratic_10"]["rounds"] = 9
    cells = suite.cells(["quadratic_10/ring/loss", "logistic_spambase/ring/awake"])
    suite.problems["logistic_spambase"]["problem"]["data"] = "keel:nothing"
    found = arena.hold(suite, cells, ["caden", "gt"], outcomes)
    assert [entry.method for entry in found.entries] == ["caden"]
    reasons = {(e["problem"], e["method"]): e["reason"] for e in found.excluded}
    assert "lost messages" in reasons["quadratic_10", "gt"]
    assert {"caden", "gt"} == {method for problem, method in reasons if problem == "logistic_spambase"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quick", "--all"], "exclude each other"),
        (["--only", "cadn"], "caden"),
        (["--graphs", "rng"], "ring"),
        (["--problems", ","], "`--problems` names nothing"),
        (["--method", ":mine"], "FILE.py:FUNCTION"),
        (["--method", "mine.py:"], "FILE.py:FUNCTION"),
        (["--quick", "--problems", "mnist"], "No cell"),
        (["--method", "nothing"], "FILE.py:FUNCTION"),
        (["--quick", "--jobs", "0"], "`jobs` must be"),
        (["--method", "caden.methods:gt"], "rename the function"),
        (["--method", "a.py:mine", "--method", "b.py:mine"], "rename the function"),
    ],
)
def test_wrong_words_get_one_clear_line(words, message, tmp_path):
    result = CliRunner().invoke(app, ["arena", *words, "--out", str(tmp_path / "a")])
    assert isinstance(result.exception, CadenError)
    assert message in str(result.exception)


def test_a_method_that_breaks_is_listed_and_does_not_end_the_arena(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def broken():\n    raise ZeroDivisionError('of its own making')\n")
    words = ["--problems", "quadratic_10", "--graphs", "random", "--conditions", "awake", "--only", "gt"]
    words += ["--method", f"{file}:broken", "--out", str(tmp_path / "a"), "--jobs", "1", "--json"]
    result = CliRunner().invoke(app, ["arena", *words])
    (reason,) = [
        row["reason"]
        for row in json.loads(result.stdout.splitlines()[-1])["excluded"]
        if row["method"].endswith("broken")
    ]
    assert reason == "ZeroDivisionError: of its own making"


def test_a_broken_method_does_not_exclude_the_others(tmp_path):
    """It is the only one that the condition admits."""
    file = tmp_path / "broken.py"
    file.write_text("def broken():\n    raise ZeroDivisionError('of its own making')\n")
    words = ["--problems", "quadratic_10", "--graphs", "ring", "--conditions", "loss", "--only", "gt"]
    words += ["--method", f"{file}:broken", "--out", str(tmp_path / "a"), "--jobs", "1", "--json"]
    result = CliRunner().invoke(app, ["arena", *words])
    reasons = {
        row["method"].rpartition(":")[2]: row["reason"]
        for row in json.loads(result.stdout.splitlines()[-1])["excluded"]
    }
    assert reasons["broken"] == "ZeroDivisionError: of its own making" and "lost messages" in reasons["gt"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from caden.methods import gt as own\nown.space = [0.1]\n", "must be a dictionary of parameters"),
        ("def own(:\n", "SyntaxError: invalid syntax"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("own = max\n", "no function with named parameters"),
    ],
)
def test_a_file_that_holds_no_method_gets_one_line(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(CadenError, match=message):
        space_of(f"{tmp_path / 'mine.py'}:own", needed=False)


def test_changed_code_of_a_method_is_measured_again(tmp_path):
    file = tmp_path / "own.py"
    words = ["arena", "--quick", "--only", "dgd", "--problems", "quadratic_10", "--jobs", "1", "--json"]
    words += ["--graphs", "random", "--method", f"{file}:own", "--out", str(tmp_path / "a")]

    def cost(text):
        file.write_text(text)
        result = CliRunner().invoke(app, words)
        (mine,) = [c for c in json.loads(result.stdout.splitlines()[-1])["cells"] if c["method"] == "own"]
        return mine["communications"], mine["parameters"]

    searched = "from caden.methods import gt\n\ndef own(alpha=0.1):\n    return gt(alpha=alpha)\n\n"
    searched += "own.space = {'alpha': [0.3]}\n"
    (reached, parameters) = cost(searched)
    assert reached is not None and parameters in ({}, {"alpha": 0.3})
    assert cost(searched.replace("return gt(alpha=alpha)", "return gt(alpha=1e-9 * alpha)"))[0] is None


def test_a_method_that_fails_in_one_seed_has_not_reached_the_goal_there(tmp_path, outcomes):
    file = tmp_path / "flaky.py"
    file.write_text(
        "from caden.methods import gt\n\ndef flaky(alpha=0.05):\n    method = gt(alpha=alpha)\n"
        "    def init(x, round):\n"
        "        with open(__file__ + '.bad') as bad: first = float(bad.read())\n"
        "        if abs(float(round.problem.hessian[0, 0, 0]) - first) < 1e-12: raise FloatingPointError\n"
        "        return method.init(x, round)\n    return method._replace(init=init)\n"
    )
    suite = arena.load_suite()._replace(trials=1)
    (cell,) = suite.cells(["quadratic_10/random/awake"])
    config = suite.experiment(cell, "gt").model_copy(update={"seed": 1})
    problem = config.model_copy(deep=True).build()[1]
    (tmp_path / "flaky.py.bad").write_text(str(float(problem.hessian[0, 0, 0])))
    standings = arena.hold(suite, [cell], [f"{file}:flaky"], outcomes)
    (entry,) = standings.entries
    assert [bool(o.refused) for o in entry.outcomes] == [False, True, False]
    assert entry.table()["seeds_reached"] <= 2 and entry.costs("bytes")[1] == INF


def test_a_run_that_ends_its_process_is_refused_and_the_others_go_on(tmp_path):
    file = tmp_path / "deadly.py"
    file.write_text("import os\n\ndef deadly():\n    os._exit(3)\n")
    suite = arena.load_suite()._replace(trials=1, seeds=[0])
    cells = suite.cells(["quadratic_10/random/awake"])
    with arena.Outcomes(tmp_path / "a", jobs=2) as outcomes:
        standings = arena.hold(suite, cells, ["gt", f"{file}:deadly", "dgd"], outcomes)
    assert [entry.method for entry in standings.entries] == ["gt", "dgd"]
    assert "ended its process" in standings.excluded[0]["reason"]


def test_what_methods_print_is_not_a_result_and_their_exits_are_refusals(tmp_path):
    file = tmp_path / "loud.py"
    file.write_text(
        "from caden.methods import gt\nprint('loading')\n\n"
        "def loud(alpha: float = 0.1):\n    print('hello')\n    return gt(alpha=alpha)\n\n"
        "def leaving(alpha: float = 0.1):\n    raise SystemExit(0)\n"
    )
    words = ["arena", "--problems", "quadratic_10", "--graphs", "random", "--conditions", "awake", "--only", "gt"]
    words += [
        "--method",
        f"{file}:loud",
        "--method",
        f"{file}:leaving",
        "--jobs",
        "2",
        "--json",
        "--out",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "caden", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    found = json.loads(result.stdout)
    assert result.returncode == 1 and "hello" in result.stderr
    assert {cell["method"] for cell in found["cells"]} == {"gt", "loud"}
    assert {row["method"]: row["reason"] for row in found["excluded"]}["leaving"] == "SystemExit: 0"


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_a_killed_arena_leaves_no_processes(tmp_path):
    words = ["--quick", "--problems", "digits_dirichlet", "--jobs", "2", "--out", str(tmp_path / "a")]
    with subprocess.Popen([sys.executable, "-m", "caden", "arena", *words], stderr=subprocess.DEVNULL) as killed:
        workers: list[int] = []
        try:
            for _ in range(600):
                listed = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
                workers = [int(p) for p in listed if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]
                if len(workers) == 2:
                    break
                time.sleep(0.1)
        finally:
            killed.kill()
    for _ in range(300):
        if not any(map(is_alive, workers)):
            break
        time.sleep(0.1)
    assert len(workers) == 2 and not any(map(is_alive, workers))


def test_what_is_known_of_a_problem_is_measured_again_by_other_code(tmp_path, monkeypatch):
    config = arena.load_suite().experiment(arena.Cell("quadratic_10", "ring", "awake"), "caden")
    with arena.Outcomes(tmp_path) as outcomes:
        assert outcomes.facts(config, lambda: {"dim": 1.0}) == outcomes.facts(config, dict) == {"dim": 1.0}
        monkeypatch.setattr(_outcomes, "_own_code", lambda: "other")
        assert outcomes.facts(config, lambda: {"dim": 2.0}) == {"dim": 2.0}


def test_every_method_has_the_same_number_of_trials():
    suite = arena.load_suite()
    for name in METHODS:
        assert len(points(suite.space("quadratic_10", name), suite.trials - 1, curvature=1.0)) == suite.trials - 1, name


def test_the_mean_of_the_quadratics_is_as_ill_conditioned_as_the_suite_says():
    suite = arena.load_suite()
    for name, condition in (("quadratic_10", 10), ("quadratic_1000", 1000)):
        problem = suite.experiment(arena.Cell(name, "random", "awake"), "caden").build()[1]
        assert 0.5 * condition < float(torch.linalg.cond(problem.hessian.mean(0))) < 2 * condition


def test_where_agents_do_not_wait_time_decides(outcomes):
    suite = arena.load_suite()._replace(trials=1, seeds=[0])
    cells = suite.cells(["quadratic_10/random/stragglers,awake"])
    standings = arena.hold(suite, cells, ["caden", "nids"], outcomes)
    by_time = arena.winners(standings)["effort"].str.endswith(" s").tolist()
    assert [cell.condition == "stragglers" for cell in cells] == by_time
    assert standings.costs()["nids"].keys() == standings.costs("time")["nids"].keys()


def test_methods_that_are_left_out_say_why(outcomes):
    suite = arena.load_suite()._replace(trials=1, seeds=[0])
    standings = arena.hold(suite, suite.cells(["quadratic_10/random/awake"]), ["d2", "nids"], outcomes)
    assert [entry.method for entry in standings.entries] == ["nids"]
    assert standings.excluded[0]["reason"] == "the same iterates as nids"


def test_an_entrant_that_cannot_run_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("def broken(alpha):\n    raise NotImplementedError\n")
    words = ["arena", "--only", "dgd", "--problems", "quadratic_10", "--graphs", "random", "--conditions", "awake"]
    words += ["--method", f"{tmp_path / 'broken.py'}:broken", "--out", str(tmp_path / "a")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and "broken ran nowhere" in result.stderr and "dgd" in result.stdout


def test_one_arena_at_a_time_works_in_a_folder(tmp_path):
    for _ in range(2):
        with arena.Outcomes(tmp_path), pytest.raises(CadenError, match="in use"):
            arena.Outcomes(tmp_path)


def test_equal_methods_share_a_place_and_servers_alone_give_no_winner(tmp_path, outcomes):
    suite = arena.load_suite()._replace(trials=1, seeds=[0], left_out={})
    cells = suite.cells(["quadratic_10/random/awake"])
    both = arena.hold(suite, cells, ["d2", "nids"], outcomes)
    assert arena.winners(both, of="d2")["first"].tolist() == ["d2 = nids"]
    alone = arena.hold(suite, cells, ["fedavg"], outcomes)
    assert len(arena.winners(alone)) == 0 and len(arena.profiles(alone)) == 0
    arena.write(alone, suite, tmp_path)


@needs_chromium
def test_the_page_in_a_browser(tournament, tmp_path):
    out, _, _ = tournament
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(out / "arena.html")
        assert browser.errors() == []
        answer = "return document.getElementById('answer').textContent"
        assert "mine is first in 0 (shared in 0) and second in 1 of 1 cells" in browser.run(answer)
        conditions = "return document.getElementById('by-condition').textContent"
        assert "caden (1)" in browser.run(conditions) and "1 of 1" in browser.run(conditions)
        winner = "return document.querySelector('#winners td button').textContent"
        assert browser.run(winner).startswith("caden")
        methods = "return [...document.querySelectorAll('#entries tbody tr')].map(r => r.cells[0].textContent)"
        assert set(browser.run(methods)) == {"caden", "gt", "dgd", "mine"}
        assert "not reached" in browser.run("return document.getElementById('entries').textContent")
        traces = "return ['profile', 'data-profile', 'curves'].map(id => document.getElementById(id).data.length)"
        assert browser.run(traces) == [4, 4, 4]
        best = "const p = document.getElementById('profile').data.find(t => t.name.startsWith('caden '));"
        assert browser.run(best + " return [p.x[1], p.y.at(-1)]") == [1, 1]  # first everywhere, solved everywhere
        select = "const e = document.getElementById('effort'); e.value = 'gradients'; e.onchange();"
        browser.run(select)
        assert browser.run(answer).startswith("By gradients")
    finally:
        browser.close()
