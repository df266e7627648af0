"""Values and gradients of quadratics and logistic regression, agent by agent in loops that numba compiles.

Data are read from memory once per value and gradient: a few samples at a time, for their products with x and, while
they are in the cache, for their part of the gradient.
"""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from caden._tensor.compiled import OPTIONS, jit, require_rows
from caden._tensor.parallel import run_in_slices

_compiled = jit(**OPTIONS)
_inner = jit(**OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # called by compiled loops only
_LINEAR = 20.0  # softplus is, from there on, as in torch
_BLOCK = 32  # samples whose data are read twice in a row, the second time from the cache
_PIECE = 1 << 17  # numbers of an agent's data, at least, that stay together


@_compiled
def _quadratic(hessian, linear, agents, x, value, gradient, begin, end):
    for a in range(begin, end):
        A, b, total = hessian[agents[a]], linear[agents[a]], 0.0
        for r in range(len(b)):
            product = x.dtype.type(0)
            for c in range(len(b)):
                product += A[r, c] * x[a, c]
            total += x[a, r] * (product / 2 - b[r])
            gradient[a, r] = product - b[r]
        value[a] = total


@_inner
def _evaluate(rows, weights, alpha, l2, regularised, v, g, margins, valued):
    """Write the gradient of samples, and of the regularisers, into g; return the value if it is wanted.

    For few samples its logarithms take a third of the time.
    """
    total = 0.0
    for j in range(len(v)):
        g[j] = 0
        if regularised:
            square = np.float64(v[j]) ** 2
            total += square * (l2 / 2 + alpha / (1 + square))
            g[j] = v[j] * (l2 + 2 * alpha / (1 + square) ** 2)
    for first in range(0, len(rows), _BLOCK):
        count = min(_BLOCK, len(rows) - first)
        for n in range(count):
            product = v.dtype.type(0)
            for j in range(len(v)):
                product += rows[first + n, j] * v[j]
            margins[n] = -product
        for n in range(count):
            margin, weight = margins[n], np.float64(weights[first + n])
            decay = math.exp(-abs(margin))
            if valued:
                total += weight * (margin if margin > _LINEAR else max(margin, 0.0) + math.log1p(decay))
            margins[n] = -weight * (1.0 if margin > 0 else decay) / (1.0 + decay)
        for n in range(count):
            weight = v.dtype.type(margins[n])
            for j in range(len(v)):
                g[j] += weight * rows[first + n, j]
    return total


@_compiled
def _logistic(data, share, alpha, l2, agents, x, value, gradient, begin, end):
    """Evaluate some of the pieces that the samples of the agents are cut into; the first has the regularisers, too."""
    pieces, samples, margins = value.shape[1], data.shape[1], np.empty(_BLOCK)
    regularised = alpha != 0 or l2 != 0  # otherwise 0 times infinity is none of its terms
    for piece in range(begin, end):
        a, c = divmod(piece, pieces)
        part = slice(samples * c // pieces, samples * (c + 1) // pieces)
        rows, weights = data[agents[a], part], share[agents[a], part]
        value[a, c] = _evaluate(rows, weights, alpha, l2, regularised and c == 0, x[a], gradient[a, c], margins, True)


@_compiled
def _descent(data, share, alpha, l2, work, step, correction, x, begin, end):
    """Take all steps of an agent before those of the next one."""
    g, margins, regularised = np.empty(x.shape[1], x.dtype), np.empty(_BLOCK), alpha != 0 or l2 != 0
    for a in range(begin, end):
        for _ in range(work[a]):
            _evaluate(data[a], share[a], alpha, l2, regularised, x[a], g, margins, False)
            for j in range(len(g)):
                x[a, j] -= step * (g[j] + correction[a, j])


@cache
def _everyone(count: int) -> np.ndarray:
    return np.arange(count)


def quadratic(hessian: Tensor, linear: Tensor, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x'A_i x / 2 - b_i'x and its gradient A_i x - b_i."""
    points, slopes, agents = x.contiguous().numpy(), linear.numpy(), None if rows is None else rows.numpy()
    require_rows(points, agents, len(slopes), slopes)
    k = len(points)
    value, gradient = x.new_empty(k), torch.empty_like(x)
    agents = _everyone(k) if agents is None else agents
    arrays = hessian.numpy(), slopes, agents, points, value.numpy(), gradient.numpy()
    run_in_slices(_quadratic, arrays, k, hessian.stride(0))
    return value, gradient


def logistic(
    data: np.ndarray, share: np.ndarray, alpha: float, l2: float, x: Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the functions of `Logistic` and their gradients.

    The samples of an agent are cut into pieces if they are many, so few agents occupy all threads, too. How they are
    cut depends on their shape alone, and so do the bits.
    """
    points, agents = x.contiguous().numpy(), None if rows is None else rows.numpy()
    require_rows(points, agents, len(data), data)
    agents, numbers = _everyone(len(points)) if agents is None else agents, data.shape[1] * data.shape[2]
    (k, d), pieces = points.shape, max(1, min(numbers // _PIECE, data.shape[1] // _BLOCK))
    value, gradient = np.empty((k, pieces), points.dtype), np.empty((k, pieces, d), points.dtype)
    run_in_slices(
        _logistic,
        (data, share, alpha, l2, agents, points, value, gradient),
        k * pieces,
        numbers // pieces,
    )
    if pieces > 1:
        return torch.from_numpy(value).sum(1), torch.from_numpy(gradient).sum(1)
    return torch.from_numpy(value[:, 0]), torch.from_numpy(gradient[:, 0])


def logistic_descent(
    data: np.ndarray,
    share: np.ndarray,
    alpha: float,
    l2: float,
    x: Tensor,
    step: float,
    correction: Tensor,
    work: Tensor,
) -> Tensor:
    """Return where `work[i]` steps v <- v - step (grad f_i(v) + correction_i) lead from x."""
    new, pull = x.numpy().copy(), correction.contiguous().numpy()
    require_rows(new, None, len(data), data)
    require_rows(pull, None, len(data), data)
    arrays = data, share, alpha, l2, work.numpy(), new.dtype.type(step), pull, new
    run_in_slices(_descent, arrays, len(new), data.shape[1] * data.shape[2])
    return torch.from_numpy(new)
