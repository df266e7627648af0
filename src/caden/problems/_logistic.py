"""Logistic regression with the non-convex regulariser alpha * sum x^2 / (1 + x^2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from caden.errors import CadenError, number, whole
from caden.parallel import each, fastest


class Logistic:
    """f_i(x) = weighted mean of log(1 + exp(-l a.x)) + alpha sum x^2/(1 + x^2) + l2/2 |x|^2.

    Shards of unequal size are padded with samples of weight zero.
    """

    def __init__(self, signed: Tensor, share: Tensor, alpha: float, l2: float, batching: str):
        self.signed, self.share = signed, share  # (m, n, d) label times features; (m, n) 1/n_i or 0
        self.alpha, self.l2 = alpha, l2
        self.agents, _, self.dim = signed.shape
        self.dtype, self.device = signed.dtype, signed.device
        zero = signed.new_zeros(self.agents, self.dim)
        self.batching = fastest(batching, ("bmm", "loop"), lambda way: self._products(zero, None, way))

    def _products(self, x: Tensor, rows: Tensor | None, way: str | None = None) -> tuple[Tensor, Any]:
        """Margins (k', n), and the function that maps sample weights (k', n) to gradients (k', d)."""
        if (way or self.batching) == "bmm":
            data = self.signed if rows is None else self.signed[rows]
            margins = torch.bmm(data, x.unsqueeze(2)).squeeze(2)
            return margins, lambda w: torch.bmm(w.unsqueeze(1), data).squeeze(1)
        at = list(range(self.agents)) if rows is None else rows.tolist()
        margins = x.new_empty(len(at), self.signed.shape[1])
        each(lambda a: torch.mv(self.signed[at[a]], x[a], out=margins[a]), range(len(at)))

        def back(w: Tensor) -> Tensor:
            out = torch.empty_like(x)
            each(lambda a: torch.mv(self.signed[at[a]].t(), w[a], out=out[a]), range(len(at)))
            return out

        return margins, back

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        share = self.share if rows is None else self.share[rows]
        margins, back = self._products(x, rows)
        value, gradient = (share * softplus(-margins)).sum(1), back(-share * torch.sigmoid(-margins))
        if self.l2:
            value += self.l2 / 2 * torch.linalg.vector_norm(x, dim=1) ** 2
            gradient.add_(x, alpha=self.l2)
        if self.alpha:
            square = x * x
            bounded = 1 / (1 + square)
            value += self.alpha * (square * bounded).sum(1)
            gradient += 2 * self.alpha * x * bounded**2
        return value, gradient

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        share = self.share if rows is None else self.share[rows]
        slope = torch.sigmoid(self._products(x, rows)[0])
        along, back = self._products(v, rows)
        square = x * x
        curved = 2 * self.alpha * (1 - 3 * square) / (1 + square) ** 3 + self.l2
        product: Tensor = back(share * slope * (1 - slope) * along)
        return product + curved * v

    def take(self, agents: list[int]) -> Logistic:
        return Logistic(self.signed[agents], self.share[agents], self.alpha, self.l2, self.batching)

    def evaluate(self, x: Tensor) -> dict[str, Tensor]:
        right = (self._products(x, None)[0] > 0).to(self.dtype)
        return {"accuracy": (self.share * right).sum(1)}


def logistic(
    agents: int = 20,
    dim: int = 10,
    samples: int = 50,
    seed: int = 0,
    alpha: float = 0.01,
    l2: float = 0.0,
    features: Sequence[Any] | None = None,
    labels: Sequence[Any] | None = None,
    batching: str = "auto",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Logistic:
    """Logistic regression over agents, on random data or on yours.

    Args:
        agents, dim, samples, seed: size and seed of the random data (each agent has its own distribution).
        alpha: weight of the non-convex regulariser; l2: weight of |x|^2/2.
        features, labels: instead of random data, one (n_i, d) and one (n_i,) array of -1/+1 (or 0/1) per agent.
        batching: "bmm", "loop" or "auto" (measured).

    `accuracy` in the history is that of the training data.

    >>> logistic(agents=4, dim=3).value_and_grad(torch.zeros(4, 3, dtype=torch.float64))[0]
    tensor([0.6931, 0.6931, 0.6931, 0.6931], dtype=torch.float64)
    """
    if number("alpha", alpha) < 0 or number("l2", l2) < 0:
        raise CadenError(f"`alpha` and `l2` must not be negative, got {alpha} and {l2}.")
    if (features is None) != (labels is None):
        raise CadenError("`features` and `labels` go together.")
    if features is None or labels is None:
        whole("agents", agents, least=1), whole("dim", dim, least=1), whole("samples", samples, least=1)
        generator = torch.Generator().manual_seed(whole("seed", seed))
        truth = torch.randn(dim, generator=generator, dtype=torch.float64)
        shift = torch.randn(agents, 1, dim, generator=generator, dtype=torch.float64)
        a = torch.randn(agents, samples, dim, generator=generator, dtype=torch.float64) + shift / 2
        noise = torch.randn(agents, samples, generator=generator, dtype=torch.float64)
        features, labels = list(a), list(torch.sign(a @ truth + noise))
    shards = [torch.as_tensor(a, device=device).to(dtype) for a in features]
    signs = [torch.as_tensor(b, device=device).to(dtype) for b in labels]
    if len(shards) != len(signs) or any(a.ndim != 2 or b.shape != a.shape[:1] for a, b in zip(shards, signs)):
        raise CadenError("`features` must hold one (n_i, d) array per agent and `labels` one (n_i,) array.")
    if len({a.shape[1] for a in shards}) != 1 or any(len(a) == 0 for a in shards):
        raise CadenError("Every agent needs at least one sample, and all must have the same number of features.")
    signs = [torch.where(b > 0, 1.0, -1.0).to(dtype) for b in signs]
    longest = max(len(a) for a in shards)
    signed = torch.stack(
        [torch.cat([a * b[:, None], a.new_zeros(longest - len(a), a.shape[1])]) for a, b in zip(shards, signs)]
    )
    share = torch.stack([(torch.arange(longest, device=device) < len(a)).to(dtype) / len(a) for a in shards])
    return Logistic(signed, share, alpha, l2, batching)
