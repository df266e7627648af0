"""Measure the speed of this library on this machine, as ratios of times taken alternately in one process.

Absolute times mean little on shared machines. The ratio of two times taken one right after the other, repeatedly,
depends on the code. Comparisons of whole methods first pass a gate, where the results must agree; the plain loops of
networks are compared in the tests.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import torch

from caden._tensor import compiled
from caden._tensor.memory import keep_freed_memory
from caden.engine.run_directory import environment
from caden.experiments.bench._many import many, million
from caden.experiments.bench._measure import Measure as Measure
from caden.experiments.bench._measure import Rounds as Rounds
from caden.experiments.bench._networks import networks
from caden.experiments.bench._paper import paper
from caden.experiments.bench._small import CASES as CASES
from caden.experiments.bench._small import against_torch, small

PARTS: dict[str, Callable[[int], Iterator[Measure]]] = {
    "many": many,
    "million": million,
    "networks": networks,
    "paper": paper,
    "small": lambda repeats: chain(small(repeats), against_torch(repeats) if compiled.installed() else ()),
}


def run(parts: list[str], repeats: int) -> Iterator[Measure]:
    """Yield the measures of some parts, one part after the other."""
    keep_freed_memory()
    for part in parts:
        yield from PARTS[part](repeats)


def remember(file: Path, measures: list[Measure]) -> dict[str, float]:
    """Append the measures to a history file; return the previous median of each."""
    last: dict[str, float] = {}
    if file.exists():
        for line in file.read_text().splitlines():
            last |= {name: statistics.median(ratios) for name, ratios in json.loads(line)["ratios"].items()}
    entry = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        **environment(),
    }
    entry["ratios"] = {m.name: m.ratios for m in measures}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(entry) + "\n")
    return last
