"""Loops that numba compiles, if it is installed: the extra `fast`. Without it, torch computes the same to rounding."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caden.errors import CadenError, require_choice

_off = False
_SWITCH = ("on", "off", "1", "0", "true", "false", "yes", "no")
_DTYPES = (torch.float32, torch.float64)
# For numba.njit. Sums may be vectorised and products fused with sums; infinities and NaN keep their meaning.
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",  # x / 0 is infinite
    "fastmath": {"reassoc", "contract", "nsz"},
}


@cache
def installed() -> bool:
    """Return whether loops can be compiled here; CADEN_COMPILED=off leaves everything to torch."""
    word = os.environ.get("CADEN_COMPILED", "on").lower() or "on"
    if require_choice("CADEN_COMPILED", word, _SWITCH) in _SWITCH[1::2] or find_spec("numba") is None:
        return False
    try:
        import_module("numba")
    except Exception as error:  # such as a numpy that it does not know yet
        warnings.warn(f"numba cannot be used ({str(error).splitlines()[0]}): small problems are slower.", stacklevel=2)
        return False
    return True


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function, and keeps the result on disk if there is a place for it."""
    from numba import njit

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # no folder can be written
            return njit(**options)(function)

    return decorate


def require_rows(x: np.ndarray, rows: np.ndarray | None, agents: int, like: np.ndarray) -> None:
    """Require that x (k, d) has a row for each of the agents asked for: compiled loops would read beyond the end."""
    wanted = (agents if rows is None else len(rows), like.shape[-1])
    if x.shape != wanted or x.dtype != like.dtype:
        raise CadenError(f"`x` must have shape {wanted} and type {like.dtype}, got {x.shape} and {x.dtype}.")
    if rows is not None and len(rows) and not (rows.min() >= 0 and rows.max() < agents):
        raise CadenError(f"`rows` must lie in 0..{agents - 1}, got {rows.min()}..{rows.max()}.")


@contextmanager
def left_to_torch() -> Iterator[None]:
    """Compile nothing within the block, for comparisons."""
    global _off  # noqa: PLW0603
    _off = True
    try:
        yield
    finally:
        _off = False


@cache
def loops(module: str) -> Any:
    """Return a module of compiled loops, imported when it is first used: numba takes a while."""
    return import_module(module)


def compiles(rows: Tensor) -> bool:
    """Return whether compiled loops take such rows: by kind only, so all processes of a run decide alike.

    What autograd records is left to torch.
    """
    return not _off and installed() and rows.is_cpu and rows.dtype in _DTYPES and not rows.requires_grad
