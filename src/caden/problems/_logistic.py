"""Logistic regression: convex, with the non-convex regulariser alpha * sum x^2 / (1 + x^2), or with a smooth L1."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from caden import data as datasets
from caden._tensor.compiled import compiles, loops
from caden._tensor.devices import require_device
from caden._tensor.parallel import AGENT_LOOPS
from caden._tensor.rows import aligned, batched_mv, row_dots, row_numbers, rows_separately, take_rows, view_rows
from caden.core import Problem
from caden.errors import CadenError, require_choice, require_integer, require_number

_COMPILED = "caden.problems._compiled"
_LARGE = 1 << 17  # size of an agent's data from which reading them agent by agent pays off

_CORNER = 0.01  # half width of the rounded corner of the smooth |x|


class Logistic(Problem):
    """f_i(x) = weighted mean of log(1 + exp(-l a.x)) + alpha sum x^2/(1 + x^2) + l2/2 |x|^2 + l1 sum s(x).

    s(x) = sqrt(x^2 + c^2) - c with c = 0.01 is a smooth |x|. Shards of unequal size are padded with
    samples of weight zero.
    """

    def __init__(self, signed: Tensor, share: Tensor, alpha: float, l2: float, execution: str, l1: float = 0.0):
        self.signed, self.share = signed, share  # (m, n, d) label times features; (m, n) 1/n_i or 0
        self.alpha, self.l2, self.l1 = alpha, l2, l1
        self.agents, _, self.dim = signed.shape
        self.dtype, self.device = signed.dtype, signed.device
        require_choice("execution", execution, ("auto", "bmm", "loop", "turns"))
        self.execution = ("turns" if signed[0].numel() >= _LARGE else "bmm") if execution == "auto" else execution

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return self.signed.numpy(), self.share.numpy()

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not self.l1 and compiles(x):
            results: tuple[Tensor, Tensor] = loops(_COMPILED).logistic(*self._arrays, self.alpha, self.l2, x, rows)
            return results
        value, gradient = self._losses(x, rows, self.execution)
        if self.l2:
            value += self.l2 / 2 * row_dots(x, x)
            gradient.add_(x, alpha=self.l2)
        if self.alpha:
            square = x * x
            bounded = 1 / (1 + square)
            value += self.alpha * (square * bounded).sum(1)
            gradient += 2 * self.alpha * x * bounded**2
        if self.l1:
            root = (x * x + _CORNER**2).sqrt()
            value += self.l1 * (root - _CORNER).sum(1)
            gradient += self.l1 * x / root
        return value, gradient

    def descend(self, x: Tensor, step: float, correction: Tensor, work: Tensor) -> Tensor | None:
        if self.l1 or not compiles(x):
            return None
        functions = *self._arrays, self.alpha, self.l2
        end: Tensor = loops(_COMPILED).logistic_descent(*functions, x, step, correction, work)
        return end

    def _losses(self, x: Tensor, rows: Tensor | None, execution: str) -> tuple[Tensor, Tensor]:
        """Return the data's part of the values and gradients; agent by agent, each agent's data stay in the cache."""
        if execution == "bmm" and not rows_separately():
            return _loss(view_rows(self.signed, rows), take_rows(self.share, rows), x)
        agents = row_numbers(rows, self.agents)
        value, gradient = x.new_empty(len(agents)), torch.empty_like(x)

        def evaluate(a: int) -> None:
            value[a], gradient[a] = _loss(*map(aligned, (self.signed[agents[a]], self.share[agents[a]], x[a])))

        AGENT_LOOPS.get(execution, AGENT_LOOPS["loop"])(evaluate, range(len(agents)))
        return value, gradient

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        if rows_separately() and len(x) > 1:
            agents = torch.tensor(row_numbers(rows, self.agents))
            return torch.cat([self.hvp(x[a : a + 1], v[a : a + 1], agents[a : a + 1]) for a in range(len(x))])
        data = view_rows(self.signed, rows)
        slope = torch.sigmoid(batched_mv(data, x))
        square = x * x
        diag = 2 * self.alpha * (1 - 3 * square) / (1 + square) ** 3 + self.l2
        if self.l1:
            diag += self.l1 * _CORNER**2 / (square + _CORNER**2) ** 1.5
        return batched_mv(data.mT, take_rows(self.share, rows) * slope * (1 - slope) * batched_mv(data, v)) + diag * v

    def take(self, agents: list[int]) -> Logistic:
        return Logistic(self.signed[agents], self.share[agents], self.alpha, self.l2, self.execution, self.l1)

    def evaluate(self, x: Tensor) -> dict[str, Tensor]:
        correct = (batched_mv(self.signed, x) > 0).to(self.dtype)
        return {"accuracy": (self.share * correct).sum(1)}


def _loss(data: Tensor, share: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of share log(1 + exp(-data x)) and its gradient, of one agent or many in a leading dimension."""
    negated = -batched_mv(data, x)
    return torch.linalg.vecdot(share, softplus(negated)), batched_mv(data.mT, -share * torch.sigmoid(negated))


def logistic(
    agents: int = 20,
    dim: int = 10,
    samples: int = 50,
    seed: int = 0,
    alpha: float = 0.01,
    l2: float = 0.0,
    features: Sequence[Any] | None = None,
    labels: Sequence[Any] | None = None,
    execution: str = "auto",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    l1: float = 0.0,
    data: str | None = None,
    partition: str | dict[str, Any] = "iid",
) -> Logistic:
    """Logistic regression over agents, on random data, a table or your own data.

    Args:
        agents, dim, samples, seed: size and seed of the random data (each agent has its own distribution).
        alpha: weight of the non-convex regulariser; l2: weight of |x|^2/2; l1: weight of a smooth |x|_1.
        data, partition: instead of random data, the first agents x samples of a data set such as "keel:spambase", and
            how they are split; of more than two classes, the upper half counts as +1.
        features, labels: instead of random data, one (n_i, d) and one (n_i,) array of -1/+1 (or 0/1) per agent.
        execution: "bmm" (all agents in one product), "loop" (one agent per thread), "turns" (one agent at a time, on
            all threads) or "auto" (chosen by the size of an agent's data).

    The `accuracy` in the history is measured on the training data.

    >>> logistic(agents=4, dim=3).value_and_grad(torch.zeros(4, 3, dtype=torch.float64))[0]
    tensor([0.6931, 0.6931, 0.6931, 0.6931], dtype=torch.float64)
    """
    if min(require_number("alpha", alpha), require_number("l2", l2), require_number("l1", l1)) < 0:
        raise CadenError(f"`alpha`, `l2` and `l1` must not be negative, got {alpha}, {l2} and {l1}.")
    if (features is None) != (labels is None):
        raise CadenError("`features` and `labels` go together.")
    if data is not None:
        if features is not None:
            raise CadenError("`data` and `features` exclude each other.")
        features, labels = _table(data, agents, samples, partition, seed)
    if features is None or labels is None:
        (
            require_integer("agents", agents, least=1),
            require_integer("dim", dim, least=1),
            require_integer("samples", samples, least=1),
        )
        generator = torch.Generator().manual_seed(require_integer("seed", seed))
        truth = torch.randn(dim, generator=generator, dtype=torch.float64)
        shift = torch.randn(agents, 1, dim, generator=generator, dtype=torch.float64)
        a = torch.randn(agents, samples, dim, generator=generator, dtype=torch.float64) + shift / 2
        noise = torch.randn(agents, samples, generator=generator, dtype=torch.float64)
        features, labels = list(a), list(torch.sign(a @ truth + noise))
    require_device(device)
    shards = [torch.as_tensor(a, device=device).to(dtype) for a in features]
    signs = [torch.as_tensor(b, device=device).to(dtype) for b in labels]
    if len(shards) != len(signs) or any(a.ndim != 2 or b.shape != a.shape[:1] for a, b in zip(shards, signs)):
        raise CadenError("`features` must contain one (n_i, d) array per agent and `labels` one (n_i,) array.")
    if len({a.shape[1] for a in shards}) != 1 or any(len(a) == 0 for a in shards):
        raise CadenError("Every agent needs at least one sample, and all must have the same number of features.")
    for agent, shard in enumerate(shards):
        if not bool(shard.isfinite().all()):
            raise CadenError(f"`features` of agent {agent} has values that are not finite.")
    signs = [torch.where(b > 0, 1.0, -1.0).to(dtype) for b in signs]
    longest = max(len(a) for a in shards)
    signed = torch.stack(
        [torch.cat([a * b[:, None], a.new_zeros(longest - len(a), a.shape[1])]) for a, b in zip(shards, signs)]
    )
    share = torch.stack([(torch.arange(longest, device=device) < len(a)).to(dtype) / len(a) for a in shards])
    return Logistic(signed, share, alpha, l2, execution, l1)


def _table(
    data: str, agents: int, samples: int, partition: str | dict[str, Any], seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the features, with a column of ones, and the signs of each agent, drawn from a data set."""
    (features, labels), _ = datasets.load(data)
    count = require_integer("agents", agents, least=1) * require_integer("samples", samples, least=1)
    if count > len(features):
        raise CadenError(f"{agents} agents x {samples} samples are more than the {len(features)} samples of {data}.")
    chosen = torch.randperm(len(features), generator=torch.Generator().manual_seed(require_integer("seed", seed)))
    half = (int(labels.max()) - 1) // 2
    features, labels = features[chosen[:count]].flatten(1).double(), labels[chosen[:count]]
    features = torch.cat([features, torch.ones(count, 1, dtype=torch.float64)], 1)
    upper = torch.where(labels > half, 1.0, -1.0)
    parts = datasets.partition_from_spec(partition, labels.numpy(), agents, seed)
    return [features[part] for part in parts], [upper[part] for part in parts]
