"""What a run produces: a table of rows, and a directory with everything needed to examine or resume it."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import tempfile
import tomllib
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from torch import Tensor, nn

from caden.core import Problem, html_table
from caden.engine import checkpoint
from caden.engine.columns import AXES, COLUMNS, EFFORTS, MEASURES, to_target
from caden.engine.figures import draw, figures, picture
from caden.errors import CadenError, require_choice, require_integer

Row = dict[str, float | int | None]


@dataclass(repr=False)
class Result:
    """The end of a run."""

    x: Tensor  # (m, d)
    rows: list[Row]
    problem: Problem
    target: float | None = None
    directory: Path | None = None
    scalars: dict[str, float] = field(default_factory=dict)  # single numbers of the method's state, such as mu_z
    stopped: str = "rounds"  # why: "rounds", "target", "tolerance", "callback", "diverged", "interrupted"
    failure: str = ""  # the error message, if the run diverged or was interrupted

    @property
    def history(self) -> pd.DataFrame:
        """One row per recorded round; row 0 is the start."""
        return pd.DataFrame(self.rows)

    @property
    def mean(self) -> Tensor:
        """(d,) the mean of the local models."""
        return self.x.mean(0)

    def _model(self, agent: int | None) -> Tensor:
        if agent is None:
            return self.mean
        if require_integer("agent", agent) >= len(self.x):
            raise CadenError(f"`agent` must lie in 0..{len(self.x) - 1}, got {agent}.")
        return self.x[agent]

    def module(self, agent: int | None = None) -> nn.Module:
        """Return the user's model with the mean of the local models loaded, or with one agent's model."""
        return self.problem.module(self._model(agent))

    def save(self, path: Path | str, agent: int | None = None) -> None:
        """Write the model that `module` returns to a safetensors file, under its module's own names.

        `model.load_state_dict(safetensors.torch.load_file(path))` reads it back.
        """
        checkpoint.write_tensors(Path(path), self.problem.module(self._model(agent)).state_dict())

    def plot(self, *measures: str, x: str = "round", target: float | None = None) -> Any:
        """Draw the history as a matplotlib figure, which a notebook shows.

        Args:
            measures: columns of the history; by default all that are curves.
            x: column of the horizontal axis: "round", "communications", "gradients", "seconds" or "bytes".
            target: accuracy to mark; by default the run's own.
        """
        require_choice("column", x, AXES)
        for measure in measures:
            require_choice("column", measure, MEASURES)
        target = self.target if target is None else target
        curves = figures({"": [self.history]}, target)
        chosen = [replace(f, x=x) for f in curves if not measures or f.measure in measures]
        if not chosen:
            raise CadenError(f"The history has no values of {', '.join(measures)}.")
        return picture(chosen)

    def summary(self) -> dict[str, Any]:
        """Return the final value of every column, the best accuracy, and the cost of the target (None: not reached)."""
        return summarise(self.rows, self.target, self.stopped) | self.scalars

    def table(self) -> list[tuple[str, str]]:
        """Return the summary as labelled text, the most important numbers first."""
        summary = self.summary()
        lines = []
        if "accuracy" in summary:
            lines.append(("final mean accuracy", COLUMNS["accuracy"].text(summary["accuracy"])))
            lines.append(("best mean accuracy", COLUMNS["accuracy"].text(summary["best_accuracy"])))
        if summary.get("target") is not None:
            for name in ("round", "communications"):
                cost = summary[to_target(name)]
                label = f"{to_target(name).removesuffix('_to_target')} to {summary['target']:.0%}"
                lines.append((label, "not reached" if cost is None else COLUMNS[name].text(cost)))
        for name in (*_SHOWN, "mu_z", "seconds"):
            if summary.get(name) is not None:
                lines.append((COLUMNS[name].label, COLUMNS[name].text(summary[name])))
        return lines

    def __repr__(self) -> str:
        rounds = self.rows[-1]["round"] if self.rows else 0
        accuracy = self.rows[-1].get("accuracy") if self.rows else None
        end = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        return f"Result({len(self.x)} agents, {rounds} rounds{end}, stopped by {self.stopped})"

    def _repr_html_(self) -> str:
        return html_table(repr(self), dict(self.table()))


_SHOWN = ("objective", "relative_error", "consensus", "dual_sum", "round", "communications", "gradients", "rejected")


def summarise(rows: list[Row], target: float | None, stopped: str) -> dict[str, Any]:
    """Return what `Result.summary` does, for rows alone."""
    summary: dict[str, Any] = {**(rows[-1] if rows else {}), "stopped": stopped}
    if "accuracy" in summary:
        summary["best_accuracy"] = max(float(row["accuracy"] or 0) for row in rows)
        if target is not None:
            reached = [row for row in rows if float(row["accuracy"] or 0) >= target]
            summary["target"] = target
            summary |= {to_target(column): reached[0][column] if reached else None for column in EFFORTS}
    return summary


class Record(NamedTuple):
    """A run as read from its directory, without the problem; reports are made of these."""

    path: Path
    config: dict[str, Any]  # config.toml; empty for a run started from Python
    rows: list[Row]
    summary: dict[str, Any]
    versions: dict[str, str]

    @property
    def history(self) -> pd.DataFrame:
        """One row per recorded round; row 0 is the start."""
        return pd.DataFrame(self.rows)


class RunDirectory:
    """The files of a run: configuration, versions, metrics (append-only), checkpoint, weights, summary, picture."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics, self.checkpoint = path / "metrics.csv", path / "checkpoint.safetensors"
        self.weights, self.summary = path / "weights.safetensors", path / "summary.json"

    @classmethod
    def create(cls, path: Path, config: str, seed: int) -> RunDirectory:
        """Make a new directory with its configuration; an existing one is never touched."""
        if path.exists():
            raise CadenError(f"{path} already exists: choose another directory, or resume that run.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))  # renamed when it is complete
            if config:  # a run started from Python has none
                (fresh / "config.toml").write_text(config)
            (fresh / "versions.json").write_text(json.dumps(environment() | {"seed": str(seed)}, indent=1) + "\n")
            fresh.chmod(0o755)
            fresh.rename(path)
        except OSError as error:
            raise CadenError(f"Cannot create the run directory {path}: {error.strerror}.") from None
        return cls(path)

    def read(self, last: int) -> list[Row]:
        """Return the rows up to round `last`; a line cut off by a crash is ignored."""
        try:
            text = self.metrics.read_text()
            lines = text[: text.rfind("\n") + 1].splitlines()
            rows = [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(lines)]
            rows = [row for row in rows if int(row["round"] or 0) <= last]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            rows = []
        if not rows or rows[0]["round"] != 0:
            raise CadenError(f"{self.metrics} is missing or damaged; delete the checkpoint beside it to start again.")
        return rows

    def record(self) -> Record:
        """Read a run, complete or not."""
        try:
            config = self.path / "config.toml"
            versions = json.loads((self.path / "versions.json").read_text())
            table = tomllib.loads(config.read_text()) if config.exists() else {}
            summary = json.loads(self.summary.read_text()) if self.summary.exists() else {}
            if not isinstance(versions, dict) or not isinstance(summary, dict):
                raise ValueError
        except (OSError, ValueError):
            raise CadenError(f"{self.path} is not a run directory, or it is damaged.") from None
        rows = self.read(2**62)
        return Record(self.path, table, rows, summary or summarise(rows, table.get("target"), "unfinished"), versions)

    def keep(self, rows: list[Row]) -> None:
        """Rewrite the metrics with these rows only; rounds after the last checkpoint will be recorded again."""
        scratch = self.metrics.with_suffix(".tmp")
        with scratch.open("w", newline="") as file:
            for number, row in enumerate(rows):
                _write(file, row, header=number == 0)
        os.replace(scratch, self.metrics)

    def append(self, row: Row) -> None:
        """Append a row, after the header if it is the first."""
        fresh = not self.metrics.exists() or self.metrics.stat().st_size == 0
        with self.metrics.open("a", newline="") as file:
            _write(file, row, header=fresh)

    def summarise(self, result: Result) -> None:
        """Write the summary of a complete run, or of one that diverged."""
        scratch = self.summary.with_suffix(".tmp")
        scratch.write_text(json.dumps(jsonable(result.summary()), indent=1) + "\n")
        os.replace(scratch, self.summary)

    def finish(self, result: Result, picture: bool = True) -> None:
        """Write the picture, the summary, the model, and last, as a sign that the run is complete, the weights."""
        if picture:
            draw(figures({"": [result.history]}, result.target), self.path / "curves.png", title=_title(self.path))
        self.summarise(result)
        state = result.problem.state_dict(result.mean)
        if state is not None:
            checkpoint.write_tensors(self.path / "model.safetensors", state)
        checkpoint.save(self.weights, {"x": result.x, "mean": result.mean}, {"agents": len(result.x)})


def _title(run_dir: Path) -> str:
    """Name the method and the data of a run directory, as far as its configuration does."""
    try:
        config = tomllib.loads((run_dir / "config.toml").read_text())
        problem = config["problem"]
        return f"{config['method']['name']} on {problem.get('data', problem['name'])}, {problem['agents']} agents"
    except (OSError, ValueError, KeyError):
        return run_dir.name


def environment() -> dict[str, str]:
    """Return the versions of what computes, and the machine."""
    packages = ("caden-opt", "torch", "numpy", "scipy", "networkx", "scikit-learn", "pandas", "safetensors")
    machine = {"python": platform.python_version(), "machine": _processor(), "cores": str(os.cpu_count())}
    return {name: version(name) for name in packages} | machine


def _processor() -> str:
    """Return the processor's model if the system knows it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def jsonable(value: Any) -> Any:
    """Convert a value for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: jsonable(v) for k, v in value.items()}
    return [jsonable(v) for v in value] if isinstance(value, list) else value


def _number(text: str) -> float | int | None:
    if text == "":
        return None
    try:
        return int(text)
    except ValueError:
        return float(text)


def _write(file: Any, row: Row, header: bool) -> None:
    writer = csv.DictWriter(file, list(row), lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerow({k: "" if v is None else repr(v) for k, v in row.items()})
