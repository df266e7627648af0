"""Loops that numba compiles, if it is installed: the extra `fast`. Without it, torch computes the same to rounding."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_off = False
_DTYPES = (torch.float32, torch.float64)
# For numba.njit. Sums may be vectorised and products fused with sums; infinities and NaN keep their meaning.
OPTIONS: dict[str, Any] = {
    "cache": True,
    "nogil": True,
    "error_model": "numpy",  # x / 0 is infinite
    "fastmath": {"reassoc", "contract", "nsz"},
}


@cache
def installed() -> bool:
    """Return whether loops can be compiled here; CADEN_COMPILED=off leaves everything to torch."""
    return os.environ.get("CADEN_COMPILED") != "off" and find_spec("numba") is not None


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
    """Return whether compiled loops take such rows: by kind only, so all processes of a run decide alike."""
    return not _off and installed() and rows.is_cpu and rows.dtype in _DTYPES
