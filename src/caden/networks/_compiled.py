"""Sums over edges in loops that numba compiles: one call instead of ten, with the same bits."""

import numpy as np
import torch
from torch import Tensor

from caden._tensor.compiled import jit
from caden.core import Edges
from caden.errors import CadenError


@jit()
def _edge_sum(rows, first, second, weights, out):
    """Add all edges at their first ends, then at their second ends, as `Tensor.index_add_` does."""
    for e in range(len(first)):
        weight, u, v, total = weights[e, 0], rows[first[e]], rows[second[e]], out[first[e]]
        for c in range(len(total)):
            total[c] += weight * (u[c] - v[c])
    for e in range(len(first)):
        weight, u, v, total = weights[e, 0], rows[first[e]], rows[second[e]], out[second[e]]
        for c in range(len(total)):
            total[c] -= weight * (u[c] - v[c])


@jit()
def _mix(own, rows, first, second, weights, out):
    """Subtract the sums over edges from the hosted agents' own rows."""
    _edge_sum(rows, first, second, weights, out)
    for i in range(len(own)):
        for c in range(own.shape[1]):
            out[i, c] = own[i, c] - out[i, c]


def _require_whole(rows: Tensor, edges: Edges, weights: Tensor | None) -> None:
    """Require a row for every agent and a weight for every edge: compiled loops would read beyond the end."""
    count = edges.agents + edges.elsewhere
    if len(rows) != count or (weights is not None and weights.shape != (edges.count, 1)):
        raise CadenError(f"A broadcast needs a row of each of the {count} agents here, got {len(rows)}.")


def edge_sum(rows: Tensor, edges: Edges, weights: Tensor | None) -> Tensor:
    """Return sum_j w_ij (v_i - v_j) for each row."""
    _require_whole(rows, edges, weights)
    array = rows.contiguous().numpy()
    out, (first, second) = np.zeros(array.shape, array.dtype), edges.arrays
    factors = np.ones((len(first), 1), array.dtype) if weights is None else weights.numpy()
    _edge_sum(array, first, second, factors, out)
    return torch.from_numpy(out[: edges.agents])


def mix(own: Tensor, rows: Tensor, edges: Edges, weights: Tensor) -> Tensor:
    """Return v_i - sum_j w_ij (v_i - v_j) for each hosted agent; v_i itself is `own`, the differences are of `rows`."""
    _require_whole(rows, edges, weights)
    array = rows.contiguous().numpy()
    out = np.zeros(array.shape, array.dtype)
    _mix(array if own is rows else own.contiguous().numpy(), array, *edges.arrays, weights.numpy(), out)
    return torch.from_numpy(out[: edges.agents])
