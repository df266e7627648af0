"""docs/choosing.md says nothing that the committed results of the arena do not show."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest

from caden import arena

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "choosing.md").read_text()
ENTRIES = pd.read_csv(ROOT / "docs" / "arena" / "entries.csv")
ENTRIES["cell"] = ENTRIES[["problem", "graph", "condition"]].agg("/".join, axis=1)


def cost(text):
    return math.inf if text.startswith("not reached") else float(text.split(" ")[0].replace(",", ""))


def advice():
    """(method, cell, factor) of each row of the first table."""
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| ([^|]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    return [(method, cell, float(factor)) for method, cells, factor in rows for cell in re.findall("`(.+?)`", cells)]


@pytest.mark.parametrize(("method", "cell", "factor"), advice())
def test_a_recommended_method_is_within_its_factor_of_the_fewest_communications(method, cell, factor):
    here = ENTRIES[(ENTRIES["cell"] == cell) & (ENTRIES["server"] == "no")]
    costs = dict(zip(here["method"], map(cost, here["communications"])))
    assert 0 < costs[method] <= factor * min(value for value in costs.values() if value > 0)


def test_there_is_advice_and_every_cell_of_the_slice_was_run():
    assert len(advice()) >= 20
    suite = arena.load_suite()
    assert set(ENTRIES["cell"]) == set(map(str, suite.cells(suite.slices["committed"])))


def test_the_count_of_first_and_second_places_is_that_of_the_results():
    winners = pd.read_csv(ROOT / "docs" / "arena" / "winners_communications.csv")
    places = winners["place of caden"].astype(str).tolist()
    stated = re.search(r"first in (\d+) and second in (\d+) of (\d+) cells", PAGE)
    assert stated is not None
    assert [int(n) for n in stated.groups()] == [places.count("1"), places.count("2"), len(places) - places.count("-")]
