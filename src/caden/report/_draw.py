"""Figures and tables as files: PNG, SVG, CSV, LaTeX, Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from caden.report._model import AXES, MEASURES, Figure, Table, style

_LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def draw(figures: Sequence[Figure], *paths: Path) -> None:
    """Draw figures side by side into each of the files (PNG or SVG, by their names)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(2, len(figures))
    rows = (len(figures) + columns - 1) // columns
    size = (5.2 * columns, 3.4 * rows)
    picture, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis, figure in zip(axes.flat, figures):
        name, logarithmic = MEASURES[figure.measure]
        positive = False
        for number, label in enumerate(figure.lines):
            line = figure.series(label, figure.x)
            if line is None:
                continue
            colour, dash = style(number)
            positive |= bool((line.y > 0).any())
            axis.plot(line.x, line.y, _LINES[dash], color=colour, linewidth=1.5, label=label.replace("$", r"\$"))
            if line.low is not None and line.high is not None:
                axis.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
        if logarithmic and positive:
            axis.set_yscale("log")
        if figure.log_x:
            axis.set_xscale("log")
        if figure.target is not None and figure.measure == "accuracy":
            axis.axhline(figure.target, color="grey", linewidth=1, linestyle=":")
            place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom", "fontsize": 8}
            axis.annotate(f"target {figure.target:.0%}", (1, figure.target), **place)
        axis.set(title=figure.title, xlabel=AXES[figure.x], ylabel="" if figure.title == name else name)
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if 1 < len(figure.lines) <= 14:  # more names would leave no room; the page has them all
            axis.legend(fontsize=8)
    for axis in axes.flat[len(figures) :]:
        axis.set_visible(False)
    for path in paths:
        picture.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        picture.set_layout_engine("none")  # the places are found; to find them again takes as long as to draw
    plt.close(picture)


def write_figure(figure: Figure, folder: Path) -> None:
    """PNG, SVG and CSV of a figure."""
    draw([figure], folder / f"{figure.name}.png", folder / f"{figure.name}.svg")
    figure.long().to_csv(folder / f"{figure.name}.csv", index=False, lineterminator="\n", float_format="%.6g")


def write_table(table: Table, folder: Path) -> None:
    """CSV, LaTeX and Markdown of a table."""
    table.cells.to_csv(folder / f"{table.name}.csv", index=False, lineterminator="\n")
    (folder / f"{table.name}.tex").write_text(latex(table))
    (folder / f"{table.name}.md").write_text(markdown(table.cells))


def markdown(cells: pd.DataFrame) -> str:
    """A table in Markdown."""
    rows = [list(cells.columns), ["---"] * len(cells.columns), *cells.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"


def latex(table: Table) -> str:
    """A table in LaTeX, for the booktabs package."""

    def row(cells: list[str]) -> str:
        return " & ".join(_escape(str(cell)) for cell in cells) + r" \\"

    body = [row(r) for r in table.cells.astype(str).to_numpy().tolist()]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escape(table.title)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.cells.columns) - 1)}}}",
        r"\toprule",
        row(list(table.cells.columns)),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


_LATEX = {c: f"\\{c}" for c in "&%$#_{}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def _escape(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)
