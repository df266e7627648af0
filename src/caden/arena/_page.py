"""The page of the arena: one HTML file that works offline, with its data and plotly.js inside."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from caden.arena._outcomes import EFFORTS
from caden.arena._statistics import paired
from caden.arena._suite import Suite
from caden.arena._tournament import Entry, Standings
from caden.engine.run_directory import environment
from caden.methods import CARDS
from caden.report.page import script_json


def html(standings: Standings, suite: Suite, mode: str = "") -> str:
    """Return the page as text; `mode` is the option of the command with which its cells are run, such as " --quick"."""
    from plotly.offline import get_plotlyjs

    subject = subject_of(standings)
    data = {
        "cells": [_entry(entry, suite) for entry in standings.entries],
        "excluded": standings.excluded,
        "pairs": [pair._asdict() for pair in paired(standings.costs(seeds=False), subject)],
        "environment": environment(),
        "subject": subject,
        "mode": mode,
    }
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return page.replace("<!--plotly-->", get_plotlyjs()).replace("<!--data-->", script_json(data))


def subject_of(standings: Standings) -> str:
    """Return the method whose places are shown: one from a file, else CADEN, else the first that takes part."""
    methods = dict.fromkeys(entry.method for entry in standings.entries)
    if own := next((method for method in methods if method not in CARDS), None):
        return own
    return "caden" if "caden" in methods or not methods else next(iter(methods))


def _entry(entry: Entry, suite: Suite) -> dict[str, Any]:
    config = suite.experiment(entry.cell, "caden")
    goal = f"accuracy {config.target}" if config.target is not None else f"relative error {config.tolerance}"
    return {
        **entry.table(),
        "seeds": len(entry.outcomes),
        "main": suite.effort(entry.cell),
        "goal": goal,
        "costs": {name: [_known(cost) for cost in entry.costs(name)] for name in EFFORTS},
        "arcs": 2 * len(config.build_graph(config.problem["agents"]).edges),
        "curve": entry.outcomes[0].curve,
    }


def _known(cost: float) -> float | None:
    return cost if math.isfinite(cost) else None
