"""What carries rows between processes. A network asks for nothing else of the world."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from caden.graphs import Graph
from caden.networks.layout import Layout


class Transport(Protocol):
    """How the agents of one process reach those of the others. `active` (m,) says who is awake in the whole network."""

    rank: int = 0  # of this process; the first one measures, writes and speaks
    world: int = 1  # how many processes work as one run
    sees_only_itself: bool = (
        False  # True: nobody here knows who is awake elsewhere, and only what this process sends is counted
    )
    wire_bytes: int = 0  # what this process has sent to others

    def hosts(self, graph: Graph) -> list[int] | None:
        """The agents of this process; None for all of them."""

    def connect(self, layout: Layout) -> None:
        """Called once, before anything is sent."""

    def begin_round(self, index: int) -> None:
        """A round begins."""
        return

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        """(k, d) hosted rows -> (rows of the layout, d), with what awake agents of other processes sent."""

    def exchange_arcs(self, arcs: Tensor, active: Tensor) -> tuple[Tensor, Tensor | None]:
        """(2e, d) what each arc's owner sends -> what its peer sent, and where it came (None: from all awake)."""

    def gather(self, rows: Tensor) -> Tensor:
        """(k, ...) of the hosted agents -> (m, ...) of all, in their order."""

    def largest(self, values: Tensor) -> Tensor:
        """(k,) -> () the largest value of all agents."""

    def reduce(self, values: Sequence[float], how: str) -> list[float]:
        """The "max" or the "sum" of each number over all processes."""
        return list(values)

    def absent(self) -> list[int]:
        """Rows of agents that do not count in this round."""
        return []

    def buffers(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""
        return {}

    def restore(self, buffers: dict[str, Tensor]) -> None:
        """Take back what `buffers` gave."""
        return


class Memory(Transport):
    """All agents in this process."""

    def hosts(self, graph: Graph) -> list[int] | None:
        return None

    def connect(self, layout: Layout) -> None:
        self._layout = layout

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        return rows

    def exchange_arcs(self, arcs: Tensor, active: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._layout.reverse(arcs), None

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def largest(self, values: Tensor) -> Tensor:
        return values.max()
