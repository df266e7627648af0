"""A progress bar for the terminal; silent everywhere else."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from caden.history import Row


class ProgressBar:
    """Round, loss, accuracy, consensus, communications and the time left."""

    def __init__(self, rounds: int, agents: int, show: bool | None):
        console = Console(stderr=True, force_terminal=show or None)
        self._on = console.is_terminal if show is None else show
        self._agents = agents
        self._bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not self._on,
            transient=True,
        )
        self._task = self._bar.add_task("", total=rounds, text="")

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

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
