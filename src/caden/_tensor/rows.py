"""Small things on rows, which are agents; `rows` picks some of them, and None stands for all, which needs no copies."""

import torch
from torch import Tensor

WIDE = 1 << 13  # rows at least this long are worth a call each; shorter ones are handled together


def index(mask: Tensor) -> Tensor | None:
    """Rows where `mask` holds."""
    return None if bool(mask.all()) else mask.nonzero().flatten()


def pick(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Rows of a tensor; the tensor itself for None."""
    return tensor if rows is None else tensor[rows]


def window(data: Tensor, rows: Tensor | None) -> Tensor:
    """`pick` for what is only read: rows that follow each other come as a view."""
    if rows is not None and len(rows) > 1 and bool((rows.diff() == 1).all()):
        return data[int(rows[0]) :][: len(rows)]
    return pick(data, rows)


def listed(rows: Tensor | None, agents: int) -> list[int]:
    """Their numbers."""
    return list(range(agents)) if rows is None else rows.tolist()


def apart() -> bool:
    """Whether every row must be computed by itself, so that its bits do not depend on which others are at hand.

    A batched product takes another path for one row than for many, and a vectorised exponential another at the end of
    a tensor; a deterministic run may not depend on either.
    """
    return torch.are_deterministic_algorithms_enabled()


def times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """(k, n, d), (k, d) -> (k, n): row by row products; also (n, d), (d,) -> (n,)."""
    if matrices.ndim == 3 and len(matrices) and apart():
        return torch.stack([torch.mv(a, v) for a, v in zip(matrices, vectors)])
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Row by row inner products, (k, d) x (k, d) -> (k,)."""
    if a.shape[1] < WIDE:
        return (a * b).sum(1)
    return torch.stack([torch.dot(u, v) for u, v in zip(a, b)])


def norm(a: Tensor) -> Tensor:
    """Row by row Euclidean norms, (k, d) -> (k,)."""
    norms: Tensor = torch.linalg.vector_norm(a, dim=1)
    return norms
