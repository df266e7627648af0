"""CADEN against textbook loops, its invariants, and where the paper's own dual rule ends up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import caden
from caden.methods import admm_edges
from caden.solvers import exact, gd, lbfgs
from conftest import distance, masks, scheduled
from oracles import caden_half_steps, caden_paper, exact_solver, gd_solver, relaxed_admm

ROUNDS = 30


def run(method, problem, graph, awake, x0, local_steps=3):
    """Every round's x and phi."""
    seen = []
    result = caden.simulate(
        method,
        problem,
        graph,
        rounds=len(awake),
        x0=torch.tensor(x0),
        local_steps=local_steps,
        participation=1.0 if all(m.all() for m in awake) else scheduled(awake),
        callbacks=[lambda row, state: seen.append((state.x.numpy().copy(), state.phi.numpy().copy()))],
    )
    return result, seen


@pytest.fixture
def setting(quadratic, graph):
    x0 = np.random.default_rng(7).normal(size=(20, 5))
    return quadratic, graph, x0, [tuple(e) for e in graph.edges.tolist()]


def solvers_of(problem):
    A, b = problem.hessian.numpy(), problem.linear.numpy()
    return [(exact(), exact_solver(A, b)), (gd(step_size=0.4), gd_solver(A, b, 3, 0.4))]


@pytest.mark.filterwarnings("ignore:.*stationary point")
@pytest.mark.parametrize("which", [0, 1], ids=["exact", "gd"])
@pytest.mark.parametrize("p", [1.0, 0.5])
def test_paper_dual_is_algorithm_1(setting, which, p):
    problem, graph, x0, edges = setting
    solver, textbook = solvers_of(problem)[which]
    awake = masks(20, ROUNDS, p)
    _, seen = run(caden.methods.caden(mu_z=0.3, mu_y=0.4, dual="paper", solver=solver), problem, graph, awake, x0)
    for (x, phi), (x_ref, phi_ref) in zip(seen, caden_paper(x0, edges, textbook, 0.3, 0.4, awake), strict=True):
        np.testing.assert_allclose(x, x_ref, atol=1e-10, rtol=0)
        np.testing.assert_allclose(phi, phi_ref, atol=1e-10, rtol=0)


@pytest.mark.parametrize("which", [0, 1], ids=["exact", "gd"])
@pytest.mark.parametrize("relax", [0.5, 0.8])
@pytest.mark.parametrize("p", [1.0, 0.5])
def test_exact_dual_is_the_half_step_rule(setting, which, relax, p):
    """At p = 1 the library runs the agent form, the oracle the edge form: they are the same iterates."""
    problem, graph, x0, edges = setting
    solver, textbook = solvers_of(problem)[which]
    awake = masks(20, ROUNDS, p)
    _, seen = run(caden.methods.caden(mu_z=0.3, mu_y=0.4, relax=relax, solver=solver), problem, graph, awake, x0)
    oracle = caden_half_steps(x0, edges, textbook, 0.3, 0.4, relax, awake)
    for (x, phi), (x_ref, phi_ref) in zip(seen, oracle, strict=True):
        np.testing.assert_allclose(x, x_ref, atol=1e-10, rtol=0)
        np.testing.assert_allclose(phi, phi_ref, atol=1e-10, rtol=0)


@pytest.mark.parametrize("relax", [0.5, 0.9])
@pytest.mark.parametrize("p", [1.0, 0.4])
def test_it_is_relaxed_admm(setting, relax, p):
    problem, graph, x0, edges = setting
    solver, textbook = solvers_of(problem)[0]
    awake = masks(20, ROUNDS, p)
    _, seen = run(caden.methods.caden(mu_z=0.3, relax=relax, solver=solver), problem, graph, awake, x0)
    for (x, _), x_ref in zip(seen, relaxed_admm(x0, edges, textbook, 0.3, relax, awake), strict=True):
        np.testing.assert_allclose(x, x_ref, atol=1e-10, rtol=0)


def test_agent_form_is_eq_5_with_edge_variables(setting):
    problem, graph, x0, _ = setting
    awake = masks(20, ROUNDS, 1.0)
    for mu_y in (0.2, 0.5):
        _, agents = run(caden.methods.caden(mu_z=0.3, mu_y=mu_y, solver=exact()), problem, graph, awake, x0)
        _, edges = run(admm_edges(mu_z=0.3, mu_y=mu_y), problem, graph, awake, x0)
        for (x, phi), (x_ref, phi_ref) in zip(agents, edges, strict=True):
            np.testing.assert_allclose(x, x_ref, atol=1e-11, rtol=0)
            np.testing.assert_allclose(phi, phi_ref, atol=1e-11, rtol=0)


UNEQUAL = [0.05] * 3 + [1.0] * 17


@pytest.mark.parametrize(
    ("participation", "rounds"),
    [(1.0, 250), (0.5, 450), (0.2, 1100), (UNEQUAL, 1300)],
    ids=["1", ".5", ".2", "unequal"],
)
def test_reaches_the_centralised_minimiser_however_agents_sleep(quadratic, graph, participation, rounds):
    """With |sum phi| at rounding level in every round."""
    sums = []
    result = caden.simulate(
        caden.methods.caden(mu_z=1.0, solver=exact()),
        quadratic,
        graph,
        rounds=rounds,
        participation=participation,
        callbacks=[lambda row, state: sums.append(float(row["dual_sum"]))],
    )
    error = (result.x - quadratic.solution).norm(dim=1).max() / quadratic.solution.norm()
    assert error < 1e-8
    assert max(sums) < 1e-12


def test_lbfgs_local_solves_reach_it_too(quadratic, graph):
    method = caden.methods.caden(mu_z=1.0, solver=lbfgs())
    assert distance(method, quadratic, graph, 450, 1e-9, participation=0.5) < 1e-8


@pytest.mark.filterwarnings("ignore:.*stationary point")
def test_the_papers_dual_does_not(quadratic, graph):
    """Algorithm 1 to the letter at 50 %: sum phi drifts and the limit is a wrong point."""
    method = caden.methods.caden(mu_z=1.0, dual="paper", solver=exact())
    result = caden.simulate(method, quadratic, graph, rounds=600, participation=0.5, record_every=50)
    assert (result.mean - quadratic.solution).norm() / quadratic.solution.norm() > 0.1
    assert result.history.dual_sum.iloc[-1] > 0.1
    # It has settled there: the limit solves sum grad f_i = -sum phi instead.
    assert result.history.consensus.iloc[-1] < 1e-3


@pytest.mark.parametrize("p", [1.0, 0.5])
def test_sleepers_do_not_move_and_relabelling_permutes(setting, p):
    problem, graph, x0, _ = setting
    awake = masks(20, 15, p)
    method = caden.methods.caden(mu_z=0.3, solver=gd(step_size=0.4))
    _, seen = run(method, problem, graph, awake, x0)
    before = x0
    for mask, (x, _) in zip(awake, seen, strict=True):
        assert np.array_equal(x[~mask], before[~mask])
        before = x
    order = np.random.default_rng(3).permutation(20)  # new agent a is old agent order[a]
    place = np.argsort(order)
    moved = caden.graphs.from_edges(place[graph.edges].tolist())
    _, again = run(method, problem.take(order.tolist()), moved, [m[order] for m in awake], x0[order])
    np.testing.assert_allclose(again[-1][0], seen[-1][0][order], atol=1e-12, rtol=0)


def test_nobody_awake_changes_nothing(quadratic, graph):
    method = caden.methods.caden(mu_z=0.3)
    asleep = lambda round, draw: np.zeros(20, bool)  # noqa: E731
    result = caden.simulate(method, quadratic, graph, 3, participation=asleep, x0=torch.ones(5, dtype=torch.float64))
    assert torch.equal(result.x, torch.ones(20, 5, dtype=torch.float64))
    assert result.history.communications.iloc[-1] == 0
    assert result.history.gradients.iloc[-1] == 20


def test_communications_are_one_vector_per_directed_edge_of_awake_agents(quadratic, graph):
    result = caden.simulate(caden.methods.caden(mu_z=0.3), quadratic, graph, rounds=4)
    assert result.history.communications.tolist() == [0, 74, 148, 222, 296]
    assert result.history.bytes.iloc[-1] == 296 * 5 * 8


def test_float32_duals_sum_to_rounding(graph):
    problem = caden.problems.quadratic(agents=20, dim=50, dtype=torch.float32)
    for participation in (1.0, 0.5):
        result = caden.simulate(caden.methods.caden(mu_z=0.3), problem, graph, 200, participation=participation)
        assert result.history.dual_sum.max() < 1e-4


def test_growing_mu_is_the_same_as_restating_it(setting):
    """mu(t) = mu growth^t, as DiNNO's penalty grows."""
    problem, graph, x0, _ = setting
    awake = masks(20, 10, 1.0)
    solver, textbook = solvers_of(problem)[0]
    _, seen = run(caden.methods.caden(mu_z=0.3, growth=1.1, solver=solver), problem, graph, awake, x0)
    near = [graph.neighbours(i) for i in range(20)]
    x, phi = x0.copy(), np.zeros_like(x0)
    for t, (found, _) in enumerate(seen):
        mu, old = 0.3 * 1.1**t, x.copy()
        for i in range(20):
            x[i] = textbook(i, old[i], phi[i] - mu * sum((old[i] + old[j]) / 2 for j in near[i]), mu * len(near[i]))
        phi = np.array([phi[i] + mu / 2 * sum(x[i] - x[j] for j in near[i]) for i in range(20)])
        np.testing.assert_allclose(found, x, atol=1e-11, rtol=0)


def test_auto_mu_is_the_documented_rule(quadratic, graph):
    """It starts at 0.006 L / (mean degree), with L from a few probing gradients that are counted."""

    seen = []
    result = caden.simulate(
        caden.methods.caden(), quadratic, graph, rounds=1, callbacks=[lambda row, state: seen.append(float(state.mu_z))]
    )
    L = float(torch.linalg.eigvalsh(quadratic.hessian).max())
    assert 0.9 * 0.006 * L / 3.7 < seen[0] <= 0.006 * L / 3.7 * (1 + 1e-6)
    assert result.history.gradients[0] == 20 + 5 * 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mu_z": 0}, "`mu_z` must be a positive number, got 0"),
        ({"mu_z": -1.0}, "positive"),
        ({"mu_z": "big"}, "positive number, got 'big'"),
        ({"mu_z": 1.0, "mu_y": 0.0}, "`mu_y`"),
        ({"relax": 1.0}, "`relax` must lie in"),
        ({"dual": "exakt"}, "did you mean 'exact'"),
        ({"dual": "paper", "relax": 0.9}, "relax"),
        ({"growth": 0}, "`growth`"),
        ({"solver": "sgd"}, "Unknown solver"),
    ],
)
def test_bad_parameters(arguments, message):
    with pytest.raises(caden.CadenError, match=message):
        caden.methods.caden(**arguments)


def test_edge_form_refuses_sleepers(quadratic, graph):
    with pytest.raises(caden.CadenError, match="everyone awake"):
        caden.simulate(admm_edges(mu_z=1.0), quadratic, graph, 1, participation=0.5)


def test_auto_does_not_run_away_when_agents_sleep(graph):
    """Skewed data, half awake: agents that wake up meet stiff directions, which must not drive mu_z up."""
    skew = {"name": "dirichlet", "alpha": 0.3}
    problem = caden.problems.PROBLEMS["classification"](partition=skew, hidden=16)
    options = {"participation": 0.5, "local_steps": "auto", "warmup": {"steps": 20, "step_size": 0.1}}
    ends = {}
    for mu_z in ("auto", 6.0):  # the old rule ended near 6
        result = caden.simulate(caden.methods.caden(mu_z), problem, graph, 60, record_every=60, **options)
        ends[mu_z] = result.rows[-1]["objective"]
    assert ends["auto"] < ends[6.0] / 2
