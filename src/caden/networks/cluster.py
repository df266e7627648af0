"""Agents spread over the processes of a cluster, with torch.distributed under `torchrun` or any launcher that sets the
same variables. A rank hosts a block of agents. Edges inside a block stay in memory. Between two ranks, one message per
exchange carries each row that the other rank needs once, however many edges cross.

Every rank draws the same random numbers, so all know who is awake and what is sent. Uses gloo on CPU, nccl on CUDA.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from caden.errors import CadenError
from caden.graphs import Graph
from caden.launcher import launched
from caden.networks.layout import Layout
from caden.networks.transport import Transport

TIMEOUT = 300.0  # seconds a rank waits for another before it gives up


def join(timeout: float = TIMEOUT, one_each: bool = False) -> Ranks:
    """Join the process group of the job that this process was launched in; `one_each`: rank i hosts agent i alone.

    A restarted job gets its own part of the store: the old part still holds the addresses of the processes that died.
    """
    job = launched()
    if job is None:
        raise CadenError("This process is not part of a job: start it with `torchrun` or `caden run --processes N`.")
    if not dist.is_initialized():
        wait = timedelta(seconds=timeout)
        store = TCPStore(job.host, job.port, job.world, job.rank == 0 and not job.store_exists, timeout=wait)
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore(f"caden/{job.attempt}", store),
            rank=job.rank,
            world_size=job.world,
            timeout=wait,
        )
        atexit.register(dist.destroy_process_group)
    return Ranks(job.rank, job.world, [[rank] for rank in range(job.world)] if one_each else None)


def blocks(graph: Graph, parts: int) -> list[list[int]]:
    """Divide the agents into `parts` blocks of nearly equal size with few edges between them.

    Recursive spectral bisection (Pothen, Simon and Liou, SIAM J. Matrix Anal. Appl. 11(3), 1990), then swaps of pairs
    of agents as long as they save edges (Kernighan and Lin, Bell Syst. Tech. J. 49, 1970).
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
    """Split the members along the Fiedler vector of their subgraph, then split each half recursively."""
    if parts == 1:
        return [members]
    inside = adjacent[np.ix_(members, members)]
    fiedler = np.linalg.eigh(np.diag(inside.sum(1)) - inside)[1][:, 1].round(9)
    order, left = members[np.argsort(fiedler, kind="stable")], parts // 2
    cut = -(-len(members) * left // parts)
    return _bisect(adjacent, order[:cut], left) + _bisect(adjacent, order[cut:], parts - left)


def _refine(adjacent: np.ndarray, home: np.ndarray, parts: int) -> None:
    """Swap the pair of agents that saves the most edges, as long as a swap saves any."""
    agents = np.arange(len(home))
    for _ in range(len(home)):
        links = adjacent @ np.eye(parts)[home]  # (m, parts) edges of each agent into each block
        gain = links - links[agents, home][:, None]  # edges saved by moving one agent
        swap = gain[:, home] + gain[:, home].T - 2 * adjacent
        swap[home[:, None] == home[None, :]] = 0
        i, j = np.unravel_index(int(swap.argmax()), swap.shape)
        if swap[i, j] <= 0:
            return
        home[i], home[j] = home[j], home[i]


class Ranks(Transport):
    """The transport between the ranks of a job."""

    def __init__(self, rank: int, world: int, plan: list[list[int]] | None = None):
        self.rank, self.world = rank, world
        self._plan = plan or []

    def hosts(self, graph: Graph) -> list[int] | None:
        if sum(map(len, self._plan)) != graph.agents:
            self._plan = blocks(graph, self.world)
        return self._plan[self.rank]

    def connect(self, layout: Layout, dim: int) -> None:
        self._layout, self.wire_bytes = layout, 0
        home = torch.empty(layout.graph.agents, dtype=torch.int64)
        for part, members in enumerate(self._plan):
            home[members] = part
        self._row_of = {int(agent): row for row, agent in enumerate(layout.rows.tolist())}
        self._owner = layout.owners.cpu()  # the agent that owns each arc
        self._peer = layout.reverse(self._owner)
        owner_rank, peer_rank = home[self._owner], home[self._peer]
        cut = ((owner_rank == self.rank) & (peer_rank != self.rank)).nonzero().flatten()
        order = torch.argsort(layout.arcs.cpu()[cut] % layout.ends.shape[1], stable=True)  # the same on both ranks
        cut = cut[order]
        others = sorted(set(peer_rank[cut].tolist()))
        self._arcs_to = {other: cut[peer_rank[cut] == other] for other in others}  # rank -> own arcs into it
        self._sent_to = {other: torch.unique(self._owner[arcs]) for other, arcs in self._arcs_to.items()}  # agents
        self._received_from = {other: torch.unique(self._peer[arcs]) for other, arcs in self._arcs_to.items()}  # agents

    def _send_and_receive(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> list[Any]:
        """Begin to send and receive one tensor per rank, except empty ones; return what to wait for."""
        operations = []
        for other in self._arcs_to:
            if incoming[other].numel():
                operations.append(dist.P2POp(dist.irecv, incoming[other], other))
            if outgoing[other].numel():
                operations.append(dist.P2POp(dist.isend, outgoing[other], other))
                self.wire_bytes += outgoing[other].numel() * outgoing[other].element_size()
        return dist.batch_isend_irecv(operations) if operations else []

    def _rows_of(self, agents: Tensor) -> list[int]:
        return [self._row_of[agent] for agent in agents.tolist()]

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        known = rows.new_zeros(len(self._layout.rows), rows.shape[1])
        known[: len(rows)] = rows
        wanted = {other: agents[active[agents]] for other, agents in self._received_from.items()}
        outgoing = {o: rows[self._rows_of(agents[active[agents]])].contiguous() for o, agents in self._sent_to.items()}
        incoming = {o: rows.new_empty(len(agents), rows.shape[1]) for o, agents in wanted.items()}
        for work in self._send_and_receive(outgoing, incoming):
            work.wait()
        for other, agents in wanted.items():
            known[self._rows_of(agents)] = incoming[other]
        return known

    def post_arcs(self, arcs: Tensor, sends: Tensor, comes: Tensor) -> Callable[[], Tensor]:
        received, sending, coming = self._layout.reverse(arcs), sends.squeeze(1).cpu(), comes.squeeze(1).cpu()
        outgoing = {o: arcs[own[sending[own]]].contiguous() for o, own in self._arcs_to.items()}
        awaited = {o: own[coming[own]] for o, own in self._arcs_to.items()}
        incoming = {o: arcs.new_empty(len(own), arcs.shape[1]) for o, own in awaited.items()}
        under_way = self._send_and_receive(outgoing, incoming)

        def receive() -> Tensor:
            for work in under_way:
                work.wait()
            for other, own in awaited.items():
                received[own] = incoming[other]
            outgoing.clear()  # needed until now
            return received

        return receive

    def reduce(self, values: Sequence[float], how: str) -> list[float]:
        result = torch.tensor(values, dtype=torch.float64, device=self._layout.rows.device)
        dist.all_reduce(result, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
        reduced: list[float] = result.tolist()
        return reduced

    def gather(self, rows: Tensor) -> Tensor:
        longest = max(map(len, self._plan))
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in self._plan]
        dist.all_gather(parts, padded)
        gathered = rows.new_empty(sum(map(len, self._plan)), *rows.shape[1:])
        for members, part in zip(self._plan, parts):
            gathered[members] = part[: len(members)]
        return gathered

    def largest(self, values: Tensor) -> Tensor:
        return self.gather(values).max()
