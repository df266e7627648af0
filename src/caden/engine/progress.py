"""Progress bars for the terminal; elsewhere a run is silent and a plan writes a line per run."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from caden.engine.history import Record, Row


class _Bar:
    """A bar with one task, shown if asked for, or by default on a terminal."""

    def __init__(self, total: int, show: bool | None, *columns: ProgressColumn):
        console = Console(stderr=True, force_terminal=show or None)
        self._on = console.is_terminal if show is None else show
        self._bar = Progress(*columns, console=console, disable=not self._on or not total, transient=True)
        self._task = self._bar.add_task("", total=total, text="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class ProgressBar(_Bar):
    """Round, loss, accuracy, consensus, communications and the time left."""

    def __init__(self, rounds: int, agents: int, show: bool | None):
        self._agents = agents
        text = TextColumn("{task.fields[text]}")
        bar = BarColumn(bar_width=None)
        super().__init__(
            rounds, show, TextColumn("round"), MofNCompleteColumn(), bar, text, TimeRemainingColumn(compact=True)
        )

    def update(self, round: int, row: Row) -> None:
        """Show the newest row."""
        if not self._on:
            return
        parts = [f"loss {float(row['objective'] or 0) / self._agents:.4g}"]
        if row.get("accuracy") is not None:
            parts.append(f"acc {float(row['accuracy'] or 0):.2%}")
        parts.append(f"apart {float(row['consensus'] or 0):.1e}")
        parts.append(f"{int(row['communications'] or 0):,} msg")
        self._bar.update(self._task, completed=round, text="  ".join(parts))


class PlanBar(_Bar):
    """Rounds over a whole plan of runs, with the time left; off the terminal a line on standard error per run."""

    def __init__(self, title: str, rounds: int, runs: int, show: bool | None):
        text, left = TextColumn(f"{title} {{task.fields[text]}}"), TimeRemainingColumn()
        super().__init__(rounds, show, text, BarColumn(bar_width=None), TextColumn("left"), left)
        self._lines = not self._on and show is None
        self._title, self._runs, self._ended, self._rounds = title, runs, 0, 0
        self._name, self._began = "", time.perf_counter()

    def begin(self, name: str) -> None:
        """A run starts."""
        self._name, self._began = name, time.perf_counter()
        self._bar.update(self._task, text=f"{self._ended + 1}/{self._runs} {name}")

    def row(self, row: Row, state: Any) -> None:
        """A callback for `simulate`."""
        accuracy = f" {float(row['accuracy'] or 0):.2%}" if "accuracy" in row else ""
        text = f"{self._ended + 1}/{self._runs} {self._name} round {row['round']}{accuracy}"
        self._bar.update(self._task, completed=self._rounds + int(row["round"] or 0), text=text)

    def end(self, name: str, rounds: int, record: Record) -> None:
        """A run has ended, perhaps before its time."""
        self._rounds, self._ended = self._rounds + rounds, self._ended + 1
        self._bar.update(self._task, completed=self._rounds, text=f"{self._ended}/{self._runs} {name}")
        if self._lines:
            end = record.summary
            accuracy = f", best {end['best_accuracy']:.2%}" if "best_accuracy" in end else ""
            reached = end.get("rounds_to_target")
            reached = "" if reached is None else f", {end['target']:.0%} in {reached}"
            said = f"{name}: {end['round']} rounds{accuracy}{reached}"
            took = time.perf_counter() - self._began
            print(f"{self._title} {self._ended}/{self._runs} {said} ({took:.0f} s)", file=sys.stderr, flush=True)
            self._began = time.perf_counter()
