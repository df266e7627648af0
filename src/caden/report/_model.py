"""What a report is made of: sections of text, figures and tables, all functions of histories."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd

from caden.graphs import Graph

AXES = {
    "round": "rounds",
    "communications": "vectors sent",
    "gradients": "gradient evaluations",
    "seconds": "seconds",
    "bytes": "bytes sent",
}
# Column of a history -> (name, whether its axis is logarithmic).
MEASURES = {
    "accuracy": ("mean test accuracy", False),
    "objective": ("sum of the local losses", True),
    "relative_error": ("relative error: |Σ∇f|² + Σ|xᵢ−xᵢ₊₁|²", True),
    "consensus": ("root mean square distance from the mean", True),
    "lyapunov": ("Lyapunov function V", True),
    "dual_sum": ("norm of the sum of the duals", True),
    "mean_lyapunov": ("running mean of V", True),
}
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


@dataclass
class Table:
    """Cells as they are shown; the header is the columns' names."""

    name: str
    title: str
    cells: pd.DataFrame
    note: str = ""


@dataclass
class Section:
    """A heading and what stands under it."""

    title: str
    text: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass
class Report:
    """A page and the files beside it."""

    title: str
    summary: list[str]
    sections: list[Section]
    graph: Graph | None = None
    about: dict[str, str] = field(default_factory=dict)  # versions, machine, command


def style(number: int) -> tuple[str, str]:
    """Colour and dash of the line with this number."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def running_mean(history: pd.DataFrame) -> pd.DataFrame:
    """The history with the mean of V over the rounds so far; rounds that were not recorded are interpolated."""
    if "lyapunov" not in history or history["lyapunov"].isna().all():
        return history
    rounds = history["round"].to_numpy(int)
    every = np.interp(np.arange(rounds[-1] + 1), rounds, history["lyapunov"].to_numpy(float))
    mean = np.cumsum(every) / np.arange(1, len(every) + 1)
    return history.assign(mean_lyapunov=mean[rounds])
