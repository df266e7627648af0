"""Tables as files: CSV, LaTeX, Markdown."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from caden.report.model import Table


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
