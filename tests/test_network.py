from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import caden
from caden.draws import Draw
from caden.networks import Network

D = 6


def network(graph, may_sleep=True, dtype=torch.float64):
    problem = caden.problems.quadratic(graph.agents, D, dtype=dtype)
    return Network(graph, problem, Draw(0, graph.agents), may_sleep), problem


def rounds(net, problem, masks):
    """Init, then one round per mask."""
    everyone = torch.ones(problem.agents, dtype=torch.bool)
    work = torch.ones(problem.agents, dtype=torch.int64)
    yield net.round(-1, everyone, work, problem)
    for t, mask in enumerate(masks):
        yield net.round(t, torch.as_tensor(mask), work, problem)


def test_laplacian_is_the_dense_product_and_sums_to_zero(graph):
    net, problem = network(graph, may_sleep=False)
    first = next(rounds(net, problem, []))
    v = torch.randn(20, D, dtype=torch.float64)
    out = first.broadcast(v).laplacian()
    torch.testing.assert_close(out, torch.tensor(graph.laplacian) @ v)
    assert out.sum(0).abs().max() < 1e-13


def test_float32_laplacian_keeps_the_sum_small(graph):
    """Edge differences: a large common part of the rows cannot spoil the sum."""
    net, problem = network(graph, may_sleep=False, dtype=torch.float32)
    v = 1000 + torch.randn(20, D)
    out = next(rounds(net, problem, [])).broadcast(v).laplacian()
    naive = torch.tensor(graph.degrees).unsqueeze(1) * v - torch.tensor(graph.adjacency).float() @ v
    drift = out.double().sum(0).abs().max()
    assert drift < 1e-5
    assert drift < naive.double().sum(0).abs().max() / 50


def test_sleepers_count_with_the_last_row_they_sent(graph):
    net, problem = network(graph)
    awake = np.arange(20) % 3 == 0
    start, second = rounds(net, problem, [awake])
    old, new = torch.randn(20, D, dtype=torch.float64), torch.randn(20, D, dtype=torch.float64)
    start.broadcast(old)
    heard = second.broadcast(new)
    known = torch.where(torch.as_tensor(awake).unsqueeze(1), new, old)
    torch.testing.assert_close(heard.laplacian(), torch.tensor(graph.laplacian) @ known)
    for rows, end in zip(heard.ends(), graph.edges.T):
        assert torch.equal(rows, known[torch.as_tensor(end)])


@pytest.mark.parametrize("p", [1.0, 0.6, 0.2])
def test_mixing_is_doubly_stochastic_on_the_awake_subgraph(graph, p):
    net, problem = network(graph)
    awake = np.random.default_rng(1).random(20) < p
    *_, context = rounds(net, problem, [awake])
    W = context.broadcast(torch.eye(20, dtype=torch.float64)).mix()
    assert torch.allclose(W, W.T)
    assert torch.allclose(W.sum(0), torch.ones(20, dtype=torch.float64))
    assert (W >= 0).all()
    asleep = torch.as_tensor(~awake)
    assert torch.equal(W[asleep], torch.eye(20, dtype=torch.float64)[asleep])
    near = torch.tensor(graph.adjacency, dtype=torch.bool)
    assert not W[~near & ~torch.eye(20, dtype=torch.bool)].any()
    if p == 1:
        torch.testing.assert_close(W, torch.tensor(graph.metropolis()))
        own = context.broadcast(torch.eye(20, dtype=torch.float64)).mix(torch.tensor(graph.metropolis_weights()) / 2)
        torch.testing.assert_close(own, (W + torch.eye(20)) / 2)


def test_exchange_hands_each_arc_to_the_other_end(graph):
    net, problem = network(graph)
    awake = np.arange(20) % 2 == 0
    *_, context = rounds(net, problem, [awake])
    arcs = torch.tensor(np.concatenate([graph.edges, graph.edges[:, ::-1]]), dtype=torch.float64)  # (owner, peer)
    received, arrived = context.exchange(arcs)
    assert torch.equal(received, arcs.flip(1))  # at arc (i, j), owned by i, lies what j wrote on (j, i)
    assert torch.equal(arrived.squeeze(1), torch.as_tensor(awake)[arcs[:, 1].long()])
    assert torch.equal(context.edges.owner().double(), arcs[:, 0])


def test_only_awake_agents_are_counted_and_the_first_exchange_is_free(graph):
    net, problem = network(graph, dtype=torch.float32)
    awake = np.arange(20) < 7
    start, full, part = rounds(net, problem, [np.ones(20, bool), awake])
    v = torch.zeros(20, D)
    start.broadcast(v)
    assert (net.communications, net.bytes) == (0, 0)
    full.broadcast(v)
    assert (net.communications, net.bytes) == (74, 74 * D * 4)
    part.broadcast(v)
    part.exchange(torch.zeros(74, D))
    sent = 2 * graph.degrees[:7].sum()
    assert net.communications == 74 + sent
    assert net.bytes == (74 + sent) * D * 4
    part.average(v)
    assert net.communications == 74 + sent + 2 * 7
    before = net.bytes
    part.maximum(torch.zeros(20))  # scalars count as bytes only
    assert net.communications == 74 + sent + 14
    assert net.bytes == before + 74 * graph.diameter * 4


def test_average_maximum_and_common_numbers(graph):
    net, problem = network(graph)
    awake = np.arange(20) < 7
    _, context, later = rounds(net, problem, [awake, awake])
    v = torch.randn(20, D, dtype=torch.float64)
    torch.testing.assert_close(context.average(v), v[:7].mean(0))
    assert context.maximum(v[:, 0]) == v[:, 0].max()
    assert 0 <= context.uniform("coin") < 1
    assert context.uniform("coin") == context.uniform("coin") != later.uniform("coin")


def test_wide_rows_in_slices_give_the_same(graph, monkeypatch):
    net, problem = network(graph, may_sleep=False)
    v = torch.randn(20, D, dtype=torch.float64)
    whole = next(rounds(net, problem, [])).broadcast(v).laplacian()
    monkeypatch.setattr("caden.networks.heard._SLICE", 100)
    assert torch.equal(whole, next(rounds(net, problem, [])).broadcast(v).laplacian())


def test_ten_thousand_agents_take_memory_of_the_edges_only():
    """In a process of its own, so that the peak is its own; a 10,000 x 10,000 matrix would be 800 MB."""
    script = """
import resource, numpy as np, caden
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
graph = caden.graphs.ring(10_000)
problem = caden.problems.quadratics(np.ones((10_000, 1, 1)), np.arange(10_000.0)[:, None])
before = peak()
result = caden.simulate(caden.methods.caden(), problem, graph, rounds=3, participation=0.5)
assert result.x.shape == (10_000, 1)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < 200


def test_sizes_must_fit(graph):
    with pytest.raises(caden.CadenError, match="graph has 20 agents but the problem has 5"):
        caden.simulate(caden.methods.caden(mu_z=1.0), caden.problems.quadratic(5, 2), graph, rounds=1)
