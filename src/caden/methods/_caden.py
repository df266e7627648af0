"""CADEN: Yi, Zeng and Freris, "Curvature accelerated decentralized non-convex optimization for high-dimensional machine
learning problems", arXiv:2504.04073, 2025.

Algorithm 1. An awake agent i

    x_i  <- a few L-BFGS steps on  f_i(v) + phi_i.v + mu_z/2 sum_j |v - (x_i + x_j)/2|^2
    broadcasts x_i
    phi_i <- phi_i + mu_y/2 sum_j (x_i - x_j)

Taken to the letter (``dual="paper"``) this is right only while everyone is awake. When an edge has one end awake, only
that end's phi moves, sum phi leaves zero, and the limit solves sum grad f_i = -sum phi: a wrong point. The default
(``dual="exact"``) keeps the paper's own edge variables z_ij = s_e and y_ij = +-y_e of its eq. (5), known at both ends,
and moves them by the half step of whichever end is awake:

    u_i = x_i - s_e if i was awake, else 0;  u_j likewise
    s_e <- s_e + relax (u_i + u_j);   y_e <- y_e + relax mu_y (u_i - u_j)

It is still one broadcast a round, sum phi = 0 by construction, and for relax = 1/2 with everyone awake it is Algorithm
1.

Sleeping agents: with dual="exact" edges move by the half step of whichever end is awake; exact.

If nobody can ever sleep, the same iterates come from agent variables alone, which is what runs then. `relax` above
1/2 over-relaxes; with mu_y = mu_z the method is the relaxed ADMM of Bastianello, Carli, Schenato and Todescato,
"Asynchronous distributed optimization over lossy networks via relaxed ADMM", IEEE TAC 66(6), 2021.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import solvers
from caden.core import Heard, Info, LocalSolver, Method, Objective, Round
from caden.errors import CadenError, choose, number, positive
from caden.theory import smoothness

AUTO = 0.1  # mu_z = AUTO * L / mean degree: see docs/parameters.md for the measurements behind it


class State(NamedTuple):
    """x and phi as in the paper; `gap` is sum_j (x_i - z_ij), the pull of the anchors."""

    x: Tensor  # (k, d)
    phi: Tensor  # (k, d)
    gap: Tensor  # (k, d)
    memory: Any  # the local solver's
    mu_z: Tensor  # ()
    s: Tensor | None  # (e, d) the paper's z_ij, where agents may sleep
    y: Tensor | None  # (e, d) the paper's y_ij, + at the first end and - at the second


def caden(
    mu_z: float | str = "auto",
    mu_y: float | None = None,
    dual: str = "exact",
    relax: float = 0.5,
    growth: float = 1.0,
    solver: LocalSolver | str | dict[str, Any] = "lbfgs",
) -> Method:
    """CADEN with its three tuning knobs; every default is meant to work unseen.

    Args:
        mu_z: weight of the pull towards the neighbours. "auto" is 0.1 L / (mean degree), L being the largest curvature
            that the warm-up (else a few probing gradients) finds at the start; agents agree on it by max-consensus.
        mu_y: dual step, `mu_z` if None. Far above it the method diverges, whatever Theorem 1 of the paper asks for.
        dual: "exact" (correct with sleeping agents) or "paper" (Algorithm 1 to the letter).
        relax: 0.5 is the paper's; up to about 0.9 is usually faster and costs nothing.
        growth: factor on mu_z and mu_y in every round.
        solver: local solver, as an object, a name or a table.

    >>> import caden
    >>> problem = caden.problems.quadratic(agents=5, dim=3, seed=0)
    >>> result = caden.simulate(caden.methods.caden(mu_z=1.0), problem, caden.graphs.ring(5), rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 1e-8)
    True
    """
    choose("dual", dual, ("exact", "paper"))
    if mu_z != "auto":
        positive("mu_z", mu_z)
    if mu_y is not None:
        positive("mu_y", mu_y)
    positive("growth", growth)
    if not 0 < number("relax", relax) < 1:
        raise CadenError(f"`relax` must lie in (0, 1), got {relax}.")
    if dual == "paper" and relax != 0.5:
        raise CadenError('`relax` belongs to `dual="exact"`; the paper\'s rule has none (0.5).')
    local = solvers.from_spec(solver)

    def init(x: Tensor, round: Round) -> State:
        curvature = round.curvature
        if mu_z == "auto":
            curvature = smoothness(round.problem, x) if curvature is None else curvature
            mean_degree = 2 * len(round.graph.edges) / round.graph.agents
            mu = AUTO * round.maximum(curvature) / mean_degree
        else:
            mu = torch.as_tensor(mu_z, dtype=x.dtype, device=x.device)
        heard = round.broadcast(x)
        first, second = heard.ends()
        edges_form = dual == "exact" and round.may_sleep
        s = (first + second) / 2 if edges_form else None
        y = torch.zeros_like(first) if edges_form else None
        memory = local.init(round.problem, x, curvature)
        return State(x, torch.zeros_like(x), heard.laplacian() / 2, memory, mu.to(x.dtype), s, y)

    def step(state: State, round: Round) -> tuple[State, Info]:
        factor = torch.tensor(growth, dtype=state.mu_z.dtype, device=state.mu_z.device) ** round.index
        mu = state.mu_z * factor
        step_y = mu if mu_y is None else mu_y * factor
        objective = Objective(round.problem, state.phi + mu * state.gap, mu * round.degree)
        solved = local.solve(objective, state.x, round.work, state.memory)
        heard = round.broadcast(solved.x)
        if state.s is not None and state.y is not None:
            phi, gap, s, y = _edges(state.s, state.y, heard, round, relax, step_y)
            return State(solved.x, phi, gap, solved.memory, state.mu_z, s, y), solved.info
        phi, gap = _agents(state, solved.x, heard, round, relax, step_y)
        return State(solved.x, phi, gap, solved.memory, state.mu_z, None, None), solved.info

    return Method(init, step, "caden")


def _agents(
    state: State, x: Tensor, heard: Heard, round: Round, relax: float, mu_y: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Dual and anchors in agent variables: Algorithm 1, also over-relaxed."""
    laplacian = heard.laplacian()
    phi = state.phi + relax * mu_y * laplacian
    gap = relax * laplacian
    if relax != 0.5:
        gap += (1 - 2 * relax) * (state.gap + round.degree * (x - state.x))
    return torch.where(round.active, phi, state.phi), gap


def _edges(
    s: Tensor, y: Tensor, heard: Heard, round: Round, relax: float, mu_y: Tensor | float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dual and anchors on edges, moved by whichever end is awake."""
    first, second = heard.ends()
    u = torch.where(round.edges.awake_first, first - s, 0)
    w = torch.where(round.edges.awake_second, second - s, 0)
    s = s + relax * (u + w)
    y = y + relax * mu_y * (u - w)
    gap = round.edges.arc_sum(torch.cat([first - s, second - s]))
    return round.edges.signed_sum(y), gap, s, y
