"""`mu_z="auto"`: the initial value of CADEN's penalty, and how it follows the residuals.

Agent i's part of the primal residual is sum_j |x_i - x_j|^2 / 4: how far away its neighbours are. Its part of the dual
residual is mu_z |change of sum_j z_ij|: how much the last move of the anchors changed the subproblem. The first is in
units of x, the second in units of gradients. The curvature that the agents met, |change of grad f_i| / |change of x_i|
over a round, converts between them. phi is not scaled by mu_z, so nothing else changes when mu_z does. Agents agree on
the numbers by max-consensus. Measurements: docs/parameters.md.
"""

from typing import Any

import torch
from torch import Tensor

from caden.core import Heard, Round
from caden.graphs import Graph

START = 0.006  # in L / (mean degree)
CHECKS = (6, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rounds after which mu_z may change
BAND = (0.5, 1.7)  # it does if curvature x |primal residual| / |dual residual|, divided by its target, is outside
LARGEST_CHANGE = 30.0


def first_penalty(curvature: Tensor, graph: Graph) -> Tensor:
    """Return the initial mu_z, given the largest curvature () over all agents."""
    largest = torch.where(curvature > 0, curvature, 1)  # zero where all gradients vanish: nothing is known of L
    return START * largest / (2 * len(graph.edges) / graph.agents)


def balance(old: Any, new: Any, heard: Heard, round: Round, mu_z: Tensor) -> Any:
    """Accumulate the residuals of one round of CADEN; after the rounds in CHECKS, change mu_z to balance them."""
    moved, gradient_change = new.x - old.x, new.memory.gradient - old.memory.gradient
    anchors = round.degree * moved - (new.gap - old.gap)
    squares = [torch.linalg.vector_norm(v, dim=1) ** 2 for v in (mu_z * anchors, moved, gradient_change)]
    rounding = (1e3 * torch.finfo(moved.dtype).eps * torch.linalg.vector_norm(new.x, dim=1)) ** 2
    curvature = torch.where(squares[1] > rounding, squares[2] / squares[1], 0)  # only of moves above the rounding error
    tally = old.tally + torch.stack([heard.disagreement() / 4, squares[0], 0 * curvature], dim=1)
    tally[:, 2] = torch.maximum(tally[:, 2], curvature)
    if round.index + 1 not in CHECKS:
        return new._replace(tally=tally)
    primal, dual, largest = (round.maximum(column) for column in tally.unbind(1))
    ratio = float((largest * primal / dual).sqrt()) / _target_ratio(round.graph)
    factor = 1.0
    if 0 < ratio < BAND[0] or BAND[1] < ratio < float("inf"):
        factor = min(max(ratio**0.5, 1 / LARGEST_CHANGE), LARGEST_CHANGE)
    return new._replace(mu_z=new.mu_z * factor, tally=tally * 0)


def _target_ratio(graph: Graph) -> float:
    """Return the ratio of residuals to aim for: the best measured ones follow 3 (lambda_min / mean degree)^(1/3)."""
    if graph.agents > 1500:  # the spectrum would take longer than it saves
        return 1.5
    return float(3 * (graph.spectrum[0] / graph.degrees.mean()) ** (1 / 3))
