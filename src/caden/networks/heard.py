"""Results of a broadcast: `core.Heard` when all neighbours know the same row, and when each knows what reached it."""

from typing import NamedTuple

import torch
from torch import Tensor

from caden._tensor.compiled import compiles, loops
from caden.core import Edges
from caden.errors import CadenError

_COMPILED = "caden.networks._compiled"
_SMALL = 1 << 20  # elements of an edge temporary: up to here, loops without one are several times faster
_ALL = slice(None)
_SLICE = 1 << 24  # elements of an edge temporary; wider rows are processed in column slices


class HeardRows(NamedTuple):
    """A broadcast after which all neighbours know the same row of an agent: one row each, hosted agents first."""

    rows: Tensor  # (k, d) the rows passed to the broadcast
    fresh: Tensor  # the same, plus what awake agents of other processes sent now
    sent: Tensor | None  # what all know of each agent; None if a sleeping agent has never sent anything
    edges: Edges

    def _known(self) -> Tensor:
        if self.sent is None:
            raise CadenError("A sleeping agent has not sent anything yet: make this broadcast in `init`, too.")
        return self.sent

    def _compiles(self, rows: Tensor) -> bool:
        return self.edges.count * rows.shape[1] < _SMALL and compiles(rows)

    def _edge_sum(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return sum_j w_ij (v_i - v_j) from edge differences: antisymmetric to the last bit, so rows sum to zero."""
        if self._compiles(rows):
            total: Tensor = loops(_COMPILED).edge_sum(rows, self.edges, weights)
            return total
        out = torch.zeros_like(rows)
        width = max(1, _SLICE // max(1, self.edges.count))
        for a in range(0, rows.shape[1], width):
            v = rows[:, a : a + width]
            difference = v[self.edges.first].sub_(v[self.edges.second])
            if weights is not None:
                difference.mul_(weights)
            part = out[:, a : a + width]
            part.index_add_(0, self.edges.first, difference)
            part.index_add_(0, self.edges.second, difference, alpha=-1)
        return out[: self.edges.agents] if self.edges.elsewhere else out

    def laplacian(self) -> Tensor:
        return self._edge_sum(self._known())

    def mix(self, weights: Tensor | None = None) -> Tensor:
        """Return W v with w_ij on edges whose ends are both awake and the rest of each row's weight on itself.

        `weights` (e,) defaults to Metropolis weights of the awake subgraph, 1 / (1 + max of the awake degrees).
        """
        known = self.fresh if self.sent is None else self.sent  # equal on edges that count, unless compressed
        mixing = self.edges.mixing(self.rows, weights)
        if self._compiles(known):
            mixed: Tensor = loops(_COMPILED).mix(self.rows, known, self.edges, mixing)
            return mixed
        return self.rows - self._edge_sum(known, mixing)

    def disagreement(self) -> Tensor:
        rows, edges = self._known(), self.edges
        square = rows.new_zeros(edges.count, 1)
        for v in torch.split(rows, max(1, _SLICE // max(1, edges.count)), dim=1):
            square += (v[edges.first] - v[edges.second]).square_().sum(1, keepdim=True)
        return edges.sum(square).squeeze(1)

    def ends(self, columns: slice = _ALL) -> tuple[Tensor, Tensor]:
        rows = self._known()[:, columns]
        return rows[self.edges.first], rows[self.edges.second]


class HeardArcs(NamedTuple):
    """A broadcast after which each arc's owner knows the row of its peer that last arrived."""

    rows: Tensor  # (k, d) each hosted agent's own row
    known: Tensor  # (2e, d) at arc (i, j): what i last received from j
    fresh: Tensor  # (2e, 1) bool: both ends are awake and a message arrived
    edges: Edges
    agreed: Tensor | None  # (rows, d) all rows, if both ends of each edge know what the other received

    def laplacian(self) -> Tensor:
        return self.edges.arc_sum(self.rows[self.edges.owner()] - self.known)

    def mix(self, weights: Tensor | None = None) -> Tensor:
        edges, weight = self.edges, self.edges.mixing(self.rows, weights)
        pull = torch.cat([weight, weight]) * (self.rows[edges.owner()] - self.known)
        return self.rows - edges.arc_sum(torch.where(self.fresh, pull, 0))

    def disagreement(self) -> Tensor:
        square = (self.rows[self.edges.owner()] - self.known).square().sum(1, keepdim=True)
        return self.edges.arc_sum(square).squeeze(1)

    def ends(self, columns: slice = _ALL) -> tuple[Tensor, Tensor]:
        if self.agreed is None:
            raise CadenError(
                "Edge variables need messages that arrive: use `caden`, or remove `messages.loss` and `messages.delay`."
            )
        agreed = self.agreed[:, columns]
        return agreed[self.edges.first], agreed[self.edges.second]
