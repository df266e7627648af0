"""Newer rivals against their textbook loops at full and at half participation; identities; their papers' claims."""

from __future__ import annotations

import runpy
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch

import caden
import oracles
import oracles_rivals as rivals
from caden import methods
from caden.draws import Draw, batch
from caden.methods import _normalised_tracking
from caden.networks.transport import Memory, Overlapped
from conftest import masks
from test_methods import ROUNDS, STEPS, assert_rows, curvature, iterates


def tree(edges):
    """The edges of the library's spanning tree."""
    graph = caden.graphs.from_edges(edges)
    return [tuple(e) for e in graph.edges[graph.spanning_tree].tolist()]


def gradients(setting):
    problem, _, x0, edges = setting
    return x0, edges, oracles.gradient(problem.hessian.numpy(), problem.linear.numpy())


def final(method, setting, rounds, **options):
    """The rows after so many rounds."""
    problem, graph, x0, _ = setting
    options = {"x0": torch.tensor(x0), "record_every": rounds} | options
    return caden.simulate(method, problem, graph, rounds, **options).x.numpy()


def draws(rounds):
    """The numbers from which all agents draw the same pairs."""
    return [Draw(0, 1).uniform("common/pairs", t)[0] for t in range(rounds)]


def sgd(lr):
    return {"name": "torch_optim", "optimizer": "SGD", "lr": lr}


def unit(v):
    return v / np.linalg.norm(v)


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
    "gt_nsgdm": (
        lambda: methods.gt_nsgdm(0.05, 0.7),
        lambda start, m: rivals.normalised_tracking(*start, 0.05, 0.7, unit, m),
    ),
    "diloco": (
        lambda: methods.diloco(outer_lr=0.6, mu=0.7, solver=sgd(0.1)),
        lambda start, m: rivals.diloco(start[0], start[2], 0.1, 0.6, 0.7, True, STEPS, m),
    ),
    "diloco heavy ball": (
        lambda: methods.diloco(outer_lr=0.6, mu=0.7, nesterov=False, solver=sgd(0.1)),
        lambda start, m: rivals.diloco(start[0], start[2], 0.1, 0.6, 0.7, False, STEPS, m),
    ),
    "noloco": (
        lambda: methods.noloco(outer_lr=0.6, mu=0.4, pull=0.5, solver=sgd(0.1)),
        lambda start, m: rivals.noloco(*start, 0.1, 0.6, 0.4, 0.5, STEPS, draws(len(m)), m),
    ),
    "gasloc": (
        lambda: methods.gasloc(0.05, 0.8, 0.4, 0.9),
        lambda start, m: rivals.gasloc(*start, 0.05, 0.8, 0.4, 0.9, STEPS, m),
    ),
    "gasloc pairs": (
        lambda: methods.gasloc(0.05, 0.8, 0.4, 0.9, pairs=True),
        lambda start, m: rivals.gasloc(*start, 0.05, 0.8, 0.4, 0.9, STEPS, m, draws(len(m))),
    ),
    "lodadac": (
        lambda: methods.lodadac(0.01, 0.8, 0.9, 1e-3, 0.6, "amsgrad"),
        lambda start, m: rivals.lodadac(*start, 0.01, 0.8, 0.9, 1e-3, 0.6, True, STEPS, np.copy, m),
    ),
    "lodadac adam": (
        lambda: methods.lodadac(0.01, 0.8, 0.9, 1e-3, 0.6, "adam"),
        lambda start, m: rivals.lodadac(*start, 0.01, 0.8, 0.9, 1e-3, 0.6, False, STEPS, np.copy, m),
    ),
    "relay_sgd": (
        lambda: methods.relay_sgd(0.2),
        lambda start, m: rivals.relay_sgd(start[0], tree(start[1]), start[2], 0.2, m),
    ),
    "kgt published start": (
        lambda: methods.kgt(0.1, 0.7, start="gradients"),
        lambda start, m: oracles.kgt(*start, 0.1, 0.7, STEPS, m, published=True),
    ),
    "led with W": (
        lambda: methods.led(0.2, 0.3, lazy=False),
        lambda start, m: oracles.led(*start, 0.2, 0.3, STEPS, m, lazy=False),
    ),
}


@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("name", LOOPS)
def test_rival_equals_its_textbook_loop(setting, name, p):
    method, oracle = LOOPS[name]
    awake = [m if m.any() else np.arange(12) == 0 for m in masks(12, ROUNDS, p, seed=1)]
    assert_rows(iterates(method(), setting, awake), oracle(gradients(setting), awake))


VECTORS = {"atg": 2, "beer": 2, "gt_adam": 2, "gt_nsgdm": 2, "kgt": 2}


@pytest.mark.parametrize("name", LOOPS)
def test_vectors_are_counted_by_the_network(setting, name):
    problem, graph, _, edges = setting
    last = caden.simulate(LOOPS[name][0](), problem, graph, 4, local_steps=STEPS).rows[-1]
    met = sum(len(rivals.random_pairs(edges, number)) for number in draws(4))
    sent = {"diloco": 4 * 2 * 12, "relay_sgd": 4 * 2 * 11, "noloco": 2 * 2 * met, "gasloc pairs": 2 * met}
    kind = name.split()[0]
    expected = sent.get(name) or sent.get(kind) or 4 * VECTORS.get(kind, 1) * 2 * len(edges)
    assert last["communications"] == expected
    assert last["bytes"] == 8 * (4 * expected + (expected if kind == "relay_sgd" else 0))  # and its counts


# Compression.


@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("name", ["choco", "beer", "lodadac"])
def test_compressed_gossip_equals_its_textbook_loop(setting, name, p):
    """The network's copies are the paper's shadow variables."""
    problem, graph, x0, edges = setting
    awake = masks(12, ROUNDS, p, seed=4)
    awake[0] = np.ones(12, bool)
    method, settings = methods.METHODS[name](0.1, 0.3), (0.1, 0.3)
    if name == "lodadac":
        method, settings = methods.lodadac(0.01, 0.8, 0.9, 1e-3, 0.3), (0.01, 0.8, 0.9, 1e-3, 0.3, True, STEPS)
    oracle = getattr(rivals, name)(*gradients(setting), *settings, rivals.top(2), awake)
    seen = []
    result = caden.simulate(
        method,
        problem,
        graph,
        ROUNDS,
        x0=torch.tensor(x0),
        messages={"top": 0.5},
        local_steps=STEPS,
        participation=1.0 if p == 1 else lambda round, draw: awake[round],
        callbacks=[lambda row, state: seen.append(state.x.numpy().copy())],
    )
    assert_rows(seen, oracle)
    kinds = 2 if name == "beer" else 1
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


def test_two_exchanges_per_round_cannot_travel_in_the_background(setting):
    """The second would be taken for the first."""
    problem, graph, _, _ = setting
    with pytest.raises(caden.CadenError, match="one exchange per round"):
        caden.simulate(methods.atg(), problem, graph, 2, transport=Overlapped(Memory()))


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


# Normalised steps.


def test_normalised_tracking_without_normalisation_is_gradient_tracking(setting):
    """From the tracker W G, with beta = 0."""
    method = _normalised_tracking._method("identity", 0.2, 0.0, "constant", lambda y, problem: y)
    x0, edges, grad = gradients(setting)
    found = iterates(method, setting, masks(12, ROUNDS, 1.0))
    assert_rows(found, rivals.gradient_tracking_mixed_start(x0, edges, grad, 0.2, ROUNDS))


@pytest.mark.parametrize("name", ["gt_nsgdm", "demuon"])
def test_the_tracked_momentum_keeps_its_sum(setting, name):
    problem, graph, x0, _ = setting

    def check(row, state):
        torch.testing.assert_close(state.tracker.sum(0), state.momentum.sum(0))

    options = {"participation": 0.5, "x0": torch.tensor(x0)}
    caden.simulate(methods.METHODS[name](0.1), problem, graph, 40, callbacks=[check], **options)


def shaped(*shapes):
    """A quadratic whose x consists of parameters of these shapes."""
    sizes = [torch.Size(shape) for shape in shapes]
    problem = caden.problems.quadratic(agents=12, dim=sum(size.numel() for size in sizes), seed=2)
    problem.shapes = sizes
    return problem


@pytest.mark.parametrize("p", [1.0, 0.5])
def test_demuon_equals_its_textbook_loop(setting, p):
    """A matrix, a kernel, a vector, and a single column."""
    _, graph, _, edges = setting
    problem = shaped((3, 2), (2, 2, 2), (4,), (3, 1))
    x0 = np.random.default_rng(7).normal(size=(12, problem.dim))
    grad = oracles.gradient(problem.hessian.numpy(), problem.linear.numpy())

    def normalise(y):
        a, b, c, d = np.split(y, [6, 14, 18])
        matrices = rivals.newton_schulz(a.reshape(3, 2)), rivals.newton_schulz(b.reshape(2, 4))
        return np.concatenate([*(m.ravel() for m in matrices), unit(c), unit(d)])

    awake = masks(12, ROUNDS, p, seed=1)
    found = iterates(methods.demuon(0.05, 0.7), (problem, graph, x0, edges), awake)
    assert_rows(found, rivals.normalised_tracking(x0, edges, grad, 0.05, 0.7, normalise, awake), 1e-9)


def test_demuon_of_one_column_is_gt_nsgdm(setting):
    _, graph, x0, edges = setting
    awake = masks(12, ROUNDS, 0.5, seed=1)
    column = shaped((4, 1)), graph, x0, edges
    assert_rows(iterates(methods.demuon(0.1), column, awake), iterates(methods.gt_nsgdm(0.1), column, awake), 1e-14)


def test_newton_schulz_leaves_singular_values_near_one():
    rows = torch.randn(50, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = _normalised_tracking.orthogonal(rows, shaped((6, 8))).view(50, 6, 8)
    values = torch.linalg.svdvals(found)
    assert 0.5 < values.min() < 0.8 < values.max() < 1.3


def test_a_tracker_of_zeros_gives_no_direction():
    zeros = torch.zeros(3, 10, dtype=torch.float64)
    assert torch.equal(_normalised_tracking.orthogonal(zeros, shaped((2, 3), (4,))), zeros)


@pytest.mark.slow
def test_normalised_steps_stop_within_their_length(setting):
    """O(alpha): shorter steps end nearer, and so do steps that begin as long and fall to 0."""
    solution = setting[0].solution.numpy()
    cases = (0.1, "constant", 300), (0.01, "constant", 1000), (0.1, "linear", 1000)
    far, near, decayed = (
        abs(final(methods.gt_nsgdm(alpha, schedule=schedule), setting, rounds) - solution).max()
        for alpha, schedule, rounds in cases
    )
    assert far < 0.4
    assert max(near, decayed) < far / 4


# Local steps and outer momentum.


def test_diloco_without_momentum_is_fedavg(setting):
    awake = [m if m.any() else np.arange(12) == 0 for m in masks(12, ROUNDS, 0.5, seed=3)]
    ours = iterates(methods.diloco(outer_lr=1.0, mu=0.0, solver=sgd(0.2)), setting, awake)
    assert_rows(ours, iterates(methods.fedavg(0.2), setting, awake), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_has_the_limit_of_fedavg(setting, nesterov):
    limit = final(methods.fedavg(0.2), setting, 400)
    method = methods.diloco(outer_lr=0.7, mu=0.5, nesterov=nesterov, solver=sgd(0.2))
    np.testing.assert_allclose(final(method, setting, 400), limit, atol=1e-9, rtol=0)
    assert abs(limit - setting[0].solution.numpy()).max() > 1e-2


def test_noloco_in_one_group_is_diloco_with_heavy_ball(setting):
    problem, _, x0, _ = setting
    complete = caden.graphs.complete(12)
    common = problem, complete, np.tile(x0[:1], (12, 1)), [tuple(e) for e in complete.edges.tolist()]
    awake = masks(12, ROUNDS, 1.0)
    ours = iterates(methods.noloco(outer_lr=0.6, mu=0.4, group="all", solver=sgd(0.1)), common, awake)
    theirs = iterates(methods.diloco(outer_lr=0.6, mu=0.4, nesterov=False, solver=sgd(0.1)), common, awake)
    assert_rows(ours, theirs, 1e-11)


def test_pairs_are_a_maximal_matching_and_others_in_every_round(setting):
    _, graph, _, edges = setting
    rounds = [rivals.random_pairs(edges, number) for number in draws(20)]
    for pairs in rounds:
        assert nx.is_maximal_matching(graph.to_networkx(), set(pairs))
    assert len({tuple(sorted(pairs)) for pairs in rounds}) > 10


@pytest.mark.slow
def test_noloco_holds_the_models_together_by_its_pull(setting):
    """Its claim: averaging what partners learned is not enough; the pull to their mean keeps the models near."""
    spread = [
        np.std(final(methods.noloco(pull=pull, solver=sgd(0.05)), setting, 300), axis=0).max() for pull in (0.7, 1e-9)
    ]
    assert spread[0] < spread[1] / 3


def test_gasloc_with_one_step_is_adapt_then_combine(setting):
    problem, graph, x0, _ = setting
    seen, awake = [], masks(12, ROUNDS, 1.0)
    callbacks = [lambda row, state: seen.append(state.x.numpy().copy())]
    method = methods.gasloc(0.2, gamma=0.0)
    caden.simulate(method, problem, graph, ROUNDS, x0=torch.tensor(x0), local_steps=1, callbacks=callbacks)
    assert_rows(seen, rivals.atc(*gradients(setting), 0.2, awake))


def test_gasloc_momentum_leaves_its_limit_alone(setting):
    problem, _, _, edges = setting
    limit = rivals.atc_limit(edges, problem.hessian.numpy(), problem.linear.numpy(), 0.2)
    for gamma in (0.0, 0.5):
        found = final(methods.gasloc(0.2, gamma=gamma), setting, 500, local_steps=1)
        np.testing.assert_allclose(found, limit, atol=1e-9, rtol=0)


@pytest.mark.slow
def test_lodadac_is_biased_whatever_its_step(setting):
    """Four times shorter steps do not bring it nearer: nothing tracks the other agents' gradients."""
    solution = setting[0].solution.numpy()
    errors = [
        abs(final(methods.lodadac(alpha, variant="adam"), setting, n, local_steps=5).mean(axis=0) - solution).max()
        for alpha, n in ((2e-3, 800), (5e-4, 3000))
    ]
    assert errors[1] > 0.1
    assert errors[1] > 0.5 * errors[0]


@pytest.mark.slow
def test_relay_sgd_is_exact_where_messages_are_lost(setting):
    """Its claim: no bias from data that differ; and sums that are received late or not at all do no harm."""
    problem = setting[0]
    for options in ({}, {"messages": {"loss": 0.2}, "participation": 0.5}):
        found = final(methods.relay_sgd(0.5), setting, 1000, **options)
        assert abs(found - problem.solution.numpy()).max() < 1e-8


def test_relay_sgd_on_a_tree_does_not_depend_on_numbers(setting):
    problem, _, x0, _ = setting
    order = np.random.default_rng(3).permutation(12)
    place = np.argsort(order)
    path = caden.graphs.path(12)
    other = caden.graphs.from_edges(place[path.edges].tolist(), 12)
    x = final(methods.relay_sgd(0.1), (problem, path, x0, None), 20)
    y = final(methods.relay_sgd(0.1), (problem.take(order.tolist()), other, x0[order], None), 20)
    np.testing.assert_allclose(y, x[order], atol=1e-12, rtol=0)


def test_edges_that_are_chosen_carry_no_copies(setting):
    problem, graph, _, _ = setting
    with pytest.raises(caden.CadenError, match="remove compression"):
        caden.simulate(methods.noloco(), problem, graph, 2, messages={"top": 0.5})


@pytest.mark.parametrize("make", [lambda: caden.graphs.erdos_renyi(15, edges=30, seed=1), lambda: caden.graphs.path(7)])
def test_the_spanning_tree_is_one_and_shallow(make):
    graph = make()
    tree = caden.graphs.from_edges(graph.edges[graph.spanning_tree].tolist(), graph.agents).to_networkx()
    assert nx.is_tree(tree)
    assert nx.diameter(tree) <= 2 * nx.radius(graph.to_networkx())


# Mini-batches.


def noisy_classes(batch_size, agents=6, samples=40):
    """Logistic regression on classes that overlap, so that its minimiser is finite."""
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(agents * samples, 3))
    targets = (inputs[:, 0] + 1.5 * rng.normal(size=len(inputs)) > 0).astype(int)
    data = torch.tensor(inputs), torch.tensor(targets)
    model = torch.nn.Linear(3, 2, bias=False)
    shards = [np.arange(i * samples, (i + 1) * samples) for i in range(agents)]
    problem = caden.problems.classification(
        model, data, agents=agents, partition=shards, batch_size=batch_size, dtype=torch.float64
    )

    def batch_grad(i, v, chosen):
        x, y = inputs[shards[i]][chosen], targets[shards[i]][chosen]
        logits = x @ v.reshape(2, 3).T
        share = np.exp(logits - logits.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        return ((share - np.eye(2)[y]).T @ x / len(y)).ravel()

    return problem, caden.graphs.ring(agents), batch_grad


@pytest.mark.parametrize("p", [1.0, 0.5])
def test_lt_admm_vr_equals_its_textbook_loop(p):
    problem, graph, batch_grad = noisy_classes(8)
    x0 = np.random.default_rng(1).normal(size=(6, 6))
    edges, awake, seen = [tuple(e) for e in graph.edges.tolist()], masks(6, 12, p, seed=1), []
    oracle = rivals.lt_admm_vr(
        x0,
        edges,
        lambda i, v, round, step: batch_grad(i, v, batch(0, round, step, i, 40, 8)),
        lambda i, v: batch_grad(i, v, np.arange(40)),
        *(0.5, 0.1, 0.3, 0.6, STEPS),
        awake,
    )
    caden.simulate(
        methods.lt_admm_vr(0.5, 0.1, 0.3, 0.6),
        problem,
        graph,
        12,
        x0=torch.tensor(x0),
        local_steps=STEPS,
        participation=1.0 if p == 1 else lambda round, draw: awake[round],
        callbacks=[lambda row, state: seen.append(state.x.numpy().copy())],
    )
    assert_rows(seen, oracle)


def test_lt_admm_vr_on_all_samples_is_lt_admm():
    ends = []
    for batch_size, method in ((40, methods.lt_admm_vr), (None, methods.lt_admm)):
        problem, graph, _ = noisy_classes(batch_size)
        ends.append(caden.simulate(method(0.5, 0.1, 0.3), problem, graph, 20, x0=torch.ones(6, dtype=torch.float64)).x)
    torch.testing.assert_close(ends[0], ends[1], atol=1e-12, rtol=0)


@pytest.mark.slow
def test_variance_reduction_removes_the_error_of_mini_batches():
    """The paper's claim: exact with batches of 4 of 40 samples, where plain LT-ADMM stays noisy."""
    problem, graph, _ = noisy_classes(4)
    errors = {}
    for method in (methods.lt_admm_vr(0.5, 0.1, 0.3), methods.lt_admm(0.5, 0.1, 0.3)):
        x = caden.simulate(method, problem, graph, 250, record_every=250, x0=torch.zeros(6, dtype=torch.float64)).x
        gradient = problem.value_and_grad(x)[1].sum(0).norm()
        errors[method.name] = float(gradient + (x - x.mean(0)).norm())
    assert errors["lt_admm_vr"] < 1e-6
    assert errors["lt_admm"] > 1e-2


CLAIMS = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "claims.py"))["CLAIMS"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # conditions that the other side does not survive
@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_rivals_paper_claims_holds(name):
    """The figures are in docs/methods.md."""
    assert CLAIMS[name]().holds


# Options of others.


def test_gt_lbfgs_of_memory_one_is_memoryless_bfgs(setting):
    """In closed form, on convex functions, where nothing is damped."""
    x0, edges, grad = gradients(setting)
    tau0 = 1 / (1e-13 + curvature(setting[0], x0))
    found = iterates(methods.gt_lbfgs(0.1, 1e-13, memory=1), setting, masks(12, 20, 1.0))
    assert_rows(found, rivals.memoryless_bfgs(x0, edges, grad, tau0, 0.1, 20), 1e-9)


@pytest.mark.parametrize("method", [methods.kgt(0.1, start="gradients"), methods.led(0.2, 0.2, lazy=False)])
def test_published_forms_are_exact(setting, method):
    assert abs(final(method, setting, 700, local_steps=STEPS) - setting[0].solution.numpy()).max() < 1e-8


def test_triggered_arcs_send_a_part_of_the_messages_and_stay_exact(setting):
    """Event-based ADMM on a graph."""
    problem, graph, _, edges = setting
    trigger = {"messages": {"trigger": {"first": 1.0, "decay": 0.85}}}
    result = caden.simulate(methods.radmm(0.4, 0.9, solver="exact"), problem, graph, 200, **trigger)
    assert (result.x - problem.solution).norm(dim=1).max() < 1e-8
    assert result.rows[-1]["communications"] < 0.5 * 200 * 2 * len(edges)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.atg(0.1, alpha=1.0), r"`alpha` must lie in \(0, 1\)"),
        (lambda: methods.atg(0.1, gamma=1.5), r"`gamma` must lie in \(0, 1\]"),
        (lambda: methods.beer(0.1, 0.0), r"`gamma` must lie in \(0, 1\]"),
        (lambda: methods.gt_adam(beta2=1.0), r"`beta2` must lie in \[0, 1\)"),
        (lambda: methods.qg_dsgdm(mu=1.0), r"`mu` must lie in \[0, 1\)"),
        (lambda: methods.qg_dsgdm(nu=0.0), r"`nu` must lie in \(0, 1\]"),
        (lambda: methods.demuon(beta=1.0), r"`beta` must lie in \[0, 1\)"),
        (lambda: methods.gt_nsgdm(schedule="linar"), "did you mean 'linear'"),
        (lambda: methods.diloco(mu=1.0), r"`mu` must lie in \[0, 1\)"),
        (lambda: methods.noloco(group="pairs"), "did you mean 'pair'"),
        (lambda: methods.gasloc(weight=2.0), r"`weight` must lie in \(0, 1\]"),
        (lambda: methods.lodadac(variant="adm"), "did you mean 'adam'"),
        (lambda: methods.lodadac(gamma=0.0), r"`gamma` must lie in \(0, 1\]"),
        (lambda: methods.kgt(start="gradient"), "did you mean 'gradients'"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(caden.CadenError, match=message):
        make()
