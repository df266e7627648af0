"""What a report consists of: sections of text, figures and tables."""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from caden.engine.figures import Figure
from caden.graphs import Graph


@dataclass
class Table:
    """Cells as they are shown; the column names are the header."""

    name: str
    title: str
    cells: pd.DataFrame
    note: str = ""


@dataclass
class Drawing:
    """A picture that is not a curve."""

    name: str
    title: str
    svg: str
    note: str = ""


@dataclass
class Section:
    """A heading and its content."""

    title: str
    text: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)


@dataclass
class Report:
    """A page and the files beside it."""

    title: str
    summary: list[str]
    sections: list[Section]
    setting: dict[str, str] = field(default_factory=dict)  # what all runs share: data, graph, participation ...
    graph: Graph | None = None
    about: dict[str, str] = field(default_factory=dict)  # versions, machine, command


def running_mean(history: pd.DataFrame) -> pd.DataFrame:
    """Add the mean of V over the rounds so far; rounds that were not recorded are interpolated."""
    if "lyapunov" not in history or history["lyapunov"].isna().all():
        return history
    rounds = history["round"].to_numpy(int)
    every = np.interp(np.arange(rounds[-1] + 1), rounds, history["lyapunov"].to_numpy(float))
    mean = np.cumsum(every) / np.arange(1, len(every) + 1)
    return history.assign(mean_lyapunov=mean[rounds])
