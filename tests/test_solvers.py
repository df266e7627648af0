from __future__ import annotations

import pytest
import torch

import caden
from caden.core import Objective
from caden.engine.run import CountingProblem
from caden.solvers import adam, exact, from_spec, gd, newton

F64 = torch.float64


def solve(problem, solver, x, work, rho, slope, curvature=None):
    memory = solver.init(problem, x, curvature)
    return solver.solve(Objective(problem, slope, rho), x, torch.as_tensor(work), memory)


@pytest.fixture
def subproblem(quadratic):
    rng = torch.Generator().manual_seed(4)
    x, slope = (torch.randn(20, 5, dtype=F64, generator=rng) for _ in range(2))
    rho = torch.rand(20, 1, dtype=F64, generator=rng) + 0.5
    return quadratic, x, slope, rho


def test_gd_is_gradient_descent(subproblem):
    problem, x, slope, rho = subproblem
    solved = solve(problem, gd(step_size=0.3), x, [4] * 20, rho, slope)
    v = x.clone()
    for _ in range(4):
        v = v - 0.3 * (torch.einsum("mij,mj->mi", problem.hessian, v) - problem.linear + slope + rho * (v - x))
    torch.testing.assert_close(solved.x, v)


def test_gd_default_step_uses_the_known_curvature(subproblem):
    problem, x, slope, rho = subproblem
    L = torch.linalg.eigvalsh(problem.hessian)[:, -1]
    solved = solve(problem, gd(), x, [1] * 20, rho, slope, curvature=L)
    expected = x - (problem.value_and_grad(x)[1] + slope) / (rho + L.unsqueeze(1))
    torch.testing.assert_close(solved.x, expected)


def test_gd_without_warm_up_probes_the_curvature(subproblem):
    problem, x, slope, rho = subproblem
    solved = solve(problem, gd(), x, [200] * 20, rho, slope)
    exactly = solve(problem, exact(), x, [1] * 20, rho, slope)
    torch.testing.assert_close(solved.x, exactly.x, atol=1e-8, rtol=0)


def test_exact_solves_quadratics(subproblem):
    problem, x, slope, rho = subproblem
    solved = solve(problem, exact(), x, [1] * 19 + [0], rho, slope)
    gradient = problem.value_and_grad(solved.x)[1] + slope + rho * (solved.x - x)
    assert gradient[:19].abs().max() < 1e-12
    assert torch.equal(solved.x[19], x[19])


def test_adam_is_torchs_adam(subproblem):
    problem, x, slope, rho = subproblem
    solved = solve(problem, adam(step_size=0.05), x, [6] * 20, rho, slope)
    v = x.clone().requires_grad_()
    optimizer = torch.optim.Adam([v], lr=0.05)
    for _ in range(6):
        optimizer.zero_grad()
        v.grad = problem.value_and_grad(v.detach())[1] + slope + rho * (v.detach() - x)
        optimizer.step()
    torch.testing.assert_close(solved.x, v.detach())


def test_newton_solves_quadratics_in_a_step_and_logistic_regression_in_a_few(subproblem):
    problem, x, slope, rho = subproblem
    solved = solve(problem, newton(), x, [1] * 20, rho, slope)
    torch.testing.assert_close(solved.x, solve(problem, exact(), x, [1] * 20, rho, slope).x, atol=1e-8, rtol=0)
    curved = caden.problems.logistic(agents=3, dim=4, alpha=0.0, l2=0.05)
    start = torch.zeros(3, 4, dtype=F64)
    solved = solve(curved, newton(), start, [8] * 3, torch.full((3, 1), 0.1, dtype=F64), start)
    gradient = curved.value_and_grad(solved.x)[1] + 0.1 * solved.x
    assert gradient.abs().max() < 1e-9


@pytest.mark.parametrize("solver", [gd(step_size=0.1), adam(), newton(eps=1.0)], ids=lambda s: s.name)
def test_budgets_and_counting(subproblem, solver):
    problem, x, slope, rho = subproblem

    class Tallied(type(problem)):
        products = 0

        def hvp(self, x, v, rows=None):
            self.products += len(x)
            return super().hvp(x, v, rows)

        def value_and_grad(self, x, rows=None):
            before, found = self.products, super().value_and_grad(x, rows)
            self.products = before  # without compiled loops, a gradient is a product with the Hessian
            return found

    tallied = Tallied(problem.hessian, problem.linear)
    counted = CountingProblem(tallied)
    work = [i % 4 for i in range(20)]
    solved = solve(counted, solver, x, work, rho, slope)
    assert counted.gradients == 20 + sum(work) + 2 * tallied.products
    assert (tallied.products > 0) == (solver.name == "newton")
    for i in range(20):
        alone = solve(problem.take([i]), solver, x[i : i + 1], [work[i]], rho[i : i + 1], slope[i : i + 1])
        torch.testing.assert_close(solved.x[i : i + 1], alone.x)


def test_smoothness_finds_the_largest_curvature(quadratic):
    """|A^n u| >= L^n c for a unit u with a part c along the top eigenvector: one of n steps stretches by L c^(1/n)."""
    values, vectors = torch.linalg.eigh(quadratic.hessian)
    true, start = values[:, -1], torch.zeros(20, 5, dtype=F64)
    gradient = quadratic.value_and_grad(start)[1]
    part = (vectors[:, :, -1] * gradient).sum(1).abs() / gradient.norm(dim=1)
    for steps in (1, 4, 30):
        found = caden.theory.smoothness(quadratic, start, steps=steps)
        assert (found <= true * (1 + 1e-6)).all()
        assert (found >= true * part ** (1 / steps) * (1 - 1e-6)).all()


def test_solvers_by_name():
    assert from_spec({"name": "gd", "step_size": 0.1}).name == "gd"
    assert from_spec("adam").name == "adam"
    for spec, message in (
        (("lbgfs"), "did you mean 'lbfgs'"),
        ({"name": "gd", "stepp": 1}, "did you mean 'solver.step_size'"),
    ):
        with pytest.raises(caden.CadenError, match=message):
            from_spec(spec)
    with pytest.raises(caden.CadenError, match="quadratic"):
        exact().init(caden.problems.logistic(3, 2), torch.zeros(3, 2, dtype=F64), None)
    for make in (lambda: gd(step_size=0), lambda: adam(step_size=-1), lambda: adam(beta1=1.0)):
        with pytest.raises(caden.CadenError):
            make()
