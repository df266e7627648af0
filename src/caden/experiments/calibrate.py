"""Measure a machine and a link, for the simulator's clock.

A machine: one agent of an experiment makes its steps as a peer does, with checkpoints and metrics, first alone and then
as a real peer of its fleet's mode, whose neighbours are another process on this machine. What the links cost is the
additional processor time: time itself would be that of both processes.

A link: `answer` listens on one machine, and `measure_link` on another asks it for some bytes over TCP, one connection
for all. Half of the shortest round trip is the latency.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import secrets
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden.engine.history import Row
from caden.engine.metrics import on_test_data
from caden.engine.process import deterministic_mode
from caden.engine.recorder import Recorder
from caden.engine.run import Run
from caden.errors import CadenError, RunError, require_integer
from caden.experiments.config import Experiment
from caden.experiments.peer import prepare_peer, run_peer
from caden.networks.peers.fleet import FORMAT, Fleet, free_ports
from caden.networks.peers.link import ASK, ZenohLink
from caden.networks.peers.transports import HEADER, LANES, Received
from caden.networks.peers.wire import LIFE, row_like

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


class _Mirror(ZenohLink):
    """A neighbour that sends every row back to the agent from which it came."""

    def reflect(self, agent: int) -> None:
        version = -1
        while True:
            with self._changed:
                if self._free:
                    self._changed.wait_for(lambda: agent in self._unread)
                else:
                    self._changed.wait_for(lambda: self._announced[agent] > version)  # noqa: B023
                    version = self._announced[agent]
            if self._free:
                version, row, _ = self.read(0)[agent]
                self.report_progress(version % LIFE)
            else:
                row = self.wait(agent, version, self._like_of(agent, version))
                self.report_progress(version // LANES)
            self.publish(version, {agent: row})

    def _like_of(self, agent: int, version: int) -> Tensor:
        """Return a tensor like the agent's row of a version: a maximum that agents agree on is shorter than a model."""
        selector = f"{self._key('row', agent, self._agent)}?v={version};o=0;b=-1"
        while not self._closing.is_set():
            reply = next((r.ok for r in self._session.get(selector, timeout=ASK) if r.ok is not None), None)
            if reply is not None and reply.attachment is not None:
                return row_like(bytes(reply.attachment))
        return self._like


def _mirror(config: Experiment, agent: int, like: Tensor, ready: Any) -> None:
    """Be all neighbours of an agent until the process is ended."""
    fleet = Fleet.of(config)
    graph = config.build_graph(len(fleet.endpoints))
    links = [_Mirror(fleet, graph, j, like) for j in graph.neighbours(agent)]
    threads = [threading.Thread(target=link.reflect, args=(agent,)) for link in links]
    for thread in threads:
        thread.start()
    ready.set()


@contextmanager
def _neighbours(config: Experiment, agent: int, like: Tensor) -> Iterator[None]:
    """Run the neighbours of an agent in a process of their own, so that this one's processor time is the agent's."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_mirror, args=(config, agent, like, ready), daemon=True)
    process.start()
    try:
        while not ready.wait(1.0):
            if not process.is_alive():
                raise RunError("The process of the neighbours ended while it started.")
        yield
    finally:
        process.terminate()
        process.join()


def measure_machine(config: Experiment, agent: int = 0, steps: int = 20) -> Machine:
    """Time the steps of one agent on this machine."""
    require_integer("agent", agent), require_integer("steps", steps, least=1)

    def hosted(graph: Any) -> list[int]:
        if agent >= graph.agents:
            raise CadenError(f"`agent` must lie in 0..{graph.agents - 1}, got {agent}.")
        return [agent]

    built = config.build(hosted)
    _, problem, graph = built
    config = _as_peers(config, graph.agents, steps + 1)
    with ExitStack() as stack:
        links = importlib.util.find_spec("zenoh") is not None  # otherwise the extra "peers" is missing
        if links:  # first: starting a process takes a while
            width = problem.dim + (HEADER if config.fleet["mode"] == "free" else 0)
            stack.enter_context(_neighbours(config, agent, torch.empty(width, dtype=problem.dtype)))
        alone = _alone(config, agent, built)
        processor = _processor_time_with_links(config, agent) if links else alone.processor
    linking = max(processor - alone.processor, 0.0) * alone.seconds / alone.processor
    serve = linking / 2  # for those that fetch its own row; the other half is for the rows that it fetches
    return Machine(alone.compute, max(alone.seconds - alone.gradient_seconds, 0.0) + linking / 2, serve)


def mode_of(config: Experiment) -> str:
    """Return the mode of an experiment's fleet."""
    return Fleet.of(config).mode if config.fleet else "lockstep"


def _as_peers(config: Experiment, agents: int, rounds: int) -> Experiment:
    """Return an experiment of peers on this machine, always awake, without early ends; in the mode of its fleet."""
    endpoints = [f"tcp/127.0.0.1:{port}" for port in free_ports(agents)]
    name = f"measure-{secrets.token_hex(3)}"
    fleet = {"format": FORMAT, "name": name, "mode": mode_of(config), "endpoints": endpoints}
    messages = {k: v for k, v in config.messages.items() if k in ("top", "bits", "trigger")}
    changes = {"participation": 1.0, "links": 1.0, "clock": None, "tolerance": None, "warmup": {"steps": 0}}
    return config.model_copy(update={**changes, "messages": messages, "fleet": fleet, "rounds": rounds})


class _Step(NamedTuple):
    """What a step takes, on average or by itself."""

    gradients: float
    gradient_seconds: float
    seconds: float
    processor: float  # seconds of all threads

    @property
    def compute(self) -> float:
        """Seconds per gradient."""
        return self.gradient_seconds / max(self.gradients, 1)


def _alone(config: Experiment, agent: int, built: Any) -> _Step:
    """Measure the steps of an agent without any links."""
    link = _Echo()
    run, start, _ = prepare_peer(config, agent, built, link)
    with tempfile.TemporaryDirectory() as folder, deterministic_mode(config.deterministic):
        recorder = Recorder(run, Path(folder) / "run", _row)
        with closing(recorder):
            run.begin(start)
            recorder.create("", config.seed)
            measured = [_step(run, recorder, config.record_every) for _ in range(config.rounds)]
    measured = measured[1:]  # the first one prepares
    return _Step(*(sum(values) / len(measured) for values in zip(*measured)))


def _step(run: Run, recorder: Recorder, record_every: int) -> _Step:
    """Make a step as a peer does."""
    before = run.problem.gradients, run.problem.seconds, time.perf_counter(), time.process_time()
    run.step()
    recorder.save(sync=False)
    if run.index % record_every == 0:
        recorder.record()
    after = run.problem.gradients, run.problem.seconds, time.perf_counter(), time.process_time()
    return _Step(*(b - a for a, b in zip(before, after)))


class _Enough(Exception):
    """All steps are measured."""


def _processor_time_with_links(config: Experiment, agent: int) -> float:
    """Run the agent as a peer, and return the processor time of a step."""
    moments: list[float] = []

    class Timed(ZenohLink):
        def report_progress(self, rounds: int, life: int = 0, calm: int = 0, flags: int = 0) -> None:
            super().report_progress(rounds, life, calm, flags)
            moments.append(time.process_time())
            if rounds == config.rounds:
                raise _Enough

    with tempfile.TemporaryDirectory() as folder, suppress(_Enough):
        run_peer(config, agent, Path(folder) / "peer", link_type=Timed)
    return (moments[-1] - moments[1]) / (len(moments) - 2)


def _row(run: Run, exact: bool, last: bool) -> Row:
    return {"round": run.index, "gradients": run.problem.gradients, **on_test_data(run, exact or last)}


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CadenError(f"`--link` must be HOST:PORT, got {text!r}.")
    return host, int(port)


def require_answer(address: str, patience: float = 10.0) -> None:
    """Require that the machine at an address answers."""
    with _connected(address, patience) as line:
        _ask(line, 1)


@contextmanager
def _connected(address: str, patience: float) -> Iterator[socket.socket]:
    try:
        with socket.create_connection(parse_address(address), patience) as line:
            yield line
    except (OSError, UnicodeError) as error:  # such as a label of a host's name that is too long
        raise RunError(f"Cannot measure the link to {address}: {getattr(error, 'strerror', None) or error}.") from None


def measure_link(address: str, patience: float = 10.0) -> Line:
    """Measure the link to a machine on which `caden clock answer` runs."""
    with _connected(address, patience) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pings = [_ask(line, 1) for _ in range(PINGS)]
        size, seconds = 1 << 16, 0.0
        while seconds < LONG and size < LARGEST:
            size *= 2
            seconds = _ask(line, size) - min(pings)
        rates = [size / max(_ask(line, size) - min(pings), 1e-9) for _ in range(3)]
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
                server.settimeout(min(left, 60.0))
                try:
                    line, _ = server.accept()
                except TimeoutError:
                    continue
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


def as_clock(machine: Machine, line: Line | None, mode: str) -> dict[str, Any]:
    """Return the table `[clock]` of a file; `mode` is that of the fleet."""
    values: dict[str, Any] = {k: float(f"{v:.3g}") for k, v in machine._asdict().items()}
    if line is not None:
        latency, rate = (float(f"{v:.3g}") for v in line)
        values |= {"latency": latency, "up": rate, "pull": True}  # neighbours share this machine's connection
    return values | ({"mode": "free"} if mode == "free" else {})
