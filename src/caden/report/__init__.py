"""Reports: one page that works offline, and every figure and table as files."""

from caden.report._draw import draw, markdown, write_figure, write_table
from caden.report._html import html, write
from caden.report._model import AXES, MEASURES, Figure, Report, Section, Table, running_mean
from caden.report._runs import figures, labelled, load, of_runs, parameters, results

__all__ = [
    "AXES",
    "MEASURES",
    "Figure",
    "Report",
    "Section",
    "Table",
    "draw",
    "figures",
    "html",
    "labelled",
    "load",
    "markdown",
    "of_runs",
    "parameters",
    "results",
    "running_mean",
    "write",
    "write_figure",
    "write_table",
]
