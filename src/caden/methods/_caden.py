"""CADEN: Yi, Zeng and Freris, "Curvature accelerated decentralized non-convex optimization for high-dimensional machine
learning problems", arXiv:2504.04073, 2025.

Algorithm 1. Each awake agent i:

    x_i  <- a few L-BFGS steps on  f_i(v) + phi_i.v + mu_z/2 sum_j |v - (x_i + x_j)/2|^2
    broadcasts x_i
    phi_i <- phi_i + mu_y/2 sum_j (x_i - x_j)

Followed to the letter (``dual="paper"``), this is correct only while everyone is awake. If only one end of an edge is
awake, only that end's phi moves. Then sum phi leaves zero, and the limit solves sum grad f_i = -sum phi: it is not a
stationary point. The default (``dual="exact"``) keeps the edge variables z_ij = s_e and y_ij = +-y_e of the paper's eq.
(5), known at both ends, and moves them by the half step of whichever end is awake:

    u_i = x_i - s_e if i was awake, else 0;  u_j likewise
    s_e <- s_e + relax (u_i + u_j);   y_e <- y_e + relax mu_y (u_i - u_j)

This still takes one broadcast per round, and sum phi = 0 by construction. With relax = 1/2 and everyone awake it is
Algorithm 1.

Sleeping agents: with dual="exact" edges move by the half step of whichever end is awake; exact.

If no agent can ever sleep, agent variables alone give the same iterates, and these are used. `relax` above 1/2
over-relaxes. With mu_y = mu_z the method is the relaxed ADMM of Bastianello, Carli, Schenato and Todescato,
"Asynchronous distributed optimization over lossy networks via relaxed ADMM", IEEE TAC 66(6), 2021.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import solvers
from caden.core import Heard, Info, LocalSolver, Method, Objective, Round, Verdict
from caden.curvature import smoothness
from caden.errors import CadenError, require_choice, require_number, require_positive
from caden.methods._auto import CHECKS, balance, first_penalty
from caden.methods._registry import BROADCAST, PENALTY, RELAX, register
from caden.theory import examine


class State(NamedTuple):
    """x and phi as in the paper; `gap` is sum_j (x_i - z_ij), the pull of the anchors z_ij."""

    x: Tensor  # (k, d)
    phi: Tensor  # (k, d)
    gap: Tensor  # (k, d)
    memory: Any  # the local solver's
    mu_z: Tensor  # ()
    s: Tensor | None  # (e, d) the paper's z_ij, if agents may sleep
    y: Tensor | None  # (e, d) the paper's y_ij, + at the first end and - at the second
    tally: Tensor | None  # (k, 3) residuals and curvature since the last check of mu_z, if it is "auto"


@register({"mu_z": 0.4, "solver": "exact"}, BROADCAST, {"mu_z": PENALTY, "relax": RELAX}, theory=True)
def caden(
    mu_z: float | str = "auto",
    mu_y: float | None = None,
    dual: str = "exact",
    relax: float = 0.5,
    growth: float = 1.0,
    unsafe: bool = False,
    solver: LocalSolver | str | dict[str, Any] = "lbfgs",
) -> Method:
    """CADEN with its three tuning knobs; the defaults are meant to work without tuning.

    Args:
        mu_z: weight of the pull towards the neighbours. "auto" starts at 0.006 L / (mean degree), where L is the
            largest curvature found by the warm-up (without one, by a few probing gradients), and balances the residuals
            in some of the first 256 rounds. Agents agree on the numbers by max-consensus, counted from round 0 on.
        mu_y: dual step, `mu_z` if None. Far above it the method diverges, although Theorem 1 of the paper asks for it.
        dual: "exact" (correct with sleeping agents) or "paper" (Algorithm 1 to the letter).
        relax: 0.5 in the paper; values up to about 0.9 are usually faster and cost nothing.
        growth: factor by which mu_z and mu_y grow in every round.
        unsafe: run even with parameters that must diverge (see `theory.examine`).
        solver: local solver, as an object, a name or a table.

    Reference: Yi, Zeng and Freris, arXiv:2504.04073, 2025.

    >>> import caden
    >>> problem = caden.problems.quadratic(agents=5, dim=3, seed=0)
    >>> result = caden.simulate(caden.methods.caden(mu_z=1.0), problem, caden.graphs.ring(5), rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 1e-8)
    True
    """
    _require_valid(mu_z, mu_y, dual, relax, growth)
    local = solvers.from_spec(solver)

    def penalties(mu: Tensor, index: int) -> tuple[Tensor, Tensor | float]:
        """Return mu_z and mu_y of a round."""
        factor = torch.tensor(growth, dtype=mu.dtype, device=mu.device) ** index
        return mu * factor, mu * factor if mu_y is None else mu_y * factor

    def init(x: Tensor, round: Round) -> State:
        curvature, tally = round.curvature, None
        if isinstance(mu_z, str):
            curvature = smoothness(round.problem, x) if curvature is None else curvature
            mu, tally = first_penalty(round.maximum(curvature).to(x.dtype), round.graph), x.new_zeros(len(x), 3)
        else:
            mu = torch.as_tensor(mu_z, dtype=x.dtype, device=x.device)
        heard = round.broadcast(x)
        s = y = None
        if dual == "exact" and round.may_sleep:
            first, second = heard.ends()
            s, y = (first + second) / 2, torch.zeros_like(first)
        memory = local.init(round.problem, x, curvature)
        return State(x, torch.zeros_like(x), heard.laplacian() / 2, memory, mu, s, y, tally)

    def step(state: State, round: Round) -> tuple[State, Info]:
        mu, step_y = penalties(state.mu_z, round.index)
        objective = Objective(round.problem, state.phi + mu * state.gap, mu * round.degree)
        solved = local.solve(objective, state.x, round.work, state.memory)
        heard = round.broadcast(solved.x)
        s, y = state.s, state.y
        if s is not None and y is not None:
            phi, gap, s, y = _edge_update(s, y, heard, round, relax, step_y)
        else:
            phi, gap = _agent_update(state, solved.x, heard, round, relax, step_y)
        new = State(solved.x, phi, gap, solved.memory, state.mu_z, s, y, state.tally)
        return new, solved.info if state.tally is None else solved.info._replace(heard=heard)

    def adapt(old: State, new: State, round: Round, info: Info) -> State:
        if old.tally is None or info.heard is None or round.index >= max(CHECKS):
            return new
        adapted: State = balance(old, new, info.heard, round, penalties(old.mu_z, round.index)[0])
        return adapted

    def examine_run(round: Round) -> Verdict:
        near_exact = local.exact or int(round.work.min()) >= 2 * min(round.problem.dim, 10)
        return _verdict(round, mu_z, mu_y, dual, relax, near_exact, unsafe)

    return Method(init, step, "caden", examine_run, adapt, _advice(mu_y, relax))


@register({"mu_z": 0.4}, BROADCAST, {"mu_z": PENALTY, "relax": RELAX}, theory=True)
def caden_gd(mu_z: float | str = "auto", step_size: float | None = None, **options: Any) -> Method:
    """CADEN with gradient descent as the local solver.

    Args:
        mu_z: as for `caden`.
        step_size: fixed step of the gradient descent; by default 1 / (rho_i + L_i).
        options: those of `caden`.

    Reference: Yi, Zeng and Freris, arXiv:2504.04073, 2025.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.caden_gd(mu_z=0.4), problem, graph, rounds=400)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    return caden(mu_z, solver=solvers.gd(step_size), **options)._replace(name="caden_gd")


def _advice(mu_y: float | None, relax: float) -> str:
    """Return what to change if the method diverges."""
    steps = ["raise `mu_z`", *(["lower `mu_y` to at most `mu_z`"] if mu_y is not None else [])]
    return ", ".join([*steps, *(["lower `relax`"] if relax > 0.5 else [])])


def _require_valid(mu_z: float | str, mu_y: float | None, dual: str, relax: float, growth: float) -> None:
    require_choice("dual", dual, ("exact", "paper"))
    for name, value in (("mu_z", mu_z), ("mu_y", mu_y), ("growth", growth)):
        if value is not None and not (name == "mu_z" and value == "auto"):
            require_positive(name, value)
    if not 0 < require_number("relax", relax) < 1:
        raise CadenError(f"`relax` must lie in (0, 1), got {relax}.")
    if dual == "paper" and relax != 0.5:
        raise CadenError(f'`relax` must be 0.5 with `dual="paper"`, got {relax}; use `dual="exact"` for other values.')


def _verdict(
    round: Round, mu_z: float | str, mu_y: float | None, dual: str, relax: float, near_exact: bool, unsafe: bool
) -> Verdict:
    """Check the parameters against theory. mu_z = "auto" is not checked, since it will change."""
    verdict = Verdict()
    if not isinstance(mu_z, str):
        step_y = mu_z if mu_y is None else mu_y
        verdict = examine(round.problem, round.graph, mu_z, step_y, relax, round.may_sleep, near_exact)
    if verdict.refusal is not None:
        return Verdict() if unsafe else Verdict(f"{verdict.refusal} (`unsafe=true` runs it anyway.)")
    if dual == "paper" and round.may_sleep:
        return Verdict(warning='`dual="paper"` with sleeping agents does not reach a stationary point.')
    return verdict


def _agent_update(
    state: State, x: Tensor, heard: Heard, round: Round, relax: float, mu_y: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Update the dual and the anchors in agent variables: Algorithm 1, also over-relaxed."""
    laplacian = heard.laplacian()
    phi = state.phi + relax * mu_y * laplacian
    gap = relax * laplacian
    if relax != 0.5:
        gap += (1 - 2 * relax) * (state.gap + round.degree * (x - state.x))
    return torch.where(round.active, phi, state.phi), gap


def _edge_update(
    s: Tensor, y: Tensor, heard: Heard, round: Round, relax: float, mu_y: Tensor | float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Update the dual and the anchors on edges by the half step of whichever end is awake."""
    first, second = heard.ends()
    u = torch.where(round.edges.awake_first, first - s, 0)
    w = torch.where(round.edges.awake_second, second - s, 0)
    s = s + relax * (u + w)
    y = y + relax * mu_y * (u - w)
    gap = round.edges.arc_sum(torch.cat([first - s, second - s]))
    return round.edges.signed_sum(y), gap, s, y
