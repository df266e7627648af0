"""A training loop of one's own: the numbers of the simulator, over ranks and peers, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import adapters
import caden
import own_loops
from caden import launcher
from caden.networks.layout import Layout
from caden.networks.peers.transports import HEADER, Free, Received
from caden.networks.transport import Memory, Overlapped
from caden.own_loop._parameters import moved
from conftest import newest
from own_loops import AGENTS, CASES, SEED, adamw, flat, line, network, sgd, squares
from peers import fleet_file, until

ADAMW = {"name": "torch_optim", "optimizer": "AdamW", "lr": 3e-3, "weight_decay": 0.01}
three, two = pytest.mark.xdist_group("three_ranks"), pytest.mark.xdist_group("two_ranks")
SCRIPT = str(Path(own_loops.__file__))


def job(function, folder, ranks, *arguments):
    """Run a function of own_loops.py in every rank; return the exit code and what rank 0 found."""
    out = folder / "found.json"
    code = launcher.start([sys.executable, SCRIPT, function, str(out), *map(str, arguments)], ranks)
    return code, json.loads(out.read_text()) if out.exists() else None


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory):
    code, found = job("three_ranks", tmp_path_factory.mktemp("three_ranks"), AGENTS)
    assert code == 0
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    code, found = job("two_ranks", tmp_path_factory.mktemp("two_ranks"), 2)
    assert code == 0
    return found


@three
@pytest.mark.parametrize("case", CASES)
def test_ranks_with_their_own_loops_end_in_the_bits_of_the_simulator(three_ranks, case):
    """A CNN with dropout, mini-batches by index, AdamW (SGD where the method asks for it)."""
    name, options = CASES[case]
    options = dict(options)
    more = {key: options.pop(key) for key in ("participation", "messages") if key in options}
    rounds, overlap = options.pop("rounds", 4), options.pop("overlap", False)
    solver = {} if name in ("kgt", "led") else {"solver": ADAMW}
    method = getattr(caden.methods, name)(**options, **solver)
    transport = Overlapped(Memory()) if overlap else None
    x = own_loops.simulated(method, rounds, 3, transport=transport, **more)
    assert three_ranks["networks"][case] == [own_loops.digest(x), rounds, True]


def require(data):
    """Skip the test if a data set is neither here nor to be had."""
    try:
        caden.data.load(data)
    except caden.CadenError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_ranks_on_fashion_mnist_end_in_the_bits_of_the_simulator(tmp_path):
    require("fashion_mnist")
    code, found = job("fashion", tmp_path, AGENTS)
    x = own_loops.simulated(caden.methods.caden(mu_z=0.1, solver=ADAMW), 6, 5, data="fashion_mnist")
    assert code == 0 and found == own_loops.digest(x)


@two
def test_full_gradients_agree_with_the_simulator(two_ranks):
    """Also where agents stop by themselves, and with messages that arrive one round late."""
    found = two_ranks["full gradients"]
    inputs, targets, _ = squares(2)
    functions = [lambda w, i=i: nn.functional.mse_loss(inputs[i] @ w.reshape(4, 1), targets[i]) / 2 for i in range(2)]
    problem = caden.problems.functions(functions, dim=4, dtype=torch.float64)
    solver = {"name": "torch_optim", "optimizer": "SGD", "lr": 0.05}
    for name, steps, start in (("steps", 4, "anchor"), ("own", 4, "own"), ("auto", "auto", None), ("overlap", 4, None)):
        method = caden.methods.caden(mu_z=0.3, solver=solver, start=start)
        transport = Overlapped(Memory()) if name == "overlap" else None
        graph = caden.graphs.exponential(2)
        result = caden.simulate(method, problem, graph, 5, local_steps=steps, transport=transport)
        np.testing.assert_allclose(found[name][0], result.x.numpy(), rtol=1e-6, atol=1e-9)
    assert found["auto"][1] <= 5 * 8
    rounds, gradients, waited = found["seconds"]
    assert 2000 < gradients <= 2 * 2000 and 1 <= rounds < 2000 and waited > 0  # the first loop to end ends the run


@two
def test_what_loops_and_models_may_be(two_ranks):
    found = dict(two_ranks["models"])
    assert found.pop("row") == "torch.float32" and found.pop("measured") == -1
    assert found.pop("buffer") == 0.5  # the mean of 0 and 1
    assert found.pop("bfloat16") < 0.02
    assert max(found.values()) < 1e-5, found


@pytest.mark.slow
def test_a_killed_job_continues_to_the_same_bits(tmp_path):
    assert job("crash", tmp_path, 2, tmp_path / "run")[0] != 0
    code, found = job("crash", tmp_path, 2, tmp_path / "run")
    x = own_loops.simulated(caden.methods.caden(mu_z=0.1, solver=ADAMW), 4, 3, agents=2)
    assert code == 0 and found == {"began": 9, "model": own_loops.digest(x)}
    assert newest(tmp_path / "run").name.startswith("checkpoint.4.")  # the last round, too


@three
def test_a_state_within_a_round_can_be_saved_and_loaded(three_ranks):
    found = three_ranks["saved"]
    assert found["from"] == 0 and found["at"] == [2, 1, 7]
    assert found["half"] == found["whole"] == three_ranks["networks"]["caden"][0]
    found = three_ranks["saved, auto"]  # the new agent is asked to measure first
    assert found["from"] == -1 and found["at"] == [1, 1, 7]
    assert found["half"] == found["whole"]


@two
def test_mistakes_get_one_clear_line(two_ranks):
    found = two_ranks["mistakes"]
    expected = {
        "nan": "`weight` is not finite after step 2",
        "closure": "call it without one",
        "added": "make the agent last",
        "late hook": "make the agent last",
        "fused": "fused=False",
        "models": "different models",
        "graph": "5 agents, but the job has 2",
        "gradients": "choose one of adapd, caden",
        "momentum": "`lr = alpha` (0.1)",
        "unequal": "must be a number of steps",
        "every": '"30s"',
        "overlap": "survives delay",
        "parameter": "did you mean",
        "short": "before its first round",
        "thawed": "added or thawed",
        "copies": "remove compression",
        "sleep": "remove `participation`",
        "state": "nothing to save",
        "scheduler": "lr = alpha` (0.05), without momentum, weight decay and schedulers",
        "skip": "none can be skipped",
    }
    for name, words in expected.items():
        assert words in found[name] and "\n" not in found[name], found[name]
    assert "`agent.finish()` was not called: the model is this agent's own, not the mean." in two_ranks["forgotten"]


def test_wrong_arguments_are_found_before_anything_is_joined(tmp_path):
    model = line()
    with pytest.raises(caden.CadenError, match="belongs to another model"):
        caden.Agent(model, sgd(line().parameters()))
    with pytest.raises(caden.CadenError, match="in this order"):
        caden.Agent(sgd(model.parameters()), model)
    with pytest.raises(caden.CadenError, match="torchrun"):
        caden.Agent(model, sgd(model.parameters()))
    frozen = line().requires_grad_(False)
    with pytest.raises(caden.CadenError, match="no parameters to train"):
        caden.Agent(frozen, sgd(frozen.parameters()))
    with pytest.raises(caden.CadenError, match="number of this agent"):
        caden.Agent(model, sgd(model.parameters()), fleet=tmp_path / "FLEET.toml")
    with pytest.raises(caden.CadenError, match="`method` is set in the fleet file"):
        caden.Agent(model, sgd(model.parameters()), "caden", fleet=tmp_path / "FLEET.toml", agent=0)
    two = nn.Sequential(line(), line())
    with pytest.warns(UserWarning, match="neither trained nor exchanged"), pytest.raises(caden.CadenError):
        caden.Agent(two, sgd(two[0].parameters()))


def in_threads(agents, loop):
    """Run the loops of some agents in threads of this process: {agent: what it returned, or its error}."""
    found = {}

    def one(agent):
        try:
            found[agent] = loop(agent)
        except Exception as error:  # the test looks at it
            found[agent] = error

    threads = [threading.Thread(target=one, args=(agent,)) for agent in range(agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return found


def lockstep_fleet(folder, agents=4, rounds=4, steps=3):
    """The file of a lockstep fleet; the loops bring their own problem."""
    problem, method = {"name": "quadratic", "agents": agents, "dim": 2}, {"name": "caden", "mu_z": 0.1, "solver": ADAMW}
    common = {"rounds": rounds, "local_steps": steps, "seed": SEED, "method": method}
    fleet_file(folder, "lockstep", problem, {"name": "exponential"}, **common)


@pytest.mark.parametrize("data", ["digits", pytest.param("fashion_mnist", marks=pytest.mark.slow)])
def test_peers_in_lockstep_end_in_the_bits_of_the_simulator(tmp_path, data):
    """The same fleet file, simulated with `torch_optim`, gives the same numbers."""
    require(data)
    lockstep_fleet(tmp_path)

    def loop(i):
        model = network(data)
        optimizer = adamw(model.parameters())
        agent = caden.Agent(model, optimizer, fleet=tmp_path / "FLEET.toml", agent=i, directory=tmp_path / f"{i}")
        own_loops.train(agent, model, optimizer, 5 if i == 0 else 10**6, agents=4, data=data)
        if i == 0:
            with pytest.raises(caden.CadenError, match="all agents make 4 rounds"):
                agent.finish()
            own_loops.train(agent, model, optimizer, 10**6, agents=4, data=data)
        agent.finish()
        return agent._recorder.run.state.x[0], flat(model)

    found = in_threads(4, loop)
    x = own_loops.simulated(caden.methods.caden(mu_z=0.1, solver=ADAMW), 4, 3, agents=4, data=data)
    assert torch.equal(torch.stack([found[i][0] for i in range(4)]), x)
    for i in range(4):
        torch.testing.assert_close(found[i][1], x.mean(0))


def test_free_running_peers_find_the_minimiser(tmp_path):
    """Loops that end when they like; the others go on."""
    inputs, targets, solution = squares(4)
    problem = {"name": "quadratic", "agents": 4, "dim": 4}
    method = {"name": "caden", "mu_z": 0.5}
    fleet_file(tmp_path, "free", problem, method=method, local_steps=4, rounds=100_000, fleet={"pace": 0.02})

    def loop(i):
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        agent = caden.Agent(model, optimizer, fleet=tmp_path / "FLEET.toml", agent=i, directory=tmp_path / f"{i}")
        own_loops.fit(agent, model, optimizer, (inputs[i], targets[i]), 800)
        agent.finish()
        return float((flat(model) - solution).abs().max()), int(agent.history["round"].iloc[-1])

    found = in_threads(4, loop)
    assert all(error < 1e-6 and rounds == 200 for error, rounds in found.values()), found


def test_free_running_peers_end_with_the_mean_of_those_present(tmp_path):
    """Rows pass along a path; an agent that has left is not waited for."""
    inputs, targets, _ = squares(4)
    problem = {"name": "quadratic", "agents": 4, "dim": 4}
    settings = {"method": {"name": "caden", "mu_z": 0.5}, "local_steps": 4, "rounds": 100_000}
    fleet_file(tmp_path, "free", problem, {"name": "path"}, fleet={"pace": 0.02, "forget": 12.0}, **settings)

    def loop(i):
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        agent = caden.Agent(model, optimizer, fleet=tmp_path / "FLEET.toml", agent=i, directory=tmp_path / f"{i}")
        if i == 0:
            agent._stop.set()
        try:
            own_loops.fit(agent, model, optimizer, (inputs[i], targets[i]), 8 + 4 * i)
            agent.finish()
        finally:
            agent._close()
        return agent._recorder.run.state.x[0], flat(model)

    found = in_threads(4, loop)
    assert isinstance(found.pop(0), caden.Interrupted)
    mean = torch.stack([found[i][0] for i in (1, 2, 3)]).mean(0)
    assert all(torch.equal(model, mean) for _, model in found.values()), found
    assert min(float((x - mean).abs().max()) for x, _ in found.values()) > 1e-4  # they had not converged


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_leave_and_reach_a_gpu_through_pinned_memory():
    row = torch.randn(1, 5)
    there = moved(row, torch.device("cuda"))
    back = moved(there, torch.device("cpu"))
    assert there.is_cuda and back.is_pinned() and torch.equal(back, row)


def test_rows_on_one_device_are_not_copied():
    row = torch.randn(1, 5)
    assert moved(row, torch.device("cpu")) is row


def test_free_running_peers_with_other_models_do_not_mix():
    """A peer that starts is told; one that runs does not use such messages."""
    graph = caden.graphs.path(2)
    message = torch.zeros(4 + HEADER)
    message[-1] = 7.0

    class Neighbour:
        version = 0

        def publish(self, version, rows):
            assert all(float(row[-1]) == 5.0 for row in rows.values())

        def life(self, step, own):
            return own

        def members(self, step):
            return {1}

        def read(self, step):
            return {1: Received(self.version, message, [])}

    free = Free(0, Neighbour())
    free.connect(Layout(graph, [0]), 4)
    free.mark = 5.0
    free.begin_round(-1)
    with pytest.raises(caden.CadenError, match="Agent 1 has another model"):
        free.share_rows(torch.zeros(1, 4), torch.ones(2, dtype=torch.bool))
    Neighbour.version = 1
    free.begin_round(0)
    sends = torch.ones(2, 1, dtype=torch.bool)
    assert not free.exchange_arcs(torch.zeros(2, 4), sends, sends)[1].any()
    message[-1] = 5.0
    assert list(free._take_new_rows()) == [1]


@pytest.mark.parametrize("kind", ["lightning", pytest.param("transformers", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:Agent 1 has heard nothing")  # while agent 0 imports its package
def test_adapters_train_as_a_plain_loop_does(tmp_path, kind):
    """Agent 0 is trained by Lightning or by the Trainer of Hugging Face, with the same batches: the same models."""
    if find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    common = {"rounds": 5, "local_steps": 3, "method": {"name": "caden", "mu_z": 0.1}, "deterministic": False}

    def fleet(name):
        folder = tmp_path / name
        folder.mkdir()
        problem, patient = {"name": "quadratic", "agents": 2, "dim": 2}, {"patience": 100.0}  # imports take long
        fleet_file(folder, "lockstep", problem, {"name": "path"}, fleet=patient, **common)

        def loop(agent):
            if name == "plain" or agent == 1:
                options = {"fleet": folder / "FLEET.toml", "agent": agent, "directory": folder / str(agent)}
                return [p.tolist() for p in adapters.plain(options, agent).parameters()]
            command = [sys.executable, adapters.__file__, kind, folder / "FLEET.toml", str(agent), folder]
            subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True, timeout=100)
            return json.loads((folder / f"{kind}-{agent}.json").read_text())

        return in_threads(2, loop)

    ours, theirs = fleet("plain"), fleet(kind)
    for agent in (0, 1):
        for a, b in zip(ours[agent], theirs[agent], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def started(folder, agent, kind, steps):
    """A peer with a loop of its own, as a process."""
    command = [sys.executable, SCRIPT, "peer", str(folder / f"{agent}.json"), str(folder), str(agent), kind, str(steps)]
    return subprocess.Popen(command, env={**os.environ, "RANK": "0", "OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_a_lockstep_peer_that_is_killed_continues_to_the_same_bits(tmp_path):
    lockstep_fleet(tmp_path, AGENTS, rounds=40)
    peers = {agent: started(tmp_path, agent, "lockstep", 10**6) for agent in range(AGENTS)}
    try:
        assert until(lambda: rounds_of(tmp_path, 1) > 8, 120)
        peers[1].kill()
        peers[1].wait()
        assert rounds_of(tmp_path, 1) < 40
        peers[1] = started(tmp_path, 1, "lockstep", 10**6)
        assert all(peer.wait(200) == 0 for peer in peers.values())
    finally:
        for peer in peers.values():
            peer.kill()
            peer.wait()
    found = [json.loads((tmp_path / f"{agent}.json").read_text()) for agent in range(AGENTS)]
    assert [peer["began"] > 0 for peer in found] == [False, True, False]
    x = own_loops.simulated(caden.methods.caden(mu_z=0.1, solver=ADAMW), 40, 3)
    assert [peer["row"] for peer in found] == [own_loops.digest(row) for row in x]


def rounds_of(folder, agent):
    """How many rows the history of a peer has so far."""
    rows = folder / str(agent) / "metrics.csv"
    return len(rows.read_text().splitlines()) if rows.exists() else 0


def fleet_of_loops(folder, kind, steps, faults):
    """Run six free-running peers; two are killed and restarted, one is frozen for 5 s. Return what they found."""
    method = {"name": "caden", "mu_z": 0.5 if kind == "squares" else 0.1}
    problem, ends = {"name": "quadratic", "agents": 6, "dim": 4}, {"tolerance": 1e-9} if kind == "squares" else {}
    common = {"method": method, "local_steps": 4, "rounds": 10**6, "deterministic": False}
    fleet = {"pace": 0.05, "forget": 120.0, "patience": 120.0}  # on a busy machine a process takes long to start
    fleet_file(folder, "free", problem, fleet=fleet, **common, **ends)
    peers = {agent: started(folder, agent, kind, steps) for agent in range(6)}

    try:
        if faults:
            assert until(lambda: min(rounds_of(folder, agent) for agent in range(6)) > 20, 120)
            for agent in (1, 4):
                peers[agent].kill()
                peers[agent].wait()
            peers |= {agent: started(folder, agent, kind, steps) for agent in (1, 4)}
            peers[2].send_signal(signal.SIGSTOP)
            time.sleep(5)
            peers[2].send_signal(signal.SIGCONT)
        if kind == "digits":  # all stop together, also if some have come back late
            assert until(lambda: min(rounds_of(folder, agent) for agent in range(6)) > 200, 400)
            (folder / "stop").touch()
        assert all(peer.wait(400) == 0 for peer in peers.values())
    finally:
        for peer in peers.values():
            peer.kill()
            peer.wait()
    return [json.loads((folder / f"{agent}.json").read_text()) for agent in range(6)]


@pytest.mark.slow
def test_free_loops_survive_two_kills_and_a_freeze(tmp_path):
    found = fleet_of_loops(tmp_path, "squares", 40_000, faults=True)
    assert [agent for agent, peer in enumerate(found) if peer["began"] > 0] == [1, 4]
    assert max(peer["error"] for peer in found) < 1e-6, found


@pytest.mark.slow
def test_a_network_trained_by_free_loops_loses_little_by_faults(tmp_path):
    accuracy = {}
    for faults in (False, True):
        (tmp_path / str(faults)).mkdir()
        found = fleet_of_loops(tmp_path / str(faults), "digits", 10**6, faults)
        accuracy[faults] = np.mean([peer["accuracy"] for peer in found])
    assert accuracy[True] > accuracy[False] - 0.01, accuracy
