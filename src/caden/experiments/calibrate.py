"""Measure a machine and a link, for the simulator's clock.

A machine: one agent of an experiment makes its steps as a peer does, with checkpoints and metrics. Its neighbours are
an echo first, and then live in the same process and talk to it over real links on this machine. They do as much for
these links as the agent does, so half of the additional processor time is what the links cost it.

A link: `answer` listens on one machine, and `measure_link` on another asks it for some bytes over TCP, one connection
for all. Half of the shortest round trip is the latency.
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch
from torch import Tensor

from caden import schedules
from caden.engine.history import Row
from caden.engine.metrics import on_test_data
from caden.engine.options import Conditions
from caden.engine.process import deterministic_mode
from caden.engine.recorder import Recorder
from caden.engine.run import Run
from caden.engine.simulate import prepare
from caden.errors import CadenError, RunError, require_integer
from caden.experiments.config import Experiment
from caden.graphs import star
from caden.networks.peers.fleet import FORMAT, Fleet, free_ports
from caden.networks.peers.transports import Lockstep, Received

LARGEST = 1 << 26  # bytes that one request may ask for
PINGS = 10
LONG = 0.5  # seconds of sending that are enough for a bandwidth


class Machine(NamedTuple):
    """Seconds per gradient, and per step besides; `serve` is work that may pass while the agent waits."""

    compute: float
    overhead: float
    serve: float


class Line(NamedTuple):
    """Seconds one way, and bytes per second."""

    latency: float
    bandwidth: float


class _Echo:
    """Neighbours that send back what they receive."""

    def __init__(self) -> None:
        self._rows: Mapping[int, Tensor] = {}

    def publish(self, version: int, rows: Mapping[int, Tensor]) -> None:
        self._rows = rows

    def wait(self, neighbour: int, version: int, like: Tensor) -> Tensor:
        return self._rows.get(neighbour, like).clone()

    def life(self, step: int, own: int) -> int:
        return own

    def members(self, step: int) -> set[int]:
        return set(self._rows)

    def read(self, step: int) -> dict[int, Received]:
        return {}

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def close(self) -> None:
        """There is nothing to close."""


class _Neighbours(_Echo):
    """The same over real links on this machine: an agent in the middle of a star, and its neighbours around it."""

    def __init__(self, neighbours: list[int], like: Tensor):
        from caden.networks.peers.link import ZenohLink

        super().__init__()
        count = len(neighbours) + 1
        endpoints = [f"tcp/127.0.0.1:{port}" for port in free_ports(count)]
        fleet = Fleet(format=FORMAT, name=f"measure-{secrets.token_hex(3)}", mode="lockstep", endpoints=endpoints)
        self._ends = {j: number for number, j in enumerate(neighbours, 1)}
        self._links = [ZenohLink(fleet, star(count), number, like) for number in range(count)]
        self._waiters = ThreadPoolExecutor(len(neighbours) or 1)

    def publish(self, version: int, rows: Mapping[int, Tensor]) -> None:
        middle, *around = self._links
        middle.publish(version, {self._ends[j]: row for j, row in rows.items()})
        for j, row in rows.items():
            link = around[self._ends[j] - 1]
            link.publish(version, {0: row})
            self._waiters.submit(link.wait, 0, version, row)

    def wait(self, neighbour: int, version: int, like: Tensor) -> Tensor:
        return self._links[0].wait(self._ends[neighbour], version, like)

    def buffers(self) -> dict[str, Tensor]:
        return self._links[0].buffers()

    def close(self) -> None:
        self._waiters.shutdown()
        for link in self._links:
            link.close()


def measure_machine(config: Experiment, agent: int = 0, steps: int = 20) -> Machine:
    """Time the steps of one agent on this machine."""
    require_integer("agent", agent), require_integer("steps", steps, least=1)

    def hosted(graph: Any) -> list[int]:
        if agent >= graph.agents:
            raise CadenError(f"`agent` must lie in 0..{graph.agents - 1}, got {agent}.")
        return [agent]

    built = config.build(hosted)
    alone = linked = _measure_steps(config, agent, steps, built, _Echo())
    if importlib.util.find_spec("zenoh"):  # without the extra "peers" there are no links
        _, problem, graph = built
        like, neighbours = torch.empty(problem.dim, dtype=problem.dtype), graph.neighbours(agent)
        linked = _measure_steps(config, agent, steps, built, _Neighbours(neighbours, like))
    links = max(linked.processor - alone.processor, 0.0) / 2
    serve = links / 2 * alone.seconds / alone.processor  # its own row; the other half is for those that it fetches
    overhead = alone.seconds - alone.gradient_seconds + serve
    return Machine(alone.gradient_seconds / alone.gradients, max(overhead, 0.0), serve)


class _Step(NamedTuple):
    """What a step takes, on average or by itself."""

    gradients: float
    gradient_seconds: float
    seconds: float
    processor: float  # seconds of all threads


def _measure_steps(config: Experiment, agent: int, steps: int, built: Any, link: _Echo) -> _Step:
    method, problem, graph = built
    conditions = Conditions(schedules.from_spec(config.participation), config.workload, config.messages)
    run, start = prepare(method, problem, graph, conditions, config.seed, Lockstep(agent, link))
    run.rounds = steps + 1
    with tempfile.TemporaryDirectory() as folder, deterministic_mode(config.deterministic), closing(link):
        recorder = Recorder(run, Path(folder) / "run", _row)
        with closing(recorder):
            run.begin(start)
            recorder.create("", config.seed)
            measured = [_step(run, recorder, config.record_every, link) for _ in range(steps + 1)]
    measured = [m for m in measured[1:] if m.gradients]  # not the first, which prepares; not those asleep
    if not measured:
        raise CadenError("The agent slept through all steps: raise `participation` or `--steps`.")
    return _Step(*(sum(values) / len(measured) for values in zip(*measured)))


def _step(run: Run, recorder: Recorder, record_every: int, link: _Echo) -> _Step:
    """Make a step as a peer does."""
    before = run.problem.gradients, run.problem.seconds, time.perf_counter(), time.process_time()
    run.step()
    recorder.save(link.buffers(), sync=False)
    if run.index % record_every == 0:
        recorder.record()
    after = run.problem.gradients, run.problem.seconds, time.perf_counter(), time.process_time()
    return _Step(*(b - a for a, b in zip(before, after)))


def _row(run: Run, exact: bool, last: bool) -> Row:
    return {"round": run.index, "gradients": run.problem.gradients, **on_test_data(run, exact or last)}


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CadenError(f"`--link` must be HOST:PORT, got {text!r}.")
    return host, int(port)


def measure_link(address: str, patience: float = 10.0) -> Line:
    """Measure the link to a machine on which `caden clock answer` runs."""
    try:
        with socket.create_connection(parse_address(address), patience) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pings = [_ask(line, 1) for _ in range(PINGS)]
            size, seconds = 1 << 16, 0.0
            while seconds < LONG and size < LARGEST:
                size *= 2
                seconds = _ask(line, size) - min(pings)
            rates = [size / max(_ask(line, size) - min(pings), 1e-9) for _ in range(3)]
    except OSError as error:
        raise RunError(f"Cannot measure the link to {address}: {error.strerror or error}.") from None
    return Line(min(pings) / 2, statistics.median(rates))


def _ask(line: socket.socket, size: int) -> float:
    """Return the seconds until so many bytes have come back."""
    began = time.perf_counter()
    line.sendall(size.to_bytes(8, "big"))
    while size:
        part = line.recv(min(size, 1 << 20))
        if not part:
            raise OSError("the other side closed the connection")
        size -= len(part)
    return time.perf_counter() - began


def answer(host: str, port: int, seconds: float) -> int:
    """Answer `measure_link` for some time, one connection after the other; return how many there were."""
    if not 0 < port < 65536:
        raise CadenError(f"`--port` must lie in 1..65535, got {port}.")
    end, served = time.monotonic() + seconds, 0
    try:
        with socket.create_server((host, port)) as server:
            while (left := end - time.monotonic()) > 0:
                server.settimeout(left)
                try:
                    line, _ = server.accept()
                except TimeoutError:
                    break
                with line:
                    _serve(line, end)
                served += 1
    except OSError as error:
        raise CadenError(f"Cannot listen on {host}:{port}: {error.strerror or error}.") from None
    return served


def _serve(line: socket.socket, end: float) -> None:
    """Send as many zeros as are asked for, until the other side leaves or the time is up."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        while (left := end - time.monotonic()) > 0:
            line.settimeout(left)
            request = line.recv(8, socket.MSG_WAITALL)
            size = int.from_bytes(request, "big")
            if len(request) < 8 or not 0 < size <= LARGEST:
                return
            line.sendall(bytes(size))
    except OSError:  # the other side has left
        return


def as_toml(machine: Machine, line: Line | None) -> str:
    """Return the table `[clock]` of a file."""
    values: dict[str, Any] = {k: float(f"{v:.3g}") for k, v in machine._asdict().items()}
    if line is not None:
        values |= {k: float(f"{v:.3g}") for k, v in line._asdict().items()} | {"pull": True}
    return tomli_w.dumps({"clock": values})
