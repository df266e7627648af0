"""Tables as files: CSV, LaTeX, Markdown."""

import re
from pathlib import Path

import pandas as pd

from caden.report.model import Table


def write_table(table: Table, folder: Path) -> None:
    """Write a table as CSV, LaTeX and Markdown."""
    table.cells.to_csv(folder / f"{table.name}.csv", index=False, lineterminator="\n")
    (folder / f"{table.name}.tex").write_text(latex(table))
    (folder / f"{table.name}.md").write_text(markdown(table.cells))


def markdown(cells: pd.DataFrame) -> str:
    """Return a table in Markdown."""
    rows = [list(cells.columns), ["---"] * len(cells.columns), *cells.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"


def latex(table: Table) -> str:
    """Return a table in LaTeX, for the booktabs package."""
    title = re.sub(r"([&%$#_{}])", r"\\\1", table.title)
    columns = "l" + "r" * (len(table.cells.columns) - 1)
    text: str = table.cells.astype(str).to_latex(index=False, escape=True, caption=title, column_format=columns)
    return text
