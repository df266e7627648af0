"""What docs/theory.md, sections 10 and 11, says: each inequality on runs or by algebra."""

import itertools

import numpy as np
import pytest
import sympy
import torch

import caden
from caden import methods
from caden.solvers import exact


@pytest.fixture(scope="module")
def setting():
    return caden.problems.quadratic(agents=10, dim=6, seed=1, condition=20.0), caden.graphs.erdos_renyi(
        10, edges=16, seed=1
    )


class Arcs:
    """The arc form by hand, on quadratics with exact solves: z -> T z, with T z_ji = R_i(z)_ij = 2 mu x_i - z_ij."""

    def __init__(self, problem, graph, mu):
        ends = graph.edges.T
        self.owner = np.concatenate([ends[0], ends[1]])
        half, self.mu = ends.shape[1], mu
        self.reverse = np.concatenate([np.arange(half) + half, np.arange(half)])
        self.A, self.b = problem.hessian.numpy(), problem.linear.numpy()
        self.degree = np.bincount(self.owner)

    def x(self, z):
        pull = np.zeros_like(self.b)
        np.add.at(pull, self.owner, z)
        weight = self.mu * self.degree[:, None, None] * np.eye(self.b.shape[1])
        return np.linalg.solve(self.A + weight, (self.b + pull)[:, :, None])[:, :, 0]

    def sent(self, z):
        return 2 * self.mu * self.x(z)[self.owner] - z

    def T(self, z):
        return self.sent(z)[self.reverse]

    def fixed_point(self, rounds=20000):
        z = np.zeros((len(self.owner), self.b.shape[1]))
        for _ in range(rounds):
            z, before = (z + self.T(z)) / 2, z
            if abs(z - before).max() < 1e-15:
                break
        return z


@pytest.mark.parametrize("mu", [0.05, 0.5, 5.0])
def test_what_is_sent_is_nonexpansive_in_the_arcs(setting, mu):
    arcs, rng = Arcs(*setting, mu), np.random.default_rng(0)
    for _ in range(50):
        z, w = rng.normal(size=(2, len(arcs.owner), 6)) * rng.uniform(0.01, 10)
        assert np.linalg.norm(arcs.T(z) - arcs.T(w)) <= np.linalg.norm(z - w) * (1 + 1e-12)


@pytest.mark.parametrize("relax", [0.5, 0.9])
def test_a_triggered_run_moves_away_from_the_fixed_point_by_no_more_than_the_threshold(setting, relax):
    """|z+ - z*| <= |z - z*| + relax mu |thresholds|, in every round; and the limit is the minimiser."""
    problem, graph = setting
    mu, first, decay = 0.4, 0.5, 0.9
    arcs, states = Arcs(problem, graph, mu), []
    result = caden.simulate(
        methods.caden(mu, relax=relax, solver=exact()),
        problem,
        graph,
        400,
        messages={"trigger": {"first": first, "decay": decay}},
        callbacks=[lambda row, state: states.append(state.z.numpy().copy())],
    )
    star = arcs.fixed_point()
    # The fixed points are not unique: the run tends to one of them, and is compared with that one.
    limit = states[-1]
    assert np.linalg.norm(arcs.T(limit) - limit) < 1e-9 * np.linalg.norm(star)
    away = [np.linalg.norm(z - limit) for z in states]
    for t in range(1, 200):
        allowed = relax * mu * first * decay**t * np.sqrt(len(arcs.owner))
        assert away[t] <= away[t - 1] + allowed + 1e-9
    assert result.rows[-1]["communications"] < 0.75 * 400 * len(arcs.owner)
    assert float((result.x - problem.solution).norm(dim=1).max()) < 1e-7


def test_the_condition_on_compression_is_that_of_the_two_by_two_system():
    """D(z) and the error of the copies: their bounds are stable iff delta < (1 - k)/((1 - k)(1 + a) + 2 a^2)."""
    a, k, delta = sympy.symbols("a k delta", positive=True)
    matrix = sympy.Matrix([[k, a], [2 * a * delta, delta * (1 + a)]])
    margin = (sympy.eye(2) - matrix).det()
    limit = (1 - k) / ((1 - k) * (1 + a) + 2 * a**2)
    assert sympy.simplify(margin.subs(delta, limit)) == 0
    rng = np.random.default_rng(0)
    for _ in range(300):
        values = dict(zip((a, k), rng.uniform([0.05, 0.0], [0.95, 0.99])))
        for factor in (0.98, 1.02):
            numbers = matrix.subs(values | {delta: float(limit.subs(values)) * factor})
            radius = max(abs(np.linalg.eigvals(np.array(numbers, dtype=float))))
            assert (radius < 1) == (factor < 1)


@pytest.mark.parametrize("relax", [0.5, 0.9])
def test_a_round_contracts_towards_the_fixed_points_although_the_operator_does_not(setting, relax):
    arcs, size = Arcs(*setting, 0.4), None
    shape = (len(arcs.owner), 6)
    size = shape[0] * shape[1]
    zero = arcs.T(np.zeros(shape))
    linear = np.stack([(arcs.T(unit.reshape(shape)) - zero).ravel() for unit in np.eye(size)], axis=1)
    assert np.linalg.norm(linear, 2) == pytest.approx(1.0)
    S = (1 - relax) * np.eye(size) + relax * linear
    _, values, rows = np.linalg.svd(S - np.eye(size))
    fixed = rows[values < 1e-9]
    away = np.eye(size) - fixed.T @ fixed
    assert len(fixed) > 0 and np.linalg.norm(fixed @ S @ away, 2) < 1e-9  # S keeps both parts apart
    assert np.linalg.norm(away @ S @ away, 2) < 0.9999


def test_leaving_silent_arcs_alone_ends_at_a_wrong_point():
    """Two agents with Hessian I and mu_z = 1: what they send is constant, so one message each would have to suffice."""
    b, z = np.array([1.0, -3.0]), np.zeros(2)
    x = (b + z) / 2
    first = 2 * x - z
    for _ in range(50):
        x = (b + z) / 2
        np.testing.assert_allclose(2 * x - z, first)  # never anything new
        z = first[::-1] / 2  # relax = 1/2, applied once and then left alone
    assert abs(x - b.mean() / 1.0).max() > 0.4 and b.mean() == -1.0
    for _ in range(50):
        z = z / 2 + first[::-1] / 2  # continuing with the copy
    np.testing.assert_allclose((b + z) / 2, b.mean())


@pytest.mark.parametrize("messages", [{"bits": 8}, {"bits": 2}, {"top": 0.5}], ids=str)
def test_copies_follow_what_they_copy(setting, messages):
    """|copy - message| <= delta (|last such error| + |change of z|), with delta what the codec left out at most."""
    problem, graph = setting
    mu, states, copies = 0.4, [], []
    method = methods.caden(mu, relax=0.5, solver=exact())
    delta = 0.0
    codec = caden.networks.messages.Messages.from_spec(messages).codec
    arcs = Arcs(problem, graph, mu)
    z = mu * np.zeros((len(arcs.owner), 6))
    copy, error, previous = arcs.sent(z) / mu * 0, 0.0, z  # x^0 = 0: the first message is 0 at both ends
    caden.simulate(
        method,
        problem,
        graph,
        60,
        messages=messages,
        callbacks=[lambda row, state: states.append(state.z.numpy().copy())],
    )
    for new in states[:40]:
        message = arcs.sent(z) / mu
        change = torch.tensor(message - copy)
        sent = codec.unpack(codec.pack(change), 6, torch.float64).numpy()
        left = np.linalg.norm(change.numpy() - sent)
        delta = left / np.linalg.norm(change.numpy())
        copy = copy + sent
        if copies:
            bound = delta * (error + np.linalg.norm(z - previous) / mu)
            assert left <= bound * (1 + 1e-9) + 1e-12
        copies.append(copy)
        error, previous = left, z
        z = 0.5 * z + 0.5 * mu * copy[arcs.reverse]
        np.testing.assert_allclose(z, new, atol=1e-9)  # the run is this loop
    assert 0 <= delta < 1


# Section 11: non-convex functions.


def sines(graph, dim=3, waves=4):
    """f_i(v) = sum_k a sin(w.v + b) for every agent, and a Lipschitz constant of their gradients."""
    rng = np.random.default_rng(7)
    a, w, b = (torch.tensor(rng.normal(size=s)) for s in ((graph.agents, waves), (graph.agents, waves, dim), (waves,)))
    functions = [lambda v, i=i: (a[i] * torch.sin(w[i] @ v + b)).sum() for i in range(graph.agents)]
    bound = float((a.abs() * (w**2).sum(2)).sum(1).max())
    return caden.problems.functions(functions, dim), bound, float(-a.abs().sum())


@pytest.fixture(scope="module")
def nonconvex():
    """A run of CADEN with mu_z just above the bound, solved to rounding error: x and phi of every round."""
    graph = caden.graphs.from_edges([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (0, 3), (1, 4)])
    problem, L, least = sines(graph)
    A = np.zeros((len(graph.edges), graph.agents))
    for e, (i, j) in enumerate(graph.edges):
        A[e, i], A[e, j] = 1, -1
    A, B = torch.tensor(A), torch.tensor(abs(A))
    s = float(torch.linalg.eigvalsh(A.T @ A)[1])
    k, d = float(torch.linalg.eigvalsh(B.T @ B)[-1]) / s, int(graph.degrees.min())
    mu = 1.01 * L * (1 + 8 * k + ((1 + 8 * k) ** 2 + 32 * d / s) ** 0.5) / (2 * d)
    x0 = torch.randn(graph.agents, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    states = [(x0, torch.zeros_like(x0))]
    keep = [lambda row, state: states.append((state.x.clone(), state.phi.clone()))]
    caden.simulate(methods.caden(mu), problem, graph, 120, x0=x0, local_steps=80, callbacks=keep)
    return problem, states, (A, B), (L, s, k, d, mu, least)


def test_caden_is_prox_pda(nonconvex):
    """The optimality condition and the dual step of Prox-PDA hold in every round."""
    problem, states, (A, B), (*_, mu, _) = nonconvex
    for (x, phi), (x_next, phi_next) in itertools.pairwise(states):
        gradient, step = problem.value_and_grad(x_next)[1], x_next - x
        torch.testing.assert_close(phi_next, phi + mu / 2 * A.T @ A @ x_next, rtol=1e-9, atol=1e-9)
        assert float((gradient + phi_next + mu / 2 * B.T @ B @ step).abs().max()) < 1e-6


def test_the_potential_falls_and_the_best_v_is_of_order_1_over_t(nonconvex):
    problem, states, (A, B), (L, s, k, d, mu, least) = nonconvex
    c = (mu * d - L) / 2 - 4 * L**2 / (mu * s) - 4 * k * L
    assert c > 0 and (mu / 1.02 * d - L) / 2 - 4 * L**2 / (mu / 1.02 * s) - 4 * k * L < 0  # the bound is that of c = 0
    potentials, steps, V = [], [], []
    for (x, _), (x_next, phi) in itertools.pairwise(states):
        value, gradient = problem.value_and_grad(x_next)
        apart, step = float((A @ x_next).norm() ** 2), x_next - x
        lagrangian = float(value.sum() + (phi * x_next).sum()) + mu / 4 * apart
        potentials.append(lagrangian + k * mu * (apart + float((B @ step).norm() ** 2)))
        steps.append(float(step.norm() ** 2))
        V.append(float((gradient + phi).norm() ** 2) + apart / 2)
    for before, after, step in zip(potentials, potentials[1:], steps[1:]):
        assert after <= before - c * step + 1e-9 * abs(before)
        assert after >= least
    assert c * sum(steps[1:]) <= potentials[0] - least
    best = np.minimum.accumulate(V)
    assert best[-1] * len(best) <= 2 * max(best[t] * (t + 1) for t in range(10))


@pytest.mark.slow
def test_caden_converges_far_below_the_bound(nonconvex):
    problem, states, _, (L, _, _, d, mu, _) = nonconvex
    graph = caden.graphs.from_edges([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (0, 3), (1, 4)])
    assert mu > 30 * L / d
    result = caden.simulate(methods.caden(0.2 * L / d), problem, graph, 400, x0=states[0][0], local_steps=8)
    assert result.rows[-1]["lyapunov"] < 1e-20
