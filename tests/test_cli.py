"""The command as a user types it, in a process of its own where that matters."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from caden import CadenError
from caden.experiments.config import experiment
from caden.methods import METHODS
from conftest import newest

QUICK = ["--set", "rounds=3", "--set", "problem.agents=5", "--set", "graph.name=ring", "--set", "warmup.steps=2"]
SMALL = 'rounds = {rounds}\n[problem]\nname = "quadratic"\nagents = 6\ndim = 3\n[graph]\nname = "ring"\n{extra}'


def caden(*arguments, cwd, timeout=120, **options):
    """Run the command; returns the finished process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", "caden", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """The same in this process: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        from caden.cli import main

        monkeypatch.setattr(sys, "argv", ["caden", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_run_prints_a_table_and_leaves_a_picture(tmp_path):
    done = caden("run", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # quiet when not a terminal
    for word in (
        "final mean accuracy",
        "rounds to 93%",
        "communications to 93%",
        "relative error",
        "norm of the dual sum",
    ):
        assert word in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    picture = next(line for line in done.stdout.splitlines() if line.startswith("picture: "))
    assert (tmp_path / picture.removeprefix("picture: ")).is_file()


def test_json_is_one_object(call):
    code, out, _ = call("run", *QUICK, "--json", "--set", "participation=0.8")
    assert code == 0
    found = json.loads(out)
    assert set(found) == {"summary", "history", "config", "directory"}
    assert len(found["history"]) == 4
    assert found["history"][0]["round"] == 0
    assert {"accuracy", "best_accuracy", "rounds_to_target", "communications_to_target"} <= set(found["summary"])
    assert found["config"]["participation"] == 0.8
    assert found["config"]["problem"]["execution"] in ("loop", "vmap")
    assert Path(found["directory"], "config.toml").is_file()


def test_files_settings_and_their_order(call, tmp_path):
    file = tmp_path / "e.toml"
    file.write_text(SMALL.format(rounds=4, extra='[method]\nname = "caden"\nmu_z = 0.7\n'))
    code, out, _ = call("run", file, "--json", "--set", "method.mu_z=0.3", "--set", "method.solver.name=gd")
    assert code == 0
    config = json.loads(out)["config"]
    assert config["method"] == {
        "name": "caden", "mu_z": 0.3, "solver": {"name": "gd"}, "dual": "exact", "relax": 0.5, "growth": 1.0,
        "unsafe": False,
    }  # fmt: skip
    assert config["rounds"] == 4
    assert "data" not in config["problem"]  # another problem does not inherit the default's parameters


def test_the_default_is_the_papers_setting():
    config = experiment()
    method, problem, graph = config.build()
    assert (problem.agents, len(graph.edges), config.local_steps) == (20, 37, "auto")
    assert problem.dim == 64 * 128 + 128 * 10
    assert config.warmup == {"steps": 20, "step_size": 0.1}
    assert method.name == "caden"


def test_the_configuration_reproduces_the_run(call, tmp_path):
    call("run", *QUICK, "--out", "first", "--set", "participation=[1, 0.5, 0.5, 0.5, 0.5]")
    call("run", "first/config.toml", "--out", "second")
    assert (tmp_path / "first/config.toml").read_text() == (tmp_path / "second/config.toml").read_text()
    assert (tmp_path / "first/weights.safetensors").read_bytes() == (
        tmp_path / "second/weights.safetensors"
    ).read_bytes()


def test_own_method_problem_and_model_by_module_and_name(call, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import caden, torch\n"
        "def method(mu=1.0):\n    return caden.methods.caden(mu_z=mu)\n"
        "def model():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    code, _, err = call(
        "run", *QUICK, "--json", "--set", "method.name=mine:method", "--set", "method.mu=0.5", "--set",
        "problem.model=mine:model",
    )  # fmt: skip
    assert code == 0, err
    code, _, err = call("run", "--set", "method.name=mine:method", "--set", "method.nu=0.5")
    assert (code, err) == (2, "caden: Unknown key 'method.nu'; did you mean 'method.mu'?\n")
    code, _, err = call("run", "--set", "method.name=mine:other")
    assert code == 2
    assert "Cannot load 'mine:other'" in err


BAD = {
    "unknown method": (["run", "--set", "method.name=cadenn"], "did you mean 'caden'"),
    "unknown problem": (["run", "--set", "problem.name=quadratics"], "did you mean 'quadratic'"),
    "unknown graph": (["run", "--set", "graph.name=rings"], "did you mean 'ring'"),
    "unknown key": (["run", "--set", "roundz=3"], "Unknown key 'roundz'; did you mean 'rounds'"),
    "unknown method key": (["run", "--set", "method.mu_x=3"], "did you mean 'method.mu_"),
    "unknown problem key": (["run", "--set", "problem.agent=3"], "did you mean 'problem.agents'"),
    "unknown graph key": (["run", "--set", "graph.edgs=3"], "did you mean 'graph.edges'"),
    "unknown warm-up key": (["run", "--set", "warmup.step=3"], "did you mean 'warmup.steps'"),
    "unknown data": (["run", "--set", "problem.data=minst"], "did you mean 'mnist'"),
    "wrong type": (["run", "--set", "rounds=many"], "`rounds`"),
    "wrong nested type": (["run", "--set", "problem.agents=many"], "`agents` must be a whole number"),
    "mu_z not positive": (["run", "--set", "method.mu_z=-1.0"], "`mu_z` must be a positive number, got -1.0"),
    "participation": (["run", "--set", "participation=1.5"], "`participation` must lie in (0, 1], got 1.5"),
    "too many agents": (["run", "--set", "problem.agents=2000", "--set", "graph.name=ring"], "2000 agents need"),
    "sizes differ": (
        ["run", "--set", "graph.name=grid", "--set", "graph.rows=3", "--set", "graph.columns=3"],
        "graph has 9 agents but the problem has 20",
    ),
    "disconnected": (
        ["run", "--set", "problem.agents=4", "--set", "graph.name=from_edges", "--set", "graph.edges=[[0,1],[2,3]]"],
        "2 components",
    ),
    "missing file": (["run", "nowhere.toml"], "Cannot read nowhere.toml: No such file"),
    "no key=value": (["run", "--set", "rounds"], "key=value"),
    "no run": (["resume", "nowhere"], "no config.toml"),
    "no kind": (["list", "method"], "did you mean 'methods'"),
    "no data": (["data", "fetch", "cifar"], "Unknown data set"),
    "bad device": (["run", "--set", "device=abacus"], "`device` 'abacus' is not available"),
    "bad dtype": (["run", "--set", "dtype=float16"], "Unknown dtype"),
    "meta device": (["run", "--set", "device=meta"], "`device` 'meta' is not available"),
    "device of the problem": (["run", "--set", "problem.device=cpu"], "Unknown key 'problem.device'"),
    "huge seed": (["run", "--set", "seed=99999999999999999999999"], "seed"),
    "bad sizes": (["run", "--set", 'problem.partition={name="sizes",sizes="abc"}'], "positive numbers"),
    "bad schedule": (["run", "--set", 'local_steps={name="switch",first=5,then=1,at="x"}'], "`at` must be"),
    "lacking": (["run", "--set", 'local_steps={name="switch",first=5}'], "`schedule.then` is missing"),
    "solver key": (["run", "--set", "method.solver.memry=5"], "did you mean 'solver.memory'"),
    "partition key": (["run", "--set", 'problem.partition={name="dirichlet",alfa=1}'], "'partition.alpha'"),
    "solver type": (["run", "--set", "method.solver=5"], "`solver` must be"),
    "dual type": (["run", "--set", "method.dual=3"], "Unknown dual 3"),
    "relax type": (["run", "--set", "method.relax=high"], "`relax` must be a number"),
    "data type": (["run", "--set", "problem.data=3"], "Unknown data set 3"),
    "graph seed": (["run", "--set", "graph.name=small_world", "--set", "graph.seed=a"], "`seed` must be"),
    "graph agents": (["run", "--set", "graph.name=ring", "--set", "graph.agents=7"], "graph has 7 agents"),
    "no module": (["run", "--set", "method.name=:f"], "Cannot load ':f'"),
    "no function": (["run", "--set", "method.name=os:sep"], "not a function"),
    "no method": (["run", "--set", "method.name=os:getcwd"], "makes a str, not a method"),
    "out in a file": (["run", "--out", "/dev/null/x"], "Cannot create the run directory"),
    "target without accuracy": (
        ["run", "--set", "problem.name=quadratic", "--set", "stop_at_target=true"],
        "which this problem does not measure",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(call, name):
    arguments, message = BAD[name]
    code, out, err = call(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("caden: ")
    assert err.count("\n") == 1
    assert out == ""


def test_what_a_users_problem_raises_is_shown_and_lack_of_memory_is_one_line(call, tmp_path):
    (tmp_path / "unfit.py").write_text(
        "import torch\n\ndef unfinished(agents):\n    raise NotImplementedError\n"
        "\ndef huge(agents):\n    return torch.empty(1 << 60)\n"
    )
    with pytest.raises(NotImplementedError):
        call("run", "--set", "problem.name=unfit:unfinished")
    code, _, err = call("run", "--set", "problem.name=unfit:huge")
    assert code == 2
    assert err.startswith("caden: There is not enough memory: you tried to allocate 4611686018427387904 bytes.\n")


def test_what_cannot_fit_is_refused_by_every_command_in_one_line(call, monkeypatch, tmp_path):
    monkeypatch.setattr("caden.experiments.forecast.vectors", lambda *_: 20.0)
    huge = ["--set", "problem.hidden=3000000000"]
    for command, start in ((["run"], "caden: The run needs"), (["compare"], "caden: caden: The run needs")):
        code, out, err = call(*command, *huge)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(start)
    code, out, err = call("run", "--dry-run", "--json", *huge)
    assert (code, err.count("\n")) == (2, 1)
    found = json.loads(out)
    assert not found["fits"] and found["seconds"] is None
    code, out, _ = call("run", "--dry-run", *huge)
    assert code == 2
    assert "20 vectors" in out and "time" not in out
    assert not (tmp_path / "runs").exists()


def test_counts_of_vectors_may_have_parts():
    from caden.engine.columns import COLUMNS

    assert [COLUMNS["communications"].text(n) for n in (296, 1234567)] == ["296", "1,234,567"]


def test_unreadable_toml(call, tmp_path):
    (tmp_path / "bad.toml").write_text("rounds = \n")
    code, _, err = call("run", "bad.toml")
    assert code == 2
    assert err.startswith("caden: bad.toml is not valid TOML")
    assert err.count("\n") == 1


def test_existing_directory_and_finished_run(call, tmp_path):
    assert call("run", *QUICK, "--out", "here")[0] == 0
    code, _, err = call("run", *QUICK, "--out", "here")
    assert (code, err) == (2, "caden: here already exists: choose another directory, or resume that run.\n")
    code, _, err = call("resume", "here")
    assert code == 2
    assert "complete" in err


def test_corrupted_checkpoint(call, tmp_path):
    assert call("run", *QUICK, "--out", "here", "--set", "checkpoint_every=1")[0] == 0
    (tmp_path / "here/weights.safetensors").unlink()
    expected = (tmp_path / "here/metrics.csv").read_bytes()
    path = newest(tmp_path / "here")
    path.write_bytes(path.read_bytes()[:-3])
    resumed = caden("resume", "here", cwd=tmp_path)
    assert resumed.returncode == 0
    assert "damaged" in resumed.stderr and "Continuing from round 2 instead of 3" in resumed.stderr
    assert resumed.stderr.count("\n") == 1
    drop = re.compile(rb"(?<=\n)(\d+),[^,]*,")  # the seconds
    assert drop.sub(rb"\1,", (tmp_path / "here/metrics.csv").read_bytes()) == drop.sub(rb"\1,", expected)
    (tmp_path / "here/weights.safetensors").unlink()
    for path in (tmp_path / "here").glob("checkpoint.*"):
        path.write_bytes(path.read_bytes()[:-3])
    code, _, err = call("resume", "here")
    assert code == 2
    assert "damaged" in err and "delete" not in err and err.count("\n") == 1


def test_divergence_is_exit_code_1_with_the_history_kept(call, tmp_path):
    (tmp_path / "e.toml").write_text(
        SMALL.format(rounds=400, extra="[method]\nmu_z = 1.0\nmu_y = 300.0\nunsafe = true\n")
    )
    code, out, err = call("run", "e.toml", "--out", "here", "--json")
    assert code == 1
    assert err.startswith("caden: Diverged in round")
    assert json.loads(out)["summary"]["stopped"] == "diverged"
    assert len((tmp_path / "here/metrics.csv").read_text().splitlines()) > 3


def test_compare_runs_all_on_the_same_start(call, tmp_path):
    code, out, err = call(
        "compare", *QUICK, "--methods", "caden,caden_gd,gt,adapd", "--set", "compare.gt.alpha=0.1", "--out", "c",
        "--json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert list(found["summaries"]) == ["caden", "caden_gd", "gt", "adapd"]
    assert (tmp_path / "c/compare.png").is_file()
    assert "alpha = 0.1" in (tmp_path / "c/gt/config.toml").read_text()
    starts = {
        tuple(line.split(",")[i] for i in (8, 9, 10))  # objective, relative error, consensus of row 0
        for line in ((tmp_path / f"c/{n}/metrics.csv").read_text().splitlines()[1] for n in found["summaries"])
    }
    assert len(starts) == 1
    code, out, _ = call("compare", *QUICK, "--methods", "caden,gt")
    assert code == 0
    assert "gt" in out


def test_compare_keeps_going_when_a_method_diverges(call, tmp_path):
    code, out, err = call(
        "compare", *QUICK, "--methods", "extra,caden", "--set", "rounds=8", "--set", "compare.extra.alpha=1e6",
        "--out", "c", "--json",
    )  # fmt: skip
    assert code == 1
    assert "extra: Diverged" in err
    assert json.loads(out)["summaries"]["caden"]["stopped"] == "rounds"


def test_compare_bad_input(call):
    for arguments, message in (
        (["--methods", "caden,gtt"], "did you mean 'gt'"),
        (["--methods", ","], "names no method"),
        (["--set", "compare.gt.alfa=1"], "did you mean 'method.alpha'"),
        (["--set", "compare.extra.alpha=1"], "compare.extra"),
    ):
        code, _, err = call("compare", *arguments)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


def test_lists(call):
    code, out, _ = call("list", "--json")
    assert code == 0
    found = json.loads(out)
    assert "caden" in found["methods"]
    assert "mu_z='auto'" in found["methods"]["caden"]["parameters"]
    assert all(entry["about"] for kind in found.values() for entry in kind.values())
    code, out, _ = call("list", "graphs")
    assert "erdos_renyi" in out
    code, out, _ = call("data", "list")
    assert "digits" in out
    assert call("data", "fetch", "digits")[0] == 0


def test_experiments_in_the_repository_are_valid():
    files = sorted(Path(__file__).parents[1].glob("experiments/*.toml"))
    assert files
    for file in files:
        experiment(file)


def test_schedules_in_toml(tmp_path):
    file = tmp_path / "e.toml"
    red = '[local_steps]\nname = "switch"\nfirst = 5\nthen = 1\nat = 2\n'
    file.write_text(SMALL.format(rounds=4, extra=red))
    history = experiment(file, ["warmup.steps=0", "method.mu_z=1.0", "method.solver.name=gd"]).run().history
    # 6 at the start and 5 x 6 for the probing of gd's curvature, then 5, 5, 1, 1 steps of 6 agents.
    assert history.gradients.diff().tolist()[1:] == [30, 30, 6, 6]
    with pytest.raises(CadenError, match="schedule"):
        experiment(file, ['participation={name="swap"}']).run()


def _touched(folder):
    """When the run last wrote to its metrics."""
    path = folder / "cut" / "metrics.csv"
    return path.stat().st_mtime_ns if path.exists() else None


def _killed_and_resumed(folder, delays, rounds):
    """Kill a run after each delay, resume it each time, and return how often it was killed before it ended."""
    common = ["--set", "checkpoint_every=3", "--set", "participation=0.7", "--set", f"rounds={rounds}"]
    common += ["--set", "problem.hidden=32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = [sys.executable, "-m", "caden", "run", "--out", "cut", *common]
    again = [sys.executable, "-m", "caden", "resume", "cut"]
    kills = 0
    for delay in delays:
        command = again if (folder / "cut" / "config.toml").exists() else first
        before = _touched(folder)
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while _touched(folder) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)  # importing takes most of the time; the interesting moments come after it
        time.sleep(delay)
        if process.poll() is None and _touched(folder) != before:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait(60)
        if (folder / "cut" / "weights.safetensors").exists():
            break
    config = folder / "cut" / "config.toml"
    if not (folder / "cut" / "weights.safetensors").exists():
        experiment(config, defaults={}).run(folder / "cut", resume=True)
    experiment(config, defaults={}).run(folder / "whole")  # the same choice of loop or vmap
    return kills


def _same_bytes(one, other, rounds):
    assert (one / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()
    rows = [(place / "metrics.csv").read_text().splitlines() for place in (one, other)]
    assert len(rows[0]) == len(rows[1]) == rounds + 2  # the head and the start
    for a, b in zip(*rows):
        fields_a, fields_b = a.split(","), b.split(",")
        assert fields_a[:1] + fields_a[2:] == fields_b[:1] + fields_b[2:]  # all but the seconds
    assert torch.isfinite(load_file(one / "weights.safetensors")["x"]).all()


def test_killed_at_random_moments_and_resumed_to_the_same_bytes(tmp_path):
    rng = random.Random(1)
    assert _killed_and_resumed(tmp_path, [rng.uniform(0, 0.3)], rounds=25) == 1
    _same_bytes(tmp_path / "cut", tmp_path / "whole", 25)


@pytest.mark.slow
def test_killed_many_times(tmp_path):
    kills = 0
    for trial in range(3):
        folder = tmp_path / str(trial)
        folder.mkdir()
        rng = random.Random(trial)
        kills += _killed_and_resumed(folder, [rng.uniform(0, 0.7) for _ in range(8)], rounds=60)
        _same_bytes(folder / "cut", folder / "whole", 60)
    assert kills >= 10


def test_list_methods_says_what_each_does_about_sleepers(call):
    listed = json.loads(call("list", "methods", "--json")[1])["methods"]
    assert set(listed) == set(METHODS)
    for name, entry in listed.items():
        assert entry["sleeping"].startswith("Sleeping agents: "), name
    assert "refused" in listed["newton_tracking"]["sleeping"]
    assert "half-step" in listed["dlm"]["sleeping"]


def test_theory_prints_what_is_known(call, tmp_path):
    (tmp_path / "e.toml").write_text(SMALL.format(rounds=4, extra="[method]\nmu_z = 0.3\nmu_y = 5.0\n"))
    code, out, _ = call("theory", "e.toml", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["graph"]["lambda_max"] == pytest.approx(4.0)
    assert not found["theorem 1"]["mu_z"][2]
    assert not found["constants, printed"]["bound follows"]
    assert "must diverge" in found["stability"]["verdict"]
    assert found["recommended"]["radius"] < 0.9
    code, out, _ = call("theory", "e.toml")
    assert code == 0
    assert "no bound follows" in out
    assert max(map(len, out.splitlines())) <= 80
    code, _, err = call("theory", "--set", "method.name=gt")
    assert code == 2
    assert "covers CADEN only" in err


def test_parameters_that_must_diverge_are_refused_in_one_line(call, tmp_path):
    (tmp_path / "e.toml").write_text(SMALL.format(rounds=4, extra="[method]\nmu_z = 0.3\nmu_y = 30.0\n"))
    code, _, err = call("run", "e.toml", "--out", "here")
    assert code == 2
    assert err.count("\n") == 1
    done = caden("run", "e.toml", "--out", "there", "--set", "method.mu_y=0.9", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("caden: warning: `mu_y = 0.9")
    assert done.stderr.count("\n") == 1


def test_more_processes_than_agents_are_refused_before_any_is_started(call):
    code, _, err = call("run", "--processes", "50")
    assert code == 2
    assert "20 agents cannot be spread over 50 processes" in err
