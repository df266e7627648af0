"""Limited-memory BFGS for all agents at once, with per-agent budgets and one gradient per accepted step.

Liu and Nocedal, "On the limited memory BFGS method for large scale optimization", Math. Programming 45, 1989; the
direction in the compact form of Byrd, Nocedal and Schnabel, "Representations of quasi-Newton matrices and their use in
limited memory methods", Math. Programming 63, 1994 (Theorem 2.2). With S = [s_1 .. s_M], Y likewise (oldest first),
R = upper triangle of S'Y and D its diagonal:

    H g = gamma g + S q - gamma Y p,   p = R^-1 S'g,   q = R^-T ((D + gamma Y'Y) p - gamma Y'g),   gamma = s'y / y'y

All inner products come from one Gram matrix of the stored vectors, of which a new pair changes two rows: an iteration
reads the memory twice, whatever its length, instead of 4 M times.

The Hessian of a subproblem is that of f_i plus rho_i I. Stored are s and the change of grad f_i alone; rho_i s is added
when a pair is used, in coefficients. So the memory stays valid when phi, the anchors or rho change between rounds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from caden._tensor.parallel import run_in_threads
from caden._tensor.rows import (
    WIDE,
    add_product,
    aligned,
    row_dots,
    row_norms,
    row_numbers,
    rows_separately,
    rows_where,
    take_rows,
)
from caden.core import Info, LocalSolver, Objective, Problem, Solved
from caden.errors import CadenError, require_choice, require_integer, require_number
from caden.solvers._blocks import in_blocks
from caden.solvers._iterate import Iterate, Memory, Trial, start

_ARMIJO = 1e-4
_BLOCK = 1 << 22  # numbers of the memory that are handled together
_TRIALS = 3  # the direction, a shortened one, a safe gradient step


class Pairs(NamedTuple):
    """Circular buffers, one per agent: slot (stored % M) is the next to be written."""

    vectors: Tensor  # (k, 2M, d): s in the first M slots, the changes of grad f_i in the others
    gram: Tensor  # (k, 2M, 2M) float64 inner products; the newest pair's are filled in when a direction is asked for
    stored: Tensor  # (k,) int64 pairs written since the last reset; this and the Gram matrix stay on the CPU

    @property
    def memory(self) -> int:
        return self.vectors.shape[1] // 2

    def place(self, rows: Tensor | None, ahead: int) -> tuple[Any, Any]:
        """Rows and their slots for indexing; a slice and one number if all rows have stored alike, which is faster."""
        stored = self.stored.numpy()
        if rows is None and (stored == stored[0]).all():
            return slice(None), int(stored[0] + ahead) % self.memory
        at = np.arange(len(stored)) if rows is None else rows.numpy(force=True)
        return at, (stored[at] + ahead) % self.memory

    def write(self, rows: Tensor | None, s: Tensor, y: Tensor) -> None:
        """Store a pair for each of the rows (all of them for None)."""
        at, slot = self.place(rows, 0)
        s, y = s.to(self.vectors.dtype), y.to(self.vectors.dtype)
        if isinstance(at, slice) or s.shape[1] < WIDE:
            self.vectors[at, slot], self.vectors[at, self.memory + slot] = s, y
        else:
            for a, (i, j) in enumerate(zip(at.tolist(), slot.tolist())):
                self.vectors[i, j], self.vectors[i, self.memory + j] = s[a], y[a]
        self.stored[at] += 1

    def _blocks(self, rows: Tensor | None, like: Tensor, work: Callable[[slice, slice, Tensor], object]) -> None:
        """Call `work` on parts of the rows and columns and their vectors, in `like`'s precision.

        Wide rows come one by one, and vectors that are kept in another precision a slice of columns at a time, so that
        what is turned back is small.
        """
        d, wide = like.shape[1], like.shape[1] >= WIDE or rows_separately()
        width = d if self.vectors.dtype == like.dtype else min(d, WIDE)
        size = 1 if wide else max(1, _BLOCK // self.vectors[0].numel())
        at = row_numbers(rows, len(like)) if wide else []

        def one(a: int) -> None:
            part = slice(a, a + size) if size < len(like) else slice(None)
            mine = slice(at[a], at[a] + 1) if wide else part if rows is None else rows[part]  # a slice is not copied
            held = aligned(self.vectors[mine])
            for c in range(0, d, width):
                columns = slice(c, c + width) if width < d else slice(None)
                work(part, columns, held[:, :, columns].to(like.dtype))

        run_in_threads(one, range(0, len(like), size))

    def inner(self, rows: Tensor | None, g: Tensor) -> Tensor:
        """(k', 3, 2M) inner products of the newest s, the newest y and g with all stored vectors, in float64."""
        at, newest = self.place(rows, -1)
        out = g.new_zeros(len(g), 3, 2 * self.memory)

        def one(part: slice, columns: slice, held: Tensor) -> None:
            here: Any
            if isinstance(at, slice):
                here, slot = at, newest
            elif len(held) == 1:
                here, slot = slice(None), int(newest[part][0])
            else:
                here, slot = np.arange(len(held)), newest[part]
            fresh = torch.stack([held[here, slot], held[here, self.memory + slot], g[part, columns]], dim=1)
            add_product(out[part], fresh, held.mT)

        self._blocks(rows, g, one)
        return out.double()

    def combine(self, rows: Tensor | None, weights: Tensor, base: Tensor) -> Tensor:
        """base + sum_l weights_l vector_l, in place: (k', 2M), (k', d) -> (k', d)."""
        weights, out = weights.to(base.dtype).unsqueeze(1), base.unsqueeze(1)
        self._blocks(rows, base, lambda part, columns, held: add_product(out[part, :, columns], weights[part], held))
        return base


class LBFGSMemory(NamedTuple):
    """The common fields of `Memory`, and the pairs if they are carried from round to round."""

    value: Tensor
    gradient: Tensor
    curvature: Tensor
    vectors: Tensor
    gram: Tensor
    stored: Tensor


def no_pairs(like: Tensor, memory: int, dtype: torch.dtype | None = None) -> Pairs:
    """Empty buffers for k agents."""
    k, d = like.shape
    gram = torch.zeros(k, 2 * memory, 2 * memory, dtype=torch.float64)
    return Pairs(like.new_zeros(k, 2 * memory, d, dtype=dtype), gram, torch.zeros(k, dtype=torch.int64))


def direction(pairs: Pairs, rows: Tensor | None, g: Tensor, rho: Tensor, scale: Tensor) -> Tensor:
    """-H g for the given rows; -scale g where nothing is stored. Completes the Gram matrix with the newest pair."""
    if pairs.memory == 0 or not pairs.stored.numpy().any():
        return -scale * g
    products = pairs.inner(rows, g).numpy(force=True)
    weights, gamma = _coefficients(pairs, rows, products, *(v.double().numpy(force=True)[:, 0] for v in (rho, scale)))
    base = torch.from_numpy(-gamma).to(g).unsqueeze(1) * g
    return pairs.combine(rows, torch.from_numpy(weights).to(g.device), base)


def _coefficients(
    pairs: Pairs, rows: Tensor | None, products: np.ndarray, rho: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The (k', 2M) weights of the stored vectors in -H g, and gamma (k',). Small algebra, for which torch is slow."""
    (at, newest), memory = pairs.place(rows, -1), pairs.memory
    grams, stored = pairs.gram.numpy(), pairs.stored.numpy()[at]
    here = at if isinstance(at, slice) else np.arange(len(at))
    for which, slot in enumerate((newest, memory + newest)):
        grams[at, slot] = products[:, which]
        grams[at, :, slot] = products[:, which]

    # With rho: y = (change of grad f) + rho s.
    gram, shift = grams[at], rho[:, None, None]
    ss, sf, ff = gram[:, :memory, :memory], gram[:, :memory, memory:], gram[:, memory:, memory:]
    sy = sf + shift * ss
    yy = ff + shift * (sf.swapaxes(1, 2) + sy)
    sg = products[:, 2, :memory]
    yg = products[:, 2, memory:] + rho[:, None] * sg

    # Slots keep their places: R is triangular in the order of age, here only up to a permutation.
    count = stored[:1, None] if isinstance(at, slice) else stored[:, None]
    age = (np.arange(memory) - count) % memory  # (k', M) or (1, M), largest at the newest
    diagonal = sy.diagonal(axis1=1, axis2=2)
    valid = (age >= memory - count) & (diagonal > 0)
    R = np.where((age[:, :, None] <= age[:, None, :]) & valid[:, :, None] & valid[:, None, :], sy, 0)
    R[:, np.arange(memory), np.arange(memory)] = np.where(valid, diagonal, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        gamma = diagonal[here, newest] / yy[here, newest, newest]
    gamma = np.where(valid[here, newest] & np.isfinite(gamma), gamma, scale)

    p = _solve(R, np.where(valid, sg, 0))
    q = diagonal * p + gamma[:, None] * ((yy @ p[:, :, None])[:, :, 0] - yg)
    q = _solve(R.swapaxes(1, 2), np.where(valid, q, 0))
    step = gamma[:, None] * p
    return np.concatenate([rho[:, None] * step - q, step], axis=1), gamma


def _solve(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Row by row; what is singular or not finite gives what is not finite, and the caller a gradient step."""
    try:
        return np.asarray(np.linalg.solve(matrices, vectors[:, :, None])[:, :, 0])
    except np.linalg.LinAlgError:
        return np.full_like(vectors, np.nan)


class _Walk:
    """The iterations of one solve: a direction for every agent, and a search along it."""

    def __init__(self, now: Iterate, pairs: Pairs, eps: float, backtrack: bool):
        self.now, self.pairs, self.eps, self.backtrack = now, pairs, eps, backtrack
        self.everyone = torch.arange(len(now.x), device=now.x.device)
        self.rejected, self.fallbacks, self.stalled = 0, 0, set[int]()

    def descent(self, rows: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor]:
        """The quasi-Newton step p, and (k',) the derivative along it; a gradient step where that does not descend."""
        shift = take_rows(self.now.rho, rows) + self.eps
        scale = 1 / shift if self.eps > 0 else self.now.safe_scale(rows, g)
        p = direction(self.pairs, rows, g, shift, scale)
        slope = row_dots(g, p)
        lost = ~(slope < 0)
        if bool(lost.any()):  # not a descent direction, or not a number
            self.fallbacks += int(lost.sum())
            p = torch.where(lost.unsqueeze(1), -scale * g, p)
            slope = torch.where(lost, row_dots(g, p), slope)
            self.pairs.stored[take_rows(self.everyone, rows)[lost].cpu()] = 0
        return p, slope

    def search(self, rows: Tensor | None, g: Tensor, p: Tensor, slope: Tensor) -> None:
        """Try the step, then a shorter one, then a safe gradient step; go where the subproblem falls."""
        now, at = self.now, take_rows(self.everyone, rows)
        worst = torch.zeros_like(slope)  # curvature met by rejected trials
        for trial in range(_TRIALS):
            seen = now.evaluate(rows, p)
            slack = 10 * torch.finfo(p.dtype).eps * (seen.value.abs() + take_rows(now.value, rows).abs())
            bound = (slack if trial == 2 else _ARMIJO * slope + slack) if self.backtrack else torch.inf
            good = seen.change.isfinite() & (seen.change <= bound)
            if bool(good.all()):
                _store(self.pairs, now, rows, p, seen)
                now.move(rows, seen, p)
                return
            _store(self.pairs, now, at[good], p[good], seen.keep(good))
            now.move(at[good], seen.keep(good), p[good])
            rows = at = at[~good]
            worst = torch.maximum(worst, seen.curvature)[~good]
            if trial == _TRIALS - 1:
                self.stalled.update(at.tolist())
                now.curvature[at] = 10 * torch.maximum(worst, now.curvature[at] + now.rho[at].squeeze(1))
                return
            self.rejected += len(at)
            g, p, slope, change = g[~good], p[~good], slope[~good], seen.change[~good]
            if trial == 0:
                shorter = (-slope / (2 * (change - slope))).nan_to_num(0.1).clamp(0.1, 0.5)
                p, slope = p * shorter.unsqueeze(1), slope * shorter
            else:
                self.fallbacks += len(at)
                self.pairs.stored[at.cpu()] = 0
                known = now.rho[at] + torch.maximum(worst, now.curvature[at]).unsqueeze(1)
                p = -torch.minimum(1 / known, (0.1 * row_norms(p) / row_norms(g)).unsqueeze(1)) * g


def lbfgs(
    memory: int = 10, line_search: str = "backtrack", carry: bool = True, eps: float = 0.0, storage: str = "full"
) -> LocalSolver:
    """A few L-BFGS steps on every agent's subproblem.

    An iteration tries the quasi-Newton step at full length; the first ever is a gradient step of 1/(rho_i + L_i). An
    accepted trial's gradient is the next iterate's, so it costs one gradient. A rejected one is shortened by
    interpolation; if that fails too, the memory is dropped and a gradient step with the curvature learnt from the
    failures is taken ("fallback"). A row for which even that is not finite or climbs stays where it is ("stalled").

    Args:
        memory: pairs kept per agent.
        line_search: "backtrack" (Armijo with a tolerance of the order of eps |f|) or "none" (take what is finite).
        carry: keep the pairs over rounds.
        eps: added to the curvature that the quasi-Newton matrix sees, which makes steps shorter; the first one is then
            1/(rho_i + eps).
        storage: precision in which the pairs are kept: "full" (that of the parameters), "float32" or "bfloat16". Inner
            products are those of the kept vectors, so the quasi-Newton matrix stays symmetric and positive definite.
    """
    require_integer("memory", memory, least=1)
    require_choice("line search", line_search, ("backtrack", "none"))
    if not isinstance(carry, bool):
        raise CadenError(f"`carry` must be true or false, got {carry!r}.")
    if require_number("eps", eps) < 0:
        raise CadenError(f"`eps` must not be negative, got {eps}.")

    require_choice("storage", storage, ("full", "float32", "bfloat16"))
    kept = None if storage == "full" else getattr(torch, storage)

    def init(problem: Problem, x: Tensor, curvature: Tensor | None) -> LBFGSMemory:
        return LBFGSMemory(*start(problem, x, curvature), *no_pairs(x, memory if carry else 0, kept))

    def solve(objective: Objective, x: Tensor, work: Tensor, state: LBFGSMemory) -> Solved:
        now, steps = Iterate(objective, x, Memory(*state[:3]), work), int(work.max())
        pairs = Pairs(*state[3:]) if carry else no_pairs(x, min(memory, max(steps - 1, 0)), kept)
        walk, common = _Walk(now, pairs, eps, line_search == "backtrack"), int(work.min())
        for iteration in range(steps):
            g = now.full_gradient(None)
            live = row_norms(g) != 0 if iteration < common else (work > iteration) & (row_norms(g) != 0)
            if not bool(live.any()):
                break
            rows = rows_where(live)  # None: all of them
            g = take_rows(g, rows)
            walk.search(rows, g, *walk.descent(rows, g))
        stalled = sorted(walk.stalled)
        if stalled:  # the caution learnt there belongs to this solve
            now.curvature[stalled] = state.curvature[stalled]
        info = Info(now.value, now.gradient, walk.rejected, walk.fallbacks, tuple(stalled))
        carried = pairs if carry else no_pairs(x, 0, kept)
        return Solved(now.x, LBFGSMemory(now.value, now.gradient, now.curvature, *carried), info)

    return in_blocks(LocalSolver(init, solve, "lbfgs"))


def _store(pairs: Pairs, now: Iterate, rows: Tensor | None, p: Tensor, seen: Trial) -> None:
    """Write the pairs of an accepted step, where the subproblem curved upwards enough along it."""
    if pairs.memory == 0 or len(p) == 0:
        return
    rho, square = take_rows(now.rho, rows).squeeze(1), seen.length**2
    convex = row_dots(p, seen.gradient_change) + rho * square > 1e-6 * (rho + take_rows(now.curvature, rows)) * square
    if bool(convex.all()):
        pairs.write(rows, p, seen.gradient_change)
    else:
        some = convex.nonzero().flatten()
        pairs.write(some if rows is None else rows[some], p[some], seen.gradient_change[some])
