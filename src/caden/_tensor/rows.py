"""Small things on rows, which are agents; `rows` picks some of them, and None stands for all, which needs no copies."""

import torch
from torch import Tensor

WIDE = 1 << 13  # rows at least this long are worth a call each; shorter ones are handled together


def rows_where(mask: Tensor) -> Tensor | None:
    """Rows where `mask` holds."""
    return None if bool(mask.all()) else mask.nonzero().flatten()


def take_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Rows of a tensor; the tensor itself for None."""
    return tensor if rows is None else tensor[rows]


def view_rows(data: Tensor, rows: Tensor | None) -> Tensor:
    """`pick` for what is only read: rows that follow each other come as a view."""
    if rows is not None and len(rows) > 1 and bool((rows.diff() == 1).all()):
        return data[int(rows[0]) :][: len(rows)]
    return take_rows(data, rows)


def row_numbers(rows: Tensor | None, agents: int) -> list[int]:
    """Their numbers."""
    return list(range(agents)) if rows is None else rows.tolist()


def rows_separately() -> bool:
    """Whether every row must be computed by itself, so that its bits do not depend on which others are at hand.

    A batched product takes another path for one row than for many, and a vectorised exponential another at the end of
    a tensor; a deterministic run may not depend on either.
    """
    return torch.are_deterministic_algorithms_enabled()


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself; in a deterministic run, at an address that is a multiple of 64.

    On some processors MKL sums in an order that depends on where its operands start, and where a row starts depends on
    which others are stored before it.
    """
    return tensor.clone() if rows_separately() and tensor.data_ptr() % 64 else tensor


def batched_mv(matrices: Tensor, vectors: Tensor) -> Tensor:
    """(k, n, d), (k, d) -> (k, n): row by row products; also (n, d), (d,) -> (n,)."""
    if matrices.ndim == 3 and len(matrices) and rows_separately():
        return torch.stack([torch.mv(aligned(a), aligned(v)) for a, v in zip(matrices, vectors)])
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, for (k, ., .) tensors."""
    if rows_separately():
        total += torch.bmm(aligned(left), aligned(right))  # into memory of its own, which is aligned
    else:
        total.baddbmm_(left, right)


def solve_rows(matrices: Tensor, vectors: Tensor) -> Tensor:
    """(k, d, d), (k, d) -> (k, d): the solutions of A_i p_i = v_i."""
    if rows_separately():
        return torch.stack([torch.linalg.solve(aligned(a), aligned(v)) for a, v in zip(matrices, vectors)])
    solutions: Tensor = torch.linalg.solve(matrices, vectors)
    return solutions


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Row by row inner products, (k, d) x (k, d) -> (k,)."""
    if a.shape[1] < WIDE:
        return (a * b).sum(1)
    return torch.stack([torch.dot(aligned(u), aligned(v)) for u, v in zip(a, b)])


def row_norms(a: Tensor) -> Tensor:
    """Row by row Euclidean norms, (k, d) -> (k,)."""
    norms: Tensor = torch.linalg.vector_norm(a, dim=1)
    return norms
