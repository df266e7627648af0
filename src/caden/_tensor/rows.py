"""Small operations on rows, which are agents. `rows` selects some of them; None means all, without copies."""

import torch
from torch import Tensor

WIDE = 1 << 13  # rows at least this long are worth a call each; shorter ones are processed together


def rows_where(mask: Tensor) -> Tensor | None:
    """Return the rows where `mask` holds, or None if it holds for all."""
    return None if bool(mask.all()) else mask.nonzero().flatten()


def take_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Return rows of a tensor; the tensor itself for None."""
    return tensor if rows is None else tensor[rows]


def view_rows(data: Tensor, rows: Tensor | None) -> Tensor:
    """Return rows of a tensor for reading only: consecutive rows are a view."""
    if rows is not None and len(rows) > 1 and bool((rows.diff() == 1).all()):
        return data[int(rows[0]) :][: len(rows)]
    return take_rows(data, rows)


def row_numbers(rows: Tensor | None, agents: int) -> list[int]:
    """Return the row numbers as a list."""
    return list(range(agents)) if rows is None else rows.tolist()


def rows_separately() -> bool:
    """Return whether every row must be computed by itself, so its bits do not depend on which other rows are present.

    A batched product takes another path for one row than for many, and a vectorised exponential takes another path at
    the end of a tensor. A deterministic run must not depend on either.
    """
    return torch.are_deterministic_algorithms_enabled()


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor; in a deterministic run, at an address that is a multiple of 64.

    On some processors MKL sums in an order that depends on the addresses of its operands, and the address of a row
    depends on which other rows are stored before it.
    """
    return tensor.clone() if rows_separately() and tensor.data_ptr() % 64 else tensor


def batched_mv(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Multiply row by row: (k, n, d), (k, d) -> (k, n); also (n, d), (d,) -> (n,)."""
    if matrices.ndim == 3 and len(matrices) and rows_separately():
        return torch.stack([torch.mv(aligned(a), aligned(v)) for a, v in zip(matrices, vectors)])
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total` in place, for (k, ., .) tensors."""
    if rows_separately():
        total += torch.bmm(aligned(left), aligned(right))  # the product has its own memory, which is aligned
    else:
        total.baddbmm_(left, right)


def solve_rows(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Solve A_i p_i = v_i row by row, (k, d, d), (k, d) -> (k, d); NaN where A_i is singular: the run diverges."""
    if rows_separately():
        return torch.cat([_solve(aligned(a)[None], aligned(v)[None]) for a, v in zip(matrices, vectors)])
    return _solve(matrices, vectors)


def _solve(matrices: Tensor, vectors: Tensor) -> Tensor:
    solutions, singular = torch.linalg.solve_ex(matrices, vectors)
    return torch.where((singular != 0)[:, None], torch.nan, solutions)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products row by row: (k, d), (k, d) -> (k,)."""
    if a.shape[1] < WIDE:
        return (a * b).sum(1)
    return torch.stack([torch.dot(aligned(u), aligned(v)) for u, v in zip(a, b)])


def row_norms(a: Tensor) -> Tensor:
    """Return the Euclidean norms row by row: (k, d) -> (k,)."""
    norms: Tensor = torch.linalg.vector_norm(a, dim=1)
    return norms
