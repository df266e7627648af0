"""Methods: each one file that reads like its paper."""

from __future__ import annotations

from collections.abc import Callable

from caden.core import Method
from caden.methods._admm_edges import admm_edges
from caden.methods._caden import caden

__all__ = ["METHODS", "admm_edges", "caden"]

METHODS: dict[str, Callable[..., Method]] = {"admm_edges": admm_edges, "caden": caden}
