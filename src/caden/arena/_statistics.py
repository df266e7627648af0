"""Statistics of a comparison: performance profiles and paired tests.

A run that did not reach its goal counts as infinitely expensive.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy.stats import binomtest


def profile(costs: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    """Return performance ratios (Dolan and Moré, Math. Program. 2002): {method: cost / best cost, sorted, inf: failed}.

    `costs` is {method: {instance: cost}}. The profile of a method at t is the fraction of its instances with a ratio of
    at most t; a method is judged on those in which it took part. Where no method reached the goal, all have failed.
    A cost of nothing (training alone) is not the best that others are compared with.

    >>> profile({"a": {"p": 1.0, "q": 4.0}, "b": {"p": 2.0, "q": float("inf")}})
    {'a': [1.0, 1.0], 'b': [2.0, inf]}
    """
    best: dict[str, float] = {}
    for line in costs.values():
        for instance, cost in line.items():
            best[instance] = min(cost if cost > 0 else math.inf, best.get(instance, math.inf))
    return {method: sorted(ratio(cost, best[i]) for i, cost in line.items()) for method, line in costs.items()}


def data_profile(costs: Mapping[str, Mapping[str, float]], units: Mapping[str, float]) -> dict[str, list[float]]:
    """Return data profiles (Moré and Wild, SIAM J. Optim. 2009): {method: cost / unit of the instance, sorted}.

    `units` is {instance: cost of one unit}, such as one message over every arc.

    >>> data_profile({"a": {"p": 6.0, "q": 4.0}}, {"p": 2.0, "q": 4.0})
    {'a': [1.0, 3.0]}
    """
    return {method: sorted(cost / units[i] for i, cost in line.items()) for method, line in costs.items()}


def ratio(cost: float, best: float) -> float:
    """Return how much more was spent than the best, at least 1; infinite if the goal was not reached."""
    return max(1.0, cost / best) if math.isfinite(cost) else math.inf


class Pair(NamedTuple):
    """A method against another over the cells in which both took part and at least one reached the goal.

    Cells of one problem depend on each other, so each problem has one vote in the test.
    """

    other: str
    wins: int
    losses: int
    ties: int
    problems_won: int
    problems_lost: int
    p: float  # two-sided sign test of the problems
    corrected: float  # by Holm, over all pairs


def paired(costs: Mapping[str, Mapping[str, float]], method: str) -> list[Pair]:
    """Return sign tests of a method against all others, corrected for their number (Holm, 1979).

    `costs` is {method: {"problem/graph/condition": cost}}.

    >>> cells = [f"{problem}/ring/{condition}" for problem in "pqrstu" for condition in ("awake", "half")]
    >>> pairs = paired({"a": dict.fromkeys(cells, 1.0), "b": dict.fromkeys(cells, 2.0)}, "a")
    >>> pairs[0].wins, pairs[0].problems_won, pairs[0].p
    (12, 6, 0.03125)
    """
    mine, pairs = costs.get(method, {}), []
    for other, line in costs.items():
        if other == method:
            continue
        both = [i for i in mine if i in line and math.isfinite(min(mine[i], line[i]))]
        votes = Counter[str]()
        for i in both:
            votes[i.partition("/")[0]] += (mine[i] < line[i]) - (mine[i] > line[i])
        wins, losses = sum(mine[i] < line[i] for i in both), sum(mine[i] > line[i] for i in both)
        won, lost = sum(v > 0 for v in votes.values()), sum(v < 0 for v in votes.values())
        p = float(binomtest(won, won + lost).pvalue) if won + lost else 1.0
        pairs.append(Pair(other, wins, losses, len(both) - wins - losses, won, lost, p, p))
    return holm(pairs)


def holm(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs by ascending p, with p corrected by Holm's step-down rule."""
    ordered = sorted(pairs, key=lambda pair: (pair.p, pair.other))
    largest, corrected = 0.0, []
    for rank, pair in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - rank) * pair.p))
        corrected.append(pair._replace(corrected=largest))
    return corrected
