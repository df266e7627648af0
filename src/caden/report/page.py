"""The page: one HTML file that works offline, with its data and plotly.js inside."""

import json
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from caden.engine.columns import AXES, MEASURES
from caden.engine.figures import Figure, styles, write_figure
from caden.engine.run_directory import jsonable
from caden.errors import CadenError
from caden.report.model import Report, Section, Table
from caden.report.tables import write_table


def write(report: Report, folder: Path) -> Path:
    """Write the page and, under figures/ and tables/, every figure and table as files; return the page's path."""
    try:
        for name in ("figures", "tables"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CadenError(f"Cannot write the report to {folder}: {error.strerror}.") from None
    for section in report.sections:
        for figure in section.figures:
            write_figure(figure, folder / "figures")
        for table in section.tables:
            write_table(table, folder / "tables")
        for drawing in section.drawings:
            (folder / "figures" / f"{drawing.name}.svg").write_text(drawing.svg, encoding="utf-8")
    page = folder / "report.html"
    page.write_text(html(report), encoding="utf-8")
    return page


def html(report: Report) -> str:
    """Return the whole page as text."""
    from plotly.offline import get_plotlyjs

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    figures = [figure for section in report.sections for figure in section.figures]
    parts = {
        "title": escape(report.title),
        "setting": _definitions(report.setting),
        "summary": "".join(f"<li>{escape(line)}</li>" for line in report.summary),
        "contents": "".join(f'<a href="#s{n}">{escape(s.title)}</a>' for n, s in enumerate(report.sections)),
        "sections": "".join(_section(n, section) for n, section in enumerate(report.sections)),
        "graph": f"<section><h2>Graph</h2>{report.graph.svg()}</section>" if report.graph else "",
        "about": _definitions(report.about),
        "axes": "".join(f'<option value="{key}">{escape(name)}</option>' for key, name in AXES.items()),
        "data": script_json({figure.name: _data(figure) for figure in figures}),
        "axis-names": script_json(AXES),
        "plotly": get_plotlyjs(),
    }
    for key, value in parts.items():
        template = template.replace(f"<!--{key}-->", value)
    return template


def _definitions(entries: Mapping[str, str]) -> str:
    pairs = (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in entries.items())
    return "".join(pairs)


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(jsonable(value), separators=(",", ":")).replace("<", "\\u003c")


def _numbers(values: np.ndarray | None) -> list[float] | None:
    return None if values is None else [float(f"{v:.5g}") for v in values]


def _data(figure: Figure) -> dict[str, Any]:
    lines = []
    for number, (label, (colour, dash)) in enumerate(styles(figure.lines).items()):
        series = {axis: line for axis in AXES if (line := figure.series(label, axis)) is not None}
        drawn = {
            axis: {"x": _numbers(s.x), "y": _numbers(s.y), "low": _numbers(s.low), "high": _numbers(s.high)}
            for axis, s in series.items()
        }
        lines.append(
            {"label": figure.caption(label), "colour": colour, "dash": dash, "symbol": number % 8, "series": drawn}
        )
    column = MEASURES[figure.measure]
    accuracy = figure.measure == "accuracy"
    target = figure.target if accuracy else None
    scales = {"log": column.log, "logx": figure.log_x, "percent": accuracy}
    return {"lines": lines, "y": column.label, "target": target, **scales}


def _section(number: int, section: Section) -> str:
    text = "".join(f"<p>{escape(line)}</p>" for line in section.text)
    tables = "".join(_table(table, section.title) for table in section.tables)
    figures = "".join(_figure(figure) for figure in section.figures)
    figures += "".join(
        f"<figure><h3>{escape(d.title)}</h3>{d.svg}<figcaption>{escape(d.note)}</figcaption></figure>"
        for d in section.drawings
    )
    head = f'<section id="s{number}"><h2>{escape(section.title)}</h2>'
    return f'{head}{text}{tables}<div class="grid">{figures}</div></section>'


def _figure(figure: Figure) -> str:
    command = f"<code>{escape(figure.command)}</code>" if figure.command else ""
    return (
        f'<figure><h3>{escape(figure.title)}</h3><label><input type="checkbox" data-log="{figure.name}"> log y</label>'
        f'<div class="plot" id="{figure.name}" role="img" aria-label="{escape(figure.title)}"></div>'
        f"<figcaption>{escape(figure.note)} {command}</figcaption></figure>"
    )


def _table(table: Table, heading: str) -> str:
    """A table under a heading, whose columns of numbers are on the right and whose text is on the left."""
    cells = [[str(cell) for cell in row] for row in table.cells.to_numpy().tolist()]
    numeric = [all(map(_is_number, column)) for column in zip(*cells)] or [False] * len(table.cells.columns)
    sides = [' class="number"' if number else "" for number in numeric]
    head = "".join(f"<th{side}>{escape(str(name))}</th>" for name, side in zip(table.cells.columns, sides))
    rows = ("".join(f"<td{side}>{escape(cell)}</td>" for cell, side in zip(row, sides)) for row in cells)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    title = f"<h3>{escape(table.title)}</h3>" if table.title != heading else ""
    return (
        f'{title}<div class="scroll" tabindex="0"><table id="{table.name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def _is_number(text: str) -> bool:
    """Whether a cell holds a number, perhaps with separators, a percent sign or a range, or none ("-")."""
    return bool(re.fullmatch(r"-|[\d., ]*\d[\d.,]*(e[+-]?\d+)?\s*%?( to [\d.,]+)?", text.strip()))
