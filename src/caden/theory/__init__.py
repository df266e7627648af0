"""The paper's section 3 made executable, and what holds instead where it does not; the derivations: docs/theory.md."""

from __future__ import annotations

from caden.core import Verdict
from caden.curvature import curvature_bound, hessians, paper_estimate, smoothness
from caden.theory._doctor import examine
from caden.theory._paper import Constants, Facts, constants, convex_bound, corollary1, lemma1, theorem1
from caden.theory._rate import local_rate
from caden.theory._report import report
from caden.theory._stability import (
    Choice,
    best_parameters,
    curvature_margin,
    dual_limit,
    margins,
    sampled_radius,
    spectral_radius,
)

__all__ = [
    "Choice",
    "Constants",
    "Facts",
    "Verdict",
    "best_parameters",
    "constants",
    "convex_bound",
    "corollary1",
    "curvature_bound",
    "curvature_margin",
    "dual_limit",
    "examine",
    "hessians",
    "lemma1",
    "local_rate",
    "margins",
    "paper_estimate",
    "report",
    "sampled_radius",
    "smoothness",
    "spectral_radius",
    "theorem1",
]
