"""The picture of the arena: performance profiles by every effort."""

from __future__ import annotations

import math
from pathlib import Path

from caden.arena._outcomes import EFFORTS
from caden.arena._statistics import profile
from caden.arena._tournament import Standings
from caden.engine.figures import blank, styles

SHOWN = 8  # methods with a colour
LAST = 30.0  # of the axis
WORDS = {"communications": "communications", "bytes": "bytes", "gradients": "gradients", "time": "simulated time"}


def draw_profiles(standings: Standings, path: Path) -> None:
    """Draw which share of its instances each method solves within a multiple of the best effort."""
    ratios = {effort: profile(standings.costs(effort)) for effort in EFFORTS}
    areas = {m: sum(_area(ratios[effort][m]) for effort in EFFORTS) for m in ratios[EFFORTS[0]]}
    counts = {m: len(ratios[EFFORTS[0]][m]) for m in areas}
    few = {m: counts[m] < max(counts.values()) / 2 for m in areas}  # such shares would not be comparable
    order = sorted(areas, key=lambda m: (few[m], -areas[m], m))
    colours = styles(order[:SHOWN])
    drawing = blank(11, 8.5)
    for axis, effort in zip(drawing.subplots(2, 2).flat, EFFORTS):
        for method in reversed(order):  # the best on top
            values = ratios[effort][method]
            solved = [r for r in values if math.isfinite(r)]
            shares = [0.0, *(n / len(values) for n in range(1, len(solved) + 1))]
            colour, dash = colours.get(method, ("#d8d8d8", "solid"))
            label = f"{method} (n = {len(values)})" if method in colours else None
            look = {"color": colour, "linestyle": "--" if dash == "dash" else "-", "label": label}
            axis.step([1.0, *solved, LAST], [*shares, shares[-1]], where="post", **look)
        axis.set(xscale="log", xlim=(1, LAST), ylim=(0, 1.02), title=f"by {WORDS[effort]}")
        axis.set(xlabel="multiple of the best effort", ylabel="share of instances solved")
        axis.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        axis.grid(alpha=0.25)
    handles, labels = axis.get_legend_handles_labels()
    drawing.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=4, fontsize=9)
    title = "tuned for few communications; n: cells x seeds in which a method takes part; grey: all other methods"
    drawing.suptitle(title, fontsize=10)
    drawing.savefig(path, dpi=100)


def _area(ratios: list[float]) -> float:
    """Return the area under a profile from 1 to LAST on a logarithmic axis."""
    return sum(max(0.0, 1 - math.log(r, LAST)) for r in ratios) / len(ratios)
