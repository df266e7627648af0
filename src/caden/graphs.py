"""Communication graphs: undirected, connected, without self-loops, built with networkx.

>>> graph = erdos_renyi(20, 0.2, edges=37, seed=0)
>>> graph.agents, len(graph.edges), int(graph.degrees.sum())
(20, 37, 74)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import networkx as nx
import numpy as np
import scipy.sparse as sp
from scipy.sparse import csgraph
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from caden.errors import CadenError, require_integer, require_number, require_positive

_DENSE = 1500  # largest number of agents for which a dense solver computes the spectrum
_EXACT = 20_000  # ... for which the spectrum is computed, and not estimated
_PATHS = 2_000  # ... for which all shortest paths are looked at


@dataclass(frozen=True, eq=False)
class Graph:
    """m agents and their edges, an (n, 2) array of pairs i < j in lexicographic order."""

    agents: int
    edges: np.ndarray
    name: str = "graph"

    @cached_property
    def degrees(self) -> np.ndarray:
        """The number of neighbours of each agent, (m,)."""
        return np.asarray(np.bincount(self.edges.ravel(), minlength=self.agents))

    def neighbours(self, agent: int) -> list[int]:
        """Return the sorted neighbours of one agent."""
        i, j = self.edges[:, 0], self.edges[:, 1]
        return sorted([*j[i == agent].tolist(), *i[j == agent].tolist()])

    def _laplacian(self, weights: np.ndarray | None = None) -> sp.csr_array:
        i, j = self.edges[:, 0], self.edges[:, 1]
        w = np.ones(len(self.edges)) if weights is None else weights
        off = sp.coo_array((np.r_[w, w], (np.r_[i, j], np.r_[j, i])), shape=(self.agents, self.agents)).tocsr()
        return sp.csr_array(sp.diags_array(off.sum(axis=1)) - off)

    @cached_property
    def laplacian(self) -> np.ndarray:
        """The (m, m) dense Laplacian D - A, for inspection; the library itself uses the edge list."""
        return np.asarray(self._laplacian().toarray())

    @cached_property
    def adjacency(self) -> np.ndarray:
        """The (m, m) dense adjacency matrix."""
        return np.asarray(np.diag(self.degrees.astype(float)) - self.laplacian)

    def _extremes(self, matrix: sp.csr_array, null: np.ndarray) -> tuple[float, float]:
        """Return the second smallest and the largest eigenvalue of a positive semidefinite matrix with a simple 0.

        `null` (m,) spans its kernel.
        """
        if self.agents == 1:
            raise CadenError("A single agent has no spectrum.")
        if self.agents <= _DENSE:
            values = np.linalg.eigvalsh(matrix.toarray())
            return float(values[1]), float(values[-1])
        begin = np.random.default_rng(0).random(self.agents)  # otherwise scipy draws another one in every call
        largest = float(eigsh(matrix, k=1, which="LA", tol=1e-5, v0=begin, return_eigenvectors=False)[0])
        if self.agents > _EXACT:  # factorising the matrix would take hours
            return self._estimate(matrix, null / np.linalg.norm(null), largest, begin), largest
        shift = -1e-3 * largest  # below the spectrum, so the shifted matrix is nonsingular
        small = eigsh(matrix, k=2, sigma=shift, which="LM", v0=begin, return_eigenvectors=False)
        return float(np.sort(small)[1]), largest

    def _estimate(self, matrix: sp.csr_array, null: np.ndarray, largest: float, begin: np.ndarray) -> float:
        """Return the second smallest eigenvalue up to 5 %, by Lanczos iterations without the kernel."""

        def product(v: np.ndarray) -> np.ndarray:
            v = v.ravel()
            return np.asarray(largest * v - matrix @ v - largest * null * (null @ v))

        operator = LinearOperator((self.agents, self.agents), matvec=product, dtype=float)
        hint = "the graph is too large and its gap too small to estimate its spectrum: use `spectrum_bounds`"
        try:
            values, vectors = eigsh(operator, k=1, which="LA", tol=1e-6, v0=begin, maxiter=300)
        except ArpackNoConvergence:
            raise CadenError(f"With {self.agents:,} agents {hint}.") from None
        value, vector = largest - float(values[0]), vectors[:, 0]
        if not np.linalg.norm(matrix @ vector - value * vector) <= 0.05 * value:
            raise CadenError(f"With {self.agents:,} agents {hint}.")
        return value

    @cached_property
    def spectrum(self) -> tuple[float, float]:
        """(lambda_min, lambda_max) of the Laplacian: its second smallest and its largest eigenvalue.

        With more than 20,000 agents they are estimates, or refused where the gap is too small for that.
        """
        return self._extremes(self._laplacian(), np.ones(self.agents))

    @property
    def spectrum_bounds(self) -> tuple[float, float]:
        """(low, high) with low <= lambda_min and lambda_max <= high, whatever the size.

        low = 4 / (m diameter) (Mohar, "Eigenvalues, diameter, and mean distance in graphs", 1991), high is the largest
        d_i + d_j of an edge (Anderson and Morley, "Eigenvalues of the Laplacian of a graph", 1985).
        """
        if self.agents == 1:
            raise CadenError("A single agent has no spectrum.")
        ends = self.degrees[self.edges]
        return 4 / (self.agents * self.diameter_bounds[1]), float(ends.sum(1).max())

    @cached_property
    def normalised_spectrum(self) -> tuple[float, float]:
        """The same for D^-1/2 Lap D^-1/2, whose eigenvalues lie in [0, 2]; only bipartite graphs reach 2."""
        scale = sp.diags_array(1 / np.sqrt(self.degrees))
        return self._extremes(sp.csr_array(scale @ self._laplacian() @ scale), np.sqrt(self.degrees))

    @cached_property
    def diameter(self) -> int:
        """The length of the longest shortest path.

        With more than 2,000 agents it is an upper bound, at most twice that, but exact for trees and rings.
        """
        if self.agents > _PATHS:
            return self.diameter_bounds[1]
        return int(nx.diameter(self.to_networkx(), usebounds=True))

    @cached_property
    def _sweeps(self) -> tuple[list[int], int]:
        """Return how far the farthest agent is in four breadth-first searches, and where the last one began.

        The searches begin at any agent, at the end of a long path, at its other end, and in its middle.
        """
        i, j = self.edges[:, 0], self.edges[:, 1]
        links = sp.csr_array((np.ones(len(i)), (i, j)), shape=(self.agents, self.agents))

        def distances(start: int) -> np.ndarray:
            return np.asarray(csgraph.dijkstra(links, directed=False, indices=[start], unweighted=True)[0])

        anywhere = distances(0)
        one = distances(int(anywhere.argmax()))
        other = distances(int(one.argmax()))
        middle = int(np.maximum(one, other).argmin())
        return [int(away.max()) for away in (anywhere, one, other, distances(middle))], middle

    @cached_property
    def diameter_bounds(self) -> tuple[int, int]:
        """(low, high) bounds of the diameter: the largest distance from any agent is at least half of it."""
        reach, is_tree = self._sweeps[0], len(self.edges) < self.agents
        exact = is_tree or bool((self.degrees == 2).all())  # a ring
        return max(reach), max(reach) if exact else 2 * min(reach)

    @cached_property
    def spanning_tree(self) -> np.ndarray:
        """(n,) bool: the edges of a breadth-first tree around a central agent; all of them if the graph is a tree."""
        graph = self.to_networkx()
        root = self._sweeps[1] if self.agents > _PATHS else nx.center(graph, usebounds=True)[0]
        tree = {(min(i, j), max(i, j)) for i, j in nx.bfs_edges(graph, root)}
        return np.array([(i, j) in tree for i, j in self.edges.tolist()])

    def metropolis_weights(self) -> np.ndarray:
        """Return the (n,) edge weights 1 / (1 + max(d_i, d_j))."""
        return np.asarray(1 / (1 + self.degrees[self.edges].max(axis=1)))

    def metropolis(self) -> np.ndarray:
        """Return the (m, m) Metropolis mixing matrix: symmetric, doubly stochastic, with positive diagonal."""
        return np.asarray(np.eye(self.agents) - self._laplacian(self.metropolis_weights()).toarray())

    def laplacian_mixing(self, step: float | None = None) -> np.ndarray:
        """Return the (m, m) mixing matrix I - step * Lap; `step` defaults to 1 / (d_max + 1)."""
        step = 1 / (float(self.degrees.max()) + 1) if step is None else require_positive("step", step)
        return np.eye(self.agents) - step * self.laplacian

    def to_networkx(self) -> nx.Graph[int]:
        """Return the graph as a networkx graph."""
        graph: nx.Graph[int] = nx.empty_graph(self.agents)
        graph.add_edges_from(self.edges.tolist())
        return graph

    def __repr__(self) -> str:
        return f"Graph({self.name}: {self.agents} agents, {len(self.edges)} edges)"

    def describe(self) -> str:
        """Return the graph in words."""
        low, high = int(self.degrees.min()), int(self.degrees.max())
        degrees = f"degree {low}" if low == high else f"degrees {low} to {high}"
        return f"{self.name}: {self.agents} agents, {len(self.edges)} edges, {degrees}"

    def svg(self) -> str:
        """Return a drawing in the colours of the surrounding page; of more than 200 agents only the words."""
        words = f"<p>{escape(self.describe())}</p>"
        if self.agents > 200:
            return words
        layout = nx.kamada_kawai_layout(self.to_networkx())
        at = {agent: (160 + 140 * x, 160 + 140 * y) for agent, (x, y) in layout.items()}
        lines = "".join(
            f'<line x1="{at[i][0]:.1f}" y1="{at[i][1]:.1f}" x2="{at[j][0]:.1f}" y2="{at[j][1]:.1f}"/>'
            for i, j in self.edges.tolist()
        )
        dots = "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9"/><text x="{x:.1f}" y="{y + 3:.1f}" fill="#fff">{agent}</text>'
            for agent, (x, y) in sorted(at.items())
        )
        return (
            f'<svg class="net" viewBox="0 0 320 320" width="320" role="img" aria-label="{escape(self.describe())}">'
            f'<g stroke="currentColor" stroke-opacity="0.5">{lines}</g><g fill="#0072b2" stroke="none" font-size="9" '
            f'text-anchor="middle">{dots}</g></svg>{words}'
        )

    def _repr_html_(self) -> str:
        return self.svg()


def from_edges(edges: Iterable[Sequence[int]], agents: int | None = None, name: str = "edges") -> Graph:
    """A graph from pairs of agents 0..m-1; m defaults to the largest agent number plus one.

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
        raise CadenError(f"The graph has {parts} components, but consensus needs a connected graph: add edges.")
    return Graph(count, array, name)


def union(graphs: Sequence[Graph]) -> Graph:
    """The union of several graphs on the same agents: the graph of a run whose `links` switches between them.

    >>> union([from_edges([(0, 1), (1, 2)]), from_edges([(0, 2), (1, 2)])]).edges.tolist()
    [[0, 1], [0, 2], [1, 2]]
    """
    if len({graph.agents for graph in graphs}) != 1:
        raise CadenError("`union` needs graphs with the same number of agents.")
    return from_edges([edge for graph in graphs for edge in graph.edges.tolist()], graphs[0].agents, "union")


def from_networkx(graph: nx.Graph[Any], name: str = "networkx") -> Graph:
    """A graph from networkx; its nodes become agents 0..m-1 in the order of networkx."""
    if graph.is_directed():
        raise CadenError("The graph is directed, but agents communicate both ways: use `graph.to_undirected()`.")
    position = {node: i for i, node in enumerate(graph.nodes)}
    return from_edges([(position[a], position[b]) for a, b in graph.edges()], len(position), name)


def from_adjacency(matrix: Any, name: str = "adjacency") -> Graph:
    """A graph from a symmetric (m, m) adjacency matrix, dense or sparse; nonzero entries are edges.

    >>> from_adjacency([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).edges.tolist()
    [[0, 1], [1, 2]]
    """
    try:
        dense = matrix.toarray() if hasattr(matrix, "toarray") else matrix  # from scipy.sparse
        entries = sp.coo_array(np.asarray(dense))
    except (TypeError, ValueError):
        raise CadenError(f"An adjacency matrix must hold numbers, got {type(matrix).__name__}.") from None
    if entries.ndim != 2 or entries.shape[0] != entries.shape[1]:
        raise CadenError(f"An adjacency matrix must be square, got shape {entries.shape}.")
    pairs = {(int(i), int(j)) for i, j, value in zip(*entries.coords, entries.data) if value != 0}
    if any((j, i) not in pairs for i, j in pairs):
        raise CadenError("The adjacency matrix is not symmetric, but agents communicate both ways.")
    return from_edges(sorted(pairs), entries.shape[0], name)


def as_graph(graph: Any) -> Graph:
    """Return a graph from itself, from a networkx graph or from an adjacency matrix."""
    if isinstance(graph, Graph):
        return graph
    if isinstance(graph, nx.Graph):
        return from_networkx(graph)
    if sp.issparse(graph) or isinstance(graph, np.ndarray):
        return from_adjacency(graph)
    raise CadenError(
        f"`graph` must be a Graph, a networkx graph or an adjacency matrix, got {type(graph).__name__}: use a function "
        "of `caden.graphs`, for example `caden.graphs.ring(20)`."
    )


def erdos_renyi(agents: int, p: float = 0.2, edges: int | None = None, seed: int = 0) -> Graph:
    """A connected random graph G(m, p), or one with exactly `edges` edges.

    Graphs are drawn until one is connected. If `edges` is so small that this is unlikely, a random spanning tree is
    drawn and random edges are added.

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
        max_edges = agents * (agents - 1) // 2
        if not agents - 1 <= require_integer("edges", edges) <= max_edges:
            raise CadenError(f"`edges` must lie in {agents - 1}..{max_edges} for {agents} agents, got {edges}.")
        draws = (nx.gnm_random_graph(agents, edges, seed=int(rng.integers(2**31))) for _ in range(100))
    for graph in draws:
        if nx.is_connected(graph):
            return from_networkx(graph, "erdos_renyi")
    if edges is None:
        raise CadenError(f"No connected graph in 500 draws of G({agents}, {p}): raise `p` or set `edges`.")
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
    """A star: agent 0 is linked to all others."""
    return from_networkx(nx.star_graph(require_integer("agents", agents, least=2) - 1), "star")


def complete(agents: int) -> Graph:
    """A complete graph: all agents are linked to each other."""
    return from_networkx(nx.complete_graph(require_integer("agents", agents, least=2)), "complete")


def grid(rows: int, columns: int) -> Graph:
    """A rows x columns grid, numbered row by row."""
    require_integer("rows", rows, least=1), require_integer("columns", columns, least=1)
    return from_networkx(nx.grid_2d_graph(rows, columns), "grid")


def torus(rows: int, columns: int) -> Graph:
    """A grid with periodic boundaries."""
    require_integer("rows", rows, least=3), require_integer("columns", columns, least=3)
    return from_networkx(nx.grid_2d_graph(rows, columns, periodic=True), "torus")


def exponential(agents: int) -> Graph:
    """Agent i linked to i + 1, i + 2, i + 4, ... (modulo m): logarithmic degree and diameter."""
    require_integer("agents", agents, least=2)
    hops = [1 << k for k in range((agents - 1).bit_length())]
    return from_networkx(nx.circulant_graph(agents, hops), "exponential")


def barbell(agents: int) -> Graph:
    """Two complete graphs of half the agents each, joined by one edge: a bottleneck."""
    require_integer("agents", agents, least=4)
    graph = nx.disjoint_union(nx.complete_graph(agents // 2), nx.complete_graph(agents - agents // 2))
    graph.add_edge(agents // 2 - 1, agents // 2)
    return from_networkx(graph, "barbell")


def small_world(agents: int, k: int = 4, p: float = 0.1, seed: int = 0) -> Graph:
    """A connected Watts-Strogatz graph: a ring of `k` nearest neighbours, edges rewired with probability `p`."""
    require_integer("agents", agents, least=3), require_integer("k", k, least=2), require_integer("seed", seed)
    if k >= agents:
        raise CadenError(f"`k` must be below the number of agents ({agents}), got {k}.")
    if not 0 <= require_number("p", p) <= 1:
        raise CadenError(f"`p` must lie in [0, 1], got {p}.")
    return from_networkx(nx.connected_watts_strogatz_graph(agents, k, p, tries=500, seed=seed), "small_world")


def regular(agents: int, degree: int = 4, seed: int = 0) -> Graph:
    """A connected random graph in which every agent has `degree` neighbours."""
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
    for f in (
        *(erdos_renyi, ring, path, star, complete, grid, torus, exponential, barbell, regular, small_world),
        from_edges,
    )
}
