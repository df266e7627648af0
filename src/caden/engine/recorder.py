"""Recording a run: rows of its history, and a directory with metrics, checkpoints and the final model."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from caden.engine.checkpoint import Checkpoints, Part
from caden.engine.history import Result, Row
from caden.engine.metrics import measure, on_test_data
from caden.engine.run import Run
from caden.engine.run_directory import RunDirectory
from caden.errors import CadenError, RunError


def full_row(run: Run, exact: bool = True, last: bool = True) -> Row:
    """Return a row about all agents: counters, metrics and what the problem adds."""
    network, transport = run.network, run.network.transport
    mine = {"gradients": run.problem.gradients, **run.counts, "wire_bytes": transport.wire_bytes}
    counts = dict(zip(mine, map(int, transport.reduce(list(mine.values()), "sum"))))
    sent = {"wire_bytes": counts.pop("wire_bytes")}
    measured = measure(run, exact, last)
    standard = ("objective", "relative_error", "consensus", "lyapunov", "dual_sum")
    return {
        "round": run.index,
        "seconds": run.seconds,
        "communications": network.communications,
        "bytes": network.bytes,
        **counts,
        **{name: measured.pop(name) for name in standard},
        "active": run.active,
        **measured,
        **(sent if transport.world > 1 else {}),
        **({"read_seconds": run.problem.whole.waited[0]} if run.problem.whole.waited else {}),
        **(run.timer.columns() if run.timer is not None else {}),
        **({"outside": len(run.outside)} if run.outside else {}),
    }


class Recorder:
    """Collects the rows of a run and, in the first process, writes its directory, if there is one."""

    def __init__(
        self, run: Run, directory: Path | None = None, row: Callable[..., Row] = full_row, exact: bool = False
    ):
        self.run, self._row, self._exact = run, row, exact or not run.problem.stochastic
        self.rows: list[Row] = []
        self._completed = -1  # the round whose row `complete` has measured
        self.run_dir = RunDirectory(directory) if directory is not None else None
        self._checkpoints = None if directory is None else Checkpoints(directory, run.network.transport)
        self._writes = self.run_dir if run.network.transport.rank == 0 else None
        self._method = {"name": run.method.name, **run.method.parameters()}

    def load(self) -> list[Part] | None:
        """Take the directory's lock and return the parts of its newest checkpoint, if there is one."""
        if self.run_dir is None or self._checkpoints is None:
            return None
        if self._writes:
            self._writes.lock.acquire()
        parts = self._checkpoints.load()
        if parts is not None:
            self.run_dir.require_unchanged(parts[0].facts)
            if parts[0].facts.get("clock") != self._clock():
                raise CadenError(f"{self.run_dir.path} was begun with another clock, or without one.")
            self._warn_of_changes(parts[0].facts.get("method", self._method))
        return parts

    def _warn_of_changes(self, before: Mapping[str, Any]) -> None:
        """Warn if the method is not that of the checkpoint, as far as its parameters show."""
        both = [(k, before.get(k), self._method.get(k)) for k in sorted({*before, *self._method})]
        changes = ", ".join(f"{name} = {new!r} (was {old!r})" for name, old, new in both if new != old)
        if changes and self._writes:
            warnings.warn(f"{self._writes.path} is resumed with another method: {changes}.", stacklevel=5)

    def _clock(self) -> str | None:
        return None if self.run.timer is None else self.run.timer.clock.fingerprint()

    def create(self, config: str, seed: int) -> None:
        """Create the directory of a new run."""
        if self._writes:
            self._writes.create(config, seed, self.run.network.graph)

    def reopen(self, part: Part | None) -> None:
        """Continue after a checkpoint, or from the start: later rows are dropped and will be recorded again."""
        if self.run_dir and part is not None:
            size = part.facts.get("metrics", {}).get("bytes")  # known in the part of the first process
            self.rows = [] if size == 0 else self.run_dir.read(size, last=self.run.index)
        if self._writes:
            self._writes.cut(part.facts["metrics"]["bytes"] if part is not None else 0)

    def record(self) -> Row:
        """Measure and write a row."""
        row = self._row(self.run, self._exact, self.run.index == self.run.rounds)
        self.rows.append(row)
        if self._writes:
            with explained(self._writes.path):
                self._writes.append(row)
        return row

    def complete(self) -> None:
        """Measure the last row on all test data, if the run ends early; before a checkpoint relies on that row."""
        if not self.rows or self._exact or self.run.index in (self._completed, self.run.rounds):
            return
        gather = self.run.network.transport.gather if self._row is full_row else None
        self.rows[-1] |= on_test_data(self.run, True, gather)
        self._completed = self.run.index
        if self._writes:
            with explained(self._writes.path):
                self._writes.replace_last(self.rows[-1])

    def save(self, tensors: Mapping[str, Tensor] = MappingProxyType({}), sync: bool = True, **numbers: float) -> None:
        """Write a checkpoint with the caller's additions; the metrics it depends on are on disk before it."""
        if self._checkpoints is None or self.run_dir is None:
            return
        own = self.run.flatten()
        with explained(self.run_dir.path):
            facts: dict[str, Any] = {"hosted": self.run.network.layout.hosted.tolist(), "method": self._method}
            if self.run.timer is not None:
                facts["clock"] = self._clock()
            if self._writes:
                facts |= self._writes.facts(sync)
            self._checkpoints.save({**own[0], **tensors}, own[1] | numbers, facts, sync)

    def _result(self, target: float | None, stopped: str, failure: str = "") -> Result:
        run, folder = self.run, self.run_dir.path if self.run_dir else None
        x = run.network.transport.gather(run.state.x)
        times = None if run.timer is None else run.timer.times()
        end = run.scalars(), stopped, failure, run.outside, times
        return Result(x, self.rows, run.problem.whole, target, folder, *end)

    def failed(self, target: float | None, stopped: str, why: str) -> Result:
        """Return the run so far; if it diverged, it cannot be resumed, and its summary is written."""
        result = self._result(target, stopped, why)
        if self._writes and stopped == "diverged":
            self._writes.summarise(result)
        return result

    def finish(self, target: float | None, stopped: str, picture: bool) -> Result:
        """Return the complete run and write its last files."""
        self.complete()
        result = self._result(target, stopped)
        if self._writes:
            with explained(self._writes.path):
                self._writes.finish(result, picture)
            self._writes.lock.release()
        return result

    def close(self) -> None:
        """Release the directory's lock."""
        if self._writes:
            self._writes.lock.release()


@contextmanager
def explained(run_dir: Path) -> Iterator[None]:
    """Turn a file-system error into one line; what is on disk stays unchanged."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(
            f"Cannot write {error.filename or run_dir}: {reason}. The run can be resumed from its last checkpoint."
        ) from None
