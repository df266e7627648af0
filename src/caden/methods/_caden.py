"""CADEN: Yi, Zeng and Freris, "Curvature accelerated decentralized non-convex optimization for high-dimensional machine
learning problems", arXiv:2504.04073, 2025.

Algorithm 1. Each awake agent i:

    x_i  <- a few L-BFGS steps on  f_i(v) + phi_i.v + mu_z/2 sum_j |v - (x_i + x_j)/2|^2
    broadcasts x_i
    phi_i <- phi_i + mu_y/2 sum_j (x_i - x_j)

Followed to the letter (``dual="paper"``), this is correct only while everyone is awake. If only one end of an edge is
awake, only that end's phi moves. Then sum phi leaves zero, and the limit solves sum grad f_i = -sum phi: it is not a
stationary point. The default (``dual="exact"``) is the same iteration in variables that stay consistent. Which ones
depends on what the network guarantees; u_i = x_i - s_e, and relax = 1/2 is the paper:

    agents  everyone awake, everything arrives:  phi_i <- phi_i + relax mu_y sum_j (x_i - x_j)
                                                 S_i <- relax sum_j (x_i + x_j) + (1 - 2 relax) S_i
    edges   agents sleep, links change:          s_e <- s_e + relax (u_i + u_j),  y_e <- y_e + relax mu_y (u_i - u_j)
                                                 with u_i = 0 if i slept; both ends know s_e and y_e of eq. (5)
    arcs    messages are lost, late or           i sends q_ij = 2 x_i - z_ij/mu_z to j (mu_y = mu_z)
            incomplete, agents run free:         z_ji <- (1 - relax) z_ji + relax mu_z q_ij where it arrived

Each awake agent minimises f_i(v) + mu_z d_i/2 |v|^2 - (mu_z S_i - phi_i).v, where S_i = sum_j (x_i + x_j)/2 at first.
While everyone is awake and everything arrives, the three are equal:

    1. Sum the edge form over the edges of i, with phi_i = sum_e +-y_e and S_i = sum_e s_e: the agent form.
    2. Put z_ij = mu_z s_e - y_e and z_ji = mu_z s_e + y_e, so that mu_z q_ij = z_ji + 2 mu_z u_i: the arc form is
       z_ji + relax 2 mu_z u_i = mu_z (s_e + relax (u_i + u_j)) + (y_e + relax mu_z (u_i - u_j)), the edge form.
    3. sum_j z_ij = mu_z S_i - phi_i, so the subproblems are equal, too.

All forms take one communication per directed edge and round; in arcs it is another vector for each neighbour. In agents
and edges sum phi = 0 by construction. In arcs an agent does not know z_ji, hence neither s_e nor y_e: `phi` is then
mu_z d_i x_i - sum_j z_ij, the pull of all arcs, whose sum vanishes in the limit only.

Sleeping agents: with dual="exact" edges move by the half step of whichever end is awake, arcs by the messages that
arrive; exact.

Compressed or triggered messages also ask for arcs: there a message that is not quite right moves one arc for one round,
while agents and edges add up its error in phi, and diverge. q_ij is in units of x, so that a copy of it remains valid
when mu_z changes, and its first value follows from x^0 at both ends.

Arcs are the relaxed ADMM of Bastianello, Carli, Schenato and Todescato, "Asynchronous distributed optimization over
lossy networks via relaxed ADMM", IEEE TAC 66(6), 2021, exact for convex f with random sleep and loss. No theory covers
delay; docs/methods.md has what was measured. A separate mu_y has no arc form: z_ji would have to move by
(mu_z + mu_y) u_i + (mu_z - mu_y) u_j, and j cannot tell s_e, hence u_j, from a single vector.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import solvers
from caden.core import Heard, Info, LocalSolver, Method, Round, Verdict
from caden.curvature import smoothness
from caden.errors import CadenError, require_choice, require_number, require_positive
from caden.methods._auto import (
    CHECKS,
    adopt,
    balance,
    balance_in_arcs,
    curvature_of_trial,
    first_news,
    first_penalty,
    smallest,
)
from caden.methods._registry import EVERYTHING, PENALTY, RELAX, register
from caden.theory import examine

_SLICE = 1 << 22  # numbers of a temporary on all edges; wider rows are updated a few columns at a time


class State(NamedTuple):
    """x and phi as in the paper; `gap` is sum_j (x_i - z_ij), the pull of the anchors z_ij, part of phi in arcs."""

    x: Tensor  # (k, d)
    phi: Tensor  # (k, d)
    gap: Tensor | None  # (k, d)
    memory: Any  # the local solver's
    mu_z: Tensor  # (), or (k, 1) while agents adapt it by gossip
    s: Tensor | None = None  # (e, d) the paper's z_ij, in edge form
    y: Tensor | None = None  # (e, d) the paper's y_ij, + at the first end and - at the second
    z: Tensor | None = None  # (2e, d) in arc form
    tally: Tensor | None = None  # (k, 3) residuals and curvature since the last check of mu_z, if it is "auto"
    news: Tensor | None = None  # (k, 5) what agents tell each other about mu_z, in arc form


@register({"mu_z": 0.4, "solver": "exact"}, EVERYTHING, {"mu_z": PENALTY, "relax": RELAX}, theory=True, free=True)
def caden(
    mu_z: float | str = "auto",
    mu_y: float | None = None,
    dual: str = "exact",
    relax: float = 0.5,
    growth: float = 1.0,
    unsafe: bool = False,
    solver: LocalSolver | str | dict[str, Any] = "lbfgs",
    start: str | None = None,
) -> Method:
    """CADEN with its three tuning knobs; the defaults are meant to work without tuning.

    Args:
        mu_z: weight of the pull towards the neighbours. "auto" starts at 0.006 L / (mean degree), where L is the
            largest curvature found by the warm-up (without one, by a few probing gradients), and balances the residuals
            in some of the first 256 rounds. Agents agree on the numbers by max-consensus, counted from round 0 on, or,
            where messages may be lost or late, by numbers that travel with their messages. For optimizers on
            mini-batches it follows from how far five steps lead and how much the agents' mean gradients disagree
            (their size, where messages may be lost, late, compressed or triggered), and stays at this value, since
            the noise of later batches looks like disagreement.
        mu_y: dual step, `mu_z` if None. Far above it the method diverges, although Theorem 1 of the paper asks for it.
        dual: "exact" (correct over any network) or "paper" (Algorithm 1 to the letter).
        relax: 0.5 in the paper; values up to about 0.9 are usually faster and cost nothing.
        growth: factor by which mu_z and mu_y grow in every round.
        unsafe: run even with parameters that must diverge (see `theory.examine`).
        solver: local solver, as an object, a name or a table.
        start: where local steps begin: "own" at x_i, "anchor" at the mean of the anchors z_ij. By default the anchor
            for optimizers on mini-batches, else x_i. In arcs the anchors are unknown, so it is always x_i there.

    Reference: Yi, Zeng and Freris, arXiv:2504.04073, 2025.

    >>> import caden
    >>> problem = caden.problems.quadratic(agents=5, dim=3, seed=0)
    >>> result = caden.simulate(caden.methods.caden(mu_z=1.0), problem, caden.graphs.ring(5), rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 1e-8)
    True
    """
    _require_valid(mu_z, mu_y, dual, relax, growth)
    local = solvers.from_spec(solver)
    begins_at_anchor = solvers.starting_point(start, local)

    def init(x: Tensor, round: Round) -> State:
        if dual == "exact" and _in_arcs(round):
            _require_arc_form(mu_z, mu_y, growth, start)
        heard = round.broadcast(x)  # the first exchange, as in every round; the trial of `_first_mu` is the second
        mu, curvature = _first_mu(mu_z, local, x, round, gossip=dual == "exact" and round.lossy)
        tally = x.new_zeros(len(x), 3) if isinstance(mu_z, str) else None
        memory = local.init(round.problem, x, curvature)
        state = State(x, torch.zeros_like(x), heard.laplacian() / 2, memory, mu, tally=tally)
        return state if dual == "paper" else _in_form(state, heard, round)

    def step(state: State, round: Round) -> tuple[State, Info]:
        mu, step_y = _penalties(state.mu_z, mu_y, growth, round.index)
        elsewhere = state.z is None and begins_at_anchor(round)
        begin, slope = _anchor(state, round) if elsewhere else (state.x, _pull(state, mu, round))
        objective = round.objective(slope, mu * round.degree, (1 - relax) / 2, elsewhere)
        solved = local.solve(objective, begin, round.work, state.memory)
        state = state._replace(memory=solved.memory)
        if state.z is not None:
            return _arc_update(state, state.z, solved.x, round, relax), solved.info
        heard = round.broadcast(solved.x)
        if state.s is not None and state.y is not None:
            new = _edge_update(state, state.s, state.y, solved.x, heard, round, relax, step_y)
        else:
            new = _agent_update(state, solved.x, heard, round, relax, step_y)
        return new, solved.info if state.tally is None else solved.info._replace(heard=heard)

    def adapt(old: State, new: State, round: Round, info: Info) -> State:
        if old.tally is None or round.index >= max(CHECKS) or round.problem.stochastic:
            return new
        adapted: State = new
        if old.z is not None:
            adapted = balance_in_arcs(old, new, round, relax)
        elif info.heard is not None:
            adapted = balance(old, new, info.heard, round, _penalties(old.mu_z, mu_y, growth, round.index)[0])
        return adapted

    def examine_run(round: Round) -> Verdict:
        many = round.accuracy is None and int(round.work.min()) >= 2 * min(round.problem.dim, 10)
        near_exact = local.exact or many
        verdict = _verdict(round, mu_z, mu_y, dual, relax, near_exact, unsafe)
        return _warn_of_overshoot(relax, round) if verdict == Verdict() and local.name == "lbfgs" else verdict

    return Method(init, step, "caden", examine_run, adapt, _advice(mu_y, relax))


@register({"mu_z": 0.4}, EVERYTHING, {"mu_z": PENALTY, "relax": RELAX}, theory=True, free=True)
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


def _in_form(state: State, heard: Heard, round: Round) -> State:
    """Return the first state with the variables of the form that the network asks for."""
    if not (round.may_sleep or _in_arcs(round)):
        return state
    first, second = heard.ends()
    if not _in_arcs(round):
        s = (first + second) / 2
        return state._replace(s=s, y=torch.zeros_like(s))
    z, weight = first.new_empty(2 * len(first), first.shape[1]), _of_arcs(state.mu_z, round)
    for columns in _column_slices(state.x, round):
        s = (first[:, columns] + second[:, columns]) / 2
        z[:, columns] = torch.cat([s, s])
    del first, second, s
    if round.abridged:  # both ends get the first value of a copy
        round.exchange(2 * state.x[round.edges.owner()] - z)
    z *= weight
    news = None if state.tally is None or not round.lossy else first_news(state.mu_z)
    return state._replace(phi=_arc_pull(state.x, z, state.mu_z, round), gap=None, z=z, news=news)


def _penalties(mu_z: Tensor, mu_y: float | None, growth: float, index: int) -> tuple[Tensor, Tensor | float]:
    """Return mu_z and mu_y of a round."""
    if growth == 1:
        return mu_z, mu_z if mu_y is None else torch.full_like(mu_z, mu_y)
    factor = torch.tensor(growth, dtype=mu_z.dtype, device=mu_z.device) ** index
    return mu_z * factor, mu_z * factor if mu_y is None else mu_y * factor


def _in_arcs(round: Round) -> bool:
    """Return whether the network asks for the arc form."""
    return round.lossy or bool(round.abridged)


def _first_mu(
    mu_z: float | str, local: LocalSolver, x: Tensor, round: Round, gossip: bool
) -> tuple[Tensor, Tensor | None]:
    """Return mu_z at the start, one per agent if it will be agreed on by gossip, and the curvature if it is known."""
    if not isinstance(mu_z, str):
        return torch.as_tensor(mu_z, dtype=x.dtype, device=x.device), round.curvature
    curvature, tries = round.curvature, local.fresh and round.problem.stochastic
    if tries or curvature is None:
        curvature = curvature_of_trial(local, x, round, _in_arcs(round)) if tries else smoothness(round.problem, x)
    if gossip:
        return first_penalty(curvature.unsqueeze(1).to(x.dtype), round.graph), curvature
    # Agents with few samples have large gradients, whatever the curvature: alone, they do not count in a trial.
    common = smallest(curvature, round) if tries else round.maximum(curvature)
    return first_penalty(common.to(x.dtype), round.graph), curvature


def _require_arc_form(mu_z: float | str, mu_y: float | None, growth: float, start: str | None) -> None:
    where = "where messages may be lost, late, compressed or triggered"
    if mu_y is not None and mu_y != mu_z:
        raise CadenError(f"`mu_y` must be `mu_z` {where}, got {mu_y}: leave it out.")
    if growth != 1:
        raise CadenError(f"`growth` must be 1 {where}, got {growth}: leave it out.")
    if start == "anchor":
        raise CadenError(f'`start` cannot be "anchor" {where}, since an agent does not know its anchors there.')


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
    if isinstance(mu_z, str) and round.abridged == "triggered":
        return Verdict(warning='`mu_z = "auto"` grows too large with triggered messages: set a number.')
    if dual == "paper" and (round.may_sleep or round.lossy):
        return Verdict(warning='`dual="paper"` does not reach a stationary point if agents sleep or messages are lost.')
    if dual == "paper" and round.abridged:
        return Verdict(
            warning='`dual="paper"` adds up the errors of short messages and may diverge: use `dual="exact"`.'
        )
    return verdict


def _warn_of_overshoot(relax: float, round: Round) -> Verdict:
    """Warn of solves that may lie beyond the minimiser by more than (1 - relax)/(1 + relax): docs/theory.md."""
    if relax <= 0.5 or round.accuracy is not None or int(round.work.min()) > 1:
        return Verdict()
    return Verdict(
        warning=f"`relax = {relax:g}` with single local steps of L-BFGS may diverge, since they may overshoot: use "
        '`local_steps = "auto"`, more steps, or `relax = 0.5`.'
    )


def _pull(state: State, mu_z: Tensor, round: Round) -> Tensor:
    """Return the pull of the duals and anchors on each agent's x, from the neighbours that count in this round."""
    if state.z is not None:
        return _arc_pull(state.x, state.z, mu_z, round)
    assert state.gap is not None
    return state.phi + mu_z * state.gap


def _anchor(state: State, round: Round) -> tuple[Tensor, Tensor]:
    """Return the mean of each working agent's anchors, and the pull there: that of the duals alone."""
    assert state.gap is not None
    return torch.where(round.work.unsqueeze(1) > 0, state.x - state.gap / round.degree.clamp(min=1), state.x), state.phi


def _agent_update(state: State, x: Tensor, heard: Heard, round: Round, relax: float, mu_y: Tensor | float) -> State:
    """Update the dual and the anchors in agent variables: Algorithm 1, also over-relaxed."""
    assert state.gap is not None
    laplacian = heard.laplacian()
    phi = state.phi + relax * mu_y * laplacian
    gap = relax * laplacian
    if relax != 0.5:
        gap += (1 - 2 * relax) * (state.gap + round.degree * (x - state.x))
    return state._replace(x=x, phi=torch.where(round.active, phi, state.phi), gap=gap)


def _edge_update(
    state: State, s: Tensor, y: Tensor, x: Tensor, heard: Heard, round: Round, relax: float, mu_y: Tensor | float
) -> State:
    """Update the dual and the anchors on edges by the half step of whichever end is awake; overwrite large s and y."""
    phi, gap, slices = torch.empty_like(x), torch.empty_like(x), _column_slices(x, round)
    s, y = (s, y) if len(slices) > 1 else (s.clone(), y.clone())
    for columns in slices:
        (first, second), s_, y_ = heard.ends(columns), s[:, columns], y[:, columns]
        u = torch.where(round.edges.awake_first, first - s_, 0)
        w = torch.where(round.edges.awake_second, second - s_, 0)
        s_ += relax * (u + w)
        y_ += relax * mu_y * (u - w)
        gap[:, columns] = round.edges.arc_sum(torch.cat([first - s_, second - s_]))
        phi[:, columns] = round.edges.signed_sum(y_)
    return state._replace(x=x, phi=phi, gap=gap, s=s, y=y)


def _arc_update(state: State, z: Tensor, x: Tensor, round: Round, relax: float) -> State:
    """Send each neighbour its message, and move the arcs whose messages arrived; overwrite a large z."""
    owner, d, mu_z, news, slices = round.edges.owner(), x.shape[1], state.mu_z, state.news, _column_slices(x, round)
    messages = torch.empty_like(z)
    for columns in slices:
        messages[:, columns] = 2 * x[:, columns][owner] - z[:, columns] / _of_arcs(mu_z, round)
    if news is None:
        received, usable = round.exchange(messages)
    else:
        received, arrived = round.exchange(torch.cat([messages, news[owner]], dim=1))
        news, usable = adopt(news, received[:, d:], arrived, round.edges)
        mu_z = news[:, 1:2].clone()
    del messages
    in_place = news is None and len(slices) > 1  # `adapt` needs the old z
    new, phi, weight = z if in_place else torch.empty_like(z), torch.empty_like(x), _of_arcs(mu_z, round)
    for columns in slices:
        own, z_ = x[:, columns][owner], z[:, columns]
        if news is not None:
            z_ = z_ + _of_arcs(mu_z - state.mu_z, round) * own  # the same point in terms of the new mu_z
        z_ = torch.where(usable, (1 - relax) * z_ + relax * weight * received[:, columns], z_)
        new[:, columns], phi[:, columns] = z_, round.edges.arc_sum(weight * own - z_)
    return state._replace(x=x, phi=phi, z=new, mu_z=mu_z, news=news)


def _column_slices(x: Tensor, round: Round) -> list[slice]:
    """Return parts of the columns of x (k, d) whose rows on all edges are a moderate number of numbers."""
    width, d = max(1, _SLICE // max(1, round.edges.count)), x.shape[1]
    return [slice(a, min(a + width, d)) for a in range(0, d, width)]


def _arc_pull(x: Tensor, z: Tensor, mu_z: Tensor, round: Round) -> Tensor:
    """Return mu_z d_i x_i - sum_j z_ij, written as a sum of differences."""
    owner, weight, pull = round.edges.owner(), _of_arcs(mu_z, round), torch.empty_like(x)
    for columns in _column_slices(x, round):
        pull[:, columns] = round.edges.arc_sum(weight * x[:, columns][owner] - z[:, columns])
    return pull


def _of_arcs(mu_z: Tensor, round: Round) -> Tensor:
    """Return the mu_z of each arc's owner."""
    return mu_z[round.edges.owner()] if mu_z.ndim else mu_z
