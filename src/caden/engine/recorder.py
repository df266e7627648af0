"""Recording a run: rows of its history, and a directory with metrics, checkpoints and the final model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from caden.engine.checkpoint import Checkpoints
from caden.engine.history import Result, Row, RunDirectory
from caden.engine.metrics import measure
from caden.engine.run import Run


def full_row(run: Run) -> Row:
    """Return a row about all agents: counters, metrics and what the problem adds."""
    network, transport = run.network, run.network.transport
    mine = {"gradients": run.problem.gradients, **run.counts, "wire_bytes": transport.wire_bytes}
    counts = dict(zip(mine, map(int, transport.reduce(list(mine.values()), "sum"))))
    sent = {"wire_bytes": counts.pop("wire_bytes")}
    measured = measure(run)
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
    }


class Recorder:
    """Collects the rows of a run and, in the first process, writes its directory, if there is one."""

    def __init__(self, run: Run, directory: Path | None = None, row: Callable[[Run], Row] = full_row):
        self.run, self._row = run, row
        self.rows: list[Row] = []
        self.run_dir = RunDirectory(directory) if directory is not None else None
        self._checkpoints = None if directory is None else Checkpoints(directory, run.network.transport)
        self._writes = self.run_dir if run.network.transport.rank == 0 else None

    def load(self) -> tuple[dict[str, Tensor], dict[str, float]] | None:
        """Return the checkpoint in the directory, if there is one."""
        return self._checkpoints.load() if self._checkpoints else None

    def create(self, config: str, seed: int) -> None:
        """Create the directory of a new run."""
        if self._writes:
            RunDirectory.create(self._writes.path, config, seed)

    def reopen(self) -> None:
        """Continue after the last checkpoint: later rows are dropped, and will be recorded again."""
        if self.run_dir:
            self.rows = self.run_dir.read(self.run.index) if self.run.index else []
        if self._writes:
            self._writes.keep(self.rows)

    def record(self) -> Row:
        """Measure and write a row."""
        row = self._row(self.run)
        self.rows.append(row)
        if self._writes:
            self._writes.append(row)
        return row

    def save(self, tensors: Mapping[str, Tensor] = MappingProxyType({}), **numbers: float) -> None:
        """Write a checkpoint, with additions of the caller."""
        if self._checkpoints:
            own = self.run.flatten()
            self._checkpoints.save({**own[0], **tensors}, own[1] | numbers)

    def _result(self, target: float | None, stopped: str, failure: str = "") -> Result:
        run, folder = self.run, self.run_dir.path if self.run_dir else None
        x = run.network.transport.gather(run.state.x)
        return Result(x, self.rows, run.problem.whole, target, folder, run.scalars(), stopped, failure)

    def failed(self, target: float | None, stopped: str, why: str) -> Result:
        """Return the run so far; if it diverged, it cannot be resumed, and its summary is written."""
        result = self._result(target, stopped, why)
        if self._writes and stopped == "diverged":
            self._writes.summarise(result)
        return result

    def finish(self, target: float | None, stopped: str, picture: bool) -> Result:
        """Return the complete run, and write its last files."""
        result = self._result(target, stopped)
        if self._writes:
            self._writes.finish(result, picture)
        return result
