"""Figures: curves of histories, drawn into files or notebooks."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from caden.engine.columns import AXES, MEASURES
from caden.engine.statistics import medians

# Okabe and Ito's colours, which colour-blind readers can tell apart; from the eighth line on they repeat, dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
DASHES = ("solid", "dash", "dot", "dashdot")


class Series(NamedTuple):
    """A line against one axis; for several seeds the median and its 95 % bootstrap interval."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass
class Figure:
    """Lines of one measure. A line is a list of histories that differ only in their seed."""

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
        """Return a line against an axis, or None if no history has both columns."""
        histories = [h.dropna(subset=[self.measure]) for h in self.lines[label] if {axis, self.measure} <= set(h)]
        histories = [h for h in histories if len(h)]
        if not histories:
            return None
        if len(histories) == 1:
            return Series(histories[0][axis].to_numpy(float), histories[0][self.measure].to_numpy(float))
        start, end = max(h[axis].iloc[0] for h in histories), min(h[axis].iloc[-1] for h in histories)
        grid = np.unique(np.concatenate([h[axis].to_numpy(float) for h in histories]))
        grid = grid[(grid >= start) & (grid <= end)]
        curves = [np.interp(grid, h[axis].to_numpy(float), h[self.measure].to_numpy(float)) for h in histories]
        return Series(grid, *medians(np.stack(curves)))

    def caption(self, label: str) -> str:
        """Return a line's name in the legend, with the number of its seeds if there are several."""
        runs = sum({self.x, self.measure} <= set(history) for history in self.lines[label])
        return f"{label} (n = {runs})" if runs > 1 else label

    def long(self) -> pd.DataFrame:
        """Return everything that is drawn as one table: line, number of the run, the axes, the measure."""
        parts = []
        for label, histories in self.lines.items():
            for number, history in enumerate(histories):
                if self.measure in history:
                    columns = [c for c in (*AXES, self.measure) if c in history]
                    parts.append(history[columns].assign(line=label, run=number))
        table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["line", "run"])
        return table[["line", "run", *(c for c in table if c not in ("line", "run"))]]


def styles(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the colour and dash of each line: the same for the same labels in files, pages and terminals."""
    order = sorted(labels, key=lambda label: (not label.startswith("caden"), label))
    return {n: (COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]) for i, n in enumerate(order)}


def figures(lines: dict[str, list[pd.DataFrame]], target: float | None = None) -> list[Figure]:
    """Return a figure for every measure that one of the histories has."""
    present = {c for group in lines.values() for h in group for c in h if not h[c].isna().all()}
    return [Figure(n, column.title, n, lines, target=target) for n, column in MEASURES.items() if n in present]


_LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def blank(width: float, height: float) -> Any:
    """Return an empty matplotlib figure that notebooks show; no backend is chosen for the process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Base

    class Picture(Base):
        def _repr_png_(self) -> bytes:
            """A notebook shows the figure also where pyplot was never imported."""
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    drawing = Picture(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawing)
    return drawing


def picture(figures: Sequence[Figure], title: str = "") -> Any:
    """Draw figures side by side, with one legend for all, into a matplotlib figure that notebooks show."""
    columns = min(2, len(figures))
    rows = (len(figures) + columns - 1) // columns
    drawing = blank(5.2 * columns, 3.2 * rows + 0.5)
    axes = drawing.subplots(rows, columns, squeeze=False)
    for axis, figure in zip(axes.flat, figures):
        _draw_lines(axis, figure)
    for axis in axes.flat[len(figures) :]:
        axis.set_visible(False)
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}
    if 1 < len(handles) <= 14:  # more names would leave no room; the page has them all
        entry = 45 + 5 * max(map(len, handles))  # points, about
        columns = max(1, min(4, len(handles), int(72 * drawing.get_figwidth() / entry)))
        drawing.legend(handles.values(), handles, loc="outside lower center", ncols=columns, fontsize=9)
    if title:
        drawing.suptitle(title, fontsize=12)
    return drawing


def draw(figures: Sequence[Figure], *paths: Path, title: str = "") -> None:
    """Draw figures side by side into each of the files (PNG or SVG, by their names)."""
    drawing = picture(figures, title)
    for path in paths:
        drawing.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        drawing.set_layout_engine("none")  # computing the layout again would take as long as drawing


def _draw_lines(axis: Any, figure: Figure) -> None:
    """Draw one figure into matplotlib's axes."""
    column, any_positive = MEASURES[figure.measure], False
    for label, (colour, dash) in styles(figure.lines).items():
        line = figure.series(label, figure.x)
        if line is None:
            continue
        any_positive |= bool((line.y > 0).any())
        name = figure.caption(label).replace("$", r"\$")
        axis.plot(line.x, line.y, _LINES[dash], color=colour, linewidth=1.6, label=name)
        if line.low is not None and line.high is not None:
            axis.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
    if column.log and any_positive:
        axis.set_yscale("log")
    if figure.log_x:
        axis.set_xscale("log")
    _readable_ticks(axis, figure)
    if figure.target is not None and figure.measure == "accuracy":
        axis.axhline(figure.target, color="grey", linewidth=1, linestyle=":", zorder=0)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
        text = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "top", "fontsize": 8, "bbox": box}
        below = {"xytext": (0, -3), "textcoords": "offset points"}
        axis.annotate(f"target {figure.target:.0%}", (0.995, figure.target), **text, **below)
    axis.set(title=figure.title, xlabel=AXES[figure.x], ylabel="" if figure.title == column.title else column.label)
    axis.title.set_fontsize(10)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _readable_ticks(axis: Any, figure: Figure) -> None:
    """Few ticks at round numbers, percentages as such, thousands as k, and plain numbers on short log axes."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, PercentFormatter

    if figure.measure == "accuracy":
        low, high = axis.get_ylim()
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if high - low > 0.05 else 1))
    if not figure.log_x:
        axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=figure.x != "seconds"))
        if figure.x != "seconds":
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if axis.get_yscale() == "log":
        low, high = axis.get_ylim()
        if low > 0 and high / low > 100:
            axis.yaxis.set_major_locator(LogLocator(numticks=7))
        else:  # less than two decades: label 1, 2 and 5 times a power of ten
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter("")


def write_figure(figure: Figure, folder: Path) -> None:
    """Write a figure as PNG, SVG and CSV."""
    draw([figure], folder / f"{figure.name}.png", folder / f"{figure.name}.svg")
    figure.long().to_csv(folder / f"{figure.name}.csv", index=False, lineterminator="\n", float_format="%.6g")
