"""The starting point of a run, and local training before round 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden.core import Problem
from caden.curvature import descend
from caden.errors import CadenError, Diverged, require_integer, require_positive


class Warmup(NamedTuple):
    """Local training before round 0: `steps` full gradient steps of length `step_size` on each f_i."""

    steps: int = 0
    step_size: float = 0.1

    @classmethod
    def from_spec(cls, spec: Warmup | Mapping[str, Any] | None) -> Warmup | None:
        """Return a checked warm-up, or None if there is nothing to do."""
        if not spec:
            return None
        try:
            warmup = spec if isinstance(spec, Warmup) else cls(**spec)
        except TypeError as error:
            raise CadenError(f"`warmup` takes `steps` and `step_size`: {error}.") from None
        require_integer("warmup.steps", warmup.steps), require_positive("warmup.step_size", warmup.step_size)
        return warmup if warmup.steps else None


def start_point(problem: Problem, x0: Tensor | None = None) -> Tensor:
    """Return the (m, d) start: the given one, the model's own parameters, or zeros."""
    shape = (problem.agents, problem.dim)
    if x0 is None:
        x0 = problem.start
    if x0 is None:
        return torch.zeros(shape, dtype=problem.dtype, device=problem.device)
    x0 = torch.as_tensor(x0).to(problem.device, problem.dtype)
    if x0.shape not in (shape, shape[1:]):
        raise CadenError(f"`x0` must have shape ({shape[1]},) or {shape}, got {tuple(x0.shape)}.")
    return x0.expand(shape).clone(memory_format=torch.contiguous_format)  # a step may overwrite it


def warm_up(problem: Problem, x: Tensor, spec: Warmup | Mapping[str, Any] | None) -> tuple[Tensor, Tensor | None]:
    """Take local gradient steps; return the new x and (k,) the curvature met, or None after too few steps."""
    warmup = Warmup.from_spec(spec)
    if warmup is None:
        return x, None
    x, (curvature,) = descend(problem, x, (warmup,))
    lost = (~x.isfinite().all(1)).nonzero().flatten().tolist()
    if lost:
        raise Diverged(f"The warm-up diverged (agents {list_agents(lost)}): shorten `warmup.step_size`.")
    return x, curvature if warmup.steps > 1 else None


def list_agents(agents: list[int]) -> str:
    """Return a short list of agents as text."""
    return ", ".join(map(str, agents[:8])) + (" ..." if len(agents) > 8 else "")
