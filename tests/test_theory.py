"""The theory against sympy, closed forms, measured runs and random draws."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import sympy as sp
import torch

import caden
import oracles
from caden import graphs, methods, problems, theory
from caden.curvature import descend
from caden.solvers import exact, gd, lbfgs
from conftest import distance, masks

F64 = torch.float64


def any_graph(rng, low=3, high=12):
    m = int(rng.integers(low, high))
    kinds = (
        lambda: graphs.erdos_renyi(
            m, edges=int(rng.integers(m - 1, m * (m - 1) // 2 + 1)), seed=int(rng.integers(999))
        ),
        lambda: graphs.ring(m),
        lambda: graphs.path(m),
        lambda: graphs.star(m),
        lambda: graphs.complete(m),
    )
    return kinds[int(rng.integers(len(kinds)))]()


def any_setting(rng):
    """A quadratic with b = 0, a graph and parameters on both sides of stability."""
    graph = any_graph(rng)
    found = problems.quadratic(
        graph.agents, int(rng.integers(1, 4)), seed=int(rng.integers(999)), condition=10 ** rng.uniform(0.1, 2)
    )
    problem = problems.quadratics(found.hessian, found.linear * 0)
    mu = 10 ** rng.uniform(-1.5, 0.5) / graph.degrees.mean()
    return problem, graph, mu, mu * 10 ** rng.uniform(-0.3, 0.6), float(rng.uniform(0.3, 0.95))


# ---------------------------------------------------------------- the paper


def test_lemma_1_on_random_graphs_also_with_the_sharper_factor():
    rng = np.random.default_rng(0)
    for _ in range(60):
        graph = any_graph(rng)
        x = torch.tensor(rng.normal(size=(graph.agents, 3)))
        plain, middle, upper = theory.lemma1(graph, x)
        sharp = theory.lemma1(graph, x, sharp=True)[0]
        assert plain <= sharp * (1 + 1e-12)
        assert sharp <= middle * (1 + 1e-12)
        assert middle <= upper * (1 + 1e-12)


def test_lemma_1s_sharper_factor_is_the_best_one():
    """Equality at the eigenvector of lambda_min."""
    graph = graphs.erdos_renyi(9, edges=14, seed=4)
    x = torch.tensor(np.linalg.eigh(graph.laplacian)[1][:, 1:2].copy())
    sharp, middle, _ = theory.lemma1(graph, x, sharp=True)
    assert sharp == pytest.approx(middle, rel=1e-10)


def printed_by_sympy():
    """Theorem 1, typed from its TeX; C-hats from their definitions with xi = p / (2 (1 - p)) where those are given."""
    d, lo, hi, L, z, y, p, R = sp.symbols("d lo hi L z y p R", positive=True)
    xi = p / (2 * (1 - p))
    base = 1 - (1 - p) * (1 + xi)
    h1 = 1 - 2 * R / base
    h2 = 1 + (1 - p) * (1 + 1 / xi) / base
    h3 = 1 / (p + p * xi - xi)
    h4 = 6 * hi / (lo**2 * y**2) * (2 * R * y**2 * h2 * (1 + h1) / h1 + (1 - p) * (1 + xi) / xi)
    out = 1 - h4 * d**2
    bracket = 36 * hi / (lo**2 * y**2) + h4
    C3 = z - 2 * R * h2 / h1 - 2 * R * h2 * y**2 * z**2 / (h1 * out) * bracket - z**2 * y / out * bracket
    both = d**2 * z**2 + L**2
    C4 = p * (2 * z - 1 - 2 * L) / 4 - 36 * R * h2 * hi * z**2 * both / (lo**2 * h1 * out)
    C4 -= 18 * hi * z**2 * both / (lo**2 * y * out)
    C5 = (
        1 / h1
        + 12 * R * h2 * hi * (1 + h3) / (h1**2 * lo**2 * out)
        + 6 * hi * (1 + h3) / (h1 * lo**2 * y * (1 - h4 * d))
    )
    C6 = 4 / h1 + 48 * R * h2 * hi * (1 + h3) / (h1**2 * lo**2 * out)
    C6 += 6 * hi * (1 + h3) * (8 * z * d + 1) / (h1 * lo**2 * y * (1 - h4 * d))
    C7 = 108 * R * h2 * hi * z**2 * both / (lo**2 * h1 * out) + 2 * L**2 + 8 * z**2 * d**2
    C7 += 18 * hi * z**2 * both / (lo**2 * y * out) * (8 * z**2 * d**2 + 1)
    C8 = 8 * R * h2 / h1 + 8 * R * h2 * y**2 * z**2 / (h1 * out) * bracket + z**2 * (8 * z**2 * d + 1) / out * bracket
    return (d, lo, hi, L, z, y, p, R), (C3, C4, C5, C6, C7, C8, h1, h2, h3, h4)


def derived_by_sympy():
    """The chain of inequalities solved as a linear system by sympy instead of by hand."""
    d, lo, hi, L, z, y, p, R = symbols = sp.symbols("d lo hi L z y p R", positive=True)
    e0, dz, dx, S, kappa, ehat, e = sp.symbols("e0 dz dx S kappa ehat e")
    xi = p / (2 * (1 - p))
    base = 1 - (1 - p) * (1 + xi)
    h1, h2, h3 = 1 - 2 * R / base, 1 + (1 - p) * (1 + 1 / xi) / base, 1 / (p + p * xi - xi)
    # |kappa|^2 <= 2 mu_y^2 |sum_j (x - z)|^2 + 2 mu_z^2 |sum_j dz|^2; each |dz| occurs at both ends of its edge
    system = [
        sp.Eq(kappa, 2 * y**2 * d * S + 2 * z**2 * d * 2 * dz),
        sp.Eq(ehat, e0 / h1 + 2 * R * h2 / h1 * kappa),
        sp.Eq(e, h3 * ehat + (h2 - 1) * kappa),
        sp.Eq(S, 2 * hi / (lo**2 * y**2) * (3 * e + 3 * ehat + 9 * z**2 * d * 2 * dz + 9 * (d**2 * z**2 + L**2) * dx)),
    ]
    solved = sp.solve(system, [kappa, ehat, e, S], dict=True)[0]
    descent = sp.expand(z * dz + p * (z / 2 - sp.Rational(1, 4) - L / 2) * dx - solved[ehat] - y * solved[S])
    V = sp.expand(4 * solved[ehat] + (2 * L**2 + 8 * z**2 * d**2) * dx + (8 * z**2 * d + 1) * solved[S])
    parts = [descent.coeff(dz), descent.coeff(dx), -descent.coeff(e0), V.coeff(e0), V.coeff(dx), V.coeff(dz)]
    return symbols, (*parts, h1, h2, h3)


@pytest.mark.parametrize("version", ["printed", "derived"])
def test_constants_agree_with_sympy(version):
    symbols, formulas = printed_by_sympy() if version == "printed" else derived_by_sympy()
    evaluate = sp.lambdify(symbols, formulas, "mpmath")
    rng = np.random.default_rng(1)
    for _ in range(20):
        facts = theory.Facts(
            d_max=float(rng.integers(1, 9)),
            lambda_min=rng.uniform(0.1, 3),
            lambda_max=rng.uniform(3, 12),
            L=rng.uniform(0.1, 10),
            mu_z=rng.uniform(0.1, 20),
            mu_y=10 ** rng.uniform(-1, 5),
            p_min=rng.uniform(0.05, 0.99),
            rate=10 ** rng.uniform(-9, -2),
        )
        with mpmath.workdps(50):
            expected = [float(value) for value in evaluate(*map(mpmath.mpf, facts))]
        found = theory.constants(facts, version)
        order = [*found[2:8], *found[8:12]][: len(expected)]
        np.testing.assert_allclose(order, expected, rtol=1e-9)  # differences of large terms lose some digits
        with mpmath.workdps(50):  # the same code in 50 digits: are the formulas equal?
            exactly = theory.constants(theory.Facts(*map(mpmath.mpf, facts)), version)
        np.testing.assert_allclose([float(value) for value in exactly[2 : 2 + len(expected)]], expected, rtol=1e-14)
        assert max(found.C8 / found.C3, found.C7 / found.C4) == found.C1
        assert pytest.approx(found.C6 + found.C1 * found.C5) == found.C2


def corollary_facts(graph, L, p=1.0, r=0.5):
    chosen = theory.corollary1(graph, L, p, r)
    return theory.Facts.of(graph, L, chosen["mu_z"], chosen["mu_y"], p, r, int(chosen["tau"]))


def test_theorem_1s_conditions_hold_for_corollary_1_and_give_no_positive_constants():
    """C_3 is negative in plain cases: two agents, and a 37-edge graph."""
    for graph, L in ((graphs.path(2), 1.0), (graphs.erdos_renyi(20, edges=37, seed=0), 1.0)):
        facts = corollary_facts(graph, L)
        assert all(holds for _, _, holds in theory.theorem1(facts).values())
        assert theory.constants(facts).C3 < 0
        assert not theory.constants(facts).bound_follows
    assert not theory.theorem1(facts._replace(mu_y=1.0))["mu_y"][2]


def test_with_sleepers_the_derivation_needs_nearly_everyone_awake():
    """Carried out with care, sum |Ax - Bz|^2 cannot be moved to the left, however large mu_y is."""
    graph = graphs.erdos_renyi(20, edges=37, seed=0)
    assert theory.constants(corollary_facts(graph, 1.0, 0.5), "derived").contraction < 0
    assert theory.constants(corollary_facts(graph, 1.0, 1.0), "derived").contraction > 0


def test_theorem_1s_mu_y_diverges():
    """Two agents of curvature L multiply their disagreement by 1 - mu_y / (L + mu_z) in every round."""
    L, graph = 0.5, graphs.path(2)
    problem = problems.quadratics([[[L]], [[L]]], [[1.0], [-1.0]])
    chosen = theory.corollary1(graph, L, 1.0, 0.5)
    factor = 1 - chosen["mu_y"] / (L + chosen["mu_z"])
    assert factor < -100
    seen = []
    method = methods.caden(chosen["mu_z"], chosen["mu_y"], solver=exact(), unsafe=True)
    with pytest.raises(caden.errors.Diverged):
        caden.simulate(
            method, problem, graph, 9, callbacks=[lambda row, state: seen.append(float(state.x[0] - state.x[1]))]
        )
    np.testing.assert_allclose(np.array(seen[2:]) / np.array(seen[1:-1]), factor, rtol=1e-9)


@pytest.mark.parametrize("mu", [0.2, 1.0, 5.0])
def test_running_mean_of_v_stays_below_the_convex_bound(mu):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        graph = any_graph(rng)
        problem = problems.quadratic(graph.agents, 3, seed=seed, condition=30)
        x0 = torch.tensor(rng.normal(size=(graph.agents, 3)))
        bound = theory.convex_bound(problem, graph, x0, problem.solution, mu)
        V = caden.simulate(methods.caden(mu, solver=exact()), problem, graph, 60, x0=x0).history.lyapunov.to_numpy()[1:]
        T = np.arange(1, 61)
        assert (np.cumsum(V) / T <= bound / T).all()
        assert np.cumsum(V)[-1] > bound / 1000  # and it says something


def test_local_rates_and_estimates_of_curvature(quadratic):
    x = torch.zeros(20, 5, dtype=F64)
    L = torch.linalg.eigvalsh(quadratic.hessian)[:, -1]
    torch.testing.assert_close(theory.curvature_bound(quadratic, x, steps=300), L, rtol=1e-3, atol=0)
    assert float(L.max()) * 0.5 < theory.paper_estimate(quadratic, x) <= float(L.max()) * (1 + 1e-6)
    torch.testing.assert_close(theory.hessians(quadratic, x), quadratic.hessian)
    rho = torch.full((20, 1), 0.3, dtype=F64)
    rates = [theory.local_rate(quadratic, x, rho, solver, steps=8) for solver in (lbfgs(), gd())]
    assert rates[0] < rates[1] < 1
    # One GD step of 1/(rho + L) shrinks gradients by at most 1 - (rho + l)/(rho + L)
    worst = ((1 - (0.3 + 0.1) / (0.3 + 1.0)) ** 2) ** 1
    assert theory.local_rate(quadratic, x, rho, gd(curvature=1.0), steps=1) <= worst + 1e-12


def test_the_papers_estimator_needs_float64():
    """A step of 1e-7 in float64 sees the curvature along the gradient; in float32 it does not move most of x at all."""
    made = problems.PROBLEMS["classification"]
    double, single = made(execution="vmap", dtype=F64, agents=4), made(execution="vmap", agents=4)
    x, (_, ratio) = descend(double, double.start.expand(4, -1).contiguous(), ((20, 0.1), (2, 1e-7)))
    g = double.value_and_grad(x)[1]
    along = double.hvp(x, g).norm(dim=1) / g.norm(dim=1)
    torch.testing.assert_close(ratio, along, rtol=1e-4, atol=0)
    rounded = x.float()
    moved = rounded - 1e-7 * single.value_and_grad(rounded)[1]
    assert (moved == rounded).double().mean() > 0.9
    _, (ratio32,) = descend(single, rounded, ((2, 1e-7),))
    assert ((ratio32.double() - along).abs() / along).max() > 100 * ((ratio - along).abs() / along).max()


# ---------------------------------------------------------------- stability and rate


def test_the_criterion_agrees_with_the_spectral_radius_on_random_draws():
    """Both margins positive: stable. The first negative: unstable. Up to relax = 1/2 nothing is in between."""
    rng = np.random.default_rng(2)
    both = []
    for _ in range(300):
        problem, graph, mu_z, mu_y, relax = any_setting(rng)
        H = problem.hessian.numpy()
        radius = theory.spectral_radius(H, graph, mu_z, mu_y, relax)
        minus, circle = theory.margins(H, graph, mu_z, mu_y, relax)
        if abs(radius - 1) > 1e-6:
            assert radius < 1 if min(minus, circle) > 0 else (radius > 1 or (minus > 0 and relax > 0.5))
            both.append(radius < 1)
    assert 0.2 < np.mean(both) < 0.9


def test_the_criterion_is_that_of_the_literature_without_relaxation():
    """2H + 4 mu_z D - (mu_z + mu_y/2) Lap, and for flat f mu_y / mu_z < 8/e - 2."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        problem, graph, mu_z, mu_y, _ = any_setting(rng)
        H, d = problem.hessian.numpy(), problem.dim
        whole = np.zeros((graph.agents * d,) * 2)
        for i in range(graph.agents):
            whole[i * d : (i + 1) * d, i * d : (i + 1) * d] = 2 * H[i]
        whole += np.kron(4 * mu_z * np.diag(graph.degrees) - (mu_z + mu_y / 2) * graph.laplacian, np.eye(d))
        assert 2 * theory.margins(H, graph, mu_z, mu_y)[0] == pytest.approx(np.linalg.eigvalsh(whole)[0], abs=1e-9)
        limit, flat = theory.dual_limit(graph), np.zeros((graph.agents, 1, 1))
        assert theory.margins(flat, graph, mu_z, 0.999 * limit * mu_z)[0] > 0
        assert theory.margins(flat, graph, mu_z, 1.001 * limit * mu_z)[0] < 0


def test_curvature_bounds_decide_only_what_they_can():
    rng = np.random.default_rng(4)
    seen = set()
    for _ in range(200):
        problem, graph, mu_z, mu_y, relax = any_setting(rng)
        curvatures = torch.linalg.eigvalsh(problem.hessian)
        answer = theory.curvature_margin(graph, float(curvatures.min()), float(curvatures.max()), mu_z, mu_y, relax)
        radius = theory.spectral_radius(problem.hessian.numpy(), graph, mu_z, mu_y, relax)
        assert answer == 0 or (answer == 1) == (radius < 1)
        seen.add(answer)
    assert seen == {-1, 0, 1}


def measured_radius(problem, graph, mu_z, mu_y, relax, rounds, seed=0):
    """Mean growth per round of the library's own iterates, scaled back to size 1 after every round."""
    growth = []

    def rescale(row, state):
        size = float(state.x.norm())
        growth.append(np.log(size))
        for part in (state.x, state.phi, state.gap, state.memory.gradient):
            part.div_(size)
        state.phi.sub_(state.phi.mean(0))  # its rounding would not shrink

    x0 = torch.tensor(np.random.default_rng(seed).normal(size=(problem.agents, problem.dim)))
    method = methods.caden(mu_z, mu_y, relax=relax, solver=exact(), unsafe=True)
    caden.simulate(method, problem, graph, rounds, x0=x0, callbacks=[rescale])
    return float(np.exp(np.mean(growth[rounds // 3 :])))


def check_predictor(draws, seed, length):
    rng = np.random.default_rng(seed)
    done = 0
    while done < draws:
        problem, graph, mu_z, mu_y, relax = any_setting(rng)
        radius = theory.spectral_radius(problem.hessian.numpy(), graph, mu_z, mu_y, relax)
        # Rounding excites the idle mode 1 - 2 relax of bipartite graphs, so a measurement needs it below the radius.
        if not abs(1 - 2 * relax) < radius < 0.97 or radius < 0.1:
            continue
        rounds = int(length / -np.log(radius))
        measured = measured_radius(problem, graph, mu_z, mu_y, relax, rounds)
        assert np.log(measured) == pytest.approx(np.log(radius), rel=0.02)
        done += 1


def test_predicted_rate_is_measured():
    check_predictor(1, seed=5, length=200)


@pytest.mark.slow
def test_predicted_rate_is_measured_on_50_draws():
    check_predictor(50, seed=6, length=600)


@pytest.mark.parametrize("p", [0.7, pytest.param(0.4, marks=pytest.mark.slow)])
def test_sampled_rate_with_sleeping_agents_is_measured(p):
    """Mean slope of the logarithm of |x| over runs with different sleepers."""
    rng = np.random.default_rng(8)
    problem, graph, mu_z, _, _ = any_setting(rng)
    H = problem.hessian.numpy()
    rate = -np.log(theory.sampled_radius(H, graph, mu_z, mu_z, 0.6, p, rounds=6000))
    rounds, slopes = int(25 / rate), []
    for seed in range(12):
        size = []
        caden.simulate(
            methods.caden(mu_z, relax=0.6, solver=exact()),
            problem,
            graph,
            rounds,
            participation=p,
            seed=seed,
            x0=torch.tensor(rng.normal(size=(problem.agents, problem.dim))),
            callbacks=[lambda row, state, size=size: size.append(float(state.x.norm()))],
        )
        slopes.append(-np.polyfit(np.arange(rounds // 4, rounds), np.log(size[-(rounds - rounds // 4) :]), 1)[0])
    assert np.mean(slopes) == pytest.approx(rate, rel=0.06)
    everyone = theory.sampled_radius(H, graph, mu_z, mu_z, 0.5, 1.0, rounds=3000)
    assert np.log(everyone) == pytest.approx(np.log(theory.spectral_radius(H, graph, mu_z, mu_z)), rel=0.02)


def test_best_parameters_are_near_the_best_of_a_fine_grid():
    problem, graph = problems.quadratic(8, 3, seed=1), graphs.erdos_renyi(8, edges=12, seed=1)
    H = problem.hessian.numpy()
    choice = theory.best_parameters(H, graph)
    grid = [
        theory.spectral_radius(H, graph, mu, mu, relax)
        for mu in np.logspace(-2, 1, 60)
        for relax in (0.5, 0.6, 0.7, 0.8, 0.9)
    ]
    assert choice.radius <= min(grid) + 0.003
    assert choice.radius == pytest.approx(theory.spectral_radius(H, graph, *choice[:3]))


# ---------------------------------------------------------------- the doctor


def refusal(method, problem, graph):
    try:
        caden.simulate(method, problem, graph, 1)
    except caden.CadenError as error:
        return str(error)
    return ""


def check_doctor(draws, seed):
    rng = np.random.default_rng(seed)
    refused = done = 0
    while done < draws or not 2 <= refused <= done - 2:  # both kinds
        assert done < 20 * draws
        problem, graph, mu_z, mu_y, relax = any_setting(rng)
        radius = theory.spectral_radius(problem.hessian.numpy(), graph, mu_z, mu_y, relax)
        if abs(radius - 1) <= 0.01 or abs(1 - 2 * relax) > radius:
            continue
        growing = measured_radius(problem, graph, mu_z, mu_y, relax, 300) > 1
        said = "must diverge" in refusal(methods.caden(mu_z, mu_y, relax=relax, solver=exact()), problem, graph)
        assert said == growing
        refused, done = refused + said, done + 1


def test_doctor_refuses_exactly_what_diverges():
    check_doctor(6, seed=9)


@pytest.mark.slow
def test_doctor_refuses_exactly_what_diverges_on_200_draws():
    check_doctor(200, seed=10)


def test_doctor_names_a_value_that_works():
    problem, graph = problems.quadratic(6, 2, seed=0), graphs.ring(6)
    opinion = theory.examine(problem, graph, 0.3, 5.0, near_exact=True)
    largest = float(opinion.refusal.split("largest stable value is mu_y = ")[1].split(";")[0])
    H = problem.hessian.numpy()
    assert (
        theory.spectral_radius(H, graph, 0.3, 0.99 * largest)
        < 1
        < theory.spectral_radius(H, graph, 0.3, 1.01 * largest)
    )


def test_doctor_is_not_fooled_by_flat_directions_or_a_flat_start():
    """sum H_i singular: a double root at 1, which is not divergence. All gradients zero: nothing is known of L."""
    rng = np.random.default_rng(0)
    for seed in range(3):
        rows = rng.normal(size=(6, 5, 8)) * (np.arange(8) < 6)
        problem = problems.quadratics(np.einsum("mij,mik->mjk", rows, rows), np.zeros((6, 8)))
        x0 = torch.tensor(np.random.default_rng(seed).normal(size=(6, 8)))
        method = methods.caden(1.0, solver=exact())
        result = caden.simulate(method, problem, graphs.ring(6), 400, x0=x0, record_every=400)
        assert result.history.relative_error.iloc[-1] < 1e-9
    still = problems.quadratics([[[1.0]], [[2.0]]], [[0.0], [0.0]])
    assert caden.simulate(methods.caden(), still, graphs.path(2), 3).x.abs().max() == 0


def test_doctor_does_not_promise_what_does_not_work():
    concave = problems.quadratics([[[2.0]], [[-0.5]], [[2.0]]], [[0.0], [0.0], [0.0]])
    assert "raise mu_z" in theory.examine(concave, graphs.ring(3), 0.3, 0.3, near_exact=True).refusal


def test_doctor_warns_about_networks_and_sleepers_and_refuses_only_far_beyond_the_flat_bound():
    problem = problems.PROBLEMS["classification"](execution="vmap", agents=6)
    graph = graphs.ring(6)
    limit = theory.dual_limit(graph)
    assert limit == pytest.approx(2.0)
    assert theory.examine(problem, graph, 0.1, 0.1 * 1.9) == (None, None)
    assert "may diverge" in theory.examine(problem, graph, 0.1, 0.1 * 3).warning
    assert "high-curvature" in theory.examine(problem, graph, 0.1, 0.1 * 21).refusal
    with pytest.warns(UserWarning, match="may diverge"):
        caden.simulate(methods.caden(0.1, 0.3), problem, graph, 1)
    sleeping = problems.quadratic(6, 2)
    with pytest.warns(UserWarning, match="may diverge"):
        caden.simulate(methods.caden(0.1, 0.3, solver=exact()), sleeping, graph, 1, participation=0.5)
    with pytest.warns(UserWarning, match="stationary"):
        caden.simulate(methods.caden(0.1, dual="paper"), sleeping, graph, 1, participation=0.5)
    with pytest.raises(caden.CadenError, match="unsafe=true"):
        caden.simulate(methods.caden(0.1, 5.0), problem, graph, 1)
    caden.simulate(methods.caden(0.1, 5.0, unsafe=True), problem, graph, 1)


# ---------------------------------------------------------------- mu_z = "auto"


def rounds_to(problem, graph, mu_z, most, tolerance):
    result = caden.simulate(methods.caden(mu_z), problem, graph, most, tolerance=tolerance)
    return int(result.history["round"].iloc[-1]) if result.stopped == "tolerance" else most


def near_best(problem, graph, most=800):
    x0 = torch.zeros(problem.agents, problem.dim, dtype=F64)
    L = float(theory.smoothness(problem, x0).max())
    tolerance = float(1e-9 * problem.value_and_grad(x0)[1].sum(0).norm() ** 2)
    best, grid = most, np.logspace(-3, 1, 12) * L / graph.degrees.mean()
    for mu in grid[[8, 9, 7, 10, 6, 11, 5, 4, 3, 2, 1, 0]]:  # the likely ones first: the others are then cut short
        best = min(best, rounds_to(problem, graph, float(mu), best, tolerance))
    return rounds_to(problem, graph, "auto", 2 * best, tolerance), best


def auto_over_best(case):
    problem, graph = problems.quadratic(14, 6, seed=3, condition=20), graphs.erdos_renyi(14, edges=24, seed=2)
    if case in ("ring", "star"):
        graph = getattr(graphs, case)(14)
    if case == "skewed":
        problem = problems.quadratics(problem.hessian, 10 * problem.linear)
    if case == "iid":
        problem = problems.quadratics(
            *(0.1 * part + 0.9 * part.mean(0, keepdim=True) for part in (problem.hessian, problem.linear))
        )
    if case == "scaled":
        problem = problems.quadratics(1e-3 * problem.hessian, 10 * problem.linear)
    auto, best = near_best(problem, graph)
    return auto / best


MORE_CASES = ("er", "star", "iid"), ("ring", "skewed", "scaled")


@pytest.mark.parametrize("cases", [("er",), *(pytest.param(cases, marks=pytest.mark.slow) for cases in MORE_CASES)])
def test_auto_is_near_the_best_of_the_grid_on_quadratics(cases):
    """A single draw may be unlucky: for 8 seeds the ratios are 0.8 to 1.66, their means over three cases up to 1.3."""
    ratios = [auto_over_best(case) for case in cases]
    assert max(ratios) < 2, ratios
    assert len(cases) == 1 or np.exp(np.log(ratios).mean()) <= 1.5, ratios


@pytest.mark.slow
def test_auto_is_near_the_best_of_the_grid_on_logistic_regression():
    graph = graphs.erdos_renyi(10, edges=18, seed=1)
    ratios = [a / b for a, b in (near_best(problems.logistic(10, 5, l2=0.2, seed=s), graph) for s in range(2))]
    assert max(ratios) < 2 and np.exp(np.log(ratios).mean()) <= 1.5, ratios


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_auto_counts_its_scalars_and_keeps_the_invariant(participation):
    problem, graph, mus = problems.quadratic(10, 4, seed=3), graphs.ring(10), []
    history = caden.simulate(
        methods.caden(),
        problem,
        graph,
        40,
        participation=participation,
        callbacks=[lambda row, state: mus.append(float(state.mu_z))],
    ).history
    assert len(set(mus)) > 2
    assert history.dual_sum.max() < 1e-12
    if participation == 1.0:
        checks = len([t for t in (6, 9, 12, 16, 24, 32) if t <= 40])
        scalars = checks * 3 * 2 * 10 * graph.diameter  # three along every directed edge, as often as the graph is long
        assert history.communications.iloc[-1] == 40 * 20
        assert history.bytes.iloc[-1] == 8 * (4 * 40 * 20 + scalars)


def test_auto_under_loss_and_with_sleepers_does_not_diverge():
    problem, graph = problems.quadratic(10, 4, seed=3), graphs.ring(10)
    caden.simulate(methods.caden(), problem, graph, 100, messages={"loss": 0.2}, record_every=100)
    assert distance(methods.caden(), problem, graph, 900, 1e-7, participation=0.3) < 1e-6


# ---------------------------------------------------------------- what docs/theory.md proves


def test_the_half_step_rule_keeps_the_sum_of_duals_and_the_papers_rule_does_not():
    problem, graph = problems.quadratic(10, 3, seed=1), graphs.erdos_renyi(10, edges=15, seed=1)
    exactly = caden.simulate(methods.caden(0.4, solver=exact()), problem, graph, 200, participation=0.5)
    with pytest.warns(UserWarning, match="stationary"):
        paper = caden.simulate(methods.caden(0.4, dual="paper", solver=exact()), problem, graph, 200, participation=0.5)
    assert exactly.history.dual_sum.max() < 1e-13
    assert paper.history.dual_sum.iloc[-1] > 0.05


def test_equivalence_with_relaxed_admm_in_symmetric_edge_variables():
    """z_ij = mu s_e - y_e and z_ji = mu s_e + y_e, also with sleepers and relaxation."""
    problem, graph = problems.quadratic(8, 3, seed=2), graphs.erdos_renyi(8, edges=12, seed=2)
    edges = [tuple(e) for e in graph.edges.tolist()]
    solve = oracles.exact_solver(problem.hessian.numpy(), problem.linear.numpy())
    x0, awake = np.random.default_rng(0).normal(size=(8, 3)), masks(8, 40, 0.5, seed=2)
    ours = [x for x, _ in oracles.caden_half_steps(x0, edges, solve, 0.4, 0.4, 0.7, awake)]
    theirs = oracles.relaxed_admm(x0, edges, solve, 0.4, 0.7, awake)
    np.testing.assert_allclose(ours, theirs, atol=1e-12, rtol=0)
