"""What a run promises when something breaks: power, disks, files, processes, and files that are not to be trusted."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch

import caden
from caden.engine import durable
from caden.engine.checkpoint import Checkpoints, load
from caden.errors import CadenError, RunError
from caden.networks import Memory
from conftest import newest

SMALL = ["--set", "problem.name=quadratic", "--set", "problem.agents=5", "--set", "problem.dim=3"]
SMALL += ["--set", "graph.name=ring", "--set", "warmup.steps=0", "--set", "method.mu_z=1.0"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "GLOO_SOCKET_IFNAME": "lo"}


def command(*arguments, cwd, **options):
    return subprocess.run(
        [sys.executable, "-m", "caden", *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def in_process(arguments, monkeypatch, capsys):
    """Exit code and standard error of the command, called here."""
    from caden.cli import main

    monkeypatch.setattr(sys, "argv", ["caden", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0, capsys.readouterr().err


@pytest.fixture(scope="module")
def small():
    return caden.problems.quadratic(agents=5, dim=3, seed=0), caden.graphs.ring(5)


def run(small, directory, **options):
    method = caden.methods.caden(mu_z=1.0)
    options = {"participation": 0.6, "checkpoint_every": 2, "picture": False, **options}
    return caden.simulate(method, *small, 12, directory=directory, **options)


def rows(result):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result.rows]


# Power cuts: every operation on files is recorded, and directories are built that a cut could leave.


class Disk:
    """A model of a disk. What was not forced to it may be lost, cut short, or kept, in any combination."""

    def __init__(self):
        self.content: dict[int, bytes] = {}  # of each file, as programs see it
        self.safe: dict[int, bytes] = {}  # as it is on disk
        self.names: dict[Path, int] = {}
        self.safe_names: dict[Path, int] = {}
        self.pending: list[tuple[str, Path, Path | None, int | None]] = []  # changes of names that are not on disk
        self.checkpoints: list[int] = []  # rounds of those that are on disk
        self._next = 0

    def _new(self, path):
        self._next += 1
        self.names[path] = self._next
        self.content[self._next] = b""
        self.pending.append(("link", path, None, self._next))
        return self._next

    def create(self, path, data):
        self.content[self._new(path)] = data

    def append(self, path, data):
        self.content[self.names.get(path) or self._new(path)] += data

    def truncate(self, path, size):
        self.content[self.names[path]] = self.content[self.names[path]][:size]

    def rename(self, source, target):
        self.names[target] = self.names.pop(source)
        self.pending.append(("rename", source, target, self.names[target]))

    def remove(self, path):
        if path in self.names:
            self.pending.append(("unlink", path, None, self.names.pop(path)))

    def sync(self, path):
        if path in self.names:
            self.safe[self.names[path]] = self.content[self.names[path]]
            return
        left = []
        for change in self.pending:
            if change[1].parent == path:
                self._apply(self.safe_names, change)
            else:
                left.append(change)
        self.pending = left
        found = [p for p in self.safe_names if p.name.startswith("checkpoint.") and p.suffix == ".safetensors"]
        self.checkpoints = sorted(int(p.name.split(".")[1]) for p in found)

    @staticmethod
    def _apply(names, change):
        kind, path, target, file = change
        if kind == "link":
            names[path] = file
        elif kind == "unlink":
            names.pop(path, None)
        else:
            names.pop(path, None)
            names[target] = file

    def after_a_cut(self, folder, rng):
        """Write a directory that a cut at this moment could leave."""
        names = dict(self.safe_names)
        for change in self.pending:
            if rng.random() < 0.5:
                self._apply(names, change)
        for path, file in names.items():
            safe, now = self.safe.get(file, b""), self.content[file]
            choices = [safe, now, now[: rng.randint(min(len(safe), len(now)), len(now))]]
            if file not in self.safe:
                choices.append(bytes(len(now)))  # blocks that were reserved, but never written
            (folder / path.name).write_bytes(rng.choice(choices))


@pytest.fixture(scope="module")
def tape(small, tmp_path_factory):
    """The operations of a run, and the run without a cut."""
    directory, operations = tmp_path_factory.mktemp("tape") / "run", []
    real = {name: getattr(durable, name) for name in ("create", "append", "truncate", "rename", "remove", "sync")}

    def recorded(name):
        def call(path, *rest):
            real[name](path, *rest)
            value = path.read_bytes() if name == "create" else rest[0] if rest else None
            operations.append((name, Path(path), value))

        return call

    patch = pytest.MonkeyPatch()
    for name in real:
        patch.setattr(durable, name, recorded(name))
    whole = run(small, directory)
    patch.undo()
    start = next(i for i, (name, path, target) in enumerate(operations) if name == "rename" and target == directory)
    return directory, operations, start, whole


def cut(tape, small, folder, rng):
    directory, operations, start, whole = tape
    end, disk = rng.randint(start + 2, len(operations)), Disk()
    for name, path, value in operations[:end]:
        if name == "rename" and value == directory:  # the directory gets its name when all in it is on disk
            disk.names = {directory / p.name: file for p, file in disk.names.items()}
            disk.safe_names, disk.pending = dict(disk.names), []
            continue
        arguments = [] if value is None else [value]
        getattr(disk, name)(path, *arguments)
    folder.mkdir()
    disk.after_a_cut(folder, rng)
    for extra in folder.glob("*.tmp"):
        extra.unlink() if rng.random() < 0.5 else None
    parts = Checkpoints(folder, Memory()).load()
    begun = int(parts[0].numbers["round"]) if parts else 0
    assert begun >= max(disk.checkpoints, default=0), "a checkpoint that was on disk is gone"
    named = [str(target.name) for name, _, target in operations[:end] if name == "rename"]
    written = [0, 0, *(int(name.split(".")[1]) for name in named if name.startswith("checkpoint."))]
    assert begun >= written[-2], "more than one checkpoint was lost"
    again = run(small, folder, resume=True)
    assert torch.equal(again.x, whole.x)
    assert rows(again) == rows(whole)


@pytest.mark.filterwarnings("ignore:.*damaged.*:UserWarning")
@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(s, marks=pytest.mark.slow) for s in range(20, 200))])
def test_after_a_power_cut_a_run_ends_in_the_same_bits(tape, small, tmp_path, seed):
    cut(tape, small, tmp_path / "cut", random.Random(seed))


def test_without_the_folder_forced_to_disk_the_model_would_notice(small, tmp_path, monkeypatch):
    """The test can fail: if nothing is forced to disk, checkpoints are lost."""
    disk = Disk()
    disk.create(tmp_path / "a", b"1")
    disk.sync(tmp_path / "a")
    folder = tmp_path / "after"
    folder.mkdir()
    for seed in range(20):
        disk.after_a_cut(folder, random.Random(seed))
        names = {p.name for p in folder.iterdir()}
        (folder / "a").unlink(missing_ok=True)
        if not names:
            return
    pytest.fail("the name was never lost")


# Files that were changed, cut or damaged.


def test_two_generations_are_kept_and_the_older_one_is_used(small, tmp_path):
    whole = run(small, tmp_path / "r")
    names = sorted(p.name for p in (tmp_path / "r").glob("checkpoint.*"))
    assert names == ["checkpoint.10.0of1.safetensors", "checkpoint.12.0of1.safetensors"]
    newest(tmp_path / "r").write_bytes(b"garbage")
    with pytest.warns(UserWarning, match="damaged.*Continuing from round 10 instead of 12"):
        again = run(small, tmp_path / "r", resume=True)
    assert torch.equal(again.x, whole.x) and rows(again) == rows(whole)


def test_metrics_belong_to_the_checkpoint(small, tmp_path):
    run(small, tmp_path / "r")
    path = tmp_path / "r" / "metrics.csv"
    good, rng = path.read_bytes(), random.Random(0)
    lines = good.splitlines(keepends=True)
    damaged = [b"".join(lines[:5]), b"".join([*lines[:3], *lines[5:]]), b"", good[1:]]
    for _ in range(50):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(data))
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(CadenError, match="missing or damaged") as caught:
            run(small, tmp_path / "r", resume=True)
        assert "delete" not in str(caught.value) and path.read_bytes() == data
    path.write_bytes(good)
    run(small, tmp_path / "r", resume=True)


def test_an_edited_configuration_is_refused_but_more_rounds_are_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = ["run", *SMALL, "--out", "here", "--set", "rounds=6", "--set", "checkpoint_every=2"]
    assert in_process(first, monkeypatch, capsys)[0] == 0
    file = Path("here/config.toml")
    text = file.read_text()
    Path("here/weights.safetensors").unlink()
    for setting, other in {"seed = 0": 1, "participation = 1.0": 0.5, "mu_z = 1.0": 2.0}.items():
        assert setting in text
        file.write_text(text.replace(setting, f"{setting.partition('=')[0]}= {other}"))
        code, err = in_process(["resume", "here"], monkeypatch, capsys)
        assert code == 2 and "was changed" in err and err.count("\n") == 1
    file.write_text(text.replace("rounds = 6", "rounds = 9"))
    assert in_process(["resume", "here"], monkeypatch, capsys)[0] == 0
    assert json.loads(Path("here/summary.json").read_text())["round"] == 9


@pytest.mark.filterwarnings("always")
def test_weights_that_cannot_be_read_are_not_complete(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = ["run", *SMALL, "--out", "here", "--set", "rounds=5", "--set", "checkpoint_every=2"]
    assert in_process(first, monkeypatch, capsys)[0] == 0
    weights = Path("here/weights.safetensors")
    good = weights.read_bytes()
    for bad in (b"", good[:-7]):
        weights.write_bytes(bad)
        code, err = in_process(["resume", "here"], monkeypatch, capsys)
        assert code == 0 and "The run is not complete" in err
        assert torch.equal(load(weights).tensors["x"], load_bytes(good, tmp_path)["x"])
    assert "nothing to resume" in in_process(["resume", "here"], monkeypatch, capsys)[1]


def load_bytes(data, folder):
    (folder / "copy.safetensors").write_bytes(data)
    return load(folder / "copy.safetensors").tensors


def test_other_formats_are_refused_with_both_versions(small, tmp_path):
    run(small, tmp_path / "r")
    path = newest(tmp_path / "r")
    path.write_bytes(path.read_bytes().replace(b'\\\\\\"format\\\\\\": 2', b'\\\\\\"format\\\\\\": 7'))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "checkpoint.safetensors").write_bytes(b"")
    with pytest.raises(CadenError, match=r"format 1.*format 2"):
        Checkpoints(tmp_path / "old", Memory()).load()


def test_a_reader_never_sees_a_part(small, tmp_path):
    """A report of a run under way: every read succeeds, or says that there is nothing yet."""
    program = (
        "import caden\nproblem, graph = caden.problems.quadratic(5, 3), caden.graphs.ring(5)\n"
        "caden.simulate(caden.methods.caden(mu_z=1.0), problem, graph, 3000, "
        f"directory={str(tmp_path / 'r')!r}, checkpoint_every=1)"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], env=ENVIRONMENT)
    reads, messages, end = 0, set(), time.monotonic() + 60
    try:
        while writer.poll() is None and reads < 150 and time.monotonic() < end:
            if (tmp_path / "r").exists():
                try:
                    caden.engine.run_directory.RunDirectory(tmp_path / "r").record()
                    reads += 1
                except CadenError as error:
                    messages.add(str(error))
    finally:
        writer.kill()
        writer.wait()
    assert reads == 150 or writer.returncode == 0
    assert all("no recorded rounds yet" in message for message in messages), messages


# One writer.


def test_a_second_writer_is_refused_with_the_holders_number(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    long = ["--set", "rounds=100000", "--set", "record_every=100", "--set", "checkpoint_every=50"]
    command_line = [sys.executable, "-m", "caden", "run", *SMALL, *long, "--out", "here"]
    first = subprocess.Popen(command_line, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not list((tmp_path / "here").glob("checkpoint.*")) and time.monotonic() < end:
            time.sleep(0.05)
        code, said = in_process(["resume", "here"], monkeypatch, capsys)
        assert code == 2
        assert f"in use by process {first.pid}" in said and said.count("\n") == 1
    finally:
        first.kill()
        first.wait()
    lines = (tmp_path / "here" / "metrics.csv").read_text().splitlines()
    assert len(lines) == len(set(lines))
    process = subprocess.Popen(
        [sys.executable, "-m", "caden", "resume", "here"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while (tmp_path / "here" / ".lock").read_text() != str(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)
    assert process.poll() is None  # the lock died with its holder
    process.send_signal(signal.SIGINT)
    assert "to continue" in process.communicate(timeout=30)[1]


# Disks that are full, and other errors of the system.


def test_a_full_disk_ends_the_run_in_one_line_and_it_can_be_resumed(small, tmp_path, monkeypatch):
    whole = run(small, tmp_path / "whole")
    append, written = durable.append, []

    def full(path, data):
        if len(written) > 7:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written.append(path)
        append(path, data)

    monkeypatch.setattr(durable, "append", full)
    with pytest.raises(RunError, match=r"Cannot write .*metrics\.csv: No space left on device") as caught:
        run(small, tmp_path / "r")
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    again = run(small, tmp_path / "r", resume=True)
    assert torch.equal(again.x, whole.x) and rows(again) == rows(whole)


def test_a_limit_on_file_sizes_is_one_line(tmp_path):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    done = command("run", *SMALL, "--out", "here", "--set", "rounds=60", cwd=tmp_path, preexec_fn=limit)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("caden: Cannot write") and done.stderr.count("\n") == 1


def test_a_picture_that_cannot_be_drawn_never_costs_the_result(small, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("caden.engine.run_directory.draw", fail)
    with pytest.warns(UserWarning, match="could not be drawn"):
        result = run(small, tmp_path / "r", picture=True)
    assert torch.equal(load(tmp_path / "r" / "weights.safetensors").tensors["x"], result.x)


# Code that a file names.


CODE = 'def graph(agents, mark="called"):\n    import pathlib\n    pathlib.Path(mark).write_text("x")\n'
CODE += "    import caden\n    return caden.graphs.ring(agents)\n"


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """A folder with a run whose graph is code, which has been executed once."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "evil.py").write_text(CODE + '\nimport pathlib\npathlib.Path("imported").write_text("x")\n')
    done = command("run", *SMALL, "--set", "graph.name=evil.py:graph", "--set", "rounds=2", "--out", "run", cwd=folder)
    assert done.returncode == 0 and "running code from evil.py\n" in done.stderr
    for mark in ("called", "imported"):
        (folder / mark).unlink()
    return folder


@pytest.fixture
def hostile(hostile_run, tmp_path, monkeypatch, capsys):
    shutil.copytree(hostile_run, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    endpoints = [f"tcp/127.0.0.1:{port}" for port in range(1, 6)]
    for path in (Path("run/fleet.toml"), Path("fleet/agent-0/config.toml")):
        path.parent.mkdir(parents=True, exist_ok=True)
        table = tomllib.loads(Path("run/config.toml").read_text())
        path.write_text(tomli_w.dumps(table | {"fleet": {"name": "x", "endpoints": endpoints}}))
    return lambda *arguments: in_process(arguments, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["report", "run"], 0),
        (["run", "run/config.toml", "--dry-run"], 2),
        (["run", "run/config.toml", "--no-code", "--out", "x"], 2),
        (["resume", "run", "--no-code"], 2),
        (["compare", "run/config.toml", "--no-code", "--out", "y"], 2),
        (["theory", "run/config.toml", "--no-code"], 2),
        (["tune", "gt", "run/config.toml", "--no-code"], 2),
        (["fleet", "run/fleet.toml", "--no-code"], 2),
        (["replay", "fleet", "--no-code"], 2),
        (["list", "graphs"], 0),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_reading_runs_no_code(hostile, arguments, code):
    ended, err = hostile(*arguments)
    assert ended == code, err
    assert not Path("called").exists() and not Path("imported").exists()
    if code:
        assert "names code outside caden" in err and err.count("\n") == 1


def test_a_report_draws_the_graph_from_the_directory(hostile):
    hostile("report", "run")
    assert Path("report/report.html").read_text().count("<line ") == 5


# Runs outside what a method survives.


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("adapd", {"messages": {"loss": 0.2}}, "lost messages"),
        ("gt", {"messages": {"delay": 2}}, "delayed messages"),
        ("dgd", {"participation": 0.5, "links": 0.9}, "sleeping agents and changing links"),
    ],
)
def test_a_run_outside_what_a_method_survives_is_marked(small, name, options, words):
    method = caden.methods.METHODS[name](**caden.methods.CARDS[name].unit_parameters)
    with pytest.warns(UserWarning, match=f"{name} does not tolerate {words}"):
        result = caden.simulate(method, *small, rounds=3, **options)
    assert result.summary()["outside"] and result.history.outside.iloc[-1] == len(result.outside)
    assert dict(result.table())["not tolerated by the method"]


def test_a_run_inside_what_a_method_survives_is_not(small):
    for method, options in (
        (caden.methods.caden(mu_z=1.0), {"participation": 0.5}),
        (caden.methods.caden(), {"participation": 0.5, "messages": {"loss": 0.2, "delay": 1}}),
        (caden.methods.radmm(0.4), {"participation": 0.5, "messages": {"loss": 0.2, "delay": 1}}),
    ):
        result = caden.simulate(method, *small, rounds=3, **options)
        assert "outside" not in result.summary() and "outside" not in result.history


def test_agents_with_a_single_sample_or_class_are_mentioned():
    data = torch.rand(9, 2), torch.tensor([0, 1, 0, 1, 1, 1, 0, 0, 1])
    parts = [[0, 1, 2], [3], [4, 5], [6, 7, 8]]
    problem = caden.problems.classification(torch.nn.Linear(2, 2), data, agents=4, partition=parts)
    assert problem.notes() == ["Agents 1 have a single sample.", "Agents 2 have samples of one class only."]


@pytest.mark.filterwarnings("always")
def test_the_command_mentions_agents_with_one_class(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ["problem.partition={name='shards', classes=1}", "graph.name=ring", "problem.hidden=4"]
    settings += ["rounds=1", "warmup.steps=1", "problem.samples=200", "problem.agents=20"]
    run_it = ["run", *(part for setting in settings for part in ("--set", setting))]
    code, err = in_process(run_it, monkeypatch, capsys)
    assert code == 0 and "have samples of one class only." in err


# Processes.


def children(pid):
    """Processes of a session that this process started, by the launcher's number in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"CADEN_LAUNCHER={pid}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGINT))],
    ids=lambda n: n.name,
)
def test_no_rank_outlives_its_launcher(tmp_path, number):
    long = ["--set", "rounds=100000", "--set", "record_every=1000", "--set", "checkpoint_every=20"]
    job = subprocess.Popen(
        [sys.executable, "-m", "caden", "run", *SMALL, *long, "--processes", "2", "--out", "here"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 90
    while len(list((tmp_path / "here").glob("checkpoint.*"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(children(job.pid)) == 2
    job.send_signal(number)
    job.wait(8)
    end = time.monotonic() + 5
    while children(job.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert children(job.pid) == []
    if number is signal.SIGINT:
        said = job.stderr.read()
        assert re.search(r"Interrupted after round \d+: run `caden resume here` to continue", said), said
    job.stderr.close()
    assert job.returncode != 0


def test_an_estimate_whose_worker_is_killed_is_an_error(monkeypatch):
    from caden.experiments import forecast

    with pytest.raises(RunError, match="was killed"):
        forecast._in_new_process(signal.raise_signal, signal.SIGKILL)


# Input that nobody thought of.


ODD = [0, -1, 1, 2.5, 1e-320, 1e308, -0.0, 10**30, "", "x", "caden", "a:b", ":", "\u2603", True, False]
ODD += [[], [1], ["x"], {}, {"name": "ring"}, {"x": {}}, float("nan"), float("inf"), [[0, 1]], "auto", "exact"]
KEYS = ["rounds", "seed", "participation", "local_steps", "target", "stop_at_target", "tolerance", "record_every"]
KEYS += [
    "checkpoint_every",
    "device",
    "dtype",
    "deterministic",
    "links",
    "method",
    "problem",
    "graph",
    "warmup",
    "messages",
]
KEYS += [
    f"method.{k}"
    for k in ("name", "mu_z", "mu_y", "dual", "relax", "growth", "solver", "alpha", "rho", "eta", "step_size")
]
KEYS += [f"problem.{k}" for k in ("name", "agents", "dim", "data", "partition", "hidden", "samples", "condition", "l2")]
KEYS += [f"graph.{k}" for k in ("name", "p", "edges", "agents", "seed", "degree")] + [
    "warmup.steps",
    "warmup.step_size",
]
KEYS += [f"messages.{k}" for k in ("loss", "delay", "top", "bits", "burst")] + ["nonsense", "fleet", "tune", "compare"]


def toml(value):
    import tomli_w

    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip() if not isinstance(value, dict) else inline(value)


def inline(table):
    return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in table.items()) + "}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", [0, *(pytest.param(p, marks=pytest.mark.slow) for p in range(1, 20))])
def test_odd_configurations_work_or_end_in_one_line(tmp_path, monkeypatch, capsys, part):
    """10 here; `make test-all` runs nearly 1,000."""
    monkeypatch.chdir(tmp_path)
    for case in range(50 if part else 10):
        rng = random.Random(1000 * part + case)
        settings = [*SMALL, "--set", "rounds=2", "--set", f"method.name={rng.choice(list(caden.methods.METHODS))}"]
        for key in rng.sample(KEYS, rng.randint(1, 3)):
            settings += ["--set", f"{key}={toml(rng.choice(ODD))}"]
        if any(
            re.match(
                r"(rounds|problem\.(agents|dim|hidden|samples)|local_steps|warmup\.steps|graph\.agents)=1\d{29}", s
            )
            for s in settings
        ):
            continue
        began = time.monotonic()
        code, err = in_process(["run", *settings, "--out", f"run-{case}"], monkeypatch, capsys)
        assert code in (0, 1, 2), (settings, err)
        lines = [line for line in err.splitlines() if "warning:" not in line and "running code" not in line]
        assert len(lines) == (1 if code else 0), (settings, err)
        assert time.monotonic() - began < 60, settings


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", [0, *(pytest.param(p, marks=pytest.mark.slow) for p in range(1, 10))])
def test_damaged_run_directories_work_or_end_in_one_line(tmp_path, monkeypatch, capsys, part):
    """10 here; `make test-all` runs nearly 500."""
    monkeypatch.chdir(tmp_path)
    whole = ["run", *SMALL, "--set", "rounds=4", "--set", "checkpoint_every=1", "--out", "whole"]
    assert in_process(whole, monkeypatch, capsys)[0] == 0
    content = {path.name: path.read_bytes() for path in Path("whole").iterdir() if path.is_file()}
    odd = [b"", b"{}", b"[]", b"null", b"1", b"\xff\xfe", b'{"a": [1]}', b"round\n1\n", b"a,b\n1,2\n", b"rounds = 1\n"]
    for case in range(50 if part else 10):
        rng = random.Random(5000 + 1000 * part + case)
        folder = Path(f"damaged-{case}")
        folder.mkdir()
        for name, data in content.items():
            (folder / name).write_bytes(data)
        if rng.random() < 0.7:
            (folder / "weights.safetensors").unlink()
        for name in rng.sample(sorted(content), rng.randint(1, 2)):
            path, data = folder / name, bytearray(content[name])
            kind = rng.randrange(4)
            if kind == 0 and data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data = data[: rng.randrange(len(data) + 1)]
            elif kind == 2:
                data = bytearray(rng.choice(odd))
            path.unlink(missing_ok=True) if kind == 3 else path.write_bytes(data)
        page = [["report", str(folder), "--out", f"page-{case}"]] if case % 5 == 0 else []  # a page takes long
        for command_ in (["resume", str(folder)], *page):
            code, err = in_process(command_, monkeypatch, capsys)
            lines = [line for line in err.splitlines() if "warning:" not in line]
            assert code in (0, 1, 2) and len(lines) == (1 if code else 0), (command_, err)


# What theory prints.


def test_the_theory_report_does_not_contradict_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    complete = ["--set", "problem.name=quadratic", "--set", "problem.agents=8", "--set", "problem.dim=3"]
    complete += ["--set", "graph.name=complete", "--set", "method.mu_z=3", "--set", "method.mu_y=21168"]
    monkeypatch.setattr(sys, "argv", ["caden", "theory", *complete])
    with pytest.raises(SystemExit):
        __import__("caden.cli").cli.main()
    text = " ".join(capsys.readouterr().out.split())
    assert "must diverge" in text and "│ a bound follows" not in text
    assert re.search(r"mu_z │ 3 │ >= 3 │ holds", text)


# Kills at random moments, over kinds of methods and of networks.

KILLED = """
import sys
import caden
sys.path.insert(0, {tests!r})
from test_reliability import arranged
method, problem, graph, options = arranged({seed})
begun = lambda row, state: print("begun", flush=True) if row["round"] else None
caden.simulate(method, problem, graph, 400, directory={directory!r}, callbacks=[begun], picture=False, **options)
"""


def arranged(seed):
    """A method, a problem, a graph and conditions that suit each other."""
    rng, methods = random.Random(seed), caden.methods
    kinds = [
        (methods.caden(relax=0.8), [{}, {"participation": 0.6}, {"links": 0.7}, {"messages": {"bits": 8}}]),
        (methods.caden(mu_z=1.0), [{"messages": {"top": 0.7}}, {"local_steps": [1, 2, 3, 4, 5]}]),
        (methods.gt(0.05), [{}, {"participation": 0.5}, {"messages": {"loss": 0.2, "burst": 3}}]),
        (methods.adapd(0.5), [{}, {"participation": 0.5}, {"messages": {"delay": 2}}]),
        (methods.radmm(0.4), [{"messages": {"loss": 0.3, "delay": 3}, "participation": 0.6}, {"links": 0.5}]),
        (methods.lt_admm(), [{"messages": {"loss": 0.2}}, {"messages": {"bits": 6}}]),
        (methods.dinno(0.2), [{}, {"participation": 0.7}]),
        (methods.accelerated({"name": "gt", "alpha": 0.05}), [{}]),
        (methods.esom(), [{}, {"participation": 0.9}]),
        (methods.proxskip(0.1, 0.5), [{}, {"participation": 0.8}]),
    ]
    method, conditions = rng.choice(kinds)
    common = {"deterministic": True, "checkpoint_every": rng.choice([1, 3, 7]), "record_every": rng.choice([1, 5])}
    problem = caden.problems.quadratic(agents=5, dim=3, seed=1)
    return method, problem, caden.graphs.complete(5), {**common, **rng.choice(conditions), "seed": seed}


@pytest.mark.filterwarnings("ignore:.*damaged.*:UserWarning")
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 100))])
def test_a_run_killed_at_a_random_moment_ends_in_the_same_bits(tmp_path, seed):
    method, problem, graph, options = arranged(seed)
    whole = caden.simulate(method, problem, graph, 400, **options)
    program = KILLED.format(tests=str(Path(__file__).parent), seed=seed, directory=str(tmp_path / "r"))
    process = subprocess.Popen([sys.executable, "-c", program], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    time.sleep(random.Random(seed).random() * 0.7)
    process.kill()
    process.wait(), process.stdout.close()
    again = caden.simulate(method, problem, graph, 400, directory=tmp_path / "r", resume=True, picture=False, **options)
    assert torch.equal(again.x, whole.x)
    assert rows(again) == rows(whole)
