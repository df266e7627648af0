"""Peers: the simulator's numbers in lockstep, the minimiser when running free, whatever dies or lies on the way."""

import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import caden
from caden.cli import app
from caden.draws import Draw
from caden.engine import checkpoint
from caden.errors import CadenError, Interrupted, RunError
from caden.experiments.peer import run_peer
from caden.experiments.replay import replay
from caden.networks import Network
from caden.networks.codec import Codec
from caden.networks.peers import Fleet, Free, certify, wire
from caden.networks.peers.certificates import link_errors, require_valid
from caden.networks.peers.fleet import free_ports
from caden.networks.peers.link import ZenohLink
from caden.networks.peers.transports import Received
from conftest import newest
from peers import QUADRATIC, as_process, as_threads, fleet_file, until

pytest.importorskip("zenoh")
runner = CliRunner()


def simulated(config):
    method, problem, graph = config.build()
    return caden.simulate(
        method,
        problem,
        graph,
        config.rounds,
        participation=config.participation,
        local_steps=config.workload,
        seed=config.seed,
        messages=config.messages,
        deterministic=True,
    )


def models(out, agents):
    return torch.cat([checkpoint.load(out / f"agent-{i}" / "weights.safetensors")[0]["x"] for i in range(agents)])


LOCKSTEP = {
    "caden": {"name": "caden", "mu_z": 1.0},
    "caden, auto": {"name": "caden", "relax": 0.8},
    "gt": {"name": "gt", "alpha": 0.05},
    "adapd": {"name": "adapd", "eta": 0.5},
    "radmm": {"name": "radmm", "rho": 0.5},
}


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(
    "method", ["caden", "gt", "adapd", *(pytest.param(m, marks=pytest.mark.slow) for m in ("caden, auto", "radmm"))]
)
def test_lockstep_peers_end_in_the_bits_of_the_simulator(tmp_path, method, participation):
    config = fleet_file(tmp_path, method=LOCKSTEP[method], participation=participation, rounds=7)
    result = simulated(config)
    found = as_threads(config, tmp_path)
    for agent in range(6):
        assert torch.equal(found[agent].x[0], result.x[agent]), found[agent]
        assert found[agent].rows[-1]["communications"] == result.rows[-1]["communications"]


NETWORK = {"name": "classification", "data": "digits", "samples": 200, "test_samples": 50, "agents": 6, "model": "cnn"}
NETWORK |= {"hidden": 8, "dropout": 0.2, "norm": "batch", "batch_size": 8}
ADAM = {"name": "caden", "solver": {"name": "torch_optim", "optimizer": "AdamW", "lr": 0.01}}


def test_peers_train_a_network_on_the_draws_of_the_simulator(tmp_path):
    config = fleet_file(tmp_path, problem=NETWORK, method=ADAM, participation=0.5, local_steps=2, rounds=5)
    result = simulated(config)
    ended = as_threads(config, tmp_path)
    for agent in range(6):
        assert torch.equal(ended[agent].x[0], result.x[agent]), ended[agent]
        assert ended[agent].rows[-1]["accuracy"] is not None


@pytest.mark.slow
def test_free_peers_train_a_network_and_are_replayed(tmp_path):
    config = fleet_file(tmp_path, "free", problem=NETWORK, method=ADAM, local_steps=2, rounds=15)
    ended = as_threads(config, tmp_path)
    assert all(ended[agent].rows[-1]["round"] == 15 for agent in range(6))
    assert all(again.same for again in replay(tmp_path))


LESS = {"bits": {"bits": 3}, "trigger": {"trigger": {"first": 0.3, "decay": 0.9}, "top": 0.5}}


@pytest.mark.parametrize("less", LESS)
@pytest.mark.parametrize("method", ["caden", pytest.param("gt", marks=pytest.mark.slow)])
def test_lockstep_peers_with_short_messages_end_in_the_bits_of_the_simulator(tmp_path, method, less):
    config = fleet_file(tmp_path, method=LOCKSTEP[method], participation=0.7, rounds=9, messages=LESS[less])
    result = simulated(config)
    found = as_threads(config, tmp_path)
    for agent in range(6):
        assert torch.equal(found[agent].x[0], result.x[agent]), found[agent]
    assert sum(peer.rows[-1]["bytes"] for peer in found.values()) == result.rows[-1]["bytes"]  # each counts its own


@pytest.mark.slow
def test_lockstep_ends_when_all_changes_are_small(tmp_path):
    config = fleet_file(tmp_path, method=LOCKSTEP["caden"], rounds=400, tolerance=1e-4)
    found = as_threads(config, tmp_path)
    assert {r.stopped for r in found.values()} == {"tolerance"}
    assert len({r.rows[-1]["round"] for r in found.values()}) == 1
    assert found[0].rows[-1]["round"] < 400
    assert max(r.rows[-1]["change"] for r in found.values()) < 1e-4


@pytest.mark.filterwarnings("always")
def test_a_peer_warns_of_conditions_that_its_method_does_not_survive(tmp_path):
    method = {"name": "dgd", "alpha": 0.05}
    config = fleet_file(tmp_path, method=method, participation=0.5, rounds=2)
    with pytest.warns(UserWarning, match="dgd does not tolerate sleeping agents"):
        as_threads(config, tmp_path)


def test_a_method_with_a_server_is_refused(tmp_path):
    found = as_threads(fleet_file(tmp_path, method={"name": "fedavg"}), tmp_path, agents=[0])
    assert isinstance(found[0], CadenError) and "server" in str(found[0])


def test_only_arc_methods_run_free(tmp_path):
    config = fleet_file(tmp_path, mode="free", method={"name": "gt"}, fleet={"forget": 0.5})
    found = as_threads(config, tmp_path, agents=[0])
    assert isinstance(found[0], CadenError) and "lockstep" in str(found[0])


STRONG = {**QUADRATIC, "condition": 4.0}
FREE = {
    "local_steps": 2,
    "tolerance": 1e-8,
    "rounds": 20000,
    "problem": STRONG,
    "method": {"name": "radmm", "rho": 0.4, "alpha": 0.7},
}


@pytest.mark.slow  # kills and short messages, below, run the same in less time
@pytest.mark.parametrize(
    "method",
    [FREE["method"], {"name": "caden"}, {"name": "caden_gd"}, {"name": "lt_admm"}],
    ids=lambda method: method["name"],
)
def test_free_peers_agree_on_the_minimiser_and_replay_to_the_bit(tmp_path, method):
    config = fleet_file(tmp_path, mode="free", **{**FREE, "method": method}, fleet={"seconds": 60.0})
    found = as_threads(config, tmp_path)
    solution = config.build()[1].solution
    for result in found.values():
        assert result.stopped == "tolerance", result
        assert float((result.x[0] - solution).norm()) < 1e-6
    assert all(again.same for again in replay(tmp_path))


@pytest.mark.filterwarnings("ignore:.*heard nothing from agent")
def test_a_peer_that_is_stopped_before_its_first_step_can_continue(tmp_path):
    config = fleet_file(tmp_path, mode="free", **FREE, fleet={"seconds": 0.5, "forget": 0.5, "patience": 1.0})
    stopped = threading.Event()
    stopped.set()
    (found,) = as_threads(config, tmp_path, [0], {0: stopped}).values()
    assert isinstance(found, Interrupted) and newest_round(tmp_path / "agent-0") == 0
    (again,) = as_threads(config, tmp_path, [0]).values()
    assert isinstance(again, RunError) and "never heard from" in str(again)  # it ran until its time was up


def test_free_peers_refuse_triggers_and_peers_refuse_simulated_faults(tmp_path):
    for mode, messages, word in (("free", {"trigger": 0.1}, "lockstep"), ("lockstep", {"loss": 0.1}, "real one")):
        with pytest.raises(CadenError, match=word):
            Fleet.of(fleet_file(tmp_path, mode=mode, messages=messages))


def test_replies_that_no_peer_would_send_are_refused(tmp_path):
    """Differences that pose as rows, rows that pose as differences, empty ones; the link goes on asking."""
    link = ZenohLink.__new__(ZenohLink)
    like, codec = torch.zeros(12, dtype=torch.float64), Codec(bits=8)
    size = codec.size(4, 8) + 64
    link._codec, link._dim, link._agent, link._folder = codec, 4, 0, None
    link._newest_rows, link.refused, link._fleet = {1: (5, like)}, Counter(), Fleet.of(fleet_file(tmp_path))
    link._zenoh = SimpleNamespace(ZError=OSError)

    def fetched(base, dtype, data):
        header = wire.pack_row(1, 7 if data else 5, base, dtype, len(data), 0, data)
        reply = SimpleNamespace(ok=SimpleNamespace(attachment=header, payload=data))
        link._session = SimpleNamespace(get=lambda selector, timeout: [reply])
        return link._fetch(1, -1, like, 5)

    zeros = torch.zeros(12, dtype=torch.float64)
    assert torch.equal(fetched(-1, torch.float64, bytes(96)).row, zeros)
    assert torch.equal(fetched(5, torch.uint8, bytes(size)).row, zeros)
    assert fetched(5, torch.uint8, b"").row is None  # nothing newer
    for base, dtype, data in (
        (-1, torch.uint8, bytes(size)),
        (5, torch.float64, bytes(96)),
        (-1, torch.uint8, b""),
        (4, torch.uint8, bytes(size)),
        (5, torch.uint8, b"\xff" * size),  # a scale that is not a number
    ):
        assert fetched(base, dtype, data) is None
    assert sum(link.refused.values()) == 5


@pytest.mark.slow
@pytest.mark.parametrize("less", [{"bits": 4}, {"top": 0.3}], ids=str)
def test_free_peers_with_short_messages_are_exact_and_replay_to_the_bit(tmp_path, less):
    """Also with a peer that is stopped and continues, whose neighbours' copies it no longer has."""
    method = {"name": "caden", "mu_z": 0.4, "relax": 0.7}
    config = fleet_file(tmp_path, mode="free", **{**FREE, "method": method, "messages": less}, fleet={"seconds": 60.0})
    stops = {2: threading.Event()}
    threading.Thread(target=lambda: (until(lambda: newest_round(tmp_path / "agent-2") > 15), stops[2].set())).start()
    found = as_threads(config, tmp_path, stops=stops, again={2})
    solution = config.build()[1].solution
    for result in found.values():
        assert not isinstance(result, Exception), result
        assert result.stopped == "tolerance"
        assert float((result.x[0] - solution).norm()) < 1e-6
    lines = [json.loads(line) for line in (tmp_path / "agent-3" / "versions.jsonl").read_text().splitlines()]
    bases = [base for line in lines for path in line.get("paths", {}).values() for _, base in path]
    assert sum(base >= 0 for base in bases) > 0.8 * len(bases)  # nearly all were differences
    assert all(again.same for again in replay(tmp_path))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*heard nothing from agent 5")
def test_a_peer_that_never_heard_a_neighbour_is_not_done_and_continues(tmp_path):
    """Agents 0 to 4 of a ring run without agent 5, whose neighbours must not report success."""
    config = fleet_file(tmp_path, mode="free", **{**FREE, "fleet": {"forget": 1.0, "patience": 4.0, "seconds": 20.0}})
    alone = as_threads(config, tmp_path, [0, 1, 2, 3, 4])
    for agent in (0, 4):
        assert isinstance(alone[agent], RunError) and "never heard from agent 5 (" in str(alone[agent])
        assert not (tmp_path / f"agent-{agent}" / "weights.safetensors").exists()
    assert all(alone[agent].stopped for agent in (1, 2, 3))


def test_a_replay_notices_a_log_that_was_changed(tmp_path):
    config = fleet_file(tmp_path, mode="free", rounds=15)
    as_threads(config, tmp_path)
    log = tmp_path / "agent-2" / "versions.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    step = next(line for line in lines if line["step"] > 2 and line["read"])
    step["read"] = {}
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not all(again.same for again in replay(tmp_path))
    step["read"] = {"1": 99}
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(CadenError, match="inconsistent"):
        replay(tmp_path)


def test_peers_that_are_killed_restarted_and_frozen_still_reach_the_minimiser(tmp_path):
    """6 processes; two die at random moments and come back, one stands still for 5 s; nobody's publish waits."""
    method = {"name": "caden", "relax": 0.7}  # mu_z = "auto"
    config = fleet_file(tmp_path, mode="free", **{**FREE, "method": method}, fleet={"seconds": 100.0, "pace": 0.02})
    chance = random.Random(0)
    crew = {agent: as_process(config, agent, tmp_path) for agent in range(6)}
    try:
        places = [tmp_path / f"agent-{i}" for i in range(6)]
        assert until(lambda: all(any(place.glob("checkpoint.*.safetensors")) for place in places), 60)
        os.kill(crew[4].pid, signal.SIGSTOP)
        frozen = time.monotonic()
        for victim in (1, 2):
            time.sleep(chance.uniform(0.1, 1.0))
            crew[victim].kill()
            crew[victim].join(10)
            assert not (tmp_path / f"agent-{victim}" / "weights.safetensors").exists()  # in the middle of its work
            time.sleep(chance.uniform(0.1, 1.0))
            crew[victim] = as_process(config, victim, tmp_path)
        time.sleep(max(0.0, frozen + 5 - time.monotonic()))
        os.kill(crew[4].pid, signal.SIGCONT)
        for process in crew.values():
            process.join(120)
            assert process.exitcode == 0
    finally:
        for process in crew.values():
            process.kill()
    solution = config.build()[1].solution
    assert float((models(tmp_path, 6) - solution).norm(dim=1).max()) < 1e-6
    for agent in range(6):
        summary = json.loads((tmp_path / f"agent-{agent}" / "summary.json").read_text())
        assert summary["stopped"] == "tolerance"
        if agent != 4:
            assert summary["slowest_publish"] < 1
    assert all(again.same for again in replay(tmp_path))


@pytest.mark.slow
def test_peers_with_certificates_survive_24_kills(tmp_path):
    certify(tmp_path / "certificates", ["127.0.0.1"] * 6)
    fleet = {"seconds": 300.0, "pace": 0.02, "certificates": str(tmp_path / "certificates")}
    config = fleet_file(tmp_path, mode="free", tls=True, **{**FREE, "tolerance": 1e-13}, fleet=fleet)
    chance = random.Random(0)
    crew = {agent: as_process(config, agent, tmp_path) for agent in range(6)}
    folders = [tmp_path / f"agent-{i}" for i in range(6)]
    kills = 0
    try:
        assert until(lambda: all(newest_round(folder) >= 0 for folder in folders), 60)
        for _ in range(24):
            victim = chance.randrange(6)
            time.sleep(chance.uniform(0.0, 0.5))
            kills += crew[victim].is_alive()
            crew[victim].kill()
            crew[victim].join(10)
            time.sleep(chance.uniform(0.0, 0.5))
            if not (folders[victim] / "weights.safetensors").exists():
                crew[victim] = as_process(config, victim, tmp_path)
        for process in crew.values():
            process.join(200)
    finally:
        for process in crew.values():
            process.kill()
    assert kills == 24  # all in the middle of the work
    solution = config.build()[1].solution
    assert float((models(tmp_path, 6) - solution).norm(dim=1).max()) < 1e-10
    assert all(again.same for again in replay(tmp_path))


@pytest.mark.slow
def test_the_fleet_goes_on_to_the_minimiser_of_those_who_remain_and_of_those_who_join(tmp_path):
    """Agent 5 comes late; agent 0 leaves for good: the rest end at the minimiser of the sum without it."""
    graph = {"name": "complete"}
    extra = {"fleet": {"forget": 1.5, "seconds": 60.0}, "graph": graph}
    config = fleet_file(tmp_path, mode="free", **FREE, **extra)
    stops = {agent: threading.Event() for agent in range(6)}
    found = {}
    early = threading.Thread(target=lambda: found.update(as_threads(config, tmp_path, [0], stops)))
    others = threading.Thread(target=lambda: found.update(as_threads(config, tmp_path, [1, 2, 3, 4], stops)))
    early.start(), others.start()
    assert until(lambda: newest_round(tmp_path / "agent-0") > 5, 20)  # it has taken part
    stops[0].set()
    early.join(30)
    found |= as_threads(config, tmp_path, [5], stops)
    others.join(90)
    problem = config.build()[1]
    rest = problem.take([1, 2, 3, 4, 5]).solution
    for agent in range(1, 6):
        assert found[agent].stopped == "tolerance", found[agent]
        assert float((found[agent].x[0] - rest).norm()) < 1e-6
    assert float((rest - problem.solution).norm()) > 1e-2  # and that is another point


@pytest.mark.slow
def test_a_killed_lockstep_peer_comes_back_and_all_end_in_the_same_bits(tmp_path):
    config = fleet_file(tmp_path, method=LOCKSTEP["gt"], participation=0.5, rounds=120)
    crew = {agent: as_process(config, agent, tmp_path) for agent in range(6)}
    try:
        log = tmp_path / "agent-3" / "metrics.csv"
        assert until(lambda: log.exists() and len(log.read_text().splitlines()) >= 20, 60)
        crew[3].kill()
        crew[3].join(10)
        time.sleep(0.5)
        crew[3] = as_process(config, 3, tmp_path)
        for process in crew.values():
            process.join(120)
            assert process.exitcode == 0
    finally:
        for process in crew.values():
            process.kill()
    assert torch.equal(models(tmp_path, 6), simulated(config).x)


@pytest.mark.slow
def test_lockstep_peers_that_are_stopped_and_restarted_still_agree_on_the_end(tmp_path):
    """Wherever a stop finds them, also between a round and the agreement after it."""
    config = fleet_file(tmp_path, method=LOCKSTEP["gt"], rounds=400, participation=0.5, tolerance=1e-2)
    found = {}
    stops = {agent: threading.Event() for agent in range(6)}
    fleet = threading.Thread(target=lambda: found.update(as_threads(config, tmp_path, [0, 1, 2, 4, 5], stops)))
    fleet.start()
    for pause in (0.7, 0.4, 0.55):
        stops[3] = threading.Event()
        timer = threading.Timer(pause, stops[3].set)
        timer.start()
        again = as_threads(config, tmp_path, [3], stops)[3]
        assert isinstance(again, Interrupted), again
    stops[3] = threading.Event()
    found |= as_threads(config, tmp_path, [3], stops)
    fleet.join(120)
    assert {r.stopped for r in found.values()} == {"tolerance"}, found
    whole = fleet_file(tmp_path, method=LOCKSTEP["gt"], rounds=found[0].rows[-1]["round"], participation=0.5)
    assert torch.equal(models(tmp_path, 6), simulated(whole).x)


def test_in_lockstep_the_time_is_up_for_all_at_once(tmp_path):
    config = fleet_file(tmp_path, method=LOCKSTEP["caden"], rounds=100_000, fleet={"seconds": 1.5})
    found = as_threads(config, tmp_path)
    assert {r.stopped for r in found.values()} == {"seconds"}, found
    assert len({r.rows[-1]["round"] for r in found.values()}) == 1


@pytest.mark.slow
def test_a_peer_that_comes_back_after_the_others_have_finished_keeps_what_it_had(tmp_path):
    """Its neighbours are gone but counted: it does not minimise its own function alone."""
    config = fleet_file(tmp_path, mode="free", **FREE, fleet={"forget": 20.0})
    stops = {agent: threading.Event() for agent in range(6)}
    threading.Timer(4.0, stops[2].set).start()
    slow = config.model_copy(update={"tolerance": None, "rounds": 10**6})
    rest = [threading.Timer(6.0, stops[agent].set) for agent in (0, 1, 3, 4, 5)]
    for timer in rest:
        timer.start()
    found = as_threads(slow, tmp_path, stops=stops)
    assert all(isinstance(error, Interrupted) for error in found.values()), found
    alone = slow.model_copy(update={"fleet": {**slow.fleet}})
    stops[2] = threading.Event()
    threading.Timer(3.0, stops[2].set).start()
    as_threads(alone, tmp_path, [2], stops)
    x = checkpoint.load(newest(tmp_path / "agent-2")).tensors["state.x"]
    assert float((x[0] - config.build()[1].solution).norm()) < 1e-3
    assert all(again.same for again in replay(tmp_path))


def test_large_rows_get_through_although_newer_ones_appear_meanwhile(tmp_path):
    config = fleet_file(tmp_path, "free")
    zero, one = (link_of(config, agent, dim=2_500_000) for agent in (0, 1))
    try:
        row = torch.ones(2_500_000, dtype=torch.float64)
        for version in range(150):
            one.publish(version, {0: row * version, 2: row})
            if 1 in zero.read(0):
                break
            time.sleep(0.02)
        assert until(lambda: 1 in zero.read(0), 5)
        version, got, _ = zero.read(0)[1]
        assert torch.equal(got, row * version)
    finally:
        zero.close(), one.close()


def test_starting_points_are_not_taken_for_messages(tmp_path):
    """A late joiner's version 0 is its start; what others say later is not theirs."""
    graph, problem = caden.graphs.ring(6), caden.problems.quadratic(agents=6, dim=4)
    everyone, work = torch.ones(6, dtype=torch.bool), torch.ones(6, dtype=torch.int64)

    class Fixed:
        def __init__(self, version):
            self.version = version

        def members(self, step):
            return {1}

        def read(self, step):
            return {1: Received(self.version, torch.ones(4, dtype=torch.float64), [])}

        def publish(self, version, rows):
            pass

        def life(self, step, own):
            return own

    for version, index in ((0, 3), (7, -1)):
        free = Free(0, Fixed(version))
        network = Network(graph, problem.take([0]), Draw(0, 6), True, transport=free)
        context = network.round(index, everyone, work, problem)
        if index < 0:
            context.broadcast(torch.zeros(1, 4, dtype=torch.float64))
        else:
            assert not context.exchange(torch.zeros(4, 4, dtype=torch.float64))[1].any()
        assert free.fresh == {}


def test_wire_bytes_are_what_the_method_needs(tmp_path):
    """d = 100,000: within 2 % of one row per directed edge and round."""
    problem = {"name": "logistic", "agents": 3, "samples": 4, "dim": 100_000}
    config = fleet_file(tmp_path, problem=problem, method={"name": "gt", "alpha": 0.01}, rounds=20)
    found = as_threads(config, tmp_path)
    sent = sum(result.rows[-1]["wire_bytes"] for result in found.values())

    needed = found[0].rows[-1]["bytes"]
    assert needed <= sent <= 1.02 * needed


def test_a_clipped_message_moves_no_further_than_allowed():
    class Silent:
        def members(self, step):
            return {1, 5}

        def read(self, step):
            return {1: Received(step + 2, torch.full((4,), 10.0 * (step + 2), dtype=torch.float64), [])}

        def publish(self, version, rows):
            pass

        def life(self, step, own):
            return own

    problem, graph = caden.problems.quadratic(agents=6, dim=4), caden.graphs.ring(6)
    network = Network(graph, problem.take([0]), Draw(0, 6), True, transport=Free(0, Silent(), clip=2.0))
    everyone, work = torch.ones(6, dtype=torch.bool), torch.ones(6, dtype=torch.int64)
    got = []
    for index in range(3):
        context = network.round(index, everyone, work, problem)
        received, arrived = context.exchange(torch.zeros(4, 4, dtype=torch.float64))
        got.append(received[arrived.squeeze(1)][0])
    assert torch.allclose(got[0].norm(), torch.tensor(2.0, dtype=torch.float64))  # the first is compared with our own
    assert torch.allclose((got[1] - got[0]).norm(), torch.tensor(2.0, dtype=torch.float64))
    assert torch.allclose((got[2] - got[1]).norm(), torch.tensor(2.0, dtype=torch.float64))


def test_messages_are_what_was_packed_and_nothing_else():
    table = [wire.Entry(5, 2, 0), wire.Entry(-1, 0, 0)]
    note = wire.pack_note(1, 9, 4, table)
    assert wire.unpack_note(note, 1, 2) == (9, 4, table)
    chunk = bytes(range(64))
    header = wire.pack_row(1, 7, -1, torch.float64, 64, 0, chunk)
    assert wire.read_row_header(header, 1, {torch.float64: 64}, 0, 64).version == 7
    chance = random.Random(1)
    for _ in range(1000):
        place, bit = chance.randrange(len(note)), 1 << chance.randrange(8)
        bad = bytes(b ^ (bit if n == place else 0) for n, b in enumerate(note))
        with pytest.raises(wire.Refused):
            wire.unpack_note(bad[: chance.choice([len(bad), chance.randrange(len(bad))])], 1, 2)
    for wrong in (
        (header, 2, {torch.float64: 64}, 0, 64),
        (header, 1, {torch.float32: 64}, 0, 64),
        (header, 1, {torch.float64: 128, torch.uint8: 64}, 0, 64),
        (header, 1, {torch.float64: 64}, 0, 32),
        (header[:-1], 1, {torch.float64: 64}, 0, 64),
    ):
        with pytest.raises(wire.Refused):
            wire.read_row_header(*wrong)


# Strangers, liars and noise.


def raw_session(endpoint, certificates=None, agent=1):
    """A Zenoh session without any of our checks."""
    import zenoh

    config = zenoh.Config()
    settings = {"mode": "client", "connect/endpoints": [endpoint], "scouting/multicast/enabled": False}
    settings |= {"connect/exit_on_failure": False, "connect/timeout_ms": 3000}
    if certificates is not None:
        own = {"private_key": f"{certificates}/agent-{agent}.key", "certificate": f"{certificates}/agent-{agent}.pem"}
        tls = {f"{side}_{k}": v for side in ("listen", "connect") for k, v in own.items()}
        settings["mode"] = "peer"
        settings["listen/endpoints"] = []
        settings["transport/link/tls"] = {"root_ca_certificate": f"{certificates}/ca.pem", "enable_mtls": True, **tls}
    for key, value in settings.items():
        config.insert_json5(key, json.dumps(value))
    return zenoh.open(config)


def link_of(config, agent, dim=4):
    fleet, graph = Fleet.of(config), config.build()[2]
    return ZenohLink(fleet, graph, agent, torch.empty(dim, dtype=torch.float64))


def test_with_certificates_only_the_fleet_gets_in_and_everyone_speaks_for_themselves(tmp_path):
    certify(tmp_path / "good", ["127.0.0.1"] * 6)
    certify(tmp_path / "other", ["127.0.0.1"] * 6)
    config = fleet_file(tmp_path, "free", tls=True, fleet={"certificates": str(tmp_path / "good")})
    stranger = config.model_copy(update={"fleet": {**config.fleet, "certificates": str(tmp_path / "other")}})
    note = [wire.pack_note(j, 3, 3, [wire.Entry()] * 6) for j in range(6)]
    zero, links = link_of(config, 0), []
    try:
        links.append(link_of(stranger, 1))  # of another authority
        assert not until(lambda: zero.silent(1) < 60 or links[0].silent(0) < 60, 3)
        links[0].close()
        liar = raw_session(config.fleet["endpoints"][0], tmp_path / "good", agent=1)  # a true certificate of agent 1
        for _ in range(20):
            liar.put("test/note/5", note[5])
            liar.put("test/note/1", note[1])
            time.sleep(0.05)
        assert zero.silent(1) < 5  # what it says as itself is heard
        assert zero.silent(5) == float("inf")  # what it says as agent 5 is not
        liar.close()
        links.append(link_of(config, 5))
        assert until(lambda: zero.silent(5) < 60 and links[1].silent(0) < 60)
        row = torch.arange(4, dtype=torch.float64)
        links[1].publish(0, {0: row, 4: row})
        assert until(lambda: 5 in zero.read(0)) and torch.equal(zero.read(0)[5][1], row)
    finally:
        zero.close()
        for link in links:
            link.close()


def memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Listener:
    """An endpoint with the certificate of an agent, as a peer would have it."""

    def __init__(self, folder, agent):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / f"agent-{agent}.pem", folder / f"agent-{agent}.key")
        context.load_verify_locations(folder / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        self._context = context
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                plain, _ = self.socket.accept()
                with suppress(OSError), self._context.wrap_socket(plain, server_side=True) as secure:
                    secure.settimeout(1)
                    secure.recv(1)
            except OSError:
                return


def test_links_say_why_they_do_not_stand(tmp_path):
    """A neighbour that is up, one of another authority, one that refuses ours, and one that is not there."""
    ours, others = tmp_path / "ours", tmp_path / "others"
    certify(ours, ["127.0.0.1"] * 4), certify(others, ["127.0.0.1"] * 4)
    up, stranger = Listener(ours, 1), Listener(others, 2)
    (closed,) = free_ports(1)
    ports = [closed, up.port, stranger.port, closed]
    fleet = Fleet(name="x", endpoints=[f"tls/127.0.0.1:{port}" for port in ports], certificates="ours")
    errors = link_errors(fleet, caden.graphs.complete(4), 0, tmp_path)
    up.socket.close(), stranger.socket.close()
    assert errors[1] == "" and "certificate is refused here" in errors[2] and "refused" in errors[3]


def test_certificates_that_neighbours_would_refuse_are_refused_at_once(tmp_path):
    folder, now = tmp_path / "own", datetime.now(UTC)
    certify(folder, ["127.0.0.1"] * 2)
    require_valid(folder, 0)
    with pytest.raises(CadenError, match=r"is not valid before .* is the clock here right"):
        require_valid(folder, 0, now - timedelta(hours=1))
    with pytest.raises(CadenError, match=r"expired on .*caden fleet renew"):
        require_valid(folder, 0, now + timedelta(days=400))
    with pytest.warns(UserWarning, match="expires on"):
        require_valid(folder, 0, now + timedelta(days=350))
    certify(tmp_path / "foreign", ["127.0.0.1"] * 2)
    shutil.copy(tmp_path / "foreign" / "ca.pem", folder / "ca.pem")
    with pytest.raises(CadenError, match="was not signed by the authority"):
        require_valid(folder, 0)
    (folder / "agent-0.pem").write_text("nothing")
    with pytest.raises(CadenError, match="is not a certificate"):
        require_valid(folder, 0)


def test_certificates_can_be_renewed_and_links_checked_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runner.invoke(app, ["fleet", "init", "--agents", "3", "--tls"]).exit_code == 0
    before = (tmp_path / "FLEET-certificates" / "ca.pem").read_bytes()
    renewed = runner.invoke(app, ["fleet", "renew", "FLEET.toml"])
    assert renewed.exit_code == 0 and "restart all peers" in renewed.stdout
    assert (tmp_path / "FLEET-certificates" / "ca.pem").read_bytes() != before
    (old,) = tmp_path.glob("FLEET-certificates.old-*")
    assert (old / "ca.pem").read_bytes() == before
    checked = runner.invoke(app, ["fleet", "check", "FLEET.toml", "--agent", "0"])
    assert checked.exit_code == 1 and checked.stdout.count("refused") == 2


def test_a_thousand_malformed_messages_leave_the_receiver_running(tmp_path):
    config = fleet_file(tmp_path, "free")
    zero, five = link_of(config, 0), link_of(config, 5)
    noise, chance = raw_session(config.fleet["endpoints"][0]), random.Random(2)
    good = wire.pack_note(1, 1, 1, [wire.Entry()] * 6)
    rows = [
        (b"", b""),
        (bytes(32), b"x" * 7),
        (bytes(5_000_000), b""),  # more than a link takes
        (bytes(32), wire.pack_row(1, 1, -1, torch.float64, 1 << 50, 0, bytes(32))),  # of an absurd size
        (bytes(16), wire.pack_row(1, 1, -1, torch.float32, 16, 0, bytes(16))),
        (bytes(32), wire.pack_row(2, 1, -1, torch.float64, 32, 0, bytes(32))),
        (b"\xff" * 32, wire.pack_row(1, 1, -1, torch.float64, 32, 0, b"\xff" * 32)),  # NaN
        (bytes(32), wire.pack_row(1, 1, -1, torch.float64, 32, 0, b"y" * 32)),  # a false checksum
        (bytes(32), wire.pack_row(1, -3, -1, torch.float64, 32, 0, bytes(32))),
    ]
    asked = 0

    def answer(query):
        nonlocal asked
        payload, header = rows[asked % len(rows)]
        asked += 1
        query.reply(query.key_expr, payload, attachment=header)

    try:
        held = noise.declare_queryable("test/row/1/0", answer)
        assert until(lambda: zero.silent(5) < 60)
        before = memory()
        for number in range(1000):
            size = chance.choice([0, 1, len(good) - 1, len(good), 200, 3_000_000 if number % 50 == 0 else 300])
            noise.put("test/note/1", chance.randbytes(size))
            if number % 10 == 0:
                noise.put("test/note/1", good)  # promises a row, which then is not one
                noise.get("test/row/0/1?v=x;o=-1", timeout=1.0), noise.get("test/row/0/5?v=0", timeout=1.0)
            time.sleep(0.002)
        assert until(lambda: asked >= 2 * len(rows))
        assert sum(zero.refused.values()) > 500
        assert 1 not in zero.read(0)
        assert memory() - before < 150e6
        row = torch.arange(4, dtype=torch.float64)
        five.publish(0, {0: row, 4: row})
        assert until(lambda: 5 in zero.read(0)) and torch.equal(zero.read(0)[5][1], row)
        held.undeclare()
    finally:
        noise.close(), zero.close(), five.close()


def test_old_versions_are_refused_and_reported(tmp_path):
    config = fleet_file(tmp_path, "free")
    zero = link_of(config, 0)
    peer = raw_session(config.fleet["endpoints"][0])
    try:
        for version in (5, 3):
            note = wire.pack_note(1, version, version, [wire.Entry()] * 6)
            assert until(lambda note=note: (peer.put("test/note/1", note), zero.silent(1) < 0.1)[1])
        assert until(lambda: any("old version" in why for _, why in zero.refused))
    finally:
        peer.close(), zero.close()


# Peers that lost steps, neighbours that are not there, and neighbours that lie.


def test_a_peer_without_its_directory_begins_another_life_that_is_accepted_at_once(tmp_path):
    config = fleet_file(tmp_path, "free", **{**FREE, "tolerance": 1e-9}, fleet={"seconds": 60.0})
    stops, found = {agent: threading.Event() for agent in range(6)}, {}
    first = threading.Thread(target=lambda: found.update(as_threads(config, tmp_path, [2], stops)))
    others = threading.Thread(target=lambda: found.update(as_threads(config, tmp_path, [0, 1, 3, 4, 5], stops)))
    others.start(), first.start()

    def versions_read(agent):
        log = tmp_path / f"agent-{agent}" / "versions.jsonl"
        lines = log.read_text().splitlines()[:-1] if log.exists() else []
        return [-1, *(json.loads(line)["read"].get("2", -1) for line in lines)]

    assert until(lambda: max(versions_read(1)) > 30, 30)
    stops[2].set()
    first.join(30)
    shutil.rmtree(tmp_path / "agent-2")
    began, known = time.monotonic(), max(versions_read(1))
    stops[2].clear()
    again = threading.Thread(target=lambda: found.update(as_threads(config, tmp_path, [2])))
    again.start()
    assert until(lambda: max(versions_read(1)) >= wire.LIFE, 10), (known, max(versions_read(1)))
    assert time.monotonic() - began < 5  # it did not have to repeat `known` steps first
    again.join(90), others.join(90)
    solution = config.build()[1].solution
    for agent, result in found.items():
        assert result.stopped == "tolerance", (agent, result)
        assert float((result.x[0] - solution).norm()) < 1e-6
    with pytest.raises(CadenError, match="Agent 2 lost steps that its neighbours had read"):
        replay(tmp_path)


def test_a_peer_that_fell_behind_what_its_neighbours_know_is_in_another_life(tmp_path):
    """After a power cut, a peer may be some steps behind: a neighbour's notice tells it."""
    config = fleet_file(tmp_path, "free")
    zero, peer = link_of(config, 0), raw_session(config.fleet["endpoints"][0])
    try:
        assert zero.life(50, 0) == 0
        table = [wire.Entry(57, 0, 0), *[wire.Entry()] * 5]  # agent 1 knows step 57 of agent 0
        note = wire.pack_note(1, 60, 60, table)
        assert until(lambda: (peer.put("test/note/1", note), zero.life(50, 0) == 1)[1])
        assert zero.life(57, 0) == 0 and zero.life(3, 1) == 1
        lie = wire.pack_note(1, 60, 60, [wire.Entry(wire.LIVES * wire.LIFE, 0, 0), *[wire.Entry()] * 5])
        assert until(lambda: (peer.put("test/note/1", lie), any("absurd" in why for _, why in zero.refused))[1])
        assert zero.life(50, 0) == 1
    finally:
        peer.close(), zero.close()


def test_formats_are_named_when_they_differ(tmp_path):
    old = wire.pack_note(1, 9, 4, [wire.Entry()] * 2).replace(b"cdn3", b"cdn1")
    with pytest.raises(wire.Refused, match="format 1, and this version speaks format 3"):
        wire.unpack_note(old, 1, 2)
    row = wire.pack_row(1, 7, -1, torch.float64, 64, 0, bytes(64)).replace(b"cdn3", b"cdn1")
    with pytest.raises(wire.Refused, match="format 1, and this version speaks format 3"):
        wire.read_row_header(row, 1, {torch.float64: 64}, 0, 64)
    with pytest.raises(CadenError, match=r"`fleet\.format` is 7, and this version reads format 1"):
        Fleet.of(fleet_file(tmp_path, fleet={"format": 7}))


@pytest.mark.filterwarnings("ignore:.*heard nothing from agent 1")
def test_a_neighbour_of_another_authority_is_named_with_the_cause(tmp_path):
    """Within 15 s of the start, in a warning and in the last line."""
    certify(tmp_path / "ours", ["127.0.0.1"] * 2), certify(tmp_path / "theirs", ["127.0.0.1"] * 2)
    problem = {**QUADRATIC, "agents": 2}
    config = fleet_file(
        tmp_path,
        "free",
        problem,
        {"name": "path"},
        True,
        {"certificates": str(tmp_path / "ours"), "seconds": 5.0, "forget": 1.0},
    )
    stranger = Listener(tmp_path / "theirs", 1)
    config.fleet["endpoints"][1] = f"tls/127.0.0.1:{stranger.port}"
    began = time.monotonic()
    try:
        with pytest.raises(RunError, match=r"never heard from agent 1 \(its certificate is refused here: "):
            run_peer(config, 0, tmp_path / "agent-0")
    finally:
        stranger.socket.close()
    assert time.monotonic() - began < 15


@pytest.mark.filterwarnings("ignore:.*heard nothing from agent")
def test_a_lockstep_peer_that_lost_its_directory_says_so(tmp_path):
    config = fleet_file(tmp_path, "lockstep", rounds=100000)
    stops = {agent: threading.Event() for agent in range(6)}
    crew = [
        threading.Thread(target=as_threads, args=(config, tmp_path, part, stops)) for part in ([0, 1, 3, 4, 5], [2])
    ]
    for thread in crew:
        thread.start()
    try:
        assert until(lambda: newest_round(tmp_path / "agent-2") > 20, 30)
        stops[2].set()
        crew[1].join(30)
        shutil.rmtree(tmp_path / "agent-2")
        (again,) = as_threads(config, tmp_path, [2]).values()
        assert isinstance(again, RunError) and "agent 2 has lost its directory" in str(again)
    finally:
        for stop in stops.values():
            stop.set()
        crew[0].join(60)


def newest_round(folder):
    return max((int(path.name.split(".")[1]) for path in folder.glob("checkpoint.*.safetensors")), default=-1)


def test_claims_of_calm_do_not_end_an_agent_that_is_not_calm(tmp_path):
    config = fleet_file(tmp_path, "free")
    zero, peer = link_of(config, 0), raw_session(config.fleet["endpoints"][0])
    try:
        zero.report_progress(10, calm=3)
        note = wire.pack_note(1, 60, 60, [wire.Entry(60, 99, wire.AGREED)] * 6)
        assert until(lambda: (peer.put("test/note/1", note), zero.table[3].calm == 99)[1])
        assert not zero.agreed(20)
        zero.report_progress(11, calm=20)
        assert zero.agreed(20)
    finally:
        peer.close(), zero.close()


class LyingLink(ZenohLink):
    """The link of a peer that adds 1,000 to every number that it sends."""

    def publish(self, version, rows):
        super().publish(version, {j: row + 1e3 for j, row in rows.items()})


@pytest.mark.slow
@pytest.mark.parametrize(("method", "bounded"), [("clipped_gossip", True), ("radmm", False)])
def test_one_liar_of_six_moves_clipped_gossip_no_further_than_honest_agents_differ(tmp_path, method, bounded):
    parameters = {"clipped_gossip": {"alpha": 0.05, "faulty": 1}, "radmm": {"rho": 0.4}}[method]
    rounds = 120 if bounded else 30
    config = fleet_file(
        tmp_path, "free", STRONG, {"name": "complete"}, rounds=rounds, method={"name": method, **parameters}
    )
    found = {}

    def run(agent):
        kind = LyingLink if agent == 5 else ZenohLink
        found[agent] = run_peer(config.model_copy(deep=True), agent, tmp_path / f"agent-{agent}", link_type=kind)

    crew = [threading.Thread(target=run, args=(agent,)) for agent in range(6)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(120)
    problem = config.build()[1]
    honest = problem.take([0, 1, 2, 3, 4])
    own = torch.linalg.solve(honest.hessian, honest.linear)  # each one's own minimiser
    spread = float((own - honest.solution).norm(dim=1).max())
    worst = max(float((found[agent].x[0] - honest.solution).norm()) for agent in range(5))
    assert (worst < spread) == bounded, (worst, spread)


# The commands.


def test_fleet_files_are_checked_in_one_line(tmp_path):
    for wrong, said in (
        ({"mode": "often"}, "mode"),
        ({"pace": -1.0}, "pace"),
        ({"colour": 1}, "colour"),
        ({"name": "a/b"}, "plain word"),
        ({"endpoints": ["udp/1:2"] * 6}, "tcp/HOST:PORT"),
        ({"endpoints": ["tls/h:2"] * 6}, "certificates"),
        ({"endpoints": ["tcp/h:2"]}, "1 entries for 6"),
        ({"calm": 0}, "calm"),
        ({"name": ".."}, "plain word"),
    ):
        config = fleet_file(tmp_path, fleet=wrong)
        with pytest.raises(CadenError, match=said):
            run_peer(config, 0, tmp_path / "x")
    for top in ({"rounds": -1}, {"record_every": 0}, {"tolerance": -1.0}):
        with pytest.raises(CadenError, match=next(iter(top))):
            Fleet.of(fleet_file(tmp_path, **top))
    (tmp_path / "taken").mkdir()
    with pytest.raises(CadenError, match="another fleet file"):
        run_peer(fleet_file(tmp_path), 0, tmp_path / "taken")
    with pytest.raises(CadenError, match="lockstep"):
        Fleet.of(fleet_file(tmp_path, "free", participation=0.5))
    with pytest.raises(CadenError, match="remove them"):
        Fleet.of(fleet_file(tmp_path, messages={"loss": 0.1}))
    with pytest.raises(CadenError, match=r"0\.\.5"):
        run_peer(fleet_file(tmp_path), 6, tmp_path / "x")


@pytest.mark.slow
def test_init_writes_a_fleet_that_runs_and_can_be_simulated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = runner.invoke(app, ["fleet", "init", "--agents", "3", "--lockstep", "--tls"])
    assert said.exit_code == 0, said.output
    assert (tmp_path / "FLEET-certificates" / "agent-2.key").stat().st_mode & 0o077 == 0
    text = (tmp_path / "FLEET.toml").read_text().replace("rounds = 200", "rounds = 3")
    (tmp_path / "FLEET.toml").write_text(text + "[warmup]\nsteps = 2\n")
    command = [sys.executable, "-m", "caden", "fleet", "FLEET.toml", "--out", "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 3 and max(map(len, done.stdout.splitlines())) <= 80
    run = runner.invoke(app, ["run", "FLEET.toml", "--out", "simulated"])
    assert run.exit_code == 0, run.output
    assert torch.equal(models(tmp_path / "run", 3), checkpoint.load(tmp_path / "simulated/weights.safetensors")[0]["x"])
    again = runner.invoke(app, ["fleet", "init"])
    assert isinstance(again.exception, CadenError) and "already exists" in str(again.exception)
    twice = runner.invoke(app, ["peer", "FLEET.toml", "--agent", "0", "--out", "run"])
    assert "has finished" in str(twice.exception)
    assert "lockstep" in str(runner.invoke(app, ["replay", "run"]).exception)


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def namespaces():
    """Three network namespaces in a ring of cables, agent i at 10.77.i.i; needs root."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip`")
    mark = f"caden{os.getpid()}"
    names = [f"{mark}n{i}" for i in range(3)]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        for i, name in enumerate(names):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"10.77.{i}.{i}/32", "dev", "lo")
        for a, b in ((0, 1), (1, 2), (0, 2)):
            ends = [f"c{a}{b}x{i}" for i in (a, b)]
            _ip("link", "add", ends[0], "netns", names[a], "type", "veth", "peer", ends[1], "netns", names[b])
            for here, there, end in ((a, b, ends[0]), (b, a, ends[1])):
                _ip("-n", names[here], "link", "set", end, "up")
                route = ["route", "add", f"10.77.{there}.{there}/32", "dev", end, "src", f"10.77.{here}.{here}"]
                _ip("-n", names[here], *route)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


@pytest.mark.slow
def test_peers_with_addresses_of_their_own_survive_a_cut_cable(tmp_path, namespaces):
    problem = {**STRONG, "agents": 3}
    endpoints = [f"tcp/10.77.{i}.{i}:7447" for i in range(3)]
    extra = {"seconds": 60.0, "endpoints": endpoints, "calm": 60}
    fleet_file(tmp_path, "free", **{**FREE, "problem": problem}, fleet=extra)
    command = [sys.executable, "-m", "caden", "peer", str(tmp_path / "FLEET.toml"), "--out", str(tmp_path), "--agent"]
    crew = [
        subprocess.Popen(["ip", "netns", "exec", name, *command, str(i)], stderr=subprocess.PIPE, text=True)
        for i, name in enumerate(namespaces)
    ]
    try:
        places = [tmp_path / f"agent-{i}" for i in range(3)]
        assert until(lambda: all(any(place.glob("checkpoint.*.safetensors")) for place in places), 60)
        _ip("-n", namespaces[0], "link", "set", "c01x0", "down")
        time.sleep(3)  # longer than a link's lease
        _ip("-n", namespaces[0], "link", "set", "c01x0", "up")
        _ip("-n", namespaces[0], "route", "add", "10.77.1.1/32", "dev", "c01x0", "src", "10.77.0.0")
        for process in crew:
            error = process.communicate(timeout=90)[1]
            assert process.returncode == 0, error
    finally:
        for process in crew:
            process.kill()
    up = [int(line.split(",")[8]) for line in (places[0] / "metrics.csv").read_text().splitlines()[1:]]
    assert min(up[20:]) == 1 and up[-1] == 2  # it was noticed, and is over
    rows = [json.loads((place / "summary.json").read_text()) for place in places]
    assert {row["stopped"] for row in rows} == {"tolerance"}
    solution = caden.problems.quadratic(agents=3, dim=4, seed=3, condition=4.0).solution
    assert float((models(tmp_path, 3) - solution).norm(dim=1).max()) < 1e-6
    assert all(again.same for again in replay(tmp_path))
