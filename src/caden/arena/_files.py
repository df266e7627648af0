"""The standings as files: one table of all entries, the winners, profiles, paired tests and who did not take part."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from caden.arena._figure import draw_profiles
from caden.arena._outcomes import EFFORTS
from caden.arena._page import html, subject_of
from caden.arena._statistics import Pair, data_profile, paired, profile, ratio
from caden.arena._suite import Suite
from caden.arena._tournament import Entry, Standings
from caden.engine.run_directory import environment, jsonable
from caden.engine.statistics import Median
from caden.report.model import Table
from caden.report.tables import write_table

RATIOS = (1.0, 1.5, 2.0, 4.0, 8.0)  # of the best cost, in the table of profiles
BUDGETS = (5, 10, 20, 50, 100, 200)  # messages over every arc, in the table of data profiles


UNITS = {"communications": "communications", "bytes": "bytes", "gradients": "gradients", "time": "s"}


def _interval(cost: Median | None) -> str:
    return "not reached" if cost is None else cost.text()


def _columns(name: str, cost: Median | None) -> dict[str, float | None]:
    """Return a median and its interval as three columns; empty: not reached."""
    ends = ("", "_low", "_high")
    return (
        dict.fromkeys((name + end for end in ends), None) if cost is None else dict(zip(map(name.__add__, ends), cost))
    )


def winners(standings: Standings, effort: str = "", of: str = "caden") -> pd.DataFrame:
    """Return a row per cell: who reached the goal with the least effort, by which factor, and one method's place.

    By default, by the effort that counts in each cell.
    """
    columns = ["cell", "first", effort or "effort", "second", "margin", f"place of {of}", "reached", "n"]
    rows = []
    for cell in dict.fromkeys(entry.cell for entry in standings.entries if not entry.server):
        ranked = standings.ranking(cell, effort)
        groups: dict[float, list[Entry]] = {}  # methods of equal cost share a place
        for entry, cost in ranked:
            groups.setdefault(cost, []).append(entry)
        reached = [(cost, group) for cost, group in groups.items() if math.isfinite(cost)]
        names = [" = ".join(entry.method for entry in group) for _, group in reached[:2]] + ["", ""]
        costs = {entry.method: cost for entry, cost in ranked}
        mine = costs.get(of)
        rank = "-" if mine is None else "not reached" if math.isinf(mine) else 1 + sum(c < mine for c in costs.values())
        counts = effort or standings.main[cell]
        interval = reached[0][1][0].effort(counts) if reached else None
        margin = f"{ratio(reached[1][0], reached[0][0]):.2f}" if len(reached) > 1 and reached[0][0] > 0 else ""
        count = f"{sum(math.isfinite(cost) for _, cost in ranked)} of {len(ranked)}"
        seeds = len(ranked[0][0].outcomes)
        spent = _interval(interval) + (f" {UNITS[counts]}" if interval and not effort else "")
        rows.append((str(cell), names[0] or "nobody", spent, names[1], margin, rank, count, seeds))
    return pd.DataFrame(rows, columns=columns)


def profiles(standings: Standings, effort: str = "") -> pd.DataFrame:
    """Return for each method the share of its instances solved within some multiples of the best effort."""
    return _shares(profile(standings.costs(effort)), {f"within {t:g}x": t for t in RATIOS}, "within 2x")


def data_profiles(standings: Standings, suite: Suite) -> pd.DataFrame:
    """Return for each method the share of its instances solved with at most so many messages over every arc."""
    arcs: dict[str, float] = {}
    for cell in standings.cells():
        config = suite.experiment(cell, "caden")
        count = 2 * len(config.build_graph(config.problem["agents"]).edges)
        arcs |= {f"{cell}/{seed}": count for seed, _ in enumerate(suite.seeds)}
    costs = standings.costs("communications")
    return _shares(data_profile(costs, arcs), {f"within {b}": b for b in BUDGETS}, "within 50")


def _shares(values: Mapping[str, Sequence[float]], limits: Mapping[str, float], by: str) -> pd.DataFrame:
    """Return for each method the shares of its values within limits, sorted by one of them."""
    rows = []
    for method, line in values.items():
        shares = [sum(v <= limit for v in line) / len(line) for limit in limits.values()]
        solved = sum(map(math.isfinite, line)) / len(line)
        rows.append((method, *(f"{share:.0%}" for share in (*shares, solved)), len(line)))
    table = pd.DataFrame(rows, columns=["method", *limits, "solved", "n"])
    return table.sort_values([by, "method"], key=_sortable, ascending=[False, True])


def _sortable(column: pd.Series[Any]) -> pd.Series[Any]:
    return column.str.rstrip("%").astype(int) if str(column.name).startswith("within") else column


def pairs(standings: Standings, method: str, effort: str = "") -> pd.DataFrame:
    """Return the sign tests of a method against the others, over cells."""
    table = pd.DataFrame(paired(standings.costs(effort, seeds=False), method), columns=Pair._fields)
    return table.assign(n=table["wins"] + table["losses"] + table["ties"])


def document(standings: Standings) -> dict[str, Any]:
    """Return everything as one JSON object."""
    return {
        "cells": [entry.table() for entry in standings.entries],
        "excluded": standings.excluded,
        "environment": environment(),
    }


def write(standings: Standings, suite: Suite, folder: Path, mode: str = "") -> dict[str, Any]:
    """Write the page and the tables, and return everything as one JSON object."""
    everything = document(standings)
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    (folder / "arena.json").write_text(json.dumps(jsonable(everything), indent=1) + "\n")
    (folder / "arena.html").write_text(html(standings, suite, mode), encoding="utf-8")
    entries = pd.DataFrame(
        {
            **e.cell._asdict(),
            "method": e.method,
            "server": "yes" if e.server else "no",
            "reached": sum(o.reached for o in e.outcomes),
            "n": len(e.outcomes),
            **{column: value for name in EFFORTS for column, value in _columns(name, e.effort(name)).items()},
            "parameters": json.dumps(e.parameters),
        }
        for e in standings.entries
    )
    tables = {"entries": entries, "excluded": pd.DataFrame(standings.excluded)}
    if standings.entries:
        first = subject_of(standings)
        draw_profiles(standings, folder / "profiles.png")
        tables |= {"pairs": pairs(standings, first), "data_profiles": data_profiles(standings, suite)}
        tables |= {"winners": winners(standings, of=first), "profiles": profiles(standings)}
        for effort in EFFORTS:
            tables |= {
                f"winners_{effort}": winners(standings, effort, first),
                f"profiles_{effort}": profiles(standings, effort),
            }
    for name, cells in tables.items():
        write_table(Table(name, name.replace("_", ", "), cells), folder / "tables")
    return everything
