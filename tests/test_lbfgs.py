"""L-BFGS as a ladder: dense BFGS -> two-loop per agent -> batched; then whole solves against scipy and torch.optim."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch

import caden
from caden.core import Objective
from caden.engine.run import CountingProblem
from caden.solvers import lbfgs
from caden.solvers._lbfgs import direction, no_pairs
from conftest import distance
from oracles import dense_bfgs, two_loop

F64 = torch.float64


def random_pairs(rng, count, d):
    """Pairs with positive curvature, from a random positive definite matrix."""
    Q = rng.normal(size=(d, d))
    A = Q @ Q.T + 0.1 * np.eye(d)
    steps = rng.normal(size=(count, d))
    return [(s, A @ s) for s in steps]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_two_loop_is_dense_bfgs(count):
    rng = np.random.default_rng(count)
    pairs, g = random_pairs(rng, count, 6), rng.normal(size=6)
    np.testing.assert_allclose(two_loop(pairs, g, 0.3), dense_bfgs(pairs, 0.3) @ g, rtol=1e-9)


@pytest.mark.parametrize(
    ("d", "block"), [(6, 1 << 22), (6, 100), (6, 9), (1 << 14, 1 << 22)], ids=["narrow", "blocks", "rows", "wide"]
)
@pytest.mark.parametrize(("rho", "kept_as"), [(0.0, F64), (0.7, F64), (0.7, torch.bfloat16)])
def test_batched_direction_is_two_loop_per_agent(d, block, rho, kept_as, monkeypatch):
    """Agents with different numbers of pairs, some beyond the memory, asked for in subsets; of the vectors as kept."""
    monkeypatch.setattr("caden.solvers._lbfgs._BLOCK", block)
    rng, memory, k = np.random.default_rng(0), 4, 5
    counts = [0, 1, 3, 4, 9]
    pairs = no_pairs(torch.zeros(k, d, dtype=F64), memory, kept_as)
    lists = [[] for _ in range(k)]
    for n in range(max(counts)):
        for i in range(k):
            if n < counts[i]:
                s = rng.normal(size=d)
                y_f = s * np.linspace(0.5, 2, d) + 0.01 * rng.normal(size=d)
                s, y_f = (torch.tensor(v).to(kept_as).double().numpy() for v in (s, y_f))
                pairs.write(torch.tensor([i]), torch.tensor(s)[None], torch.tensor(y_f)[None])
                lists[i].append((s, y_f + rho * s))
        rows = torch.arange(k)
        direction(pairs, rows, torch.ones(k, d, dtype=F64), torch.full((k, 1), rho, dtype=F64), torch.ones(k, 1))
    g = rng.normal(size=(k, d))
    scale = torch.full((k, 1), 0.25, dtype=F64)
    for chosen in ([0, 1, 2, 3, 4], [1, 4], [0]):
        rows = torch.tensor(chosen)
        weight = torch.full((len(chosen), 1), rho, dtype=F64)
        found = direction(pairs, rows, torch.tensor(g[chosen]), weight, scale[rows])
        for a, i in enumerate(chosen):
            kept = lists[i][-memory:]
            gamma = (kept[-1][0] @ kept[-1][1]) / (kept[-1][1] @ kept[-1][1]) if kept else 0.25
            np.testing.assert_allclose(found[a].numpy(), -two_loop(kept, g[i], gamma), rtol=1e-8, atol=1e-10)


def test_carried_pairs_stay_right_when_rho_changes():
    """Only the change of grad f is stored: the same memory serves another rho."""
    rng, d = np.random.default_rng(1), 8
    A = np.diag(np.linspace(0.5, 3, d))
    pairs = no_pairs(torch.zeros(1, d, dtype=F64), 3)
    row, kept = torch.tensor([0]), []
    g = torch.tensor(rng.normal(size=(1, d)))
    for _ in range(3):
        s = rng.normal(size=d)
        pairs.write(row, torch.tensor(s)[None], torch.tensor(A @ s)[None])
        kept.append((s, A @ s))
        direction(pairs, row, g, torch.full((1, 1), 5.0, dtype=F64), torch.ones(1, 1, dtype=F64))
    for rho in (0.0, 0.1, 20.0):
        real = [(s, y + rho * s) for s, y in kept]
        gamma = (real[-1][0] @ real[-1][1]) / (real[-1][1] @ real[-1][1])
        found = direction(pairs, row, g, torch.full((1, 1), rho, dtype=F64), torch.ones(1, 1, dtype=F64))
        np.testing.assert_allclose(found[0].numpy(), -two_loop(real, g[0].numpy(), gamma), rtol=1e-9)


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def beale(x):
    a, b = x[0], x[1]
    return (1.5 - a + a * b) ** 2 + (2.25 - a + a * b**2) ** 2 + (2.625 - a + a * b**3) ** 2


def powell(x):
    a, b, c, d = x
    return (a + 10 * b) ** 2 + 5 * (c - d) ** 2 + (b - 2 * c) ** 4 + 10 * (a - d) ** 4


FUNCTIONS = {
    "rosenbrock2": (rosenbrock, [-1.2, 1.0]),
    "rosenbrock10": (rosenbrock, [-1.2, 1.0] * 5),
    "beale": (beale, [1.0, 1.0]),
    "powell": (powell, [3.0, -1.0, 0.0, 1.0]),
}


def solve(problem, x, work, solver, rho=0.0, slope=None):
    """Minimise with one call of the local solver."""
    memory = solver.init(problem, x, None)
    slope = torch.zeros_like(x) if slope is None else slope
    objective = Objective(problem, slope, torch.full((len(x), 1), rho, dtype=x.dtype))
    return solver.solve(objective, x, torch.as_tensor(work), memory)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_standard_functions_against_scipy_and_torch(name):
    """From the usual starts to the minimum 0 within 150 iterations, as the two references do."""
    f, start = FUNCTIONS[name]
    problem = caden.problems.functions([f], dim=len(start))
    solved = solve(problem, torch.tensor([start], dtype=F64), [150], lbfgs(), rho=1e-8)

    def both(v):
        value, gradient = problem.value_and_grad(torch.tensor(v)[None])
        return float(value), gradient[0].numpy()

    reference = scipy.optimize.minimize(both, start, jac=True, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-9})
    x = torch.tensor(start, dtype=F64, requires_grad=True)
    other = torch.optim.LBFGS([x], max_iter=150, line_search_fn="strong_wolfe", tolerance_change=0)

    def closure():
        other.zero_grad()
        value = f(x)
        value.backward()
        return value

    other.step(closure)
    assert reference.fun < 1e-8
    assert float(f(x.detach())) < 1e-8
    assert float(f(solved.x[0])) < 1e-8


def test_logistic_regression_against_scipy_and_torch():
    problem = caden.problems.logistic(agents=1, dim=12, samples=80, alpha=0.0, l2=0.05, seed=5)
    x0 = torch.zeros(1, 12, dtype=F64)

    def both(v):
        value, gradient = problem.value_and_grad(torch.tensor(v)[None])
        return float(value), gradient[0].numpy()

    options = {"ftol": 0, "gtol": 1e-10}  # its default tolerance on the gradient leaves 1e-5 / l2 in x
    best = scipy.optimize.minimize(both, x0[0].numpy(), jac=True, method="L-BFGS-B", options=options)
    ours = solve(problem, x0, [60], lbfgs(), rho=0.0 + 1e-12)
    np.testing.assert_allclose(ours.x[0].numpy(), best.x, atol=1e-6)

    x = x0.clone().requires_grad_()
    torch_lbfgs = torch.optim.LBFGS([x], lr=1, max_iter=15, history_size=10, line_search_fn="strong_wolfe")

    def closure():
        value, gradient = problem.value_and_grad(x.detach())
        x.grad = gradient
        return value.sum()

    torch_lbfgs.step(closure)
    theirs = float(problem.value_and_grad(x.detach())[0])
    fifteen = solve(problem, x0, [15], lbfgs(), rho=1e-12)
    start, optimum = float(problem.value_and_grad(x0)[0]), float(best.fun)
    # After 15 iterations both have closed all but a thousandth of the gap.
    assert float(fifteen.memory.value) - optimum < 1e-3 * (start - optimum)
    assert theirs - optimum < 1e-3 * (start - optimum)


def test_subproblem_is_the_one_that_was_asked_for(quadratic):
    rng = torch.Generator().manual_seed(0)
    x, slope = torch.randn(20, 5, dtype=F64, generator=rng), torch.randn(20, 5, dtype=F64, generator=rng)
    solved = solve(quadratic, x, [60] * 20, lbfgs(), rho=0.4, slope=slope)
    H = quadratic.hessian + 0.4 * torch.eye(5, dtype=F64)
    expected = torch.linalg.solve(H, quadratic.linear - slope + 0.4 * x)
    # 60 steps may each climb by the slack of 10 eps |f|, and the subproblem is 0.5 strongly convex.
    climb = 60 * 10 * torch.finfo(F64).eps * float(solved.info.value.abs().max() + 1)
    torch.testing.assert_close(solved.x, expected, atol=(2 * climb / 0.5) ** 0.5, rtol=0)


def test_budgets_are_per_agent_and_agents_do_not_mix(quadratic):
    """A batched solve equals the solves of its agents one by one; budget 0 leaves a row untouched to the bit."""
    x = torch.randn(20, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    work = [i % 5 for i in range(20)]
    together = solve(quadratic, x, work, lbfgs(), rho=0.3)
    for i in range(20):
        alone = solve(quadratic.take([i]), x[i : i + 1], [work[i]], lbfgs(), rho=0.3)
        torch.testing.assert_close(together.x[i : i + 1], alone.x, rtol=1e-10, atol=1e-12)
        if work[i] == 0:
            assert torch.equal(together.x[i], x[i])


def test_value_and_gradient_are_those_of_f_at_the_end(quadratic):
    x = torch.randn(20, 5, dtype=F64, generator=torch.Generator().manual_seed(2))
    solved = solve(quadratic, x, [3] * 20, lbfgs(), rho=0.3)
    value, gradient = quadratic.value_and_grad(solved.x)
    torch.testing.assert_close(solved.memory.value, value)
    torch.testing.assert_close(solved.memory.gradient, gradient)


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("carry", [True, False])
def test_a_local_step_costs_one_gradient(graph, participation, carry):
    """tau gradients per awake agent and round, plus the rejected ones, plus one each at the very start."""
    method = caden.methods.caden(mu_z=0.3, solver=lbfgs(carry=carry))
    problem = caden.problems.logistic(agents=20, dim=30, seed=1)
    result = caden.simulate(method, problem, graph, rounds=12, local_steps=5, participation=participation)
    history = result.history
    # Row 0 has no round: its `active` is not work.
    expected = 20 + 5 * history.active[1:].sum() + history.rejected.iloc[-1]
    assert history.gradients.iloc[-1] == expected
    assert history.rejected.iloc[-1] <= 2 * 5 * history.active[1:].sum()


def test_rejected_trials_are_at_most_two_per_step_and_descent_is_kept():
    """A function whose curvature explodes away from the start: long steps must be taken back."""
    f = lambda x: (x**4).sum() * 1e3 + x.sum()  # noqa: E731
    problem = CountingProblem(caden.problems.functions([f], dim=3))
    x = torch.full((1, 3), 0.01, dtype=F64)
    before = float(problem.value_and_grad(x)[0])
    problem.gradients = 0
    solved = solve(problem, x, [8], lbfgs(), rho=1e-3)
    assert 0 < solved.info.rejected <= 16
    assert problem.gradients == 1 + 8 + solved.info.rejected
    assert float(solved.memory.value) < before


def test_not_a_number_falls_back_to_a_safe_step_and_says_so():
    """A barrier: the function exists in a ball of radius 0.03 only, far shorter than the first two trials."""
    f = lambda x: 100 * x.sum() - (0.03**2 - (x**2).sum()).log()  # noqa: E731
    problem = caden.problems.functions([f], dim=2)
    solved = solve(problem, torch.zeros(1, 2, dtype=F64), [60], lbfgs(), rho=1e-4)
    assert solved.info.rejected >= 2
    assert solved.info.fallbacks > 0
    assert solved.info.stalled == ()
    assert solved.memory.gradient.norm() < 1e-4


def test_nowhere_to_go_is_reported_as_stalled():
    f = lambda x: torch.where(x > 0, torch.nan, x).sum()  # noqa: E731  (defined at the start only)
    problem = caden.problems.functions([f, lambda x: (x**2).sum()], dim=1)
    start = torch.tensor([[0.0], [1.0]], dtype=F64)

    class Uphill(caden.Problem):
        """Gradient pointing away from where the function exists."""

        agents, dim = 2, 1

        def value_and_grad(self, x, rows=None):
            value, gradient = problem.value_and_grad(x, rows)
            first = 0 if rows is None else (rows == 0).nonzero().flatten().tolist()
            gradient[first] = -1.0
            return value, gradient

    solved = solve(Uphill(), start, [3, 3], lbfgs(), rho=0.1)
    assert solved.info.stalled == (0,)
    assert torch.equal(solved.x[0], start[0])
    assert abs(float(solved.x[1])) < 0.1  # the other agent went on


def test_float32_accepts_good_steps_near_the_end():
    """Plain Armijo rejects steps whose gain is below the rounding of f; the tolerance must let them pass."""
    problem = caden.problems.quadratic(agents=4, dim=30, condition=50, dtype=torch.float32)
    offset = 1e4  # a large constant in f makes its rounding visible

    class Shifted(caden.Problem):
        agents, dim, dtype, device = 4, 30, torch.float32, torch.device("cpu")

        def value_and_grad(self, x, rows=None):
            value, gradient = problem.value_and_grad(x, rows)
            return value + offset, gradient

    solved = solve(Shifted(), torch.zeros(4, 30), [60] * 4, lbfgs(), rho=0.1)
    H = problem.hessian + 0.1 * torch.eye(30)
    expected = torch.linalg.solve(H, problem.linear)
    assert solved.info.fallbacks == 0
    torch.testing.assert_close(solved.x, expected, rtol=1e-2, atol=1e-2)


def test_a_stall_does_not_make_later_rounds_timid():
    """What a stalled solve learnt of caution is forgotten when it ends."""
    broken = True

    def f(x):
        return x.sum() * torch.nan if broken else (x**2).sum()

    class Switching(caden.Problem):
        agents, dim = 1, 2

        def value_and_grad(self, x, rows=None):
            value = torch.tensor([float(f(x[0]))], dtype=F64)
            return value, 2 * x

    x, solver = torch.ones(1, 2, dtype=F64), lbfgs()
    broken = False
    memory = solver.init(Switching(), x, None)
    objective = Objective(Switching(), torch.zeros_like(x), torch.full((1, 1), 0.1, dtype=F64))
    broken = True
    solved = solver.solve(objective, x, torch.tensor([5]), memory)
    assert solved.info.stalled == (0,)
    broken = False
    again = solver.solve(objective, solved.x, torch.tensor([10]), solved.memory)
    assert again.memory.gradient.norm() < 0.5


@pytest.mark.parametrize(
    "problem",
    [
        caden.problems.quadratic(agents=20, dim=5, seed=3),
        caden.problems.logistic(agents=20, dim=5, execution="loop"),
        caden.problems.classification(
            caden.problems.mlp(6, 3, 4), (torch.randn(400, 6), torch.arange(400) % 3), agents=20, execution="loop"
        ),
    ],
    ids=["quadratic", "logistic", "network"],
)
def test_blocks_of_agents_give_the_same_bits(problem, graph, monkeypatch):
    """With sleepers and unequal work; 6 of 20 agents at a time, the last block smaller; counts add up."""
    runs = []
    for numbers in (1 << 21, 6 * problem.dim + 2):
        monkeypatch.setattr("caden.solvers._blocks.NUMBERS", numbers)
        method = caden.methods.caden(mu_z=0.5, solver=lbfgs(memory=3))
        runs.append(caden.simulate(method, problem, graph, 12, participation=0.7, local_steps=[1, 2, 3, 4] * 5))
    assert torch.equal(runs[0].x, runs[1].x)
    assert runs[0].rows[-1]["gradients"] == runs[1].rows[-1]["gradients"]
    assert runs[0].rows[-1]["rejected"] == runs[1].rows[-1]["rejected"]


def test_pairs_kept_in_half_the_memory_do_as_well(quadratic, graph):
    """Rounded pairs make a slightly different matrix, not a different answer."""
    for storage, dtype in (("full", F64), ("bfloat16", torch.bfloat16)):
        solver = lbfgs(storage=storage)
        assert solver.init(quadratic, torch.zeros(20, 5, dtype=F64), None).vectors.dtype == dtype
        assert distance(caden.methods.caden(mu_z=1.0, solver=solver), quadratic, graph, 300, 1e-9) < 1e-8


def test_bad_parameters():
    for make in (
        lambda: lbfgs(memory=0),
        lambda: lbfgs(line_search="wolf"),
        lambda: lbfgs(carry="yes"),
        lambda: lbfgs(storage="int8"),
    ):
        with pytest.raises(caden.CadenError):
            make()
