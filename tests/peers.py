"""Fleets for tests: files, peers as threads of this process, peers as processes that can be killed."""

import multiprocessing
import threading
import time
from contextlib import suppress

import tomli_w

from caden.errors import Interrupted, RunError
from caden.experiments.config import experiment
from caden.experiments.peer import run_peer
from caden.networks.peers.fleet import free_ports

QUADRATIC = {"name": "quadratic", "agents": 6, "dim": 4, "seed": 3}


def fleet_file(folder, mode="lockstep", problem=QUADRATIC, graph=None, tls=False, fleet=None, **top):
    """Write FLEET.toml and read it back."""
    agents = problem["agents"]
    endpoints = [f"{'tls' if tls else 'tcp'}/127.0.0.1:{port}" for port in free_ports(agents)]
    table = {
        "rounds": 12,
        "deterministic": True,
        "warmup": {"steps": 0},
        "method": {"name": "radmm", "rho": 0.5},
        "problem": problem,
        "graph": graph or {"name": "ring"},
        **top,
        "fleet": {"name": "test", "mode": mode, "endpoints": endpoints, "patience": 30.0, **(fleet or {})},
    }
    path = folder / "FLEET.toml"
    path.write_text(tomli_w.dumps(table))
    return experiment(path)


def as_threads(config, out, agents=None, stops=None, again=()):
    """Run peers in threads of this process: {agent: result or error}; those in `again` continue when interrupted."""
    found = {}

    def one(agent, stop):
        try:
            own = config.model_copy(deep=True)
            found[agent] = run_peer(own, agent, out / f"agent-{agent}", stop)
        except Exception as error:  # the test looks at it
            found[agent] = error
            if isinstance(error, Interrupted) and agent in again:
                one(agent, None)

    agents = range(len(config.fleet["endpoints"])) if agents is None else agents
    runners = [threading.Thread(target=one, args=(agent, (stops or {}).get(agent))) for agent in agents]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join(120)
    assert not any(runner.is_alive() for runner in runners)
    return found


def until(condition, seconds=10):
    """Wait for something to become true, and say whether it did."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def _process(config, agent, out):
    with suppress(RunError):
        run_peer(config, agent, out / f"agent-{agent}")


def as_process(config, agent, out):
    """Start a peer as a process; importing torch is paid once, by the server that forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["caden.experiments.peer"])
    process = context.Process(target=_process, args=(config, agent, out), daemon=True)
    process.start()
    return process
