"""The page: one HTML file that works without a network, with its data and plotly.js inside."""

import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from caden.engine.columns import AXES, MEASURES
from caden.engine.figures import Figure, style, write_figure
from caden.engine.history import jsonable
from caden.errors import CadenError
from caden.graphs import Graph
from caden.report.model import Report, Section, Table
from caden.report.tables import write_table


def write(report: Report, folder: Path) -> Path:
    """Write the page and, under figures/ and tables/, every figure and table as files; returns the page's path."""
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
    page = folder / "report.html"
    page.write_text(html(report), encoding="utf-8")
    return page


def html(report: Report) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    figures = [figure for section in report.sections for figure in section.figures]
    parts = {
        "title": escape(report.title),
        "summary": "".join(f"<li>{escape(line)}</li>" for line in report.summary),
        "contents": "".join(f'<a href="#s{n}">{escape(s.title)}</a>' for n, s in enumerate(report.sections)),
        "sections": "".join(_section(n, section) for n, section in enumerate(report.sections)),
        "graph": _graph(report.graph) if report.graph else "",
        "about": "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in report.about.items()),
        "axes": "".join(f'<option value="{key}">{escape(name)}</option>' for key, name in AXES.items()),
        "data": _json({figure.name: _data(figure) for figure in figures}),
        "axis-names": _json(AXES),
        "plotly": get_plotlyjs(),
    }
    for key, value in parts.items():
        template = template.replace(f"<!--{key}-->", value)
    return template


def _json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(jsonable(value), separators=(",", ":")).replace("<", "\\u003c")


def _numbers(values: np.ndarray | None) -> list[float] | None:
    return None if values is None else [float(f"{v:.5g}") for v in values]


def _data(figure: Figure) -> dict[str, Any]:
    lines = []
    for number, label in enumerate(figure.lines):
        colour, dash = style(number)
        series = {axis: line for axis in AXES if (line := figure.series(label, axis)) is not None}
        drawn = {
            axis: {"x": _numbers(s.x), "y": _numbers(s.y), "low": _numbers(s.low), "high": _numbers(s.high)}
            for axis, s in series.items()
        }
        lines.append({"label": label, "colour": colour, "dash": dash, "symbol": number % 8, "series": drawn})
    column = MEASURES[figure.measure]
    accuracy = figure.measure == "accuracy"
    target = figure.target if accuracy else None
    scales = {"log": column.log, "logx": figure.log_x, "percent": accuracy}
    return {"lines": lines, "y": column.title, "target": target, **scales}


def _section(number: int, section: Section) -> str:
    text = "".join(f"<p>{escape(line)}</p>" for line in section.text)
    tables = "".join(_table(table) for table in section.tables)
    figures = "".join(_figure(figure) for figure in section.figures)
    head = f'<section id="s{number}"><h2>{escape(section.title)}</h2>'
    return f'{head}{text}{tables}<div class="grid">{figures}</div></section>'


def _figure(figure: Figure) -> str:
    command = f"<code>{escape(figure.command)}</code>" if figure.command else ""
    return (
        f'<figure><h3>{escape(figure.title)}</h3><label><input type="checkbox" data-log="{figure.name}"> log y</label>'
        f'<div class="plot" id="{figure.name}" role="img" aria-label="{escape(figure.title)}"></div>'
        f"<figcaption>{escape(figure.note)} {command}</figcaption></figure>"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(str(name))}</th>" for name in table.cells.columns)
    rows = ("".join(f"<td>{escape(str(c))}</td>" for c in row) for row in table.cells.to_numpy().tolist())
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll"><table id="{table.name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def _graph(graph: Graph) -> str:
    """The graph as an inline drawing that takes the page's colours."""
    import networkx as nx

    net: nx.Graph[int] = nx.Graph(graph.edges.tolist())
    net.add_nodes_from(range(graph.agents))
    place = nx.kamada_kawai_layout(net) if graph.agents <= 200 else nx.spring_layout(net, seed=0)
    at = {i: (160 + 140 * x, 160 + 140 * y) for i, (x, y) in place.items()}
    lines = "".join(
        f'<line x1="{at[i][0]:.1f}" y1="{at[i][1]:.1f}" x2="{at[j][0]:.1f}" y2="{at[j][1]:.1f}"/>'
        for i, j in graph.edges.tolist()
    )
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9"/><text x="{x:.1f}" y="{y + 3:.1f}">{i}</text>'
        for i, (x, y) in sorted(at.items())
    )
    words = f"{graph.agents} agents, {len(graph.edges)} edges, degrees {graph.degrees.min()} to {graph.degrees.max()}"
    return (
        f'<section><h2>The graph</h2><svg class="net" viewBox="0 0 320 320" role="img" aria-label="{words}">'
        f"{lines}{dots}</svg><p>{words}.</p></section>"
    )
