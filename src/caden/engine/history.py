"""What a run leaves: a table of rows, and a directory that holds everything needed to look at it or go on."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import tempfile
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from torch import Tensor, nn

from caden.core import Problem
from caden.engine import checkpoint
from caden.engine.columns import EFFORTS, to_target
from caden.engine.figures import draw, figures
from caden.errors import CadenError

Row = dict[str, float | int | None]


@dataclass
class Result:
    """The end of a run."""

    x: Tensor  # (m, d)
    rows: list[Row]
    problem: Problem = field(repr=False)
    target: float | None = None
    directory: Path | None = None
    scalars: dict[str, float] = field(default_factory=dict)  # single numbers of the method's state, such as mu_z
    stopped: str = "rounds"  # why: "rounds", "target", "tolerance", "callback", "diverged", "interrupted"
    failure: str = ""  # what was said if it diverged or was interrupted

    @property
    def history(self) -> pd.DataFrame:
        """A row per recorded round; row 0 is the start."""
        return pd.DataFrame(self.rows)

    @property
    def mean(self) -> Tensor:
        """(d,) the mean of the local models."""
        return self.x.mean(0)

    def module(self) -> nn.Module:
        """The user's model with the mean of the local models loaded."""
        return self.problem.module(self.mean)

    def summary(self) -> dict[str, Any]:
        """Final value of every column, best accuracy, and what the target took (None if it was not reached)."""
        return summarise(self.rows, self.target, self.stopped) | self.scalars


def summarise(rows: list[Row], target: float | None, stopped: str) -> dict[str, Any]:
    """What rows come to."""
    found: dict[str, Any] = {**(rows[-1] if rows else {}), "stopped": stopped}
    if "accuracy" in found:
        found["best_accuracy"] = max(float(row["accuracy"] or 0) for row in rows)
        if target is not None:
            reached = [row for row in rows if float(row["accuracy"] or 0) >= target]
            found["target"] = target
            found |= {to_target(column): reached[0][column] if reached else None for column in EFFORTS}
    return found


class Record(NamedTuple):
    """A run as its directory tells it, without the problem: what reports are made of."""

    path: Path
    config: dict[str, Any]  # of config.toml; empty for a run started from Python
    rows: list[Row]
    summary: dict[str, Any]
    versions: dict[str, str]

    @property
    def history(self) -> pd.DataFrame:
        """A row per recorded round; row 0 is the start."""
        return pd.DataFrame(self.rows)


class RunDirectory:
    """config.toml, versions.json, metrics.csv (append-only), checkpoint, final weights, summary and picture."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics, self.checkpoint = path / "metrics.csv", path / "checkpoint.safetensors"
        self.weights, self.summary = path / "weights.safetensors", path / "summary.json"

    @classmethod
    def create(cls, path: Path, config: str, seed: int) -> RunDirectory:
        """A new directory with its configuration; an existing one is never touched."""
        if path.exists():
            raise CadenError(f"{path} exists already; choose another directory, or resume that run.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))  # gets its name when it is complete
            if config:  # a run started from Python has no text that could make it again
                (fresh / "config.toml").write_text(config)
            (fresh / "versions.json").write_text(json.dumps(environment() | {"seed": str(seed)}, indent=1) + "\n")
            fresh.chmod(0o755)
            fresh.rename(path)
        except OSError as error:
            raise CadenError(f"Cannot make the run directory {path}: {error.strerror}.") from None
        return cls(path)

    def read(self, last: int) -> list[Row]:
        """The rows written up to round `last`; a line cut off by a crash does not count."""
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
        """What a run, complete or not, has left here."""
        try:
            config = self.path / "config.toml"
            versions = json.loads((self.path / "versions.json").read_text())
            table = tomllib.loads(config.read_text()) if config.exists() else {}
            summary = json.loads(self.summary.read_text()) if self.summary.exists() else {}
            if not isinstance(versions, dict) or not isinstance(summary, dict):
                raise ValueError
        except (OSError, ValueError):
            raise CadenError(f"{self.path} is not a run directory, or a damaged one.") from None
        rows = self.read(2**62)
        return Record(self.path, table, rows, summary or summarise(rows, table.get("target"), "unfinished"), versions)

    def keep(self, rows: list[Row]) -> None:
        """Rewrite the metrics with these rows only: what was recorded after the last checkpoint is done again."""
        scratch = self.metrics.with_suffix(".tmp")
        with scratch.open("w", newline="") as file:
            for number, row in enumerate(rows):
                _write(file, row, header=number == 0)
        os.replace(scratch, self.metrics)

    def append(self, row: Row) -> None:
        """Add a row; the first one brings the header."""
        fresh = not self.metrics.exists() or self.metrics.stat().st_size == 0
        with self.metrics.open("a", newline="") as file:
            _write(file, row, header=fresh)

    def summarise(self, result: Result) -> None:
        """Write the summary: of a complete run, or of one that diverged."""
        scratch = self.summary.with_suffix(".tmp")
        scratch.write_text(json.dumps(jsonable(result.summary()), indent=1) + "\n")
        os.replace(scratch, self.summary)

    def finish(self, result: Result, picture: bool = True) -> None:
        """Picture, summary and, as the sign that the run is complete, the weights."""
        if picture:
            draw(figures({"": [result.history]}, result.target), self.path / "curves.png")
        self.summarise(result)
        checkpoint.save(self.weights, {"x": result.x, "mean": result.mean}, {"agents": len(result.x)})


def environment() -> dict[str, str]:
    """Versions and machine."""
    packages = ("caden-opt", "torch", "numpy", "scipy", "networkx", "scikit-learn", "pandas", "safetensors")
    machine = {"python": platform.python_version(), "machine": _processor(), "cores": str(os.cpu_count())}
    return {name: version(name) for name in packages} | machine


def _processor() -> str:
    """The processor's model where the system tells it, else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def jsonable(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: they become null."""
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
