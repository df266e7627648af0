"""docs/choosing.md says nothing that the committed results of the arena do not show."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest

from caden import arena

ROOT = Path(__file__).parents[1]
SUITE = arena.load_suite()
PAGE = (ROOT / "docs" / "choosing.md").read_text()
ENTRIES = pd.read_csv(ROOT / "docs" / "arena" / "entries.csv")
ENTRIES["cell"] = ENTRIES[["problem", "graph", "condition"]].agg("/".join, axis=1)


def advice():
    """(method, cell, factor) of each row of the first table."""
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| ([^|]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    return [(method, cell, float(factor)) for method, cells, factor in rows for cell in re.findall("`(.+?)`", cells)]


def costs(cell):
    """{method: median of what counts in the cell; infinite: not reached} of the methods without a server."""
    effort = SUITE.effort(arena.Cell(*cell.split("/")))
    here = ENTRIES[(ENTRIES["cell"] == cell) & (ENTRIES["server"] == "no")]
    return dict(zip(here["method"], here[effort].fillna(math.inf)))


@pytest.mark.parametrize(("method", "cell", "factor"), advice())
def test_a_recommended_method_is_within_its_factor_of_the_least_effort(method, cell, factor):
    found = costs(cell)
    assert 0 < found[method] <= factor * min(value for value in found.values() if value > 0) < math.inf


def test_there_is_advice_and_every_cell_of_the_slice_was_run():
    assert len(advice()) >= 20
    cells = set(map(str, SUITE.cells(SUITE.slices["committed"])))
    assert set(ENTRIES["cell"]) == cells
    named = {cell for cell in re.findall("`([^`/]+/[^`/]+/[^`/]+)`", PAGE) if cell in cells}
    assert named == cells  # those in which the advice fails, too


@pytest.mark.parametrize("effort", ["", "_bytes", "_gradients", "_time"])
def test_the_counts_of_first_and_second_places_are_those_of_the_results(effort):
    places = pd.read_csv(ROOT / "docs" / "arena" / f"winners{effort}.csv")["place of caden"].astype(str).tolist()
    words = {"": "By what counts in the cell", "_bytes": "By bytes", "_gradients": "By gradients", "_time": "By time"}
    stated = re.search(
        words[effort] + r"[^.]*?first in (\d+) and second in (\d+) of (\d+) cells", " ".join(PAGE.split())
    )
    assert stated is not None
    assert [int(n) for n in stated.groups()] == [places.count("1"), places.count("2"), len(places) - places.count("-")]
