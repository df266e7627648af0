"""Limited-memory BFGS for all agents together, with per-agent budgets and one gradient per accepted step.

Liu and Nocedal, "On the limited memory BFGS method for large scale optimization", Math. Programming 45, 1989; the
direction in the compact form of Byrd, Nocedal and Schnabel, "Representations of quasi-Newton matrices and their use in
limited memory methods", Math. Programming 63, 1994 (Theorem 2.2). With S = [s_1 .. s_M], Y likewise (oldest first),
R = upper triangle of S'Y and D its diagonal:

    H g = gamma g + S q - gamma Y p,   p = R^-1 S'g,   q = R^-T ((D + gamma Y'Y) p - gamma Y'g),   gamma = s'y / y'y

All inner products come from one Gram matrix of the stored vectors, in which a new pair changes two rows. A local step
reads the memory twice, whatever its length, instead of 4 M times.

The Hessian of a subproblem is that of f_i plus rho_i I. Only s and the change of grad f_i are stored; rho_i s is added
in the coefficients when a pair is used. So the memory stays valid when phi, the anchors or rho change between rounds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from caden._tensor.compiled import compiles, loops
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
from caden.core import LocalSolver, Objective, Problem, Solved
from caden.errors import CadenError, require_choice, require_integer, require_number
from caden.solvers._blocks import in_blocks
from caden.solvers._iterate import FLOOR, Iterate, Memory, Trial, start

_ARMIJO = 1e-4
_BLOCK = 1 << 22  # numbers of the memory that are processed together
_NARROW = 1 << 12  # rows shorter than this are worth compiled loops; longer ones take their time in any case
_TRIALS = 3  # the direction, a shortened one, a safe gradient step


class Pairs(NamedTuple):
    """Circular buffers of pairs, one per agent; slot (stored % M) is written next."""

    vectors: Tensor  # (k, 2M, d): s in the first M slots, the changes of grad f_i in the others
    # (k, 2M, 2M) float64 inner products; `direction` fills in those of the newest pair, compiled loops leave zeros.
    gram: Tensor
    stored: Tensor  # (k,) int64 pairs written since the last reset; this and the Gram matrix stay on the CPU

    @property
    def memory(self) -> int:
        return self.vectors.shape[1] // 2

    def slots(self, rows: Tensor | None, ahead: int) -> tuple[Any, Any]:
        """Return rows and their slots for indexing; a slice and one number, which is faster, if all slots are equal."""
        stored = self.stored.numpy()
        if rows is None and (stored == stored[0]).all():
            return slice(None), int(stored[0] + ahead) % self.memory
        at = np.arange(len(stored)) if rows is None else rows.numpy(force=True)
        return at, (stored[at] + ahead) % self.memory

    def fill_gram(self) -> None:
        """Compute the inner products of pairs that compiled loops stored."""
        if self.memory:
            unknown = ((self.stored > 1) & (self.gram[:, 0, 0] == 0)).nonzero().flatten()
            vectors = self.vectors[unknown.to(self.vectors.device)].double()
            self.gram[unknown] = (vectors @ vectors.mT).cpu()

    def write(self, rows: Tensor | None, s: Tensor, y: Tensor) -> None:
        """Store a pair for each of the rows (all rows for None)."""
        at, slot = self.slots(rows, 0)
        s, y = s.to(self.vectors.dtype), y.to(self.vectors.dtype)
        if isinstance(at, slice) or s.shape[1] < WIDE:
            self.vectors[at, slot], self.vectors[at, self.memory + slot] = s, y
        else:
            for a, (i, j) in enumerate(zip(at.tolist(), slot.tolist())):
                self.vectors[i, j], self.vectors[i, self.memory + j] = s[a], y[a]
        self.stored[at] += 1

    def _blocks(self, rows: Tensor | None, like: Tensor, work: Callable[[slice, slice, Tensor], object]) -> None:
        """Call `work` on parts of the rows and columns and their vectors, in the precision of `like`.

        Wide rows are passed one by one. Vectors stored in another precision are passed in slices of columns, so only
        small parts are converted.
        """
        d, wide = like.shape[1], like.shape[1] >= WIDE or rows_separately()
        width = d if self.vectors.dtype == like.dtype else min(d, WIDE)
        size = 1 if wide else max(1, _BLOCK // self.vectors[0].numel())
        at = row_numbers(rows, len(like)) if wide else []

        def block(a: int) -> None:
            part = slice(a, a + size) if size < len(like) else slice(None)
            index = slice(at[a], at[a] + 1) if wide else part if rows is None else rows[part]  # a slice is not copied
            vectors = aligned(self.vectors[index])
            for c in range(0, d, width):
                columns = slice(c, c + width) if width < d else slice(None)
                work(part, columns, vectors[:, :, columns].to(like.dtype))

        run_in_threads(block, range(0, len(like), size))

    def inner(self, rows: Tensor | None, g: Tensor) -> Tensor:
        """Return the (k', 3, 2M) float64 inner products of the newest s, the newest y and g with all stored vectors."""
        at, newest = self.slots(rows, -1)
        out = g.new_zeros(len(g), 3, 2 * self.memory)

        def add_block(part: slice, columns: slice, vectors: Tensor) -> None:
            index: Any
            if isinstance(at, slice):
                index, slot = at, newest
            elif len(vectors) == 1:
                index, slot = slice(None), int(newest[part][0])
            else:
                index, slot = np.arange(len(vectors)), newest[part]
            left = torch.stack([vectors[index, slot], vectors[index, self.memory + slot], g[part, columns]], dim=1)
            add_product(out[part], left, vectors.mT)

        self._blocks(rows, g, add_block)
        return out.double()

    def combine(self, rows: Tensor | None, weights: Tensor, base: Tensor) -> Tensor:
        """Add sum_l weights_l vector_l to `base` in place: (k', 2M), (k', d) -> (k', d)."""
        weights, out = weights.to(base.dtype).unsqueeze(1), base.unsqueeze(1)
        self._blocks(rows, base, lambda part, columns, v: add_product(out[part, :, columns], weights[part], v))
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
    """Return empty buffers for k agents."""
    k, d = like.shape
    gram = torch.zeros(k, 2 * memory, 2 * memory, dtype=torch.float64)
    return Pairs(like.new_zeros(k, 2 * memory, d, dtype=dtype), gram, torch.zeros(k, dtype=torch.int64))


def direction(pairs: Pairs, rows: Tensor | None, g: Tensor, rho: Tensor, scale: Tensor) -> Tensor:
    """Return -H g for the given rows, -scale g where nothing is stored; add the newest pair to the Gram matrix."""
    if pairs.memory == 0 or not pairs.stored.numpy().any():
        return -scale * g
    products = pairs.inner(rows, g).numpy(force=True)
    weights, gamma = _coefficients(pairs, rows, products, *(v.double().numpy(force=True)[:, 0] for v in (rho, scale)))
    base = torch.from_numpy(-gamma).to(g).unsqueeze(1) * g
    return pairs.combine(rows, torch.from_numpy(weights).to(g.device), base)


def _coefficients(
    pairs: Pairs, rows: Tensor | None, products: np.ndarray, rho: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the (k', 2M) weights of the stored vectors in -H g, and gamma (k',). Torch is slow at such small sizes."""
    (at, newest), memory = pairs.slots(rows, -1), pairs.memory
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

    # Slots are not sorted by age: R is triangular in the order of age, here only up to a permutation.
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
    """Solve row by row; singular or non-finite systems give non-finite results, for which a gradient step is taken."""
    try:
        return np.asarray(np.linalg.solve(matrices, vectors[:, :, None])[:, :, 0])
    except np.linalg.LinAlgError:
        return np.full_like(vectors, np.nan)


class _LocalSteps:
    """The local steps of one solve: a direction for every agent, and a search along it."""

    def __init__(self, now: Iterate, pairs: Pairs, eps: float, backtrack: bool):
        self.now, self.pairs, self.eps, self.backtrack = now, pairs, eps, backtrack
        self.everyone = torch.arange(len(now.x), device=now.x.device)
        self.rejected, self.fallbacks, self.stalled = 0, 0, set[int]()

    def run(self, objective: Objective) -> None:
        """Take all local steps, all rows together."""
        now, common = self.now, int(self.now.work.min())
        self.pairs.fill_gram()
        for iteration in range(int(now.work.max())):
            g = now.full_gradient(None)
            live = row_norms(g) != 0
            if iteration >= common or objective.accuracy is not None:
                live &= now.live(iteration)
            if not bool(live.any()):
                break
            rows = rows_where(live)
            g = take_rows(g, rows)
            self.search(rows, g, *self.descent(rows, g))

    def run_compiled(self, objective: Objective) -> None:
        """Take all local steps, row by row in compiled loops: the same to rounding, with far fewer calls."""
        compiled = loops("caden.solvers._lbfgs_compiled")
        accuracy = torch.nan if objective.accuracy is None else objective.accuracy
        rule = accuracy, objective.overshoot, FLOOR, torch.finfo(self.now.x.dtype).eps, _TRIALS
        settings = compiled.Settings(self.eps, self.backtrack, _ARMIJO, *rule)
        self.rejected, self.fallbacks, self.stalled = compiled.run(self.now, self.pairs, settings)

    def descent(self, rows: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quasi-Newton step p, a gradient step where that does not descend, and the (k',) slope along it."""
        shift = take_rows(self.now.rho, rows) + self.eps
        scale = 1 / shift if self.eps > 0 else self.now.safe_scale(rows, g)
        p = direction(self.pairs, rows, g, shift, scale)
        slope = row_dots(g, p)
        uphill = ~(slope < 0)
        if bool(uphill.any()):  # not a descent direction, or not a number
            self.fallbacks += int(uphill.sum())
            p = torch.where(uphill.unsqueeze(1), -scale * g, p)
            slope = torch.where(uphill, row_dots(g, p), slope)
            self.pairs.stored[take_rows(self.everyone, rows)[uphill].cpu()] = 0
        return p, slope

    def search(self, rows: Tensor | None, g: Tensor, p: Tensor, slope: Tensor) -> None:
        """Try the step, then a shorter one, then a safe gradient step; move where the subproblem decreases."""
        now, at = self.now, take_rows(self.everyone, rows)
        worst = torch.zeros_like(slope)  # curvature met by rejected trials
        for attempt in range(_TRIALS):
            trial = now.evaluate(rows, p)
            slack = 10 * torch.finfo(p.dtype).eps * (trial.value.abs() + take_rows(now.value, rows).abs())
            bound = (slack if attempt == 2 else _ARMIJO * slope + slack) if self.backtrack else torch.inf
            good = trial.change.isfinite() & (trial.change <= bound)
            if bool(good.all()):
                _store(self.pairs, now, rows, p, trial)
                now.move(rows, trial, p)
                return
            _store(self.pairs, now, at[good], p[good], trial.select(good))
            now.move(at[good], trial.select(good), p[good])
            rows = at = at[~good]
            worst = torch.maximum(worst, trial.curvature)[~good]
            if attempt == _TRIALS - 1:
                self.stalled.update(at.tolist())
                now.curvature[at] = 10 * torch.maximum(worst, now.curvature[at] + now.rho[at].squeeze(1))
                return
            self.rejected += len(at)
            g, p, slope, change = g[~good], p[~good], slope[~good], trial.change[~good]
            if attempt == 0:
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

    A local step tries the full quasi-Newton step; the very first is a gradient step of 1/(rho_i + L_i). The gradient of
    an accepted trial is that of the next iterate, so it costs one gradient. A rejected trial is shortened by
    interpolation. If that fails too, the memory is dropped and a gradient step is taken with the curvature learnt from
    the failures ("fallback"). A row for which even that is not finite or climbs does not move ("stalled").

    Args:
        memory: pairs stored per agent.
        line_search: "backtrack" (Armijo with a tolerance of the order of eps |f|) or "none" (accept every finite step).
        carry: keep the pairs from round to round.
        eps: added to the curvature in the quasi-Newton matrix, which makes steps shorter; the first one is then
            1/(rho_i + eps).
        storage: precision of the stored pairs: "full" (that of the parameters), "float32" or "bfloat16". Inner products
            are those of the stored vectors, so the quasi-Newton matrix stays symmetric and positive definite.
    """
    require_integer("memory", memory, least=1)
    require_choice("line search", line_search, ("backtrack", "none"))
    if not isinstance(carry, bool):
        raise CadenError(f"`carry` must be true or false, got {carry!r}.")
    if require_number("eps", eps) < 0:
        raise CadenError(f"`eps` must not be negative, got {eps}.")

    require_choice("storage", storage, ("full", "float32", "bfloat16"))
    stored_dtype = None if storage == "full" else getattr(torch, storage)

    def init(problem: Problem, x: Tensor, curvature: Tensor | None) -> LBFGSMemory:
        return LBFGSMemory(*start(problem, x, curvature), *no_pairs(x, memory if carry else 0, stored_dtype))

    def solve(objective: Objective, x: Tensor, work: Tensor, state: LBFGSMemory) -> Solved:
        now, steps = Iterate(objective, x, Memory(*state[:3]), work), int(work.max())
        pairs = Pairs(*state[3:]) if carry else no_pairs(x, min(memory, max(steps - 1, 0)), stored_dtype)
        local = _LocalSteps(now, pairs, eps, line_search == "backtrack")
        if x.shape[1] < _NARROW and compiles(x) and pairs.vectors.dtype == x.dtype:
            local.run_compiled(objective)
        else:
            local.run(objective)
        stalled = sorted(local.stalled)
        if stalled:  # the curvature raised there is meant for this solve only
            now.curvature[stalled] = state.curvature[stalled]
        info = now.info()._replace(rejected=local.rejected, fallbacks=local.fallbacks, stalled=tuple(stalled))
        carried = pairs if carry else no_pairs(x, 0, stored_dtype)
        return Solved(now.x, LBFGSMemory(now.value, now.gradient, now.curvature, *carried), info)

    return in_blocks(LocalSolver(init, solve, "lbfgs"))


def _store(pairs: Pairs, now: Iterate, rows: Tensor | None, p: Tensor, trial: Trial) -> None:
    """Store the pairs of an accepted step where the curvature of the subproblem along it is positive enough."""
    if pairs.memory == 0 or len(p) == 0:
        return
    rho, square = take_rows(now.rho, rows).squeeze(1), trial.length**2
    convex = row_dots(p, trial.gradient_change) + rho * square > 1e-6 * (rho + take_rows(now.curvature, rows)) * square
    if bool(convex.all()):
        pairs.write(rows, p, trial.gradient_change)
    else:
        chosen = convex.nonzero().flatten()
        pairs.write(chosen if rows is None else rows[chosen], p[chosen], trial.gradient_change[chosen])
