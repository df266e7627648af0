"""Loops that numba compiles, if it is installed: the extra `fast`. Without it, torch computes the same to rounding."""

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

# Sums may be vectorised and products fused with sums; infinities and NaN keep their meaning.
RELAXED = {"reassoc", "contract", "nsz"}


@cache
def installed() -> bool:
    """Return whether loops can be compiled here; CADEN_COMPILED=off leaves everything to torch."""
    return os.environ.get("CADEN_COMPILED") != "off" and find_spec("numba") is not None


def compiles(rows: Tensor) -> bool:
    """Return whether compiled loops take such rows: by kind only, so all processes of a run decide alike."""
    return rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64) and installed()
