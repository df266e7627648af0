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

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import solvers
from caden.core import Heard, Info, LocalSolver, Method, Objective, Round
from caden.errors import CadenError, choose, number, positive
from caden.graphs import Graph
from caden.theory import Opinion, examine, smoothness

# mu_z = "auto": where it starts, in L / (mean degree), and how it goes on; docs/parameters.md has the measurements.
START = 0.006
CHECKS = (6, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rounds after which mu_z may change
BAND = (0.5, 1.7)  # it does if curvature x |primal residual| / |dual residual| is not within this of what is wanted
LARGEST_CHANGE = 30.0


class State(NamedTuple):
    """x and phi as in the paper; `gap` is sum_j (x_i - z_ij), the pull of the anchors."""

    x: Tensor  # (k, d)
    phi: Tensor  # (k, d)
    gap: Tensor  # (k, d)
    memory: Any  # the local solver's
    mu_z: Tensor  # ()
    s: Tensor | None  # (e, d) the paper's z_ij, where agents may sleep
    y: Tensor | None  # (e, d) the paper's y_ij, + at the first end and - at the second
    tally: Tensor | None  # (k, 3) residuals and curvature since mu_z was last looked at, if it is "auto"


def caden(
    mu_z: float | str = "auto",
    mu_y: float | None = None,
    dual: str = "exact",
    relax: float = 0.5,
    growth: float = 1.0,
    unsafe: bool = False,
    solver: LocalSolver | str | dict[str, Any] = "lbfgs",
) -> Method:
    """CADEN with its three tuning knobs; every default is meant to work unseen.

    Args:
        mu_z: weight of the pull towards the neighbours. "auto" starts at 0.006 L / (mean degree), L being the largest
            curvature that the warm-up (else a few probing gradients) finds, and moves in some of the first 256 rounds
            so that neither residual lags behind; agents agree on the numbers by max-consensus, counted from round 0 on.
        mu_y: dual step, `mu_z` if None. Far above it the method diverges, whatever Theorem 1 of the paper asks for.
        dual: "exact" (correct with sleeping agents) or "paper" (Algorithm 1 to the letter).
        relax: 0.5 is the paper's; up to about 0.9 is usually faster and costs nothing.
        growth: factor on mu_z and mu_y in every round.
        unsafe: run also what must diverge (see `theory.examine`).
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
        curvature, tally = round.curvature, None
        if mu_z == "auto":
            curvature = smoothness(round.problem, x) if curvature is None else curvature
            steepest = round.maximum(curvature).to(x.dtype)
            steepest = torch.where(steepest > 0, steepest, 1)  # all gradients vanish here: nothing is known
            mu = START * steepest / (2 * len(round.graph.edges) / round.graph.agents)
            tally = x.new_zeros(len(x), 3)
        else:
            mu = torch.as_tensor(mu_z, dtype=x.dtype, device=x.device)
        near_exact = local.name in ("exact", "newton") or int(round.work.min()) >= 2 * min(round.problem.dim, 10)
        if mu_z == "auto":
            opinion = Opinion()  # mu_z will move
        else:
            step_y = float(mu) if mu_y is None else mu_y
            opinion = examine(round.problem, round.graph, float(mu), step_y, relax, round.may_sleep, near_exact)
        if opinion.refusal and not unsafe:
            raise CadenError(f"{opinion.refusal} (`unsafe=true` runs it all the same.)")
        if opinion.warning:
            warnings.warn(opinion.warning, stacklevel=2)
        if dual == "paper" and round.may_sleep:
            warnings.warn('`dual="paper"` with sleeping agents does not reach a stationary point.', stacklevel=2)
        heard = round.broadcast(x)
        first, second = heard.ends()
        edges_form = dual == "exact" and round.may_sleep
        s = (first + second) / 2 if edges_form else None
        y = torch.zeros_like(first) if edges_form else None
        memory = local.init(round.problem, x, curvature)
        return State(x, torch.zeros_like(x), heard.laplacian() / 2, memory, mu, s, y, tally)

    def step(state: State, round: Round) -> tuple[State, Info]:
        factor = torch.tensor(growth, dtype=state.mu_z.dtype, device=state.mu_z.device) ** round.index
        mu = state.mu_z * factor
        step_y = mu if mu_y is None else mu_y * factor
        objective = Objective(round.problem, state.phi + mu * state.gap, mu * round.degree)
        solved = local.solve(objective, state.x, round.work, state.memory)
        heard = round.broadcast(solved.x)
        s, y = state.s, state.y
        if s is not None and y is not None:
            phi, gap, s, y = _edges(s, y, heard, round, relax, step_y)
        else:
            phi, gap = _agents(state, solved.x, heard, round, relax, step_y)
        new = State(solved.x, phi, gap, solved.memory, state.mu_z, s, y, state.tally)
        if round.index < max(CHECKS):
            new = _balance(state, new, heard, round, mu)
        return new, solved.info

    return Method(init, step, "caden")


def _balance(old: State, new: State, heard: Heard, round: Round, mu: Tensor) -> State:
    """Tally the residuals; in a round of CHECKS, move mu_z so that neither of them lags behind.

    Agent i's part of the primal residual is sum_j |x_i - x_j|^2 / 4, of the dual one mu_z |change of sum_j z_ij|: how
    far the neighbours are, and what the last move of the anchors did to the subproblem. The first is in units of x, the
    second in units of gradients; between them stands the curvature that the agents met, |change of grad f_i| / |change
    of x_i| over a round. phi is not scaled by mu_z, so nothing else changes with it.
    """
    if old.tally is None:
        return new
    moved, bent = new.x - old.x, new.memory.gradient - old.memory.gradient
    anchors = round.degree * moved - (new.gap - old.gap)
    squares = [heard.disagreement() / 4] + [
        torch.linalg.vector_norm(v, dim=1) ** 2 for v in (mu * anchors, moved, bent)
    ]
    rounding = (1e3 * torch.finfo(moved.dtype).eps * torch.linalg.vector_norm(new.x, dim=1)) ** 2
    curvature = torch.where(squares[2] > rounding, squares[3] / squares[2], 0)  # of a move that is more than noise
    tally = old.tally + torch.stack([squares[0], squares[1], 0 * curvature], dim=1)
    tally[:, 2] = torch.maximum(tally[:, 2], curvature)
    if round.index + 1 not in CHECKS:
        return new._replace(tally=tally)
    primal, dual, curved = (round.maximum(column) for column in tally.unbind(1))
    ratio = float((curved * primal / dual).sqrt()) / _wanted(round.graph)
    factor = 1.0
    if 0 < ratio < BAND[0] or BAND[1] < ratio < float("inf"):
        factor = min(max(ratio**0.5, 1 / LARGEST_CHANGE), LARGEST_CHANGE)
    return new._replace(mu_z=new.mu_z * factor, tally=tally * 0)


def _wanted(graph: Graph) -> float:
    """The ratio of residuals to aim for: measured best ones follow 3 (lambda_min / mean degree)^(1/3)."""
    if graph.agents > 1500:  # the spectrum would take longer than it saves
        return 1.5
    return float(3 * (graph.spectrum[0] / graph.degrees.mean()) ** (1 / 3))


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
