"""Many runs as one piece of work: found again by their content, resumed where they stopped, with the time left."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import caden
from caden.config import Experiment, experiment
from caden.core import Problem
from caden.errors import CadenError, Diverged
from caden.graphs import Graph
from caden.history import Record, Row, RunDirectory


def digest(config: Experiment) -> str:
    """A name for what a run computes; how often it is checkpointed does not count."""
    content = config.model_dump(exclude_defaults=True, exclude={"checkpoint_every", "compare", "tune"})
    text = json.dumps([caden.__version__, content], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


class Store:
    """Runs under one folder. What is complete there is read, what was interrupted goes on, the rest is run."""

    def __init__(self, folder: Path, progress: bool | None = None):
        self.folder, self._progress = folder, progress
        self._built: tuple[str, tuple[Problem, Graph]] | None = None
        self.seen: dict[Path, Record] = {}  # what was asked for, in order

    def path(self, config: Experiment) -> Path:
        """Where the run of this experiment is, or will be."""
        what = config.problem.get("data", config.problem["name"])
        name = f"{config.method['name']}-{what}-{digest(config)}"
        return self.folder / name.replace(":", ".").replace("/", ".")

    def find(self, config: Experiment) -> Record | None:
        """The record of a complete run (one that diverged is complete, too)."""
        place = RunDirectory(self.path(config))
        return place.record() if place.summary.exists() else None

    def build(self, config: Experiment) -> tuple[Problem, Graph]:
        """Problem and graph of an experiment; those of the last one are kept."""
        key = json.dumps([config.problem, config.graph, config.seed, config.dtype, config.device], sort_keys=True)
        if self._built is None or self._built[0] != key:
            self._built = None  # the old data go before the new ones come
            self._built = key, config.model_copy(deep=True).build()[1:]
        return self._built[1]

    def run(self, title: str, plans: Mapping[str, Experiment]) -> dict[str, Record]:
        """The records of all experiments; those that are not there yet are run first, in the given order."""
        found = {name: self.find(config) for name, config in plans.items()}
        todo = {name: config for name, config in plans.items() if found[name] is None}
        with _Bar(title, sum(config.rounds for config in todo.values()), len(todo), self._progress) as bar:
            for name, config in todo.items():
                bar.begin(name)
                found[name] = self.find(config) or self._one(config, bar)  # two names may mean the same run
                bar.end(config.rounds, found[name])
        records = {name: record for name, record in found.items() if record is not None}
        self.seen |= {record.path: record for record in records.values()}
        return records

    def _one(self, config: Experiment, bar: _Bar) -> Record:
        place = RunDirectory(self.path(config))
        begun = place.path.exists()
        config = experiment(place.path / "config.toml", defaults={}) if begun else config.model_copy(deep=True)
        try:
            config.run(place.path, begun, self.build(config), progress=False, picture=False, callbacks=[bar.row])
        except Diverged:
            if not place.summary.exists():  # before the first round: nothing to show, nothing to keep
                raise
        except CadenError as error:
            raise CadenError(f"{place.path.name}: {error}") from None
        place.checkpoint.unlink(missing_ok=True)  # large, and of no more use
        return place.record()


class _Bar:
    """Rounds over a whole plan: a bar on a terminal, else a line on standard error per run that has ended."""

    def __init__(self, title: str, rounds: int, runs: int, show: bool | None):
        console = Console(stderr=True, force_terminal=show or None)
        on = console.is_terminal if show is None else show
        self._lines, self._runs, self._number, self._done = not on and show is None, runs, 0, 0
        self._title, self._name, self._began = title, "", 0.0
        self._bar = Progress(
            TextColumn(f"{title} {{task.fields[text]}}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not on or not rounds,
            transient=True,
        )
        self._task = self._bar.add_task("", total=max(rounds, 1), text="")

    def begin(self, name: str) -> None:
        self._number, self._name, self._began = self._number + 1, name, time.perf_counter()
        self._bar.update(self._task, text=f"{self._number}/{self._runs} {name}")

    def row(self, row: Row, state: Any) -> None:
        """A callback for `simulate`."""
        accuracy = f" {float(row['accuracy'] or 0):.2%}" if "accuracy" in row else ""
        text = f"{self._number}/{self._runs} {self._name} round {row['round']}{accuracy}"
        self._bar.update(self._task, completed=self._done + int(row["round"] or 0), text=text)

    def end(self, rounds: int, record: Record | None) -> None:
        self._done += rounds
        self._bar.update(self._task, completed=self._done)
        if self._lines and record is not None:
            end = record.summary
            accuracy = f", best {end['best_accuracy']:.2%}" if "best_accuracy" in end else ""
            reached = end.get("rounds_to_target")
            reached = "" if reached is None else f", {end['target']:.0%} in {reached}"
            print(
                f"{self._title} {self._number}/{self._runs} {self._name}: {end['round']} rounds{accuracy}{reached}"
                f" ({time.perf_counter() - self._began:.0f} s)",
                file=sys.stderr,
                flush=True,
            )

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
