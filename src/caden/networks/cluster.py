"""Agents spread over the processes of a cluster: torch.distributed under `torchrun` (or any launcher that sets the same
variables). A rank hosts a block of agents. Edges inside it are memory; between two ranks one message per exchange
carries each row that the other needs once, however many edges cross.

Every rank draws the same random numbers, so all know who is awake and what will be sent. gloo on CPU, nccl on CUDA.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from caden.errors import CadenError
from caden.graphs import Graph
from caden.networks.layout import Layout
from caden.networks.transport import Transport

TIMEOUT = 60.0  # seconds that a rank waits for another before it gives up


class Job(NamedTuple):
    """What a launcher's environment says of the job that this process is part of."""

    rank: int
    world: int
    name: str  # that all processes of the job know
    restarted: bool  # the launcher has started the job anew


def launched() -> Job | None:
    """The job that a launcher started this process in; None if it stands alone. Only the command line asks."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        return None
    name = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("CADEN_JOB") or os.environ["MASTER_PORT"]
    return Job(int(os.environ.get("RANK", "0")), world, name, _attempt() > 0)


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join(timeout: float = TIMEOUT) -> Ranks:
    """Enter the process group of the job that the environment describes.

    A restarted job gets a part of the store of its own: the addresses of the dead are still in the old one.
    """
    job = launched()
    if job is None:
        raise CadenError("This process is not part of a job: start it with torchrun, or `caden run --processes N`.")
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        wait = timedelta(seconds=timeout)
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
        master = job.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = TCPStore(host, port, job.world, master, timeout=wait)
        shared = PrefixStore(f"caden/{_attempt()}", store)
        dist.init_process_group(backend, store=shared, rank=job.rank, world_size=job.world, timeout=wait)
        atexit.register(dist.destroy_process_group)
    return Ranks(job.rank, job.world)


def start(command: list[str], processes: int) -> int:
    """Run a command as the ranks of a job on this machine; the exit code of the first that fails, else 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    common["CADEN_JOB"] = f"{os.getpid()}"
    ranks = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    try:
        code = 0
        while code == 0 and any(rank.poll() is None for rank in ranks):
            time.sleep(0.05)
            code = next((rank.returncode for rank in ranks if rank.returncode), 0)
        if code:
            time.sleep(1)  # for the others to say what they have to say
        return code or next((rank.wait() for rank in ranks if rank.wait()), 0)
    except KeyboardInterrupt:  # the ranks got it too, and end after their round
        return next((rank.wait() for rank in ranks if rank.wait()), 0)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def blocks(graph: Graph, parts: int) -> list[list[int]]:
    """Agents in `parts` blocks of nearly equal size that few edges cross.

    Spectral bisection, again and again (Pothen, Simon and Liou, SIAM J. Matrix Anal. Appl. 11(3), 1990); then pairs of
    agents change places while that saves edges (Kernighan and Lin, Bell Syst. Tech. J. 49, 1970).
    """
    if not 1 <= parts <= graph.agents:
        raise CadenError(f"{graph.agents} agents cannot be spread over {parts} processes.")
    if graph.agents > 3000:  # dense algebra would take longer than it saves
        return [members.tolist() for members in np.array_split(np.arange(graph.agents), parts)]
    adjacent = -graph.laplacian * (1 - np.eye(graph.agents))
    home = np.empty(graph.agents, int)
    for part, members in enumerate(_bisect(adjacent, np.arange(graph.agents), parts)):
        home[members] = part
    _refine(adjacent, home, parts)
    return [np.flatnonzero(home == part).tolist() for part in range(parts)]


def _bisect(adjacent: np.ndarray, members: np.ndarray, parts: int) -> list[np.ndarray]:
    """Cut the members in two along the Fiedler vector of their subgraph, and each half again."""
    if parts == 1:
        return [members]
    inside = adjacent[np.ix_(members, members)]
    fiedler = np.linalg.eigh(np.diag(inside.sum(1)) - inside)[1][:, 1].round(9)
    order, left = members[np.argsort(fiedler, kind="stable")], parts // 2
    cut = -(-len(members) * left // parts)
    return _bisect(adjacent, order[:cut], left) + _bisect(adjacent, order[cut:], parts - left)


def _refine(adjacent: np.ndarray, home: np.ndarray, parts: int) -> None:
    """Swap the pair of agents that saves most edges, as long as one does."""
    agents = np.arange(len(home))
    for _ in range(len(home)):
        links = adjacent @ np.eye(parts)[home]  # (m, parts) edges of each agent into each block
        gain = links - links[agents, home][:, None]  # of moving an agent
        swap = gain[:, home] + gain[:, home].T - 2 * adjacent
        swap[home[:, None] == home[None, :]] = 0
        i, j = np.unravel_index(int(swap.argmax()), swap.shape)
        if swap[i, j] <= 0:
            return
        home[i], home[j] = home[j], home[i]


class Ranks(Transport):
    """The transport between the processes of a job."""

    def __init__(self, rank: int, world: int):
        self.rank, self.world = rank, world
        self._plan: list[list[int]] = []

    def hosts(self, graph: Graph) -> list[int] | None:
        if sum(map(len, self._plan)) != graph.agents:
            self._plan = blocks(graph, self.world)
        return self._plan[self.rank]

    def connect(self, layout: Layout) -> None:
        self._layout, self.wire_bytes = layout, 0
        home = torch.empty(layout.graph.agents, dtype=torch.int64)
        for part, members in enumerate(self._plan):
            home[members] = part
        self._row_of = {int(agent): row for row, agent in enumerate(layout.rows.tolist())}
        self._speaker = layout.owners.cpu()  # the agent that owns each arc
        self._peer = layout.reverse(self._speaker)
        ours, theirs = home[self._speaker], home[self._peer]
        cut = ((ours == self.rank) & (theirs != self.rank)).nonzero().flatten()
        order = torch.argsort(layout.arcs.cpu()[cut] % layout.ends.shape[1], stable=True)  # as both sides see them
        cut = cut[order]
        others = sorted(set(theirs[cut].tolist()))
        self._cut = {other: cut[theirs[cut] == other] for other in others}  # with a rank: the arcs of ours into it
        self._out = {other: torch.unique(self._speaker[arcs]) for other, arcs in self._cut.items()}  # whom it must know
        self._in = {other: torch.unique(self._peer[arcs]) for other, arcs in self._cut.items()}  # whom we must know

    def _trade(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        """Send and receive one tensor per rank; empty ones are not sent."""
        operations = []
        for other in self._cut:
            if incoming[other].numel():
                operations.append(dist.P2POp(dist.irecv, incoming[other], other))
            if outgoing[other].numel():
                operations.append(dist.P2POp(dist.isend, outgoing[other], other))
                self.wire_bytes += outgoing[other].numel() * outgoing[other].element_size()
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def _rows_of(self, agents: Tensor) -> list[int]:
        return [self._row_of[agent] for agent in agents.tolist()]

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        known = rows.new_zeros(len(self._layout.rows), rows.shape[1])
        known[: len(rows)] = rows
        wanted = {other: agents[active[agents]] for other, agents in self._in.items()}
        outgoing = {o: rows[self._rows_of(agents[active[agents]])].contiguous() for o, agents in self._out.items()}
        incoming = {o: rows.new_empty(len(agents), rows.shape[1]) for o, agents in wanted.items()}
        self._trade(outgoing, incoming)
        for other, agents in wanted.items():
            known[self._rows_of(agents)] = incoming[other]
        return known

    def exchange_arcs(self, arcs: Tensor, active: Tensor) -> tuple[Tensor, Tensor | None]:
        received = self._layout.reverse(arcs)
        outgoing = {o: arcs[mine[active[self._speaker[mine]]]].contiguous() for o, mine in self._cut.items()}
        into = {o: mine[active[self._peer[mine]]] for o, mine in self._cut.items()}
        incoming = {o: arcs.new_empty(len(mine), arcs.shape[1]) for o, mine in into.items()}
        self._trade(outgoing, incoming)
        for other, mine in into.items():
            received[mine] = incoming[other]
        return received, None

    def reduce(self, values: Sequence[float], how: str) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self._layout.rows.device)
        dist.all_reduce(total, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
        reduced: list[float] = total.tolist()
        return reduced

    def gather(self, rows: Tensor) -> Tensor:
        largest = max(map(len, self._plan))
        padded = rows.new_zeros(largest, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in self._plan]
        dist.all_gather(parts, padded)
        out = rows.new_empty(sum(map(len, self._plan)), *rows.shape[1:])
        for members, part in zip(self._plan, parts):
            out[members] = part[: len(members)]
        return out

    def largest(self, values: Tensor) -> Tensor:
        return self.gather(values).max()
