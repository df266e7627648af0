"""What `caden list` prints."""

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from caden import data, schedules
from caden.graphs import GRAPHS
from caden.methods import METHODS
from caden.problems import PROBLEMS
from caden.solvers import SOLVERS


def _registries() -> dict[str, Mapping[str, Any]]:
    """Everything that `caden list` knows, by kind."""
    return {
        "methods": METHODS,
        "problems": PROBLEMS,
        "graphs": GRAPHS,
        "solvers": SOLVERS,
        "schedules": schedules.SCHEDULES,
        "partitions": data.PARTITIONS,
        "data": data.DATASETS | data.TEXTS,
    }


def _signature_and_summary(entry: str | Callable[..., Any]) -> tuple[str, str]:
    """Return the parameters and the first paragraph of the documentation."""
    if isinstance(entry, str):
        return "", entry
    hidden = ("dtype", "device")
    parameters = [
        name if p.default is p.empty else f"{name}={p.default!r}"
        for name, p in inspect.signature(entry).parameters.items()
        if name not in hidden
    ]
    return ", ".join(parameters), (inspect.getdoc(entry) or "").split("\n\n")[0].replace("\n", " ")


def _policy(method: Callable[..., Any]) -> str:
    """Return what a method does about sleeping agents: the part of its module's text after "Sleeping agents:"."""
    for paragraph in (sys.modules[method.__module__].__doc__ or "").split("\n\n"):
        _, marker, policy = " ".join(paragraph.split()).partition("Sleeping agents: ")
        if marker:
            return f"Sleeping agents: {policy}"
    return ""


def _entries(kind: str) -> dict[str, dict[str, str]]:
    """Return the parameters and documentation of everything of a kind."""
    entries = {}
    for name, entry in sorted(_registries()[kind].items()):
        parameters, summary = _signature_and_summary(entry)
        entries[name] = {"parameters": parameters, "about": summary}
        if kind == "methods":
            entries[name]["sleeping"] = _policy(entry)
    return entries


def listing(kinds: Sequence[str], json_wanted: bool) -> None:
    """Print what there is, by kind."""
    listed = {kind: _entries(kind) for kind in kinds}
    if json_wanted:
        print(json.dumps(listed))
        return
    for kind, entries in listed.items():
        table = Table("name", "description", title=kind, title_justify="left", expand=True, show_lines=True)
        for name, entry in entries.items():
            lines = [entry["about"], entry.get("sleeping", ""), f"[dim]{entry['parameters']}[/dim]"]
            table.add_row(name, "\n".join(line for line in lines if line and line != "[dim][/dim]"))
        Console().print(table)
