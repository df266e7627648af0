"""`mu_z="auto"`: where CADEN's penalty starts, and how it follows the residuals; docs/parameters.md has measurements.

Agent i's part of the primal residual is sum_j |x_i - x_j|^2 / 4, of the dual one mu_z |change of sum_j z_ij|: how far
the neighbours are, and what the last move of the anchors did to the subproblem. The first is in units of x, the second
in units of gradients; between them stands the curvature that the agents met, |change of grad f_i| / |change of x_i|
over a round. phi is not scaled by mu_z, so nothing else changes with it. Agents agree on the numbers by max-consensus.
"""

from typing import Any

import torch
from torch import Tensor

from caden.core import Heard, Round
from caden.graphs import Graph

START = 0.006  # in L / (mean degree)
CHECKS = (6, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rounds after which mu_z may change
BAND = (0.5, 1.7)  # it does if curvature x |primal residual| / |dual residual| is not within this of what is wanted
LARGEST_CHANGE = 30.0


def first_penalty(curvature: Tensor, graph: Graph) -> Tensor:
    """mu_z to start with, given the largest curvature of all agents ()."""
    steepest = torch.where(curvature > 0, curvature, 1)  # all gradients vanish here: nothing is known
    return START * steepest / (2 * len(graph.edges) / graph.agents)


def balance(old: Any, new: Any, heard: Heard, round: Round, mu_z: Tensor) -> Any:
    """Tally the residuals of a round of CADEN; in those of CHECKS, move mu_z so that neither lags behind."""
    moved, bent = new.x - old.x, new.memory.gradient - old.memory.gradient
    anchors = round.degree * moved - (new.gap - old.gap)
    squares = [torch.linalg.vector_norm(v, dim=1) ** 2 for v in (mu_z * anchors, moved, bent)]
    rounding = (1e3 * torch.finfo(moved.dtype).eps * torch.linalg.vector_norm(new.x, dim=1)) ** 2
    curvature = torch.where(squares[1] > rounding, squares[2] / squares[1], 0)  # of a move that is more than noise
    tally = old.tally + torch.stack([heard.disagreement() / 4, squares[0], 0 * curvature], dim=1)
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
