"""The local steps of `_lbfgs.py`, row by row in loops that numba compiles.

Tensors of a few numbers cost nearly as much per call as large ones, and a local step takes a hundred calls. Here it
takes one, and an evaluation of the problem. Every row is computed by itself, so its bits do not depend on the others,
and rows need not wait for each other: each takes its next step while others try a rejected one again.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from caden._tensor.compiled import OPTIONS, jit
from caden._tensor.parallel import run_in_slices

_NEW_STEP, _FINISHED = -1, -2  # instead of the number of a row's trial


class Rows(NamedTuple):
    """The arrays of a solve, all of them changed in place."""

    x: np.ndarray  # (k, d), as in `Iterate`
    slope: np.ndarray  # (k, d)
    value: np.ndarray  # (k,)
    gradient: np.ndarray  # (k, d)
    curvature: np.ndarray  # (k,)
    rho: np.ndarray  # (k,) float64
    work: np.ndarray  # (k,) int64
    steps: np.ndarray  # (k,) int64 accepted
    vectors: np.ndarray  # (k, 2M, d), as in `Pairs`
    gram: np.ndarray  # (k, 2M, 2M); set to zero
    stored: np.ndarray  # (k,)
    pairs: np.ndarray  # (k, M, 3) s.s, s.f, f.f of the stored pairs, f the change of grad f_i
    start: np.ndarray  # (k, d) where the solve began
    first: np.ndarray  # (k,) norm of grad h there
    begun: np.ndarray  # (k,) int64 local steps
    trial: np.ndarray  # (k,) int64 number of the trial under way
    place: np.ndarray  # (k,) int64 row of its evaluation
    p: np.ndarray  # (k, d) the step on trial
    descent: np.ndarray  # (k,) float64 slope of h along p
    worst: np.ndarray  # (k,) float64 curvature met by rejected trials
    rejected: np.ndarray  # (k,) int64
    fallbacks: np.ndarray  # (k,) int64
    stalled: np.ndarray  # (k,) bool


class Settings(NamedTuple):
    """The parameters of a solve."""

    eps: float  # of `lbfgs`
    backtrack: bool
    armijo: float
    accuracy: float  # NaN: none
    overshoot: float
    floor: float  # of the rule of accuracy, in units of the rounding error
    rounding: float  # of x, relative
    trials: int


_compiled = jit(**OPTIONS)
_inner = jit(**OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # called by compiled loops only


@_inner
def _dot(a, b):
    total = 0.0
    for c in range(len(a)):
        total += np.float64(a[c]) * np.float64(b[c])
    return total


@_inner
def _full_gradient(rows, i, g):
    for c in range(len(g)):
        g[c] = rows.gradient[i, c] + rows.slope[i, c]


@_inner
def _measure_pair(rows, i, slot):
    """Compute the inner products of a stored pair with itself."""
    memory = rows.vectors.shape[1] // 2
    s, f = rows.vectors[i, slot], rows.vectors[i, memory + slot]
    ss, sf, ff = 0.0, 0.0, 0.0
    for c in range(len(s)):
        a, b = np.float64(s[c]), np.float64(f[c])
        ss, sf, ff = ss + a * a, sf + a * b, ff + b * b
    rows.pairs[i, slot, 0], rows.pairs[i, slot, 1], rows.pairs[i, slot, 2] = ss, sf, ff


@_inner
def _direction(rows, i, g, shift, scale):
    """Write -H g into p by the two-loop recursion: for rows in the cache faster than the compact form, and equal."""
    d, memory, stored, p = len(g), rows.vectors.shape[1] // 2, rows.stored[i], rows.p[i]
    count, gamma, r, weights = min(stored, memory), scale, np.empty(d), np.zeros(memory)
    for c in range(d):
        r[c] = g[c]
    for n in range(count):  # newest first
        slot = (stored - 1 - n) % memory
        s, f, (ss, sf, ff) = rows.vectors[i, slot], rows.vectors[i, memory + slot], rows.pairs[i, slot]
        sy = sf + shift * ss
        if not sy > 0:
            continue
        if n == 0:
            ratio = sy / (ff + shift * (sf + sy))
            gamma = ratio if np.isfinite(ratio) else scale
        weight = _dot(s, r) / sy
        for c in range(d):
            r[c] -= weight * (f[c] + shift * s[c])
        weights[slot] = weight
    for c in range(d):
        r[c] *= gamma
    for n in range(count - 1, -1, -1):
        slot = (stored - 1 - n) % memory
        s, f, (ss, sf, ff) = rows.vectors[i, slot], rows.vectors[i, memory + slot], rows.pairs[i, slot]
        sy, along = sf + shift * ss, 0.0
        if not sy > 0:
            continue
        for c in range(d):
            along += (f[c] + shift * s[c]) * r[c]
        weight = weights[slot] - along / sy
        for c in range(d):
            r[c] += weight * s[c]
    for c in range(d):
        p[c] = -r[c]


@_inner
def _is_accurate(rows, settings, i, g, norm):
    """Return whether a row may stop by the rule of `_iterate.accurate`."""
    rho, along, square = rows.rho[i], 0.0, 0.0
    for c in range(len(g)):
        way = np.float64(rows.x[i, c]) - np.float64(rows.start[i, c])
        along += way * g[c]
        square += way * way
    length = np.sqrt(square)
    enough = settings.accuracy * (rho * length if rho > 0 else rows.first[i])
    parts = np.sqrt(_dot(rows.gradient[i], rows.gradient[i])) + np.sqrt(_dot(rows.slope[i], rows.slope[i]))
    beyond = along > settings.overshoot * rho * square
    return norm <= settings.floor * settings.rounding * parts or (norm <= enough and not (beyond and rho > 0))


@_inner
def _propose(rows, settings, i):
    """Begin the row's next local step, if it takes one."""
    g = np.empty(rows.x.shape[1], rows.x.dtype)
    _full_gradient(rows, i, g)
    norm = np.sqrt(_dot(g, g))
    if rows.begun[i] == 0:
        rows.first[i] = norm
        for slot in range(min(rows.stored[i], rows.pairs.shape[1])):
            _measure_pair(rows, i, slot)
        if rows.gram.shape[1] and rows.gram[i, 0, 0] != 0:
            rows.gram[i] = 0  # not kept up to date here
    done = rows.begun[i] >= rows.work[i] or norm == 0
    if not done and rows.begun[i] > 0 and not np.isnan(settings.accuracy):
        done = _is_accurate(rows, settings, i, g, norm)
    if done:
        rows.trial[i] = _FINISHED
        return
    rows.begun[i] += 1
    shift, known = rows.rho[i] + settings.eps, rows.curvature[i]
    if settings.eps > 0:
        scale = 1 / shift
    else:
        scale = 1 / (rows.rho[i] + known)
        if not known > 0:
            scale = min(scale, max(np.sqrt(_dot(rows.x[i], rows.x[i])), 1.0) / norm)
    _direction(rows, i, g, shift, scale)
    descent = _dot(g, rows.p[i])
    if not descent < 0:  # not a descent direction, or not a number
        rows.fallbacks[i] += 1
        rows.stored[i] = 0
        for c in range(len(g)):
            rows.p[i, c] = -scale * g[c]
        descent = _dot(g, rows.p[i])
    rows.descent[i], rows.worst[i], rows.trial[i] = descent, 0.0, 0


@_inner
def _accept(rows, i, value, gradient, square, along, curvature):
    """Store the pair, if the subproblem is convex enough along p, and move."""
    memory, rho, p = rows.vectors.shape[1] // 2, rows.rho[i], rows.p[i]
    if memory > 0 and along + rho * square > 1e-6 * (rho + rows.curvature[i]) * square:
        slot = rows.stored[i] % memory
        for c in range(len(p)):
            rows.vectors[i, slot, c] = p[c]
            rows.vectors[i, memory + slot, c] = gradient[c] - rows.gradient[i, c]
        _measure_pair(rows, i, slot)
        rows.stored[i] += 1
    for c in range(len(p)):
        rows.x[i, c] += p[c]
        rows.slope[i, c] += rho * p[c]
        rows.gradient[i, c] = gradient[c]
    rows.value[i] = value
    rows.curvature[i] = max(rows.curvature[i], curvature)
    rows.steps[i] += 1
    rows.trial[i] = _NEW_STEP


@_inner
def _reject(rows, settings, i, change, length, curvature):
    """Shorten the step, then replace it by a safe gradient step, then give up."""
    p, rho = rows.p[i], rows.rho[i]
    rows.worst[i] = max(rows.worst[i], curvature)
    if rows.trial[i] == settings.trials - 1:
        rows.stalled[i] = True
        rows.curvature[i] = 10 * max(rows.worst[i], rows.curvature[i] + rho)
        rows.trial[i] = _NEW_STEP
        return
    rows.rejected[i] += 1
    if rows.trial[i] == 0:
        shorter = -rows.descent[i] / (2 * (change - rows.descent[i]))
        shorter = 0.1 if np.isnan(shorter) else min(max(shorter, 0.1), 0.5)
        for c in range(len(p)):
            p[c] *= shorter
        rows.descent[i] *= shorter
    else:
        rows.fallbacks[i] += 1
        rows.stored[i] = 0
        g = np.empty(len(p), p.dtype)
        _full_gradient(rows, i, g)
        known = rho + max(rows.worst[i], np.float64(rows.curvature[i]))
        scale = min(1 / known, 0.1 * length / np.sqrt(_dot(g, g)))
        for c in range(len(p)):
            p[c] = -scale * g[c]
    rows.trial[i] += 1


@_compiled
def _gather(rows, at, points):
    """List the rows that are on trial, and their points x + p; return how many."""
    count = 0
    for i in range(len(rows.trial)):
        if rows.trial[i] >= 0:
            at[count], rows.place[i] = i, count
            for c in range(rows.x.shape[1]):
                points[count, c] = rows.x[i, c] + rows.p[i, c]
            count += 1
    return count


@_compiled
def _advance(rows, settings, values, gradients, at, points, begin, end):
    """Judge the evaluated trials of rows begin..end-1 and propose the next; if these are all rows, gather them."""
    for i in range(begin, end):
        if rows.trial[i] >= 0:
            value, gradient, p = np.float64(values[rows.place[i]]), gradients[rows.place[i]], rows.p[i]
            old, slope, square, distance, along, pull = rows.gradient[i], rows.slope[i], 0.0, 0.0, 0.0, 0.0
            for c in range(len(p)):
                step, difference = np.float64(p[c]), np.float64(gradient[c] - old[c])
                square += step * step
                pull += step * slope[c]
                along += step * difference
                distance += difference * difference
            length, distance, before = np.sqrt(square), np.sqrt(distance), np.float64(rows.value[i])
            change = value - before + pull + rows.rho[i] * square / 2
            curvature = distance / length if np.isfinite(distance / length) else 0.0
            slack = 10 * settings.rounding * (abs(value) + abs(before))
            bound = np.inf
            if settings.backtrack:
                bound = slack if rows.trial[i] == settings.trials - 1 else settings.armijo * rows.descent[i] + slack
            if np.isfinite(change) and np.isfinite(distance) and change <= bound:
                _accept(rows, i, value, gradient, square, along, curvature)
            else:
                _reject(rows, settings, i, change if np.isfinite(distance) else np.nan, length, curvature)
        if rows.trial[i] == _NEW_STEP:
            _propose(rows, settings, i)
    return _gather(rows, at, points) if end - begin == len(rows.trial) else -1


def run(now: Any, pairs: Any, settings: Settings) -> tuple[int, int, set[int]]:
    """Run a whole solve on an `Iterate` and its `Pairs`; return rejected trials, fallbacks and stalled rows."""
    k, d = now.x.shape
    now.slope, now.gradient = now.slope.contiguous(), now.gradient.contiguous()
    x, counts, numbers = now.x.numpy(), np.zeros((4, k), np.int64), np.zeros((3, k))
    rho = now.rho.reshape(-1).double().expand(k).contiguous().numpy()
    slope, value, gradient, curvature = (v.numpy() for v in (now.slope, now.value, now.gradient, now.curvature))
    vectors, gram, stored = (part.numpy() for part in pairs)
    rows = Rows(
        x, slope, value, gradient, curvature, rho, now.work.contiguous().numpy(), now.steps.numpy(),
        vectors, gram, stored, np.empty((k, pairs.memory, 3)),
        start=x if np.isnan(settings.accuracy) else x.copy(), first=numbers[0],
        begun=counts[0], trial=np.full(k, _NEW_STEP), place=counts[1], p=np.empty_like(x),
        descent=numbers[1], worst=numbers[2],
        rejected=counts[2], fallbacks=counts[3], stalled=np.zeros(k, np.bool_),
    )  # fmt: skip
    values, gradients, size = rows.value, rows.gradient, d * (1 + rows.vectors.shape[1])
    while True:
        at, points = np.empty(k, np.int64), torch.empty_like(now.x)  # new ones: the problem may keep them
        places = at, points.numpy()
        count = run_in_slices(_advance, (rows, settings, values, gradients, *places), k, size)
        count = _gather(rows, *places) if count is None else count
        if count == 0:
            break
        chosen = None if count == k else torch.from_numpy(at[:count])
        answer = now.problem.value_and_grad(points if chosen is None else points[:count], chosen)
        values, gradients = (part.contiguous().numpy() for part in answer)
    return int(rows.rejected.sum()), int(rows.fallbacks.sum()), set(rows.stalled.nonzero()[0].tolist())
