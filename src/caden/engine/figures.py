"""Figures: lines of histories, drawn into files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from caden.engine.columns import AXES, MEASURES

# Okabe and Ito's colours, which colour-blind people can tell apart; a second turn is dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
DASHES = ("solid", "dash", "dot", "dashdot")


class Series(NamedTuple):
    """A line against one axis; with several seeds their mean, smallest and largest value."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass
class Figure:
    """Lines of one measure; a line is a list of histories that differ in their seed."""

    name: str  # of its files
    title: str
    measure: str
    lines: dict[str, list[pd.DataFrame]]
    x: str = "round"
    target: float | None = None
    note: str = ""
    command: str = ""
    log_x: bool = False

    def series(self, label: str, axis: str) -> Series | None:
        """A line against an axis; None if no history has both columns."""
        known = [h.dropna(subset=[self.measure]) for h in self.lines[label] if {axis, self.measure} <= set(h)]
        known = [h for h in known if len(h)]
        if not known:
            return None
        if len(known) == 1:
            return Series(known[0][axis].to_numpy(float), known[0][self.measure].to_numpy(float))
        start, end = max(h[axis].iloc[0] for h in known), min(h[axis].iloc[-1] for h in known)
        grid = np.unique(np.concatenate([h[axis].to_numpy(float) for h in known]))
        grid = grid[(grid >= start) & (grid <= end)]
        values = np.stack([np.interp(grid, h[axis].to_numpy(float), h[self.measure].to_numpy(float)) for h in known])
        return Series(grid, values.mean(0), values.min(0), values.max(0))

    def long(self) -> pd.DataFrame:
        """All that is drawn as one table: line, seed (a number), the axes, the measure."""
        parts = []
        for label, histories in self.lines.items():
            for number, history in enumerate(histories):
                if self.measure in history:
                    columns = [c for c in (*AXES, self.measure) if c in history]
                    parts.append(history[columns].assign(line=label, run=number))
        found = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["line", "run"])
        return found[["line", "run", *(c for c in found if c not in ("line", "run"))]]


def style(number: int) -> tuple[str, str]:
    """Colour and dash of the line with this number."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def figures(lines: dict[str, list[pd.DataFrame]], target: float | None = None) -> list[Figure]:
    """A figure of every measure that one of the histories has."""
    known = {c for group in lines.values() for h in group for c in h if not h[c].isna().all()}
    return [Figure(n, column.title, n, lines, target=target) for n, column in MEASURES.items() if n in known]


_LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def draw(figures: Sequence[Figure], *paths: Path) -> None:
    """Draw figures side by side into each of the files (PNG or SVG, by their names)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no backend is chosen for the rest of the process
    from matplotlib.figure import Figure as Picture

    columns = min(2, len(figures))
    rows = (len(figures) + columns - 1) // columns
    picture = Picture(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots(rows, columns, squeeze=False)
    for axis, figure in zip(axes.flat, figures):
        _draw_lines(axis, figure)
    for axis in axes.flat[len(figures) :]:
        axis.set_visible(False)
    for path in paths:
        picture.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        picture.set_layout_engine("none")  # the places are found; to find them again takes as long as to draw


def _draw_lines(axis: Any, figure: Figure) -> None:
    """One figure into matplotlib's axes."""
    column, positive = MEASURES[figure.measure], False
    for number, label in enumerate(figure.lines):
        line = figure.series(label, figure.x)
        if line is None:
            continue
        colour, dash = style(number)
        positive |= bool((line.y > 0).any())
        axis.plot(line.x, line.y, _LINES[dash], color=colour, linewidth=1.5, label=label.replace("$", r"\$"))
        if line.low is not None and line.high is not None:
            axis.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
    if column.log and positive:
        axis.set_yscale("log")
    if figure.log_x:
        axis.set_xscale("log")
    if figure.target is not None and figure.measure == "accuracy":
        axis.axhline(figure.target, color="grey", linewidth=1, linestyle=":")
        place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom", "fontsize": 8}
        axis.annotate(f"target {figure.target:.0%}", (1, figure.target), **place)
    axis.set(title=figure.title, xlabel=AXES[figure.x], ylabel="" if figure.title == column.title else column.title)
    axis.title.set_fontsize(10)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if 1 < len(figure.lines) <= 14:  # more names would leave no room; the page has them all
        axis.legend(fontsize=8)


def write_figure(figure: Figure, folder: Path) -> None:
    """PNG, SVG and CSV of a figure."""
    draw([figure], folder / f"{figure.name}.png", folder / f"{figure.name}.svg")
    figure.long().to_csv(folder / f"{figure.name}.csv", index=False, lineterminator="\n", float_format="%.6g")
