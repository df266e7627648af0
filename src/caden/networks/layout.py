"""The rows and edges that a process holds."""

import torch
from torch import Tensor

from caden.graphs import Graph


class Layout:
    """The hosted agents, their neighbours in other processes, and the edges between them.

    Row r belongs to agent `rows[r]`; the first `agents` rows are hosted here. Edge e joins rows `first[e]` and
    `second[e]` and is edge `edges[e]` of the graph. Arc e is owned by `first[e]`, arc e + len(edges) by `second[e]`.
    """

    def __init__(self, graph: Graph, hosted: list[int] | None = None, device: torch.device | str = "cpu"):
        self.graph = graph
        self.ends = torch.from_numpy(graph.edges.T.copy()).to(device)  # (2, |E|) of the whole graph
        self.hosted = torch.arange(graph.agents) if hosted is None else torch.tensor(hosted)
        self.agents = len(self.hosted)
        here = torch.isin(self.ends, self.hosted.to(device)).any(0)
        others = sorted(set(self.ends[:, here].flatten().tolist()) - set(self.hosted.tolist()))
        self.rows = torch.cat([self.hosted, torch.tensor(others, dtype=torch.int64)]).to(device)
        self.edges = here.nonzero().flatten()
        row_of = torch.zeros(graph.agents, dtype=torch.int64, device=device)
        row_of[self.rows] = torch.arange(len(self.rows), device=device)
        self.first, self.second = row_of[self.ends[:, self.edges]]
        self.degree = torch.from_numpy(graph.degrees.copy())[self.hosted].to(device).unsqueeze(1)  # (k, 1)

    @property
    def arcs(self) -> Tensor:
        """(2e,) indices of the held arcs among the 2 |E| arcs of the graph."""
        return torch.cat([self.edges, self.edges + self.ends.shape[1]])

    @property
    def owners(self) -> Tensor:
        """(2e,) the agent that owns each arc."""
        return self.rows[torch.cat([self.first, self.second])]

    def reverse(self, arcs: Tensor) -> Tensor:
        """Return (2e, ...) with the value of the opposite arc at each arc."""
        return arcs.roll(len(self.edges), 0)
