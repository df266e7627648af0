"""Agents spread over the processes of a cluster: torch.distributed under `torchrun` (or any launcher that sets the same
variables). A rank hosts a block of agents. Edges inside it are memory; between two ranks one message per exchange
carries each row that the other needs once, however many edges cross.

Every rank draws the same random numbers, so all know who is awake and what will be sent. gloo on CPU, nccl on CUDA.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from caden import checkpoint
from caden.core import Problem
from caden.errors import CadenError
from caden.graphs import Graph
from caden.messages import Messages
from caden.network import Stacked
from caden.schedules import Draw, Links

TIMEOUT = 60.0  # seconds that a rank waits for another before it gives up


def launched() -> bool:
    """Whether this process is one of several of a job."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """The number of this process in its job; 0 where there is none."""
    return int(os.environ.get("RANK", "0")) if launched() else 0


def job() -> str:
    """A name that all processes of a job know."""
    return os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("CADEN_JOB") or os.environ["MASTER_PORT"]


def join(timeout: float = TIMEOUT) -> tuple[int, int]:
    """Enter the job's process group: (rank, number of ranks).

    A restarted job gets a part of the store of its own: the addresses of the dead are still in the old one.
    """
    here, world = rank(), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        wait = timedelta(seconds=timeout)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
        master = here == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = TCPStore(host, port, world, master, timeout=wait)
        shared = PrefixStore(f"caden/{attempt}", store)
        dist.init_process_group(backend, store=shared, rank=here, world_size=world, timeout=wait)
        atexit.register(dist.destroy_process_group)
    return here, world


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


def hosted(graph: Graph) -> list[int]:
    """The agents of this rank."""
    here, world = join()
    return blocks(graph, world)[here]


def host(
    problem: Problem, graph: Graph, draw: Draw, may_sleep: bool, messages: Any, links: Any
) -> tuple[Problem, Ranks]:
    """This rank's part of a problem and of the network."""
    if Messages.from_spec(messages) != Messages() or Links.from_spec(links, graph, draw.seed) is not None:
        raise CadenError("`messages` and `links` model a network; on a real one they are not for us to choose.")
    here, world = join()
    plan = blocks(graph, world)
    if problem.agents not in (graph.agents, len(plan[here])):
        raise CadenError(f"The graph has {graph.agents} agents but the problem has {problem.agents}.")
    mine = problem.take(plan[here]) if problem.agents == graph.agents else problem
    return mine, Ranks(graph, mine, draw, may_sleep, plan, here)


class Ranks(Stacked):
    """The part of the network that this rank hosts."""

    def __init__(self, graph: Graph, problem: Problem, draw: Draw, may_sleep: bool, plan: list[list[int]], rank: int):
        super().__init__(graph, problem, draw, may_sleep, hosted=plan[rank])
        self.rank, self.plan = rank, plan
        home = torch.empty(graph.agents, dtype=torch.int64)
        for part, members in enumerate(plan):
            home[members] = part
        ends = self.ends.cpu()
        self._out: dict[int, Tensor] = {}  # to a rank: agents of ours that it must know
        self._in: dict[int, Tensor] = {}  # from a rank: agents of its that we must know
        self._cut: dict[int, Tensor] = {}  # with a rank: the arcs of ours into it, in the graph's order
        place = {int(agent): row for row, agent in enumerate(self.rows.tolist())}
        self._place = place
        half = len(self.first)
        for other in range(len(plan)):
            if other == rank:
                continue
            ours, theirs, arcs = set(), set(), []
            for number, edge in enumerate(self._edges.tolist()):
                i, j = (int(v) for v in ends[:, edge])
                if {int(home[i]), int(home[j])} != {rank, other}:
                    continue
                mine = i if int(home[i]) == rank else j
                ours.add(mine)
                theirs.add(j if mine == i else i)
                arcs.append(number if mine == i else number + half)
            if arcs:
                self._out[other] = torch.tensor(sorted(ours))
                self._in[other] = torch.tensor(sorted(theirs))
                self._cut[other] = torch.tensor(arcs)

    def _trade(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        """Send and receive one tensor per rank; empty ones are not sent."""
        operations = []
        for other in sorted({*outgoing, *incoming}):
            if other in incoming and incoming[other].numel():
                operations.append(dist.P2POp(dist.irecv, incoming[other], other))
            if other in outgoing and outgoing[other].numel():
                operations.append(dist.P2POp(dist.isend, outgoing[other], other))
                self.wire_bytes += outgoing[other].numel() * outgoing[other].element_size()
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def _rows_of(self, agents: Tensor) -> list[int]:
        return [self._place[int(a)] for a in agents.tolist()]

    def _reach(self, rows: Tensor, active: Tensor) -> Tensor:
        found = rows.new_zeros(len(self.rows), rows.shape[1])
        found[: len(rows)] = rows
        wanted = {other: agents[active[agents]] for other, agents in self._in.items()}
        outgoing = {o: rows[self._rows_of(agents[active[agents]])].contiguous() for o, agents in self._out.items()}
        incoming = {o: rows.new_empty(len(agents), rows.shape[1]) for o, agents in wanted.items()}
        self._trade(outgoing, incoming)
        for other, agents in wanted.items():
            found[self._rows_of(agents)] = incoming[other]
        return found

    def _swap(self, messages: Tensor, active: Tensor) -> Tensor:
        received, half = super()._swap(messages, active), len(self.first)
        owner = torch.cat([self.first, self.second]).cpu()
        speaker = self.rows.cpu()[owner]  # the agent that owns each arc
        peer = torch.cat([speaker[half:], speaker[:half]])
        outgoing = {o: messages[arcs[active[speaker[arcs]]]].contiguous() for o, arcs in self._cut.items()}
        into = {o: arcs[active[peer[arcs]]] for o, arcs in self._cut.items()}
        incoming = {o: messages.new_empty(len(arcs), messages.shape[1]) for o, arcs in into.items()}
        self._trade(outgoing, incoming)
        for other, arcs in into.items():
            received[arcs] = incoming[other]
        return received

    def load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, float]] | None:
        pointer, world = folder / "checkpoint.json", len(self.plan)
        if not pointer.exists():
            return None
        last = json.loads(pointer.read_text())
        if last["processes"] != world:
            raise CadenError(
                f"{folder} was checkpointed by {last['processes']} processes and cannot go on with {world}."
            )
        tensors, numbers = checkpoint.load(folder / self._part(last["round"]))
        self.wire_bytes = int(numbers["wire_bytes"])
        return tensors, numbers

    def save(self, folder: Path, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        """All write their part; the checkpoint counts from the moment that all are there."""
        name = self._part(int(numbers["round"]))
        checkpoint.save(folder / name, tensors, {**numbers, "wire_bytes": self.wire_bytes})
        self.reduce([0], "max")  # all parts are written
        if self.rank == 0:
            scratch = folder / "checkpoint.json.tmp"
            scratch.write_text(json.dumps({"round": int(numbers["round"]), "processes": len(self.plan)}))
            os.replace(scratch, folder / "checkpoint.json")
        self.reduce([0], "max")  # and count
        for old in folder.glob(self._part("*")):
            if old.name != name:
                old.unlink()

    def _part(self, index: int | str) -> str:
        return f"checkpoint.{index}.{self.rank}of{len(self.plan)}.safetensors"

    def reduce(self, values: Sequence[float], how: str) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64, device=self.rows.device)
        dist.all_reduce(found, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
        reduced: list[float] = found.tolist()
        return reduced

    def gather(self, rows: Tensor) -> Tensor:
        largest = max(map(len, self.plan))
        padded = rows.new_zeros(largest, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in self.plan]
        dist.all_gather(parts, padded)
        out = rows.new_empty(sum(map(len, self.plan)), *rows.shape[1:])
        for members, part in zip(self.plan, parts):
            out[members] = part[: len(members)]
        return out
