"""Local solves in blocks of agents.

A local solve temporarily holds a dozen vectors per agent. Many agents, or large models, are therefore solved in blocks.
Only one block's vectors then take memory, and they stay in the cache.
"""

from typing import Any

import torch
from torch import Tensor

from caden.core import Info, LocalSolver, Objective, Problem, Solved

NUMBERS = 1 << 21  # numbers of x in a block; smaller blocks cost more in calls than they save


class _Block(Problem):
    """The problem of consecutive agents."""

    def __init__(self, problem: Problem, part: slice):
        self._problem, self._rows = problem, torch.arange(part.start, part.stop)
        self.agents, self.dim, self.dtype, self.device = len(self._rows), problem.dim, problem.dtype, problem.device
        self.stochastic = problem.stochastic

    def redraw(self, step: int) -> Problem:
        part = slice(int(self._rows[0]), int(self._rows[-1]) + 1)
        return _Block(self._problem.redraw(step), part)

    def _global_rows(self, x: Tensor, rows: Tensor | None) -> Tensor:
        return self._rows.to(x.device) if rows is None else rows + self._rows[0]

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._problem.value_and_grad(x, self._global_rows(x, rows))

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return self._problem.hvp(x, v, self._global_rows(x, rows))


def in_blocks(solver: LocalSolver) -> LocalSolver:
    """Return the same solver, on one block at a time; agents do not depend on each other within a round."""

    def solve(objective: Objective, x: Tensor, work: Tensor, memory: Any) -> Solved:
        size = max(1, NUMBERS // x.shape[1])
        if size >= len(x):
            return solver.solve(objective, x, work, memory)
        new, fields = torch.empty_like(x), list(memory)
        rejected, fallbacks, stalled, steps, seen = 0, 0, list[int](), list[Tensor](), list[Tensor]()
        for first in range(0, len(x), size):
            part = slice(first, min(first + size, len(x)))
            block = Objective(
                _Block(objective.problem, part), objective.slope[part], objective.rho[part], *objective[3:]
            )
            old_memory = type(memory)(*(field[part] for field in memory))
            new[part], new_memory, info = solver.solve(block, x[part], work[part], old_memory)
            for i, (before, after) in enumerate(zip(old_memory, new_memory)):
                if after.data_ptr() == before.data_ptr():
                    continue  # changed in place
                if fields[i] is memory[i]:
                    fields[i] = memory[i].clone()
                fields[i][part] = after
            rejected, fallbacks = rejected + info.rejected, fallbacks + info.fallbacks
            stalled += [first + i for i in info.stalled]
            steps += [] if info.steps is None else [info.steps]
            seen += [] if info.seen is None else [info.seen]
        taken, losses = (torch.cat(part) if part else None for part in (steps, seen))
        value, gradient = (None, None) if seen else (fields[0], fields[1])
        info = Info(value, gradient, rejected, fallbacks, tuple(stalled), taken, losses)
        return Solved(new, type(memory)(*fields), info)

    return solver._replace(solve=solve)
