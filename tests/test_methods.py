"""Every method against its textbook loop, at full and at half participation; invariants; limits; identities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import caden
import oracles
from caden import methods
from caden.draws import Draw
from caden.solvers import agd, exact, gd
from conftest import distance, masks, scheduled

ROUNDS, STEPS = 30, 3
FORMS = ("atc", "semi_a", "semi_b", "non_atc")


def iterates(method, setting, awake, x0=None):
    problem, graph, start, _ = setting
    seen = []
    caden.simulate(
        method,
        problem,
        graph,
        rounds=len(awake),
        x0=torch.tensor(start if x0 is None else x0),
        local_steps=STEPS,
        participation=1.0 if all(m.all() for m in awake) else scheduled(awake),
        callbacks=[lambda row, state: seen.append(state.x.numpy().copy())],
    )
    return seen


def chebyshev_matrix(edges, degree):
    """p(W) by numpy's Chebyshev series: T_n(W / rho) / T_n(1 / rho), with the rho of the whole graph."""
    full = oracles.metropolis(edges, np.ones(12, bool))
    rho = np.sort(np.abs(np.linalg.eigvalsh(full)))[-2]
    series = np.polynomial.chebyshev.Chebyshev.basis(degree)

    def mix(mask, v):
        values, vectors = np.linalg.eigh(oracles.metropolis(edges, mask))
        return vectors @ np.diag(series(values / rho) / series(1 / rho)) @ vectors.T @ v

    return mix


def curvature(problem, x):
    """What the library finds without a warm-up; only the first step uses it."""
    return caden.theory.smoothness(problem, torch.tensor(x)).numpy()


def coins(rounds):
    """The numbers that all agents share, as the documentation of the draws defines them."""
    return [Draw(0, 1).uniform("common/proxskip", t)[0] for t in range(rounds)]


def cases(problem, edges):
    """name -> (method, oracle as a function of (x0, masks))."""
    A, b = problem.hessian.numpy(), problem.linear.numpy()
    grad, solve, inner = oracles.gradient(A, b), oracles.exact_solver(A, b), oracles.gd_solver(A, b, STEPS, 0.2)
    one = oracles.gradient(A, b)

    def linearised(eps):
        return lambda i, v, linear, quadratic: v - (one(i, v) + linear + quadratic * v) / (quadratic + eps)

    def newton_step(eps):
        def step(i, v, linear, quadratic):
            return v - np.linalg.solve(A[i] + (quadratic + eps) * np.eye(4), one(i, v) + linear + quadratic * v)

        return step

    found = {
        f"gt {form}": (methods.gt(0.2, form), lambda x, m, f=form: oracles.gradient_tracking(x, edges, grad, 0.2, f, m))
        for form in FORMS
    }
    half = oracles.caden_half_steps
    found |= {
        "diging": (methods.diging(0.2), lambda x, m: oracles.gradient_tracking(x, edges, grad, 0.2, "non_atc", m)),
        "adapd exact": (methods.adapd(2.0, solver=exact()), lambda x, m: oracles.adapd(x, edges, solve, grad, 2.0, m)),
        "adapd gd": (
            methods.adapd(2.0, solver=gd(step_size=0.2)),
            lambda x, m: oracles.adapd(x, edges, inner, grad, 2.0, m),
        ),
        "adapd og": (methods.adapd(0.5, "og"), lambda x, m: oracles.adapd(x, edges, solve, grad, 0.5, m, "og")),
        "adapd mc": (
            methods.adapd(2.0, "mc", degree=3, solver=exact()),
            lambda x, m: oracles.adapd(x, edges, solve, grad, 2.0, m, mix=chebyshev_matrix(edges, 3)),
        ),
        "dgd": (methods.dgd(0.1), lambda x, m: oracles.dgd(x, edges, grad, 0.1, m)),
        "exact_diffusion": (
            methods.exact_diffusion(0.3),
            lambda x, m: oracles.exact_diffusion(x, edges, grad, 0.3, m, True),
        ),
        "nids": (methods.nids(0.3), lambda x, m: oracles.exact_diffusion(x, edges, grad, 0.3, m, False)),
        "d2": (methods.d2(0.3), lambda x, m: oracles.exact_diffusion(x, edges, grad, 0.3, m, False)),
        "extra": (methods.extra(0.3), lambda x, m: oracles.extra(x, edges, grad, 0.3, m)),
        "radmm": (
            methods.radmm(0.3, 0.7, solver=exact()),
            lambda x, m: oracles.relaxed_admm(x, edges, solve, 0.3, 0.7, m),
        ),
        "led": (methods.led(0.2, 0.3), lambda x, m: oracles.led(x, edges, grad, 0.2, 0.3, STEPS, m)),
        "proxskip": (
            methods.proxskip(0.3, 0.4, 1.5),
            lambda x, m: oracles.proxskip(x, edges, grad, 0.3, 0.4, 1.5, coins(len(m)), m),
        ),
        "kgt": (methods.kgt(0.1, 0.7), lambda x, m: oracles.kgt(x, edges, grad, 0.1, 0.7, STEPS, m)),
        "lt_admm": (
            methods.lt_admm(0.1, 0.05, 0.8, 0.5),
            lambda x, m: oracles.lt_admm(x, edges, grad, 0.1, 0.05, 0.8, 0.5, STEPS, m),
        ),
        "dinno": (
            methods.dinno(0.2, 1.01, solver=gd(step_size=0.2)),
            lambda x, m: oracles.dinno(x, edges, inner, 0.2, 1.01, m),
        ),
        "fedavg": (methods.fedavg(0.2), lambda x, m: oracles.fedavg(x, grad, 0.2, STEPS, m)),
        "scaffold": (methods.scaffold(0.2, 0.9), lambda x, m: oracles.scaffold(x, grad, 0.2, 0.9, STEPS, m)),
        "fedadmm": (methods.fedadmm(0.5, solver=exact()), lambda x, m: oracles.fedadmm(x, solve, 0.5, m)),
        "caden_gd": (
            methods.caden_gd(0.3, step_size=0.2),
            lambda x, m: [v for v, _ in half(x, edges, inner, 0.3, 0.3, 0.5, m)],
        ),
        "dlm": (methods.dlm(0.2, 1.0), lambda x, m: [v for v, _ in half(x, edges, linearised(1.0), 0.4, 0.4, 0.5, m)]),
        "druid gd": (
            methods.druid(0.4, "gd", eps=1.0),
            lambda x, m: [v for v, _ in half(x, edges, linearised(1.0), 0.4, 0.4, 0.5, m)],
        ),
        "esom": (methods.esom(0.5, 0, 0.4), lambda x, m: oracles.splitting(x, edges, A, b, m, 0.5, 0, 0.4)),
        "esom 2": (methods.esom(0.5, 2, 0.4), lambda x, m: oracles.splitting(x, edges, A, b, m, 0.5, 2, 0.4)),
        "network_newton": (methods.network_newton(0.2, 1), lambda x, m: oracles.splitting(x, edges, A, b, m, 0.2, 1)),
        "adapd agd": (
            methods.adapd(2.0, solver=agd(step_size=0.2)),
            lambda x, m: oracles.adapd(x, edges, oracles.fista(A, b, STEPS, 0.2), grad, 2.0, m),
        ),
        "druid lbfgs": (
            methods.druid(0.4, "lbfgs", eps=0.5),
            lambda x, m: oracles.druid_lbfgs(x, edges, A, b, 0.4, 0.5, 10, m),
        ),
        "gt_lbfgs": (
            methods.gt_lbfgs(0.2, 0.3, memory=4),
            lambda x, m: oracles.gt_lbfgs(x, edges, grad, curvature(problem, x), 0.2, 0.3, 4, m),
        ),
        "prox_diffusion": (
            methods.prox_diffusion(0.3, 0.05),
            lambda x, m: oracles.prox_diffusion(x, edges, grad, 0.3, 0.05, m),
        ),
        "druid newton": (
            methods.druid(0.4, "newton", eps=0.5),
            lambda x, m: [v for v, _ in half(x, edges, newton_step(0.5), 0.4, 0.4, 0.5, m)],
        ),
    }
    return found


NAMES = list(cases(caden.problems.quadratic(12, 4, seed=2), []))


@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_method_equals_its_textbook_loop(setting, name, p):
    problem, _, x0, edges = setting
    method, oracle = cases(problem, edges)[name]
    awake = [m if m.any() else np.arange(12) == 0 for m in masks(12, ROUNDS, p, seed=1)]
    found, expected = iterates(method, setting, awake), oracle(x0, awake)
    for x, x_ref in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, x_ref, atol=1e-10, rtol=0)


VECTORS = {"gt": 2, "gt_lbfgs": 2, "diging": 2, "kgt": 2, "scaffold": None, "fedavg": None, "fedadmm": None}


def test_vectors_per_directed_edge_are_counted_by_the_network(setting):
    problem, graph, _, edges = setting
    arcs = 2 * len(graph.edges)
    for name, (method, _) in cases(problem, edges).items():
        result = caden.simulate(method, problem, graph, rounds=4, local_steps=STEPS)
        sent = result.history.communications.iloc[-1] / 4
        if name == "proxskip":
            assert sent == arcs * np.mean([coin < 0.4 for coin in coins(4)])
        elif name in ("adapd mc", "esom 2"):
            assert sent == 3 * arcs
        elif name == "network_newton":
            assert sent == 2 * arcs
        elif name in ("fedavg", "fedadmm"):
            assert sent == 2 * 12
        elif name == "scaffold":
            assert sent == 4 * 12
        elif name in ("d2", "nids"):
            assert sent == 0.75 * arcs  # the first of the four rounds does not mix
        else:
            assert sent == VECTORS.get(name.split()[0], 1) * arcs, name


EXACT = {
    "gt": lambda: methods.gt(0.3),
    "diging": lambda: methods.diging(0.2),
    "adapd": lambda: methods.adapd(2.0, solver=exact()),
    "adapd og": lambda: methods.adapd(0.5, "og"),
    "exact_diffusion": lambda: methods.exact_diffusion(0.5),
    "nids": lambda: methods.nids(0.5),
    "extra": lambda: methods.extra(0.5),
    "radmm": lambda: methods.radmm(0.4, 0.7, solver=exact()),
    "led": lambda: methods.led(0.3, 0.3),
    "kgt": lambda: methods.kgt(0.1),
    "lt_admm": lambda: methods.lt_admm(0.2, 0.1, 0.4),
    "dinno": lambda: methods.dinno(0.2, 1.0, solver=exact()),
    "scaffold": lambda: methods.scaffold(0.3),
    "fedadmm": lambda: methods.fedadmm(0.3, solver=exact()),
    "caden_gd": lambda: methods.caden_gd(0.4),
    "dlm": lambda: methods.dlm(0.2, 1.0),
    "druid newton": lambda: methods.druid(0.4, "newton", eps=0.2),
    "druid lbfgs": lambda: methods.druid(0.4, "lbfgs", eps=0.2),
    "proxskip": lambda: methods.proxskip(0.5, 0.5),
    "adapd agd": lambda: methods.adapd(2.0, solver="agd"),
    "gt_lbfgs": lambda: methods.gt_lbfgs(0.1, 0.3),
    "prox_diffusion": lambda: methods.prox_diffusion(0.5, 0.0),
    "esom": lambda: methods.esom(1.0, 0, 0.5),
    "esom 1": lambda: methods.esom(1.0, 1, 0.5),
}


def error(method, setting, participation, rounds, enough=0.0):
    problem, graph, _, _ = setting
    return distance(method, problem, graph, rounds, enough, participation=participation, local_steps=STEPS)


@pytest.mark.parametrize(("participation", "rounds"), [(1.0, 700), (0.5, 1600)])
@pytest.mark.parametrize("name", EXACT)
def test_exact_methods_reach_the_minimiser(setting, name, participation, rounds):
    assert error(EXACT[name](), setting, participation, rounds, enough=1e-7) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_exact_methods_stay_at_the_minimiser(setting, name):
    assert error(EXACT[name](), setting, 0.5, 1600) < 1e-6


@pytest.mark.parametrize("name", ["dgd", "fedavg", "network_newton"])
def test_biased_methods_do_not(setting, name):
    """They stop away from the minimiser, and nearer to it with smaller steps."""
    kinds = {"dgd": methods.dgd, "fedavg": methods.fedavg, "network_newton": methods.network_newton}
    far, near = (error(kinds[name](alpha), setting, 1.0, rounds) for alpha, rounds in ((0.2, 300), (0.05, 1200)))
    assert 1e-3 < near < 0.6 * far


def test_invariants_of_sleeping_agents(setting):
    """sum g = sum grad f for the trackers; sums of duals stay zero."""
    problem, graph, x0, _ = setting

    def watch(method, check):
        caden.simulate(
            method, problem, graph, 40, participation=0.4, x0=torch.tensor(x0), callbacks=[lambda row, s: check(s)]
        )

    def tracking(state):
        torch.testing.assert_close(state.tracker.sum(0), problem.value_and_grad(state.x)[1].sum(0))

    def zero(name):
        return lambda state: torch.testing.assert_close(
            getattr(state, name).sum(0), torch.zeros(4, dtype=torch.float64), atol=1e-10, rtol=0
        )

    for form in FORMS:
        watch(methods.gt(0.2, form), tracking)
    for method, name in (
        (methods.adapd(2.0), "z"),
        (methods.exact_diffusion(0.3), "q"),
        (methods.extra(0.3), "q"),
        (methods.led(0.2), "y"),
        (methods.kgt(0.1), "c"),
        (methods.proxskip(0.3), "y"),
        (methods.dinno(0.2, solver="gd"), "phi"),
        (methods.dlm(0.2, 1.0), "phi"),
    ):
        watch(method, zero(name))


def test_caden_gd_is_dinno_with_gradient_descent(setting):
    """From a common start, with mu_z = mu_y = 2 rho and no growth."""
    common = np.tile(np.random.default_rng(0).normal(size=4), (12, 1))
    awake = masks(12, ROUNDS, 1.0)
    ours = iterates(methods.caden_gd(0.4, step_size=0.2), setting, awake, common)
    theirs = iterates(methods.dinno(0.2, 1.0, solver=gd(step_size=0.2)), setting, awake, common)
    np.testing.assert_allclose(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("p", [1.0, 0.4])
@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_radmm_is_relaxed_caden(setting, alpha, p):
    awake = masks(12, ROUNDS, p, seed=5)
    ours = iterates(methods.caden(0.3, relax=alpha, solver=exact()), setting, awake)
    theirs = iterates(methods.radmm(0.3, alpha, solver=exact()), setting, awake)
    np.testing.assert_allclose(ours, theirs, atol=1e-11, rtol=0)


SUDA = {  # form -> (A, B^2, C) as polynomials of W
    "atc": (lambda W, E: W @ W, lambda W, E: (E - W) @ (E - W), lambda W, E: E),
    "semi_a": (lambda W, E: W, lambda W, E: (E - W) @ (E - W), lambda W, E: W),
    "semi_b": (lambda W, E: W, lambda W, E: (E - W) @ (E - W), lambda W, E: W),
    "non_atc": (lambda W, E: E, lambda W, E: (E - W) @ (E - W), lambda W, E: W @ W),
}


@pytest.mark.parametrize("form", FORMS)
def test_gradient_tracking_satisfies_its_suda_recursion(setting, form):
    """x'' = (I - B^2 + A C) x' - A C x - alpha A (G' - G)."""
    problem, _, _, edges = setting
    W, E = oracles.metropolis(edges, np.ones(12, bool)), np.eye(12)
    A, B2, C = (f(W, E) for f in SUDA[form])
    x = iterates(methods.gt(0.2, form), setting, masks(12, ROUNDS, 1.0))
    grad = oracles.gradient(problem.hessian.numpy(), problem.linear.numpy())
    G = [oracles.stacked(grad, v) for v in x]
    for k in range(ROUNDS - 2):
        expected = (E - B2 + A @ C) @ x[k + 1] - A @ C @ x[k] - 0.2 * A @ (G[k + 1] - G[k])
        np.testing.assert_allclose(x[k + 2], expected, atol=1e-11, rtol=0)


def test_adapd_scales_with_the_objective(setting):
    """f / m with eta m and step m is the same run: eta here belongs to unscaled f_i."""
    problem, graph, x0, edges = setting
    small = caden.problems.quadratics(problem.hessian / 12, problem.linear / 12)
    awake = masks(12, ROUNDS, 1.0)
    ours = iterates(methods.adapd(0.5, solver=gd(step_size=0.1)), setting, awake)
    theirs = iterates(methods.adapd(0.5 * 12, solver=gd(step_size=0.1 * 12)), (small, graph, x0, edges), awake)
    np.testing.assert_allclose(ours, theirs, atol=1e-10, rtol=0)


def test_newton_tracking_equals_its_textbook_loop_and_is_exact(setting):
    problem, graph, x0, edges = setting
    A, b = problem.hessian.numpy(), problem.linear.numpy()
    found = iterates(methods.newton_tracking(0.5, 0.5), setting, masks(12, ROUNDS, 1.0))
    for x, x_ref in zip(found, oracles.newton_tracking(x0, edges, A, b, 0.5, 0.5, ROUNDS), strict=True):
        np.testing.assert_allclose(x, x_ref, atol=1e-10, rtol=0)
    assert error(methods.newton_tracking(0.5, 0.5), setting, 1.0, 700) < 1e-6
    one = caden.simulate(methods.newton_tracking(), problem, graph, rounds=4)
    assert one.history.communications.iloc[-1] == 4 * 2 * len(graph.edges)


def rows_of(method, setting, rounds):
    return iterates(method, setting, masks(12, rounds, 1.0))


def assert_rows(found, expected, atol=1e-10):
    for x, x_ref in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, np.broadcast_to(x_ref, x.shape), atol=atol, rtol=0)


@pytest.mark.parametrize("theta", [1e-4, 1.5])  # the second makes every agent correct its direction
def test_dino_equals_its_textbook_loop(setting, theta):
    problem, _, x0, _ = setting
    A, b = problem.hessian.numpy(), problem.linear.numpy()
    found = rows_of(methods.dino(theta, 1e-2, tolerance=1e-14), setting, ROUNDS)
    assert_rows(found, oracles.dino(x0, A, b, theta, 1e-2, 1e-4, ROUNDS))


@pytest.mark.parametrize("cubic", [0.0, 0.7])
def test_c2eden_equals_its_textbook_loop(setting, cubic):
    from scipy.optimize import minimize

    def step(g, H):
        if cubic == 0:
            return -np.linalg.inv(H) @ g

        def model(s):
            return g @ s + s @ H @ s / 2 + cubic / 6 * np.linalg.norm(s) ** 3

        return minimize(model, -g, method="Nelder-Mead", options={"xatol": 1e-12, "fatol": 1e-16, "maxfev": 20000}).x

    problem, _, x0, _ = setting
    A, b = problem.hessian.numpy(), problem.linear.numpy()
    rounds = ROUNDS if cubic == 0 else 8
    found = rows_of(methods.c2eden(0.3, cubic), setting, rounds)
    assert_rows(found, oracles.c2eden(x0, A, b, 0.3, step, rounds), 1e-10 if cubic == 0 else 1e-6)


def test_cubic_step_is_stationary_also_for_indefinite_matrices():
    from caden.methods._c2eden import cubic_step

    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        H, g = torch.randn(5, 5, dtype=torch.float64, generator=rng), torch.randn(5, dtype=torch.float64, generator=rng)
        H = H + H.mT
        s = cubic_step(g, H, 0.3)
        matrix = H + 0.15 * s.norm() * torch.eye(5, dtype=torch.float64)
        assert (g + matrix @ s).norm() < 1e-9 * matrix.norm() * s.norm()
        assert torch.linalg.eigvalsh(matrix)[0] > -1e-9  # a global minimiser, by the theory of cubic models


@pytest.mark.parametrize("step", [1.0, 0.4])
def test_tutunov_equals_newton_on_the_dual(setting, step):
    problem, _, x0, edges = setting
    A, b = problem.hessian.numpy(), problem.linear.numpy()
    found = rows_of(methods.tutunov(step, exchanges=80), setting, ROUNDS)
    assert_rows(found, oracles.dual_newton(x0, edges, A, b, ROUNDS, step), 1e-9)


def test_tutunov_with_many_exchanges_on_a_complete_graph_does_not_overflow():
    problem = caden.problems.quadratic(6, 3, seed=1)
    result = caden.simulate(methods.tutunov(exchanges=150), problem, caden.graphs.complete(6), 4)
    assert (result.x - problem.solution).norm(dim=1).max() < 1e-9


def test_acceleration_leaves_what_is_not_a_vector_alone():
    """In three dimensions the tally of mu_z="auto" has the width of a model; its squares must stay squares."""
    problem, graph = caden.problems.quadratic(8, 3, seed=1), caden.graphs.ring(8)
    tallies = []
    caden.simulate(
        methods.accelerated("caden"),
        problem,
        graph,
        60,
        callbacks=[lambda row, state: tallies.append(state.inner.tally)],
    )
    assert min(float(tally.min()) for tally in tallies) >= 0


def test_tutunov_counts_every_exchange(setting):
    problem, graph, _, _ = setting
    result = caden.simulate(methods.tutunov(exchanges=7), problem, graph, rounds=2)
    assert result.history.communications.iloc[-1] == 2 * 2 * len(graph.edges) * (7 * (4 + 2) + 1)


@pytest.mark.parametrize("secants", [1, 3])
def test_acceleration_equals_its_textbook_loop(setting, secants):
    """On DGD, whose state is x alone and whose round is an affine map."""
    problem, _, x0, edges = setting
    A, b = problem.hessian.numpy(), problem.linear.numpy()
    W = oracles.metropolis(edges, np.ones(12, bool))
    grad = oracles.gradient(A, b)

    def F(z):
        x = z.reshape(12, 4)
        return (W @ x - 0.1 * oracles.stacked(grad, x)).ravel()

    found = rows_of(methods.accelerated(methods.dgd(0.1), secants), setting, 16)
    assert_rows(found, [z.reshape(12, 4) for z in oracles.accelerate(x0.ravel(), F, secants, 16)], 1e-9)


@pytest.mark.parametrize("name", ["caden", "gt", "adapd", "exact_diffusion", "radmm"])
def test_acceleration_keeps_the_limit_and_needs_fewer_rounds(setting, name):
    problem, graph, _, _ = setting
    base = {"caden": lambda: methods.caden(0.2, solver=exact()), "radmm": lambda: methods.radmm(0.2, solver=exact())}
    make = base.get(name) or EXACT[name]
    took = {}
    for kind, method in (("plain", make()), ("accelerated", methods.accelerated(make()))):
        result = caden.simulate(method, problem, graph, 900, tolerance=1e-16)
        assert (result.x - problem.solution).norm(dim=1).max() < 1e-6
        took[kind] = result.history["round"].iloc[-1]
    if name not in ("adapd", "exact_diffusion"):  # which do not always gain
        assert took["accelerated"] < 0.8 * took["plain"], took


def test_acceleration_keeps_the_sum_of_duals(setting):
    problem, graph, x0, _ = setting
    sums = []
    caden.simulate(
        methods.accelerated("caden"),
        problem,
        graph,
        40,
        x0=torch.tensor(x0),
        callbacks=[lambda row, state: sums.append(state.inner.phi.sum(0).abs().max())],
    )
    assert max(sums) < 1e-10


def test_prox_diffusion_solves_the_lasso(setting):
    """Against coordinate-wise optimality of mean f + l1 |x|_1, with sleeping agents."""
    problem, graph, _, _ = setting
    l1 = 0.9 * float(problem.linear.mean(0).abs().max())  # above that, x = 0 is the solution
    for participation, rounds in ((1.0, 800), (0.5, 2500)):
        result = caden.simulate(
            methods.prox_diffusion(0.5, l1), problem, graph, rounds, participation=participation, record_every=rounds
        )
        x = result.mean
        g = (problem.hessian @ x - problem.linear).mean(0)
        assert (result.x - x).abs().max() < 1e-9
        assert (x != 0).any()
        torch.testing.assert_close(g[x != 0], -l1 * x[x != 0].sign(), atol=1e-9, rtol=0)
        assert (g[x == 0].abs() <= l1).all()


def test_prox_diffusion_without_a_regulariser_is_exact_diffusion(setting):
    awake = masks(12, ROUNDS, 0.5, seed=3)
    ours = iterates(methods.prox_diffusion(0.3, 0.0), setting, awake)
    np.testing.assert_array_equal(ours, iterates(methods.exact_diffusion(0.3), setting, awake))


def test_small_dimension_methods_refuse_large_ones_with_the_memory_they_need():
    problem = caden.problems.PROBLEMS["classification"](agents=20, hidden=500, execution="vmap")
    graph = caden.graphs.ring(20)
    size = {"c2eden": 2, "tutunov": 20}
    for name, matrices in size.items():
        with pytest.raises(caden.CadenError, match=f"{matrices * problem.dim**2 * 4 / 1e6:,.0f} MB"):
            caden.simulate(methods.METHODS[name](), problem, graph, 1)


@pytest.mark.parametrize("name", ["accelerated", "admm_edges", "c2eden", "dino", "newton_tracking", "tutunov"])
def test_methods_that_need_everyone_refuse_sleepers(setting, name):
    problem, graph, _, _ = setting
    method = methods.METHODS[name](**({"mu_z": 0.4} if name == "admm_edges" else {}))
    for option in ({"participation": 0.5}, {"links": 0.5}):
        with pytest.raises(caden.CadenError, match="everyone awake"):
            caden.simulate(method, problem, graph, 1, **option)


def test_led_with_one_step_is_exact_diffusion(setting):
    problem, graph, x0, _ = setting
    runs = [
        caden.simulate(method, problem, graph, ROUNDS, x0=torch.tensor(x0), local_steps=1, participation=0.6).x
        for method in (methods.led(0.3, 1.0), methods.exact_diffusion(0.3))
    ]
    torch.testing.assert_close(runs[0], runs[1], atol=1e-11, rtol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.gt(0), "`alpha` must be a positive"),
        (lambda: methods.gt(0.1, "act"), "did you mean 'atc'"),
        (lambda: methods.adapd(-1), "`eta`"),
        (lambda: methods.adapd(1.0, "og2"), "did you mean 'og'"),
        (lambda: methods.radmm(1.0, 1.0), r"`alpha` must lie in \(0, 1\)"),
        (lambda: methods.proxskip(0.1, 0.0), "`p`"),
        (lambda: methods.proxskip(0.1, chi=0.5), "`chi`"),
        (lambda: methods.druid(1.0, "newtn"), "did you mean 'newton'"),
        (lambda: methods.lt_admm(0.1, 0.1, alpha=2), "`alpha`"),
        (lambda: methods.led("fast"), "`alpha`"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(caden.CadenError, match=message):
        make()


# Not meant for networks: exact solves of quadratics, convex f_i, ill-conditioned inverses, or matrices of d x d.
SMALL = ("admm_edges", "c2eden", "dino", "esom", "network_newton", "newton_tracking", "tutunov")
NETWORKS = [name for name in methods.METHODS if name not in SMALL]


@pytest.fixture(scope="module")
def digits():
    return caden.problems.PROBLEMS["classification"](execution="vmap"), caden.graphs.erdos_renyi(20, edges=37, seed=0)


@pytest.mark.parametrize("name", NETWORKS)
def test_default_parameters_train_the_digits_network(digits, name):
    """From below 70 % to at least 85 % mean accuracy within 30 rounds."""
    warmup = {"steps": 20, "step_size": 0.1}
    result = caden.simulate(
        methods.METHODS[name](), *digits, rounds=30, warmup=warmup, target=0.85, stop_at_target=True
    )
    assert result.rows[0]["accuracy"] < 0.7
    assert result.rows[-1]["accuracy"] >= 0.85


def test_the_check_covers_every_method_and_tells_exact_from_biased():
    from caden.experiments.method_check import distance, verdict

    assert verdict(distance("gt", 700)).startswith("exact")
    assert verdict(distance("dgd", 300)).startswith("biased")
    assert distance("admm_edges", 10, participation=0.5) == "refused"
    assert distance("fedavg", 10, messages={"loss": 0.2}) == "refused"
    assert verdict(distance("radmm", 700, messages={"loss": 0.2})).startswith("exact")


def test_local_descent_in_threads_and_agent_by_agent_is_that_of_the_rows():
    """Threads do not disturb each other, and both ways of going through the agents agree."""
    data = torch.randn(240, 6, generator=torch.Generator().manual_seed(0)), torch.arange(240) % 3
    ends, before = [], torch.get_num_threads()
    try:
        for threads, execution in ((1, "loop"), (3, "loop"), (1, "vmap")):
            torch.set_num_threads(threads)
            model = caden.problems.mlp(6, 3, 8)
            problem = caden.problems.classification(model, data, agents=6, execution=execution, dtype=torch.float64)
            x0 = torch.randn(problem.dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            work = [0, 1, 2, 3, 4, 5]
            ring = caden.graphs.ring(6)
            ends.append(caden.simulate(caden.methods.lt_admm(), problem, ring, 10, local_steps=work, x0=x0).x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(ends[0], ends[1])
    assert torch.allclose(ends[0], ends[2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("faulty", [0, 1])
def test_clipped_gossip_equals_its_textbook_loop(p, faulty):
    problem, graph = caden.problems.quadratic(agents=8, dim=3, seed=4), caden.graphs.exponential(8)
    x0, awake, edges = problem.linear.clone(), masks(8, ROUNDS, p), [tuple(e) for e in graph.edges.tolist()]
    A, b = problem.hessian.numpy(), problem.linear.numpy()
    oracle = oracles.clipped_gossip(x0.numpy(), edges, lambda i, v: A[i] @ v - b[i], 0.1, faulty, awake)
    method = methods.clipped_gossip(0.1, faulty)
    assert_rows(iterates(method, (problem, graph, x0.numpy(), edges), awake), oracle)


def test_clipped_gossip_needs_more_honest_neighbours_than_liars():
    problem = caden.problems.quadratic(agents=6)
    with pytest.raises(caden.CadenError, match=r"needs at least 3 neighbours per agent, but agent \d has 2"):
        caden.simulate(methods.clipped_gossip(0.1, 1), problem, caden.graphs.ring(6), 1)


def test_clipped_gossip_believes_nobody_if_all_neighbours_present_may_lie():
    from caden.core import Edges
    from caden.methods._clipped_gossip import _radius

    awake = torch.ones(2, 1, dtype=torch.bool)
    edges = Edges(torch.tensor([0, 1]), torch.tensor([1, 2]), awake, awake, 3, torch.tensor([[1], [2], [1]]))
    lengths = torch.tensor([[1000.0], [5.0], [3.0], [7.0]])  # of arcs 0-1, 1-2, 1-0, 2-1
    assert _radius(edges, lengths, 1).flatten().tolist() == [0.0, 3.0, 0.0]
    assert _radius(edges, lengths, 0).flatten().tolist() == [1000.0, 5.0, 7.0]
