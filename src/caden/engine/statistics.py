"""Medians over seeds with bootstrap intervals. A run that did not reach its goal counts as infinitely expensive.

For up to five seeds the interval is their range, which contains the median of all possible seeds with probability
1 - 2^(1-n): 75 % for three, 94 % for five.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
EXACT = 5  # up to so many values all resamples are enumerated
LEVEL = 0.95


class Median(NamedTuple):
    """A median with a 95 % bootstrap interval; None: not reached."""

    median: float | None
    low: float | None
    high: float | None
    n: int

    def text(self, form: str = "", missing: str = "not reached") -> str:
        """Return the median as text, with the interval if there are several values.

        >>> Median(2000.0, 1000.0, None, 3).text(",.0f")
        '2,000 (1,000 to not reached)'
        """
        middle, low, high = (missing if v is None else format(v, form or _form(v)) for v in self[:3])
        return middle if self.n == 1 or self[:3] == (None,) * 3 else f"{middle} ({low} to {high})"


def _form(value: float) -> str:
    return ",.4g" if value < 1000 else ",.0f"


def median(values: Sequence[float]) -> Median:
    """Return the median of n values and the percentile interval of its bootstrap distribution.

    >>> median([3.0, 1.0, 2.0])
    Median(median=2.0, low=1.0, high=3.0, n=3)
    >>> median([3.0, float("inf"), float("inf")])
    Median(median=None, low=3.0, high=None, n=3)
    """
    middle, low, high = (
        float(v[0]) if math.isfinite(v[0]) else None for v in medians(np.asarray(values, float)[:, None])
    )
    return Median(middle, low, high, len(values))


def medians(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the medians of the columns of (n, p) values, and the lower and upper ends of their intervals.

    Up to five values, the bootstrap distribution is that of all n^n resamples; beyond, that of 2,000 with a fixed seed.
    """
    n = len(values)
    if n <= EXACT:
        draws = np.array(list(product(range(n), repeat=n)))
    else:
        draws = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    resampled = np.sort(_middle(values[draws.T]), axis=0)  # (resamples, p)
    tail, last = (1 - LEVEL) / 2, len(resampled) - 1
    low, high = (resampled[min(last, int(q * len(resampled)))] for q in (tail, 1 - tail))
    return _middle(values), low, high


def _middle(values: np.ndarray) -> np.ndarray:
    """Return the medians along the first axis; of an even number the mean of the middle two, also if infinite."""
    ordered, n = np.sort(values, axis=0), len(values)
    return np.asarray((ordered[(n - 1) // 2] + ordered[n // 2]) / 2)
