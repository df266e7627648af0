"""Progress bars for terminals and notebooks; elsewhere a run is silent and a plan prints one line per run."""

import importlib
import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from caden.engine.history import Row
from caden.engine.run_directory import Record


class _Bar:
    """A bar with one task, shown on request, or by default on a terminal."""

    def __init__(self, total: float, show: bool | None, *columns: ProgressColumn):
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


class _NotebookBar:
    """A bar in a notebook: one HTML output that is updated in place, without widgets."""

    def __init__(self, rounds: int):
        ipython: Any = importlib.import_module("IPython.display")
        self._html, self._rounds, self._began, self._shown = ipython.HTML, rounds, time.monotonic(), 0.0
        self._handle = ipython.display(self._html(self._page(0, "")), display_id=True)

    def _page(self, round: int, text: str) -> str:
        head = f"<progress value='{round}' max='{self._rounds}' style='width:16em'></progress>"
        return f"<div style='white-space:nowrap'>{head} round {round}/{self._rounds} {text}</div>"

    def update(self, round: int, text: str) -> None:
        now = time.monotonic()
        if now - self._shown < 0.2 and round < self._rounds:
            return
        self._shown = now
        left = (now - self._began) / max(1, round) * (self._rounds - round)
        self._handle.update(self._html(self._page(round, f"{text} {left:.0f} s left" if round else text)))


def in_notebook() -> bool:
    """Return whether this code runs in a Jupyter kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class ProgressBar(_Bar):
    """Round, loss, accuracy, consensus, communications and the time left, on a terminal or in a notebook."""

    def __init__(self, rounds: int, agents: int, show: bool | None):
        self._agents = agents
        self._notebook = _NotebookBar(rounds) if show is not False and rounds and in_notebook() else None
        columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=None))
        text, left = TextColumn("{task.fields[text]}"), TimeRemainingColumn(compact=True)
        super().__init__(rounds, False if self._notebook else show, *columns, text, left)

    def update(self, round: int, row: Row) -> None:
        """Show the newest row."""
        if not self._on and self._notebook is None:
            return
        exact, seen = row["objective"], row.get("batch_loss")
        loss = float(seen or 0) if exact is None else float(exact) / self._agents
        parts = [f"loss {loss:.4g}"]
        if row.get("accuracy") is not None:
            parts.append(f"accuracy {float(row['accuracy'] or 0):.2%}")
        parts.append(f"consensus {float(row['consensus'] or 0):.1e}")
        parts.append(f"{int(row['communications'] or 0):,} communications")
        if self._notebook is not None:
            self._notebook.update(round, ", ".join(parts))
        else:
            self._bar.update(self._task, completed=round, text=" ".join(parts))


class PlanBar(_Bar):
    """Rounds over a whole plan of runs, with the time left; off the terminal one line per run on standard error."""

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
        accuracy = f" {float(row['accuracy'] or 0):.2%}" if row.get("accuracy") is not None else ""
        text = f"{self._ended + 1}/{self._runs} {self._name} round {row['round']}{accuracy}"
        self._bar.update(self._task, completed=self._rounds + int(row["round"] or 0), text=text)

    def end(self, name: str, rounds: int, record: Record) -> None:
        """A run has ended, perhaps early."""
        self._rounds, self._ended = self._rounds + rounds, self._ended + 1
        self._bar.update(self._task, completed=self._rounds, text=f"{self._ended}/{self._runs} {name}")
        if self._lines:
            end = record.summary
            accuracy = f", best {end['best_accuracy']:.2%}" if "best_accuracy" in end else ""
            reached = end.get("rounds_to_target")
            reached = "" if reached is None else f", {end['target']:.0%} in {reached}"
            outcome = f"{name}: {end['round']} rounds{accuracy}{reached}"
            seconds = time.perf_counter() - self._began
            print(f"{self._title} {self._ended}/{self._runs} {outcome} ({seconds:.0f} s)", file=sys.stderr, flush=True)
            self._began = time.perf_counter()


class CountBar(_Bar):
    """A share of known work with the time left; off the terminal a line whenever another tenth is done."""

    def __init__(self, title: str, total: float, show: bool | None = None):
        text, left = TextColumn(f"{title} {{task.fields[text]}}"), TimeRemainingColumn()
        super().__init__(total, show, text, BarColumn(bar_width=None), TextColumn("left"), left)
        self._lines = not self._on and show is None
        self._title, self._total, self._done, self._began = title, max(1.0, total), 0.0, time.perf_counter()

    def advance(self, text: str, amount: float) -> None:
        """Some of the work is done."""
        before, self._done = self._done, self._done + amount
        self._bar.update(self._task, completed=self._done, text=text)
        if self._lines and 10 * before // self._total < 10 * self._done // self._total:
            minutes = (time.perf_counter() - self._began) / 60
            share = f"{self._done / self._total:.0%}"
            print(f"{self._title} {share} after {minutes:.1f} minutes ({text})", file=sys.stderr, flush=True)
