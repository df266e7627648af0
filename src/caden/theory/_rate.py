"""The convergence rate of local solvers."""

import torch
from torch import Tensor

from caden.core import LocalSolver, Objective, Problem


def local_rate(problem: Problem, x: Tensor, rho: Tensor, solver: LocalSolver, steps: int = 5) -> float:
    """Measure the paper's r, the largest over agents: tau local steps reduce |grad h|^2 to at most r^tau times itself.

    The subproblems are f_i(v) + rho_i/2 |v - x_i|^2, started at x_i, with tau = `steps`; `rho` (k, 1) is mu_z d_i.
    """
    work = torch.full((len(x),), steps, device=x.device)
    memory = solver.init(problem, x, None)
    solved = solver.solve(Objective(problem, torch.zeros_like(x), rho), x, work, memory)
    after = problem.value_and_grad(solved.x)[1] + rho * (solved.x - x)
    ratio = torch.linalg.vector_norm(after, dim=1) / torch.linalg.vector_norm(memory.gradient, dim=1)
    return float(ratio.nan_to_num(0).max() ** (2 / steps))
