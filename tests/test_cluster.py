"""Agents spread over processes: the same numbers as in one, to the bit where that is promised."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import ranks
from caden import graphs, launcher, problems
from caden.cli import app
from caden.draws import Draw
from caden.errors import CadenError
from caden.networks import Memory, Network, cluster

HERE = Path(__file__).parent


def cut(graph, plan):
    home = {agent: part for part, members in enumerate(plan) for agent in members}
    return sum(home[i] != home[j] for i, j in graph.edges.tolist())


@pytest.mark.parametrize(
    ("graph", "parts", "most"),
    [
        (graphs.ring(12), 3, 3),
        (graphs.path(10), 2, 1),
        (graphs.grid(4, 8), 2, 4),
        (graphs.erdos_renyi(20, 0.2, edges=37, seed=0), 2, 10),  # networkx's Kernighan-Lin: 8 at best of 50
        (graphs.star(7), 7, 6),
    ],
)
def test_blocks_are_even_and_few_edges_cross(graph, parts, most):
    plan = cluster.blocks(graph, parts)
    sizes = [len(members) for members in plan]
    assert sorted(agent for members in plan for agent in members) == list(range(graph.agents))
    assert max(sizes) - min(sizes) <= 1
    assert cut(graph, plan) <= most
    assert plan == cluster.blocks(graph, parts)


def test_more_processes_than_agents_are_refused():
    with pytest.raises(CadenError, match="cannot be spread"):
        cluster.blocks(graphs.ring(4), 5)


def test_a_part_of_the_network_has_the_rows_of_the_whole():
    """Laplacian, mixing and sums of a block equal the simulator's rows to the bit (the exchange itself is memory)."""
    graph, problem = graphs.erdos_renyi(10, 0.4, seed=2), problems.quadratic(agents=10, dim=4)
    draw, rows = Draw(0, 10), torch.randn(10, 4, dtype=torch.float64)
    active = torch.tensor([True, False] * 5)
    work = torch.ones(10, dtype=torch.int64)
    whole = Network(graph, problem, draw, True)
    hosted = [1, 4, 5, 8]

    class Part(Memory):
        def hosts(self, graph):
            return hosted

        def share_rows(self, mine, active):
            return rows[self._layout.rows]

    part = Network(graph, problem.take(hosted), draw, True, transport=Part())
    for network in (whole, part):
        network.round(-1, torch.ones(10, dtype=torch.bool), work, problem).broadcast(rows[network.layout.hosted])
    ours = part.round(0, active, work, problem)
    theirs = whole.round(0, active, work, problem)
    heard, all_heard = ours.broadcast(rows[hosted]), theirs.broadcast(rows)
    assert torch.equal(heard.mix(), all_heard.mix()[hosted])
    assert torch.equal(heard.laplacian(), all_heard.laplacian()[hosted])
    assert torch.equal(heard.disagreement(), all_heard.disagreement()[hosted])
    assert torch.equal(ours.degree, theirs.degree[hosted])
    assert part.communications == whole.communications


def run_job(tmp_path, world, script):
    out = tmp_path / f"{world}.json"
    command = [sys.executable, str(script), str(out)]
    assert launcher.start(command, world) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_end_in_the_bits_of_the_simulator(tmp_path, world):
    exact, near, sent = run_job(tmp_path, world, HERE / "ranks.py")
    assert exact == json.loads(json.dumps(ranks.results()))
    if world != 2:
        return
    for name, x in ranks.fast()[0].items():  # not deterministic: as many threads and calls as are fastest
        assert np.abs(np.array(near[name]) - np.array(x)).max() < 1e-10, name
    graph = graphs.erdos_renyi(9, 0.4, seed=1)
    home = {agent: part for part, members in enumerate(cluster.blocks(graph, world)) for agent in members}
    pairs = {(i, home[j]) for a, b in graph.edges.tolist() for i, j in ((a, b), (b, a)) if home[i] != home[j]}
    assert sent == (3 + 1) * len(pairs) * 100_000 * 8  # each row once per rank that needs it; the start is sent as well


SMALL = ["rounds=6", "problem.hidden=8", "problem.agents=6", "graph.name=ring", "warmup.steps=3", "deterministic=true"]
SMALL += ["checkpoint_every=2"]


def arguments(name, *more):
    return [name, *(part for setting in SMALL for part in ("--set", setting)), *more]


def caden(*words):
    command = [sys.executable, "-m", "caden", *arguments(*words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)


def without_clock(folder):
    lines = (folder / "metrics.csv").read_text().splitlines()
    head = lines[0].split(",")
    drop = {"seconds", "wire_bytes"}
    return [[v for k, v in zip(head, line.split(",")) if k not in drop] for line in lines]


@pytest.mark.slow
def test_the_command_with_processes_ends_in_the_same_bytes(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert caden("run", "--out", str(one)).returncode == 0
    shared = caden("run", "--out", str(two), "--processes", "2")
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout.count("rounds to 93%") == 1  # only the first rank speaks
    assert (one / "weights.safetensors").read_bytes() == (two / "weights.safetensors").read_bytes()
    assert without_clock(one) == without_clock(two)


@pytest.mark.slow
def test_the_command_with_processes_refuses_in_one_line(tmp_path):
    two = tmp_path
    refused = caden("run", "--out", str(two), "--processes", "2")
    assert refused.returncode == 2 and refused.stderr.count("already exists") == 1
    wrong = caden("run", "--processes", "2", "--set", "messages.loss=2")
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("faults", "stages"),
    [
        (["participation=0.5"], ((4, 1), (8, 2))),
        *(
            pytest.param(faults, ((3, 3), (5, 1), (8, 2)), marks=pytest.mark.slow)
            for faults in (
                [],
                ["participation=0.5"],
                ["method.name=radmm"],
                ["participation=0.5", "messages.bits=3"],
                ["method.name=gt", "messages.top=0.5", "messages.trigger=0.01"],
            )
        ),
    ],
    ids=str,
)
def test_a_run_can_be_resumed_by_any_number_of_processes(tmp_path, faults, stages):
    """The parts of a checkpoint are dealt anew: 3 processes, then 1, then 2, end in the bytes of one run."""
    settings = [part for setting in ("rounds=8", *faults) for part in ("--set", setting)]
    whole, out = tmp_path / "whole", tmp_path / "parts"
    assert CliRunner().invoke(app, arguments("run", "--out", str(whole), *settings)).exit_code == 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for rounds, processes in stages:
        command = arguments(
            "run", *settings, "--set", f"rounds={rounds}", "--set", "checkpoint_every=1", "--out", str(out)
        )
        if out.exists():
            text = (out / "config.toml").read_text()
            (out / "config.toml").write_text(re.sub(r"rounds = \d+", f"rounds = {rounds}", text))
            (out / "weights.safetensors").unlink()
            command = ["resume", str(out)]
        if processes == 1:
            assert CliRunner().invoke(app, command).exit_code == 0
            continue
        command = [sys.executable, "-m", "caden", *command, "--processes", str(processes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("rounds to 93%") == 1  # only the first rank speaks
    assert (out / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    columns = ["communications", "bytes", "gradients", "relative_error", "dual_sum"]
    ours, theirs = (pd.read_csv(run / "metrics.csv")[columns] for run in (out, whole))
    pd.testing.assert_frame_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["caden", "gt"])
def test_fewer_bits_are_fewer_bytes_between_ranks(tmp_path, method):
    sent = []
    for name, more in (("plain", []), ("short", ["--set", "messages.bits=2"])):
        done = caden("run", "--out", str(tmp_path / name), "--processes", "2", "--set", f"method.name={method}", *more)
        assert done.returncode == 0, done.stderr
        sent.append(pd.read_csv(tmp_path / name / "metrics.csv")["wire_bytes"])
    plain, short = (counted.iloc[-1] - counted.iloc[1] for counted in sent)  # the first rows are sent whole
    assert short < (0.12 if method == "gt" else 0.3) * plain  # arcs: a row for each neighbour instead of each rank


@pytest.mark.slow
def test_a_killed_rank_comes_back_and_ends_in_the_same_bytes(tmp_path):
    """torchrun --max-restarts: one of 4 ranks is killed at a random moment, five times over."""
    settings = ["rounds=400", "checkpoint_every=20", "problem.agents=8"]
    whole = tmp_path / "whole"
    more = [part for setting in settings for part in ("--set", setting)]
    assert caden("run", "--out", str(whole), *more).returncode == 0
    for attempt in range(5):
        out = tmp_path / f"killed{attempt}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        command += ["--max-restarts", "3", "-m", "caden", "run", "--out", str(out)]
        for setting in (*SMALL, *settings):
            command += ["--set", setting]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        try:
            for _ in range(1200):
                if len(list(out.glob("checkpoint.*.safetensors"))) >= 4:
                    break
                time.sleep(0.05)
            time.sleep(float(np.random.default_rng(attempt).uniform(0, 1.5)))
            children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=False)
            victims = [int(p) for p in children.stdout.split()]
            assert victims
            assert not (out / "weights.safetensors").exists()  # there is something left to do
            os.kill(victims[attempt % len(victims)], signal.SIGKILL)
            output, _ = job.communicate(timeout=240)
        finally:
            job.kill()
        assert job.returncode == 0, output[-2000:]
        assert (out / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
        assert without_clock(out) == without_clock(whole)
