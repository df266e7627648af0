"""`mu_z="auto"`: the initial value of CADEN's penalty, and how it follows the residuals.

Agent i's part of the primal residual is sum_j |x_i - x_j|^2 / 4: how far away its neighbours are. Its part of the dual
residual is mu_z |change of sum_j z_ij|: how much the last move of the anchors changed the subproblem. The first is in
units of x, the second in units of gradients. The curvature that the agents met over a round converts between them. phi
is not scaled by mu_z, so nothing else changes when mu_z does. Agents agree on the numbers by max-consensus.
Measurements: docs/parameters.md.

Where messages may be lost or late there is no max-consensus, and agents may count their own rounds. There, each message
carries `news`: how many checks of mu_z its sender knows of, the mu_z since then, and the largest residuals that it has
heard of since then. Whoever comes to a check first proposes a new mu_z. Agents take the proposal of the latest check,
of two for the same check the larger mu_z, so all end with the same. A message in terms of another mu_z is not used.
"""

from typing import Any

import torch
from torch import Tensor

from caden._tensor.rows import row_dots, row_norms
from caden.core import Edges, Heard, LocalSolver, Objective, Round
from caden.graphs import Graph

START = 0.006  # in L / (mean degree)
CHECKS = (6, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rounds after which mu_z may change
BAND = (0.5, 1.7)  # it does if curvature x |primal residual| / |dual residual|, divided by its target, is outside
LARGEST_CHANGE = 30.0
ROUNDS_TO_ADAPT = 10  # of duals to |gradient|, or, where that is known, in twice as many to the disagreement
TRIAL = 5  # local steps, to see how far an optimizer moves


def curvature_of_steps(ratio: Tensor) -> Tensor:
    """Return what to take for the curvature if all that is known is |g| / |way| of some local steps.

    With the mu_z that follows, duals that move by such a way in each round are as large as g after ROUNDS_TO_ADAPT
    rounds.
    """
    return ratio / (ROUNDS_TO_ADAPT * START)


def curvature_of_trial(local: LocalSolver, x: Tensor, round: Round, alone: bool) -> Tensor:
    """Return (k,) what to take for the curvature under mini-batches: local steps on f_i alone are tried, and forgotten.

    The duals end as minus the gradients, and their sum is zero: they have to become as large as the gradients disagree.
    So g is the disagreement of the mean gradients at x, without the noise of the batches, and at least a hundredth of
    the gradients. Agents that are `alone`, since vectors may not arrive as they were sent, take the mean gradient. The
    way of a round is as much longer as a round has more steps.
    """
    problem, zero = round.problem, torch.zeros_like(x)
    known = problem.known_curvature(x)
    if known is not None:
        return known
    tried = torch.full((len(x),), TRIAL, dtype=torch.int64, device=x.device)
    end = local.solve(Objective(problem, zero, zero[:, :1]), x, tried, local.init(problem, x, None)).x
    way = row_norms(end - x) * round.work.clamp(min=1) / TRIAL
    gradients = [problem.redraw(step).value_and_grad(x)[1] for step in range(TRIAL)]
    mean = torch.stack(gradients).mean(0)
    size = row_norms(mean)
    if alone:
        return curvature_of_steps((size / way).nan_to_num(0, 0))
    degree = round.degree.squeeze(1)
    noise = sum((row_norms(g - mean).square() for g in gradients), 0 * size) / (TRIAL * (TRIAL - 1))
    noise_around = noise - round.broadcast(noise.unsqueeze(1), keep=False).laplacian().squeeze(1) / degree
    apart = round.broadcast(mean, keep=False).disagreement() / degree - noise - noise_around
    size = torch.maximum((apart / 2).clamp(min=0).sqrt(), size / 100)
    largest, longest = (round.maximum(torch.where(rows.isfinite(), rows, 0)) for rows in (size, way))
    return curvature_of_steps(largest / longest / 2).nan_to_num(0, 0).repeat(len(x))


def smallest(values: Tensor, round: Round) -> Tensor:
    """Return the smallest positive number () of all agents; 0 if there is none."""
    return (-round.maximum(torch.where(values > 0, -values, -torch.inf))).nan_to_num(posinf=0)


def first_penalty(curvature: Tensor, graph: Graph) -> Tensor:
    """Return the initial mu_z, given the curvature () that counts for all agents, or that of each (k, 1)."""
    largest = torch.where(curvature > 0, curvature, 1)  # zero where all gradients vanish: nothing is known of L
    return START * largest / (2 * len(graph.edges) / graph.agents)


def balance(old: Any, new: Any, heard: Heard, round: Round, mu_z: Tensor) -> Any:
    """Accumulate the residuals of one round of CADEN; after the rounds in CHECKS, change mu_z to balance them."""
    moved, gradient_change = new.x - old.x, new.memory.gradient - old.memory.gradient
    anchors = round.degree * moved - (new.gap - old.gap)
    pull = torch.linalg.vector_norm(mu_z * anchors, dim=1) ** 2
    curvature = _squared_curvature(new.x, moved, gradient_change)
    tally = old.tally + torch.stack([heard.disagreement() / 4, pull, 0 * curvature], dim=1)
    tally[:, 2] = _met(old.tally[:, 2], curvature, round.may_sleep)
    if round.index + 1 not in CHECKS:
        return new._replace(tally=tally)
    primal, dual, largest = (round.maximum(column) for column in tally.unbind(1))
    factor = _factor(primal, dual, largest, round.graph)
    return new._replace(mu_z=new.mu_z * factor, tally=tally * 0)


def _met(before: Tensor, now: Tensor, may_sleep: bool) -> Tensor:
    """Return the largest curvature that an agent met since the last check; the smallest if agents may sleep.

    An agent that wakes up is pulled back by all that has changed meanwhile, along the stiffest directions. With the
    largest curvature mu_z would grow, the other directions would move less, and mu_z would grow again.
    """
    if not may_sleep:
        return torch.maximum(before, now)
    return torch.where((before > 0) & (now > 0), torch.minimum(before, now), torch.maximum(before, now))


def _squared_curvature(x: Tensor, moved: Tensor, gradient_change: Tensor) -> Tensor:
    """Return (k,) the squared curvature met on the way, 0 for moves below the rounding error.

    It is a mean of |g|/|s| and s.g/|s|^2, with s the move and g the change of the gradient, which agree along one
    eigenvector. The first alone is that of the stiffest direction, with which mu_z grows far too large on networks; the
    second is that of the longest. Three parts of the first to one of the second were best (docs/parameters.md).
    """
    way, rounding = torch.linalg.vector_norm(moved, dim=1), 1e3 * torch.finfo(moved.dtype).eps
    steepness = torch.linalg.vector_norm(gradient_change, dim=1) / way
    along = row_dots(moved, gradient_change).clamp(min=0) / way**2
    return torch.where(way > rounding * torch.linalg.vector_norm(x, dim=1), steepness**1.5 * along**0.5, 0)


def _factor(primal: Tensor, dual: Tensor, curvature: Tensor, graph: Graph) -> Tensor:
    """Return by how much to change mu_z, given the squared residuals and curvature."""
    ratio = (curvature * primal / dual).sqrt() / _target_ratio(graph)
    change = ratio.sqrt().clamp(1 / LARGEST_CHANGE, LARGEST_CHANGE)
    outside = ((ratio > 0) & (ratio < BAND[0])) | ((ratio > BAND[1]) & ratio.isfinite())
    return torch.where(outside, change, 1)


def first_news(mu_z: Tensor) -> Tensor:
    """Return (k, 5) what agents that start with mu_z (k, 1) tell: checks, mu_z, and the three numbers of a tally."""
    zero = torch.zeros_like(mu_z)
    return torch.cat([zero, mu_z, zero, zero, zero], dim=1)


def adopt(own: Tensor, received: Tensor, arrived: Tensor, edges: Edges) -> tuple[Tensor, Tensor]:
    """Merge own news (k, 5) with those received (2e, 5); return the new ones, and which messages can be used.

    A message whose news no honest agent could send is dropped.
    """
    owner, number = edges.owner(), received[:, :1]
    possible = (number == number.floor()) & (number <= len(CHECKS)) & (received[:, 1:2] > 0)
    arrived = arrived & possible & ((received >= 0) & received.isfinite()).all(1, keepdim=True)

    def latest(value: Tensor, counts: Tensor, own_value: Tensor, own_counts: Tensor) -> Tensor:
        others = edges.arc_max(torch.where(counts, value, -torch.inf))
        return torch.maximum(others, torch.where(own_counts, own_value, -torch.inf))

    everyone = torch.ones_like(own[:, :1], dtype=torch.bool)
    checks = latest(received[:, :1], arrived, own[:, :1], everyone)
    current, own_current = arrived & (received[:, :1] == checks[owner]), own[:, :1] == checks
    rest = latest(received[:, 1:], current, own[:, 1:], own_current)
    return torch.cat([checks, rest], dim=1), arrived & (received[:, 1:2] == rest[owner, :1])


def balance_in_arcs(old: Any, new: Any, round: Round, relax: float) -> Any:
    """Accumulate the residuals of one round of CADEN in arcs; at a check, change mu_z, or propose to.

    A message moves its arc by relax 2 mu_z (x_j - s_e). An agent does not know s_e, but if that was half-way between
    the two ends, this less its own move is (x_j - x_i)/2, the primal residual. It takes the anchors to move as it does.
    """
    moved, gradient_change, arcs = new.x - old.x, new.memory.gradient - old.memory.gradient, new.z - old.z
    weight, owner = 2 * relax * new.mu_z, round.edges.owner()
    away = arcs / (weight[owner] if weight.ndim else weight) - moved[owner]
    away = torch.where((arcs != 0).any(1, keepdim=True), away, 0)  # where a message came
    apart = round.edges.arc_sum(torch.linalg.vector_norm(away, dim=1, keepdim=True) ** 2)
    changed = torch.linalg.vector_norm(weight * round.degree * moved, dim=1, keepdim=True) ** 2
    curvature = _squared_curvature(new.x, moved, gradient_change).unsqueeze(1)
    tally = old.tally + torch.cat([apart, changed, 0 * curvature], dim=1)
    tally[:, 2:] = torch.maximum(old.tally[:, 2:], curvature)
    if new.news is not None:
        return _propose(old, new._replace(tally=tally), round)
    if round.index + 1 not in CHECKS:
        return new._replace(tally=tally)
    primal, dual, largest = (round.maximum(column) for column in tally.unbind(1))
    factor = _factor(primal, dual, largest, round.graph)
    return _with_penalty(new, new.mu_z * factor, round)._replace(tally=0 * tally)


def _with_penalty(state: Any, mu_z: Tensor, round: Round) -> Any:
    """Return the same point of CADEN in arcs in terms of another mu_z."""
    owner = round.edges.owner()
    change = mu_z - state.mu_z
    return state._replace(z=state.z + (change[owner] if change.ndim else change) * state.x[owner], mu_z=mu_z)


def _propose(old: Any, new: Any, round: Round) -> Any:
    """Spread the residuals with the next messages; at a check, propose a mu_z that balances them."""
    same = (new.news[:, :2] == old.news[:, :2]).all(1, keepdim=True)  # else z changed with mu_z, and the tally begins
    tally = torch.where(same, new.tally, 0)
    news = torch.cat([new.news[:, :2], torch.maximum(new.news[:, 2:], tally)], dim=1)
    new = new._replace(tally=tally, news=news)
    if round.index + 1 not in CHECKS:
        return new
    number = 1.0 + CHECKS.index(round.index + 1)
    proposes = round.active & (news[:, :1] < number)
    primal, dual, largest = news[:, 2:].unbind(1)
    mu_z = torch.where(proposes, new.mu_z * _factor(primal, dual, largest, round.graph).unsqueeze(1), new.mu_z)
    fresh = torch.cat([torch.full_like(mu_z, number), mu_z, 0 * news[:, 2:]], dim=1)
    return _with_penalty(new, mu_z, round)._replace(
        news=torch.where(proposes, fresh, news), tally=torch.where(proposes, 0, tally)
    )


def _target_ratio(graph: Graph) -> float:
    """Return the ratio of residuals to aim for: the best measured ones follow 3 (lambda_min / mean degree)^(1/3)."""
    if graph.agents > 1500:  # the spectrum would take longer than it saves
        return 1.5
    return float(3 * (graph.spectrum[0] / graph.degrees.mean()) ** (1 / 3))
