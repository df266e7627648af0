"""`local_steps = "auto"`: when agents stop, what they may leave undone, and who may not use it."""

import numpy as np
import pytest
import sympy
import torch

import caden
from caden import methods, solvers
from caden.core import Objective
from caden.draws import Draw
from caden.schedules import Workload, auto

SOLVERS = ["lbfgs", "gd", "agd", "newton", {"name": "adam", "step_size": 0.05}]


@pytest.fixture(scope="module")
def problem():
    return caden.problems.logistic(agents=8, samples=30, dim=6, l2=0.02, seed=1)


@pytest.fixture(scope="module")
def minimiser(problem):
    options = {"tolerance": 1e-18, "local_steps": 9, "record_every": 20}
    return caden.simulate(methods.caden(0.3), problem, caden.graphs.complete(8), 999, **options).mean


def subproblem(problem, accuracy=None, overshoot=0.25, rho=0.5):
    generator = torch.Generator().manual_seed(3)
    slope = torch.randn(8, problem.dim, generator=generator, dtype=problem.dtype)
    return Objective(problem, slope, torch.full((8, 1), rho, dtype=problem.dtype), accuracy, overshoot)


def start(problem):
    return torch.zeros(8, problem.dim, dtype=problem.dtype)


def residuals(problem, objective, x, v):
    """|grad h| and grad h.(v - x), each in units of the rule, agent by agent."""
    out = []
    for i in range(8):
        row = torch.tensor([i])
        g = problem.value_and_grad(v[i : i + 1], row)[1][0] + objective.slope[i] + objective.rho[i] * (v[i] - x[i])
        length = float((v[i] - x[i]).norm())
        rho = float(objective.rho[i])
        out.append((float(g.norm()) / (rho * length), float(g @ (v[i] - x[i])) / (rho * length**2)))
    return out


@pytest.mark.parametrize("spec", SOLVERS, ids=str)
@pytest.mark.parametrize("accuracy", [0.7, 0.2])
def test_agents_stop_at_the_first_point_that_is_accurate_enough(problem, spec, accuracy):
    solver, x = solvers.from_spec(spec), start(problem)
    objective = subproblem(problem, accuracy)
    cap = torch.full((8,), 200)
    solved = solver.solve(objective, x, cap, solver.init(problem, x, None))
    steps = solved.info.steps
    assert int(steps.min()) >= 1 and int(steps.max()) < 200
    for size, beyond in residuals(problem, objective, x, solved.x):
        assert size <= accuracy * (1 + 1e-9) and beyond <= 0.25 + 1e-9
    plain = subproblem(problem)
    fixed = solver.solve(plain, x, steps, solver.init(problem, x, None))
    if spec != "agd":  # whose last step is not extrapolated
        assert torch.equal(fixed.x, solved.x)  # nothing else changed
    if spec == "agd" or int(steps.max()) == 1:
        return
    before = solver.solve(plain, x, (steps - 1).clamp(min=1), solver.init(problem, x, None))
    for (size, beyond), taken in zip(residuals(problem, plain, x, before.x), steps.tolist(), strict=True):
        assert taken == 1 or size > accuracy or beyond > 0.25


def test_a_step_beyond_the_minimiser_is_not_enough():
    """f = 0: gradient descent with a step of 1.4 / rho overshoots by 40 %, which accuracy 0.5 alone would accept."""
    problem = caden.problems.quadratics(torch.zeros(8, 2, 2).double(), torch.zeros(8, 2).double())
    solver = solvers.gd(step_size=1.4 / 0.5)
    x = start(problem)
    for overshoot, expected in ((0.5, 1), (0.05, 2)):  # |grad| / rho |v - x| is 0.4/1.4 beyond, then 0.16/0.84 before
        objective = subproblem(problem, 0.3, overshoot)
        steps = solver.solve(objective, x, torch.full((8,), 50), solver.init(problem, x, None)).info.steps
        assert steps.tolist() == [expected] * 8


def test_it_ends_at_the_rounding_floor_and_without_a_penalty(problem):
    x, cap = start(problem), torch.full((8,), 500)
    for solver in (solvers.lbfgs(), solvers.gd()):
        objective = subproblem(problem, 1e-15)  # cannot be had
        solved = solver.solve(objective, x, cap, solver.init(problem, x, None))
        again = solver.solve(
            objective._replace(slope=objective.slope + objective.rho * (solved.x - x)), solved.x, cap, solved.memory
        )
        assert int(again.info.steps.max()) < 20
        alone = solver.solve(
            subproblem(problem, 0.1, rho=0.0), x, torch.full((8,), 3000), solver.init(problem, x, None)
        )
        first = problem.value_and_grad(x)[1] + objective.slope
        last = problem.value_and_grad(alone.x)[1] + objective.slope
        reached = last.norm(dim=1) <= 0.1 * first.norm(dim=1)
        assert bool((reached | (alone.info.steps == 3000)).all()) and bool(reached.any())


@pytest.mark.parametrize("name", ["kgt", "led", "lt_admm", "fedavg", "scaffold"])
def test_methods_that_unequal_steps_would_bias_refuse_it(problem, name):
    with pytest.raises(caden.CadenError, match="needs a method with a local solver"):
        caden.simulate(methods.METHODS[name](), problem, caden.graphs.ring(8), 1, local_steps="auto")


@pytest.mark.parametrize(
    ("relax", "options"),
    [(0.9, {}), (0.5, {"participation": 0.5}), (0.9, {"messages": {"loss": 0.2, "delay": 2}})],
    ids=str,
)
def test_caden_is_exact_with_it_and_spends_less(problem, minimiser, relax, options):
    graph = caden.graphs.erdos_renyi(8, edges=12, seed=2)
    ends = {}
    for steps in (8, "auto"):
        method = methods.caden(0.3, relax=relax)
        ends[steps] = caden.simulate(
            method, problem, graph, 3000, local_steps=steps, tolerance=1e-13, record_every=10, **options
        )
        assert ends[steps].stopped == "tolerance", (steps, ends[steps].rows[-1])
        assert float((ends[steps].x - minimiser).norm(dim=1).max()) < 1e-5
    spent = {steps: result.rows[-1]["gradients"] for steps, result in ends.items()}
    assert spent["auto"] < 0.6 * spent[8]


def test_the_history_says_how_many_steps_were_taken(problem):
    result = caden.simulate(
        methods.caden(0.3), problem, caden.graphs.ring(8), 10, local_steps=auto(0.5, 6), participation=0.5
    )
    steps = result.history[["local_steps", "local_steps_least", "local_steps_most"]].iloc[1:]
    assert ((steps.local_steps_least >= 1) & (steps.local_steps_most <= 6)).all()
    assert ((steps.local_steps_least <= steps.local_steps) & (steps.local_steps <= steps.local_steps_most)).all()
    assert "local_steps" not in caden.simulate(methods.caden(0.3), problem, caden.graphs.ring(8), 1).history


def test_wrong_values_are_refused():
    draw = Draw(0, 4)
    for spec, word in (("often", '"auto"'), (lambda: auto(1.5), "accuracy"), (lambda: auto(0.5, 0), "most")):
        with pytest.raises(caden.CadenError, match=word):
            Workload(spec() if callable(spec) else spec, draw)
    assert Workload("auto", draw)(0).tolist() == [8] * 4


# What local solves may leave undone: with solves v = x + (1 + s) (v* - x) and curvature h mu_z d_i, a mode of the
# normalised Laplacian with eigenvalue e follows a 3 x 3 matrix in (x, S / d, phi / mu_z d).


def mode(relax, s, e, h):
    solution = sympy.Matrix([[0, 1 / (1 + h), -1 / (1 + h)]])
    x = (1 + s) * solution - s * sympy.Matrix([[1, 0, 0]])
    anchors = relax * (2 - e) * x + (1 - 2 * relax) * sympy.Matrix([[0, 1, 0]])
    dual = sympy.Matrix([[0, 0, 1]]) + relax * e * x
    return sympy.Matrix.vstack(x, anchors, dual)


def test_the_largest_overshoot_on_bipartite_graphs_in_symbols():
    """At e = 2, h = 0, -1 is an eigenvalue for s = (1-relax)/(1+relax), where |grad h| = (1-relax)/2 rho |v - x|."""
    relax, s = sympy.symbols("relax s", positive=True)
    matrix = mode(relax, s, 2, 0)
    at_minus_one = sympy.factor((matrix + sympy.eye(3)).det())
    (root,) = sympy.solve(at_minus_one, s)
    assert sympy.simplify(root - (1 - relax) / (1 + relax)) == 0
    assert sympy.simplify(root / (1 + root) - (1 - relax) / 2) == 0


@pytest.mark.parametrize("relax", [0.5, 0.7, 0.9])
def test_no_mode_is_unstable_below_that_overshoot_nor_at_any_undershoot(relax):
    symbols = sympy.symbols("s e h")
    matrix = sympy.lambdify(symbols, mode(sympy.Rational(str(relax)), *symbols), "numpy")

    def largest(s):
        grid = [(e, h) for e in np.linspace(0.05, 2, 40) for h in (0, 0.01, 0.1, 0.5, 1, 3, 10, 100)]
        return max(abs(np.linalg.eigvals(np.asarray(matrix(s, e, h), float))).max() for e, h in grid)

    bound = (1 - relax) / (1 + relax)
    assert largest(0.99 * bound) < 1 + 1e-9 < largest(1.05 * bound)
    for s in (-0.1, -0.5, -0.9, -0.99):
        assert largest(s) < 1 + 1e-9


@pytest.mark.parametrize(("relax", "steps"), [(0.5, 1), (0.5, 4), (0.9, 2)])
def test_gradient_steps_undershoot_so_caden_gd_is_proximal_admm(relax, steps):
    """With k steps of t <= 1/(rho + L), v - v* = (I - t (H + rho))^k (x - v*): v minimises the subproblem plus
    |v - x|^2_Q / 2 with Q = (H + rho) (B^-1 - I) >= 0, where B = I - (I - t (H + rho))^k.
    """
    problem, graph = caden.problems.quadratic(agents=6, dim=3, seed=4), caden.graphs.ring(6)
    mu, t, d = 0.3, 0.4, 2
    seen = []
    caden.simulate(
        methods.caden_gd(mu, step_size=t, relax=relax),
        problem,
        graph,
        25,
        local_steps=steps,
        callbacks=[lambda row, state: seen.append(state.x.numpy().copy())],
    )
    A, b = problem.hessian.numpy(), problem.linear.numpy()
    x, near = np.zeros((6, 3)), [((i - 1) % 6, (i + 1) % 6) for i in range(6)]
    phi, anchors = np.zeros((6, 3)), np.zeros((6, 3))
    for expected in seen:
        new = np.empty_like(x)
        for i in range(6):
            P = A[i] + mu * d * np.eye(3)
            B = np.eye(3) - np.linalg.matrix_power(np.eye(3) - t * P, steps)
            Q = P @ (np.linalg.inv(B) - np.eye(3))
            assert np.linalg.eigvalsh((Q + Q.T) / 2)[0] > -1e-12
            new[i] = np.linalg.solve(P + Q, b[i] - phi[i] + mu * anchors[i] + Q @ x[i])
        x = new
        for i, (j, k) in enumerate(near):
            phi[i] += relax * mu * (2 * x[i] - x[j] - x[k])
            anchors[i] = relax * (2 * x[i] + x[j] + x[k]) + (1 - 2 * relax) * anchors[i]
        np.testing.assert_allclose(x, expected, atol=1e-11, rtol=0)


def test_over_relaxation_with_few_steps_is_warned_of(problem):
    ring = caden.graphs.ring(8)
    with pytest.warns(UserWarning, match="`relax = 0.9` with single local steps"):
        caden.simulate(methods.caden(0.3, relax=0.9), problem, ring, 1, local_steps=1)
    for steps, relax in ((5, 0.9), ("auto", 0.9), (1, 0.5)):
        caden.simulate(methods.caden(0.3, relax=relax), problem, ring, 1, local_steps=steps)
    caden.simulate(methods.caden_gd(0.3, relax=0.9), problem, ring, 1, local_steps=1)  # it undershoots
