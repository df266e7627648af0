"""Transports: what carries rows between processes. A network depends on nothing else outside its process."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from caden.errors import CadenError
from caden.graphs import Graph
from caden.networks.layout import Layout


class Transport(Protocol):
    """How the agents of one process reach those of others. `active` (m,) marks who is awake in the whole network."""

    rank: int = 0  # of this process; rank 0 measures, writes and prints
    world: int = 1  # number of processes of the run
    # True: this process does not know who is awake elsewhere, and counts only what it sends itself.
    sees_only_itself: bool = False
    late: bool = False  # True: messages of arcs arrive a round later
    packs: bool = False  # True: it compresses messages of arcs itself
    posted: tuple[int, int] | None = None  # messages and bytes of the last exchange, if not what was to be sent
    wire_bytes: int = 0  # bytes that this process has sent to others

    def hosts(self, graph: Graph) -> list[int] | None:
        """Return the agents of this process; None for all of them."""

    def connect(self, layout: Layout, dim: int) -> None:
        """Prepare for a layout and rows of `dim` numbers; called once, before anything is sent."""

    def begin_round(self, index: int) -> None:
        """Prepare for a round."""
        return

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        """Send hosted rows and receive others: (k, d) -> (rows of the layout, d); only awake agents send."""

    def exchange_arcs(self, arcs: Tensor, sends: Tensor, comes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Send (2e, n) from the arc owners that send; return what their peers sent, and where it came (None: `comes`).

        `sends` and `comes` (2e, 1) say for each arc whether its owner sends, and whether its peer does.
        """
        return self.post_arcs(arcs, sends, comes)(), None

    def post_arcs(self, arcs: Tensor, sends: Tensor, comes: Tensor) -> Callable[[], Tensor]:
        """Begin an exchange of arcs; return a function that waits for its end and returns what came."""
        raise CadenError("Messages cannot be sent in the background here.")

    def gather(self, rows: Tensor) -> Tensor:
        """Collect the rows of all agents, in order: (k, ...) -> (m, ...)."""

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest value of all agents: (k,) -> ()."""

    def reduce(self, values: Sequence[float], how: str) -> list[float]:
        """Return the "max" or the "sum" of each number over all processes."""
        return list(values)

    def absent(self) -> list[int]:
        """Return the rows of agents that do not count in this round."""
        return []

    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must hold."""
        return {}

    def restore(self, buffers: dict[str, Tensor]) -> None:
        """Restore the tensors that `buffers` returned."""
        return


class Memory(Transport):
    """The transport of a single process that hosts all agents."""

    def hosts(self, graph: Graph) -> list[int] | None:
        return None

    def connect(self, layout: Layout, dim: int) -> None:
        self._layout = layout

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        return rows

    def post_arcs(self, arcs: Tensor, sends: Tensor, comes: Tensor) -> Callable[[], Tensor]:
        return lambda: self._layout.reverse(arcs)

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def largest(self, values: Tensor) -> Tensor:
        return values.max()


class Overlapped(Transport):
    """Another transport whose messages of arcs travel while agents compute: an exchange gives what the last one sent.

    So no agent waits for its neighbours' messages of the same round, and the method must survive delay and have one
    exchange per round.
    """

    late = True

    def __init__(self, inside: Transport):
        self._inside = inside
        self._pending: tuple[Callable[[], Tensor], Tensor] | None = None
        self._posted = False  # in this round
        self.rank, self.world = inside.rank, inside.world

    @property
    def wire_bytes(self) -> int:
        return self._inside.wire_bytes

    @wire_bytes.setter
    def wire_bytes(self, count: int) -> None:
        self._inside.wire_bytes = count

    def exchange_arcs(self, arcs: Tensor, sends: Tensor, comes: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._posted:
            raise CadenError("Messages can travel in the background only for methods with one exchange per round.")
        self._posted = True
        received, came = torch.zeros_like(arcs), torch.zeros_like(comes)
        if self._pending is not None:
            receive, came = self._pending
            received = receive()
        self._pending = self._inside.post_arcs(arcs, sends, comes), comes
        return received, came

    def buffers(self) -> dict[str, Tensor]:
        if self._pending is None:
            return self._inside.buffers()
        receive, came = self._pending
        received = receive()
        self._pending = (lambda: received), came
        return {**self._inside.buffers(), "received": received, "came": came}

    def restore(self, buffers: dict[str, Tensor]) -> None:
        rest = dict(buffers)
        if self._pending is not None:
            self._pending[0]()  # what is under way
            self._pending = None
        if "received" in rest:
            received, came = rest.pop("received"), rest.pop("came")
            self._pending = (lambda: received), came
        self._inside.restore(rest)

    def hosts(self, graph: Graph) -> list[int] | None:
        return self._inside.hosts(graph)

    def connect(self, layout: Layout, dim: int) -> None:
        self._inside.connect(layout, dim)

    def begin_round(self, index: int) -> None:
        self._posted = False
        self._inside.begin_round(index)

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        return self._inside.share_rows(rows, active)

    def gather(self, rows: Tensor) -> Tensor:
        return self._inside.gather(rows)

    def largest(self, values: Tensor) -> Tensor:
        return self._inside.largest(values)

    def reduce(self, values: Sequence[float], how: str) -> list[float]:
        return self._inside.reduce(values, how)
