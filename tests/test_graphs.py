from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from caden import CadenError, graphs

ALL = [
    graphs.erdos_renyi(20, 0.2, seed=4),
    graphs.erdos_renyi(20, 0.2, edges=37, seed=4),
    graphs.ring(7),
    graphs.path(6),
    graphs.star(9),
    graphs.complete(5),
    graphs.grid(3, 4),
    graphs.torus(3, 4),
    graphs.exponential(10),
    graphs.barbell(9),
    graphs.small_world(12, 4, 0.3, seed=2),
]


@pytest.mark.parametrize("graph", ALL, ids=lambda g: g.name)
def test_matrices_agree_with_networkx(graph):
    reference = nx.Graph([tuple(e) for e in graph.edges.tolist()])
    laplacian = nx.laplacian_matrix(reference, nodelist=range(graph.agents)).toarray()
    np.testing.assert_array_equal(graph.laplacian, laplacian)
    np.testing.assert_array_equal(graph.degrees, [reference.degree[i] for i in range(graph.agents)])
    values = np.linalg.eigvalsh(laplacian)
    np.testing.assert_allclose(graph.spectrum, (values[1], values[-1]), atol=1e-10)
    values = np.sort(nx.normalized_laplacian_spectrum(reference))
    np.testing.assert_allclose(graph.normalised_spectrum, (values[1], values[-1]), atol=1e-10)
    assert graph.diameter == nx.diameter(reference)


@pytest.mark.parametrize("graph", ALL, ids=lambda g: g.name)
def test_mixing_matrices_are_symmetric_doubly_stochastic_and_contract(graph):
    for W in (graph.metropolis(), graph.laplacian_mixing()):
        np.testing.assert_allclose(W, W.T)
        np.testing.assert_allclose(W.sum(axis=0), 1)
        assert (W > -1e-15).all()
        assert np.linalg.norm(W - 1 / graph.agents, 2) < 1


def test_shapes_are_what_their_names_say():
    assert [len(g.edges) for g in ALL[1:8]] == [37, 7, 5, 8, 10, 17, 24]
    assert graphs.complete(5).spectrum == pytest.approx((5, 5))
    assert graphs.ring(4).normalised_spectrum[1] == pytest.approx(2)  # bipartite
    assert graphs.exponential(8).neighbours(0) == [1, 2, 4, 6, 7]
    assert graphs.star(4).degrees.tolist() == [3, 1, 1, 1]


@pytest.mark.parametrize("edges", [19, 20, 37, 190])
def test_exact_edge_count_is_always_connected(edges):
    for seed in range(5):
        graph = graphs.erdos_renyi(20, edges=edges, seed=seed)
        assert len(graph.edges) == edges
        assert nx.is_connected(graph.to_networkx())


def test_random_graphs_are_reproducible_and_differ_by_seed():
    first, again, other = (graphs.erdos_renyi(20, 0.2, seed=s).edges for s in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_large_ring_needs_no_dense_matrix():
    graph = graphs.ring(10_000)
    low, high = graph.spectrum
    assert low == pytest.approx(2 - 2 * np.cos(2 * np.pi / 10_000), rel=1e-6)
    assert high == pytest.approx(4, rel=1e-5)


def test_from_networkx_numbers_nodes_in_order():
    graph = graphs.from_networkx(nx.Graph([("b", "a"), ("a", "c")]))
    assert graph.edges.tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: graphs.from_edges([(0, 1), (2, 3)]), "2 components"),
        (lambda: graphs.from_edges([(0, 1)], agents=3), "2 components"),
        (lambda: graphs.from_edges([(0, 0), (0, 1)]), "self-loops"),
        (lambda: graphs.from_edges([(0, 5)], agents=3), "agents 0..2"),
        (lambda: graphs.from_edges([(0, 1, 2)]), "pairs"),
        (lambda: graphs.from_edges([3]), "pairs"),
        (lambda: graphs.from_edges([(0, 1.5)]), "whole numbers"),
        (lambda: graphs.from_networkx(nx.DiGraph([(0, 1)])), "directed"),
        (lambda: graphs.erdos_renyi(20, 0.001), "raise `p`"),
        (lambda: graphs.erdos_renyi(20, 1.5), r"\(0, 1\]"),
        (lambda: graphs.erdos_renyi(20, edges=5), "19..190"),
        (lambda: graphs.ring(2), "at least 3"),
        (lambda: graphs.ring("many"), "whole number"),
        (lambda: graphs.small_world(5, k=9), "below the number"),
    ],
)
def test_bad_input_is_one_clear_line(make, message):
    with pytest.raises(CadenError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_regular_graphs_give_everyone_the_same_number_of_neighbours():
    graph = graphs.regular(50, 4, seed=1)
    assert set(graph.degrees.tolist()) == {4} and graph.spectrum[0] > 0
    assert (graph.edges == graphs.regular(50, 4, seed=1).edges).all()
    for agents, degree in ((5, 3), (4, 4), (6, 1)):
        with pytest.raises(CadenError, match="no connected graph"):
            graphs.regular(agents, degree)


@pytest.mark.parametrize("kind", ["path", "ring", "erdos_renyi", "regular", "star", "grid"])
def test_bounds_hold_where_the_exact_values_are_known(kind):
    make = {"grid": lambda: graphs.grid(5, 9), "erdos_renyi": lambda: graphs.erdos_renyi(60, 0.08, seed=1)}
    graph = make.get(kind, lambda: getattr(graphs, kind)(60))()
    low, high = graph.diameter_bounds
    assert low <= graph.diameter <= high <= 2 * graph.diameter
    least, most = graph.spectrum_bounds
    assert 0 < least <= graph.spectrum[0] * (1 + 1e-12) and graph.spectrum[1] <= most * (1 + 1e-12)
    if kind == "path":
        assert high <= graph.diameter + 1  # the last search begins in the middle


def test_estimates_for_very_large_graphs(monkeypatch):
    graph = graphs.regular(1600, 4, seed=2)
    exact, diameter = graph.spectrum, graph.diameter
    monkeypatch.setattr(graphs, "_EXACT", 1000)
    again = graphs.regular(1600, 4, seed=2)
    assert again.spectrum == pytest.approx(exact, rel=0.02)
    assert diameter <= again.diameter <= 2 * diameter
    grid = graphs.grid(40, 50)
    assert grid.spectrum[0] == pytest.approx(2 - 2 * np.cos(np.pi / 50), rel=0.05)
    with pytest.raises(CadenError, match="use `spectrum_bounds`"):
        print(graphs.ring(5001).spectrum)
