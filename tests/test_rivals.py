"""Newer rivals against their textbook loops at full and at half participation; identities; their papers' claims."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import caden
import oracles
import oracles_rivals as rivals
from caden import methods
from conftest import masks
from test_methods import ROUNDS, assert_rows, iterates


@pytest.fixture(scope="module")
def setting():
    problem = caden.problems.quadratic(agents=12, dim=4, seed=2)
    graph = caden.graphs.erdos_renyi(12, edges=20, seed=3)
    x0 = np.random.default_rng(7).normal(size=(12, 4))
    return problem, graph, x0, [tuple(e) for e in graph.edges.tolist()]


def gradients(setting):
    problem, _, x0, edges = setting
    return x0, edges, oracles.gradient(problem.hessian.numpy(), problem.linear.numpy())


def final(method, setting, rounds, **options):
    """The rows after so many rounds."""
    problem, graph, x0, _ = setting
    options = {"x0": torch.tensor(x0), "record_every": rounds} | options
    return caden.simulate(method, problem, graph, rounds, **options).x.numpy()


LOOPS = {
    "atg": (
        lambda: methods.atg(0.3, 0.4, 0.8, 0.6),
        lambda start, m: rivals.atg(*start, 0.3, 0.4, 0.8, 0.6, m),
    ),
    "choco": (
        lambda: methods.choco(0.1, 0.6),
        lambda start, m: rivals.choco(*start, 0.1, 0.6, np.copy, m),
    ),
    "beer": (
        lambda: methods.beer(0.1, 0.6),
        lambda start, m: rivals.beer(*start, 0.1, 0.6, np.copy, m),
    ),
    "gt_adam": (
        lambda: methods.gt_adam(0.05, 0.8, 0.9, 1e-3, 0.5),
        lambda start, m: rivals.gt_adam(*start, 0.05, 0.8, 0.9, 1e-3, 0.5, m),
    ),
    "qg_dsgdm": (
        lambda: methods.qg_dsgdm(0.1, 0.8, 0.2),
        lambda start, m: rivals.qg_dsgdm(*start, 0.1, 0.8, 0.2, False, m),
    ),
    "qg_dsgdm nesterov": (
        lambda: methods.qg_dsgdm(0.1, 0.8, 0.2, nesterov=True),
        lambda start, m: rivals.qg_dsgdm(*start, 0.1, 0.8, 0.2, True, m),
    ),
}


@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("name", LOOPS)
def test_rival_equals_its_textbook_loop(setting, name, p):
    method, oracle = LOOPS[name]
    awake = [m if m.any() else np.arange(12) == 0 for m in masks(12, ROUNDS, p, seed=1)]
    assert_rows(iterates(method(), setting, awake), oracle(gradients(setting), awake))


VECTORS = {"atg": 2, "beer": 2, "gt_adam": 2}


@pytest.mark.parametrize("name", LOOPS)
def test_vectors_per_directed_edge(setting, name):
    problem, graph, _, _ = setting
    rows = caden.simulate(LOOPS[name][0](), problem, graph, 4, local_steps=3).rows
    assert rows[-1]["communications"] == 4 * VECTORS.get(name.split()[0], 1) * 2 * len(graph.edges)


# Compression.


@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("name", ["choco", "beer"])
def test_compressed_gossip_equals_its_textbook_loop(setting, name, p):
    """The network's copies are the paper's shadow variables."""
    problem, graph, x0, edges = setting
    awake = masks(12, ROUNDS, p, seed=4)
    awake[0] = np.ones(12, bool)
    method = methods.METHODS[name](0.1, 0.3)
    oracle = getattr(rivals, name)(*gradients(setting), 0.1, 0.3, rivals.top(2), awake)
    seen = []
    result = caden.simulate(
        method,
        problem,
        graph,
        ROUNDS,
        x0=torch.tensor(x0),
        messages={"top": 0.5},
        participation=1.0 if p == 1 else lambda round, draw: awake[round],
        callbacks=[lambda row, state: seen.append(state.x.numpy().copy())],
    )
    assert_rows(seen, oracle)
    kinds = {"choco": 1, "beer": 2}[name]
    arcs = sum(int(mask[list(edge)].sum()) for mask in awake for edge in edges)
    whole, part = 4 * 8, 2 * 8 + 1  # two entries of eight bytes, and which they are in one
    assert result.rows[-1]["bytes"] == kinds * (2 * len(edges) * whole + (arcs - 2 * len(edges)) * part)


def test_choco_without_compression_is_adapt_then_combine(setting):
    awake = masks(12, ROUNDS, 0.5, seed=2)
    found = iterates(methods.choco(0.2, 1.0), setting, awake)
    assert_rows(found, rivals.atc(*gradients(setting), 0.2, awake))


def test_beer_without_compression_is_diging(setting):
    awake = masks(12, ROUNDS, 0.5, seed=2)
    assert_rows(iterates(methods.beer(0.2, 1.0), setting, awake), iterates(methods.diging(0.2), setting, awake), 1e-12)


@pytest.mark.parametrize("method", [methods.beer(0.1, 0.4), methods.gt_adam(0.02, eps=0.01)])
def test_trackers_sum_to_the_gradients_also_compressed_and_half_awake(setting, method):
    problem, graph, x0, _ = setting

    def check(row, state):
        torch.testing.assert_close(state.tracker.sum(0), problem.value_and_grad(state.x)[1].sum(0))

    options = {"participation": 0.5, "messages": {"top": 0.5}, "x0": torch.tensor(x0)}
    caden.simulate(method, problem, graph, 40, callbacks=[check], **options)


@pytest.mark.slow
def test_beer_is_exact_where_choco_stops_short(setting):
    """BEER's claim against CHOCO-SGD, at a quarter of the entries."""
    few = {"messages": {"top": 0.25}}
    solution = setting[0].solution.numpy()
    exact = final(methods.beer(0.1, 0.2), setting, 2500, **few)
    biased = [
        abs(final(methods.choco(a, 0.2), setting, n, **few) - solution).max() for a, n in ((0.1, 600), (0.01, 3000))
    ]
    assert abs(exact - solution).max() < 1e-6
    assert 1e-3 < biased[1] < 0.6 * biased[0]


# ADMM-tracking gradient.


def test_atg_tracks_the_means_in_the_limit(setting):
    """sum y = sum x and sum s = sum grad f = 0 once it stands still, whatever happened on the way."""
    problem, graph, x0, _ = setting
    seen, rounds = [], 1000
    options = {"participation": 0.5, "messages": {"loss": 0.3}, "x0": torch.tensor(x0), "record_every": rounds}
    callbacks = [lambda row, state: seen.append(state)]
    caden.simulate(methods.atg(0.5), problem, graph, rounds, callbacks=callbacks, **options)
    state, arcs = seen[-1], torch.from_numpy(graph.edges.T.flatten())
    share = 1 / (1 + 0.3 * torch.from_numpy(graph.degrees).double().unsqueeze(1))

    def tracked(own, z):
        return share * (own + torch.zeros_like(own).index_add(0, arcs, z))

    y, s = tracked(state.x, state.model_arcs), tracked(state.gradient, state.gradient_arcs)
    torch.testing.assert_close(y.sum(0), state.x.sum(0), atol=1e-9, rtol=0)
    assert s.abs().max() < 1e-9
    assert (state.x - problem.solution).norm(dim=1).max() < 1e-8


# Adam and momentum.


@pytest.mark.slow
def test_gt_adam_converges_and_leaves_again_if_its_step_is_too_long(setting):
    """alpha L / sqrt(eps) = 0.2 is exact; at 100, v decays and the step grows until the iterates circle."""
    solution = setting[0].solution.numpy()
    assert abs(final(methods.gt_adam(0.02, eps=0.01, beta2=0.99), setting, 1500) - solution).max() < 1e-8
    assert abs(final(methods.gt_adam(0.01, eps=1e-8, beta2=0.9), setting, 1500) - solution).max() > 1e-6


@pytest.mark.parametrize("nesterov", [False, True])
def test_quasi_global_momentum_has_the_limit_of_adapt_then_combine(setting, nesterov):
    problem, _, _, edges = setting
    step = 0.2 * (1.8 if nesterov else 1.0)
    limit = rivals.atc_limit(edges, problem.hessian.numpy(), problem.linear.numpy(), step)
    found = final(methods.qg_dsgdm(0.2, 0.8, nesterov=nesterov), setting, 700)
    np.testing.assert_allclose(found, limit, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.atg(0.1, alpha=1.0), r"`alpha` must lie in \(0, 1\)"),
        (lambda: methods.atg(0.1, gamma=1.5), r"`gamma` must lie in \(0, 1\]"),
        (lambda: methods.beer(0.1, 0.0), r"`gamma` must lie in \(0, 1\]"),
        (lambda: methods.gt_adam(beta2=1.0), r"`beta2` must lie in \[0, 1\)"),
        (lambda: methods.qg_dsgdm(mu=1.0), r"`mu` must lie in \[0, 1\)"),
        (lambda: methods.qg_dsgdm(nu=0.0), r"`nu` must lie in \(0, 1\]"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(caden.CadenError, match=message):
        make()
