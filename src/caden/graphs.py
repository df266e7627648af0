"""Communication graphs: undirected, connected, without self-loops. networkx does the constructing.

>>> graph = erdos_renyi(20, 0.2, edges=37, seed=0)
>>> graph.agents, len(graph.edges), int(graph.degrees.sum())
(20, 37, 74)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np
import scipy.sparse as sp
from scipy.sparse import csgraph
from scipy.sparse.linalg import eigsh

from caden.errors import CadenError, require_integer, require_number, require_positive

_DENSE = 1500  # up to this many agents the spectrum comes from a dense eigenvalue solver


@dataclass(frozen=True, eq=False)
class Graph:
    """m agents and their edges, as an (n, 2) array of pairs i < j in lexicographic order."""

    agents: int
    edges: np.ndarray
    name: str = "graph"

    @cached_property
    def degrees(self) -> np.ndarray:
        """(m,) number of neighbours."""
        return np.asarray(np.bincount(self.edges.ravel(), minlength=self.agents))

    def neighbours(self, agent: int) -> list[int]:
        """The neighbours of one agent, sorted."""
        i, j = self.edges[:, 0], self.edges[:, 1]
        return sorted([*j[i == agent].tolist(), *i[j == agent].tolist()])

    def _laplacian(self, weights: np.ndarray | None = None) -> sp.csr_array:
        i, j = self.edges[:, 0], self.edges[:, 1]
        w = np.ones(len(self.edges)) if weights is None else weights
        off = sp.coo_array((np.r_[w, w], (np.r_[i, j], np.r_[j, i])), shape=(self.agents, self.agents)).tocsr()
        return sp.csr_array(sp.diags_array(off.sum(axis=1)) - off)

    @cached_property
    def laplacian(self) -> np.ndarray:
        """(m, m) dense Laplacian D - A, for looking at; the library itself works on the edge list."""
        return np.asarray(self._laplacian().toarray())

    @cached_property
    def adjacency(self) -> np.ndarray:
        """(m, m) dense adjacency matrix."""
        return np.asarray(np.diag(self.degrees.astype(float)) - self.laplacian)

    def _extremes(self, matrix: sp.csr_array) -> tuple[float, float]:
        """Second smallest and largest eigenvalue of a symmetric positive semidefinite matrix with a simple 0."""
        if self.agents <= _DENSE:
            values = np.linalg.eigvalsh(matrix.toarray())
            return float(values[1]), float(values[-1])
        largest = float(eigsh(matrix, k=1, which="LA", tol=1e-5, return_eigenvectors=False)[0])
        shift = -1e-3 * largest  # below the spectrum, so that the shifted matrix is regular
        small = eigsh(matrix, k=2, sigma=shift, which="LM", return_eigenvectors=False)
        return float(np.sort(small)[1]), largest

    @cached_property
    def spectrum(self) -> tuple[float, float]:
        """(lambda_min, lambda_max) of the Laplacian: its second smallest and its largest eigenvalue."""
        return self._extremes(self._laplacian())

    @cached_property
    def normalised_spectrum(self) -> tuple[float, float]:
        """The same for D^-1/2 Lap D^-1/2, whose eigenvalues lie in [0, 2]; 2 is reached by bipartite graphs only."""
        scale = sp.diags_array(1 / np.sqrt(self.degrees))
        return self._extremes(sp.csr_array(scale @ self._laplacian() @ scale))

    @cached_property
    def diameter(self) -> int:
        """The longest shortest path."""
        return int(nx.diameter(self.to_networkx(), usebounds=True))

    def metropolis_weights(self) -> np.ndarray:
        """(n,) edge weights 1 / (1 + max(d_i, d_j))."""
        return np.asarray(1 / (1 + self.degrees[self.edges].max(axis=1)))

    def metropolis(self) -> np.ndarray:
        """(m, m) Metropolis mixing matrix: symmetric, doubly stochastic, positive diagonal."""
        return np.asarray(np.eye(self.agents) - self._laplacian(self.metropolis_weights()).toarray())

    def laplacian_mixing(self, step: float | None = None) -> np.ndarray:
        """(m, m) mixing matrix I - step * Lap; `step` defaults to 1 / (d_max + 1)."""
        step = 1 / (float(self.degrees.max()) + 1) if step is None else require_positive("step", step)
        return np.eye(self.agents) - step * self.laplacian

    def to_networkx(self) -> nx.Graph[int]:
        """The graph as networkx knows it."""
        graph: nx.Graph[int] = nx.empty_graph(self.agents)
        graph.add_edges_from(self.edges.tolist())
        return graph

    def __repr__(self) -> str:
        return f"Graph({self.name}: {self.agents} agents, {len(self.edges)} edges)"


def from_edges(edges: Iterable[Sequence[int]], agents: int | None = None, name: str = "edges") -> Graph:
    """A graph from pairs of agents 0..m-1; m defaults to the largest number that occurs, plus one.

    >>> from_edges([(0, 1), (1, 2)]).degrees.tolist()
    [1, 2, 1]
    """
    try:
        pairs = [tuple(edge) for edge in edges]
    except TypeError:
        pairs = [()]
    if any(len(pair) != 2 for pair in pairs):
        raise CadenError("`edges` must be pairs of agents.")
    if any(isinstance(end, bool) or not isinstance(end, int | np.integer) for pair in pairs for end in pair):
        raise CadenError("`edges` must be pairs of whole numbers.")
    array = np.array(sorted({(min(pair), max(pair)) for pair in pairs}), dtype=np.int64).reshape(-1, 2)
    count = require_integer("agents", int(array.max()) + 1 if agents is None and len(array) else agents, least=1)
    if len(array) and (array[:, 0] == array[:, 1]).any():
        loop = int(array[array[:, 0] == array[:, 1]][0, 0])
        raise CadenError(f"Agent {loop} has an edge to itself; remove self-loops.")
    if len(array) and (array.min() < 0 or array.max() >= count):
        raise CadenError(f"`edges` must name agents 0..{count - 1}, got {int(array.min())}..{int(array.max())}.")
    links = sp.coo_array((np.ones(len(array)), (array[:, 0], array[:, 1])), shape=(count, count))
    parts = csgraph.connected_components(links, directed=False)[0]
    if parts > 1:
        raise CadenError(f"The graph has {parts} components; consensus needs a connected one: add edges.")
    return Graph(count, array, name)


def union(graphs: Sequence[Graph]) -> Graph:
    """All edges of several graphs on the same agents: the graph of a run whose `links` goes through them.

    >>> union([from_edges([(0, 1), (1, 2)]), from_edges([(0, 2), (1, 2)])]).edges.tolist()
    [[0, 1], [0, 2], [1, 2]]
    """
    if len({graph.agents for graph in graphs}) != 1:
        raise CadenError("`union` needs graphs with equally many agents.")
    return from_edges([edge for graph in graphs for edge in graph.edges.tolist()], graphs[0].agents, "union")


def from_networkx(graph: nx.Graph[Any], name: str = "networkx") -> Graph:
    """A graph from networkx; its nodes become agents 0..m-1 in the order in which networkx lists them."""
    if graph.is_directed():
        raise CadenError("The graph is directed; agents talk both ways: use `graph.to_undirected()`.")
    position = {node: i for i, node in enumerate(graph.nodes)}
    return from_edges([(position[a], position[b]) for a, b in graph.edges()], len(position), name)


def erdos_renyi(agents: int, p: float = 0.2, edges: int | None = None, seed: int = 0) -> Graph:
    """A connected random graph G(m, p); with `edges`, one with exactly so many edges instead.

    Graphs are drawn until one is connected. With `edges` so few that this is unlikely, a random spanning tree is drawn
    first and filled up with random edges.

    >>> erdos_renyi(20, 0.2, edges=37).degrees.sum()
    np.int64(74)
    """
    require_integer("agents", agents, least=2)
    require_integer("seed", seed)
    rng = np.random.default_rng(seed)
    if edges is None:
        if not 0 < require_number("p", p) <= 1:
            raise CadenError(f"`p` must lie in (0, 1], got {p}.")
        draws = (nx.fast_gnp_random_graph(agents, p, seed=int(rng.integers(2**31))) for _ in range(500))
    else:
        most = agents * (agents - 1) // 2
        if not agents - 1 <= require_integer("edges", edges) <= most:
            raise CadenError(f"`edges` must lie in {agents - 1}..{most} for {agents} agents, got {edges}.")
        draws = (nx.gnm_random_graph(agents, edges, seed=int(rng.integers(2**31))) for _ in range(100))
    for graph in draws:
        if nx.is_connected(graph):
            return from_networkx(graph, "erdos_renyi")
    if edges is None:
        raise CadenError(f"No connected graph in 500 draws of G({agents}, {p}): raise `p` or give `edges`.")
    graph = nx.random_labeled_tree(agents, seed=int(rng.integers(2**31)))
    while graph.number_of_edges() < edges:
        i, j = rng.choice(agents, 2, replace=False)
        graph.add_edge(int(i), int(j))
    graph.remove_edges_from(nx.selfloop_edges(graph))
    return from_networkx(graph, "erdos_renyi")


def ring(agents: int) -> Graph:
    """A cycle."""
    return from_networkx(nx.cycle_graph(require_integer("agents", agents, least=3)), "ring")


def path(agents: int) -> Graph:
    """A line."""
    return from_networkx(nx.path_graph(require_integer("agents", agents, least=2)), "path")


def star(agents: int) -> Graph:
    """Agent 0 in the middle, linked to all others."""
    return from_networkx(nx.star_graph(require_integer("agents", agents, least=2) - 1), "star")


def complete(agents: int) -> Graph:
    """Everyone linked to everyone."""
    return from_networkx(nx.complete_graph(require_integer("agents", agents, least=2)), "complete")


def grid(rows: int, columns: int) -> Graph:
    """A rows x columns grid, numbered row by row."""
    require_integer("rows", rows, least=1), require_integer("columns", columns, least=1)
    return from_networkx(nx.grid_2d_graph(rows, columns), "grid")


def torus(rows: int, columns: int) -> Graph:
    """A grid whose borders are glued together."""
    require_integer("rows", rows, least=3), require_integer("columns", columns, least=3)
    return from_networkx(nx.grid_2d_graph(rows, columns, periodic=True), "torus")


def exponential(agents: int) -> Graph:
    """Agent i is linked to i + 1, i + 2, i + 4, ... (modulo m): logarithmic degree and diameter."""
    require_integer("agents", agents, least=2)
    hops = [1 << k for k in range((agents - 1).bit_length())]
    return from_networkx(nx.circulant_graph(agents, hops), "exponential")


def small_world(agents: int, k: int = 4, p: float = 0.1, seed: int = 0) -> Graph:
    """Watts-Strogatz: a ring of `k` nearest neighbours, each edge rewired with probability `p`; connected."""
    require_integer("agents", agents, least=3), require_integer("k", k, least=2), require_integer("seed", seed)
    if k >= agents:
        raise CadenError(f"`k` must be below the number of agents ({agents}), got {k}.")
    if not 0 <= require_number("p", p) <= 1:
        raise CadenError(f"`p` must lie in [0, 1], got {p}.")
    return from_networkx(nx.connected_watts_strogatz_graph(agents, k, p, tries=500, seed=seed), "small_world")


def regular(agents: int, degree: int = 4, seed: int = 0) -> Graph:
    """A random graph in which everyone has `degree` neighbours, connected."""
    require_integer("agents", agents, least=2), require_integer("degree", degree, least=1)
    if degree >= agents or agents * degree % 2 or (degree == 1 and agents > 2):
        raise CadenError(f"There is no connected graph of {agents} agents with {degree} neighbours each.")
    for attempt in range(100):
        graph = nx.random_regular_graph(degree, agents, seed=seed + 1000 * attempt)
        if nx.is_connected(graph):
            return from_edges(graph.edges, agents, "regular")
    raise CadenError(f"No connected graph of {agents} agents with {degree} neighbours each was found.")


GRAPHS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (erdos_renyi, ring, path, star, complete, grid, torus, exponential, regular, small_world, from_edges)
}
