"""Methods: each one file that reads like its paper.

Default parameters are starting points for networks like the embedded digits' one; tune them for anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from caden.core import Method
from caden.methods._accelerated import accelerated
from caden.methods._adapd import adapd
from caden.methods._admm_edges import admm_edges
from caden.methods._c2eden import c2eden
from caden.methods._caden import caden
from caden.methods._dgd import dgd
from caden.methods._dinno import dinno
from caden.methods._dino import dino
from caden.methods._druid import dlm, druid
from caden.methods._esom import esom, network_newton
from caden.methods._exact_diffusion import d2, exact_diffusion, nids, prox_diffusion
from caden.methods._extra import extra
from caden.methods._fedadmm import fedadmm
from caden.methods._fedavg import fedavg
from caden.methods._gt import diging, gt
from caden.methods._gt_lbfgs import gt_lbfgs
from caden.methods._kgt import kgt
from caden.methods._led import led
from caden.methods._lt_admm import lt_admm
from caden.methods._newton_tracking import newton_tracking
from caden.methods._proxskip import proxskip
from caden.methods._radmm import radmm
from caden.methods._scaffold import scaffold
from caden.methods._tutunov import tutunov
from caden.solvers import gd


def caden_gd(mu_z: float | str = "auto", step: float | None = None, **options: Any) -> Method:
    """CADEN with gradient descent as the local solver; `options` are those of `caden`."""
    return caden(mu_z, solver=gd(step), **options)._replace(name="caden_gd")


__all__ = [
    "METHODS",
    "accelerated",
    "adapd",
    "admm_edges",
    "c2eden",
    "caden",
    "caden_gd",
    "d2",
    "dgd",
    "diging",
    "dinno",
    "dino",
    "dlm",
    "druid",
    "esom",
    "exact_diffusion",
    "extra",
    "fedadmm",
    "fedavg",
    "gt",
    "gt_lbfgs",
    "kgt",
    "led",
    "lt_admm",
    "network_newton",
    "newton_tracking",
    "nids",
    "prox_diffusion",
    "proxskip",
    "radmm",
    "scaffold",
    "tutunov",
]

METHODS: dict[str, Callable[..., Method]] = {name: globals()[name] for name in __all__ if name != "METHODS"}
