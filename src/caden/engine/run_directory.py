"""The directory of a run: everything needed to examine or resume it, in files that survive a power cut."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import platform
import tempfile
import tomllib
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from caden.engine import checkpoint, durable
from caden.engine.checkpoint import FORMAT
from caden.engine.figures import draw, figures
from caden.engine.history import Result, Row, summarise
from caden.engine.lock import DirectoryLock
from caden.errors import CadenError
from caden.graphs import Graph, from_edges

# Changing these in config.toml does not change the rounds that were already computed.
_MAY_CHANGE = ("rounds", "checkpoint_every", "tolerance", "stop_at_target", "compare", "tune")


class Record(NamedTuple):
    """A run as read from its directory, without the problem; reports are built from these."""

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
    """The files of a run: configuration, versions, graph, metrics, checkpoints, weights, summary and picture.

    Metrics are forced to disk before the checkpoint that relies on them. A checkpoint records how many bytes of metrics
    precede it, their digest, and that of the configuration.
    """

    def __init__(self, path: Path):
        self.path, self.lock = path, DirectoryLock(path)
        self.config, self.metrics, self.graph_file = path / "config.toml", path / "metrics.csv", path / "graph.json"
        self.weights, self.summary, self.model = (
            path / "weights.safetensors",
            path / "summary.json",
            path / "model.safetensors",
        )
        self._written, self._digest = 0, hashlib.blake2b(digest_size=16)  # of the metrics
        self._before_last, self._relied_on = 0, 0  # bytes before the last row, and those that a checkpoint relies on

    def create(self, config: str, seed: int, graph: Graph) -> None:
        """Create the directory with its configuration and graph; an existing one is never touched."""
        if self.path.exists():
            raise CadenError(f"{self.path} already exists: choose another directory, or resume that run.")
        facts = environment() | {"seed": str(seed), "format": str(FORMAT)}
        edges = {"name": graph.name, "agents": graph.agents, "edges": graph.edges.tolist()}
        texts = {"versions.json": json.dumps(facts, indent=1) + "\n", "graph.json": json.dumps(edges) + "\n"}
        if config:  # a run started from Python has none
            texts["config.toml"] = config
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=self.path.parent))  # renamed when it is complete
            for name, text in texts.items():
                durable.create(fresh / name, partial(Path.write_text, data=text, encoding="utf-8"))
                durable.sync(fresh / name)
            fresh.chmod(0o755)
            durable.sync_folder(fresh)
            durable.rename(fresh, self.path)
            durable.sync_folder(self.path.parent)
        except OSError as error:
            raise CadenError(f"Cannot create the run directory {self.path}: {error.strerror}.") from None
        self.lock.acquire()

    # Metrics.

    def append(self, row: Row) -> None:
        """Append a row, after a header if it is the first; later rows have the same columns."""
        text = io.StringIO()
        fields = self._head(4096).decode().partition("\n")[0].split(",") if self._written else list(row)
        writer = csv.DictWriter(text, fields, extrasaction="ignore", lineterminator="\n")
        if self._written == 0:
            writer.writeheader()
        writer.writerow({k: "" if row.get(k) is None else repr(row[k]) for k in fields})
        data = text.getvalue().encode()
        durable.append(self.metrics, data)
        self._before_last = self._written
        self._written += len(data)
        self._digest.update(data)

    def cut(self, size: int) -> None:
        """Drop everything after the first `size` bytes of the metrics."""
        if self.metrics.exists():
            durable.truncate(self.metrics, size)
        self._written, self._digest = size, hashlib.blake2b(self._head(size), digest_size=16)
        self._relied_on = size

    def replace_last(self, row: Row) -> None:
        """Write another last row, unless a checkpoint relies on the one that is there."""
        if self._relied_on <= self._before_last:
            self.cut(self._before_last)
            self.append(row)

    def _head(self, size: int) -> bytes:
        try:
            with self.metrics.open("rb") as file:
                return file.read(size)
        except OSError:
            return b""

    def facts(self, sync: bool = True) -> dict[str, Any]:
        """Return what a checkpoint must know about the other files, after forcing the metrics to disk if `sync`."""
        if sync and self.metrics.exists():
            durable.sync(self.metrics)
        self._relied_on = self._written
        metrics = {"bytes": self._written, "digest": self._digest.hexdigest()}
        return {"config": self._config_digest(), "metrics": metrics}

    def _config_digest(self) -> str:
        """Return a digest of everything in config.toml that past rounds depend on."""
        table = _read_toml(self.config) if self.config.exists() else {}
        text = json.dumps({k: v for k, v in table.items() if k not in _MAY_CHANGE}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def require_unchanged(self, facts: dict[str, Any]) -> None:
        """Refuse to resume if the configuration or the metrics are not those that the checkpoint was saved with."""
        if facts.get("config", self._config_digest()) != self._config_digest():
            raise CadenError(
                f"{self.config} was changed after the checkpoint: restore it, or start a new run with it (only "
                f"{', '.join(_MAY_CHANGE[:4])} may change)."
            )
        if "metrics" in facts:
            head = self._head(facts["metrics"]["bytes"])
            same = hashlib.blake2b(head, digest_size=16).hexdigest() == facts["metrics"]["digest"]
            if len(head) < facts["metrics"]["bytes"] or not same:
                raise CadenError(
                    f"{self.metrics} is missing or damaged: it is not the file that the checkpoint was saved with. "
                    "Nothing was overwritten; restore the file to resume the run."
                )

    def read(self, size: int | None = None, last: int | None = None) -> list[Row]:
        """Return the rows in the first `size` bytes, up to round `last`; a line cut off by a crash is ignored."""
        try:
            data = self.metrics.read_bytes() if size is None else self._head(size)
            lines = data[: data.rfind(b"\n") + 1].decode().splitlines()
            rows = [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(lines)]
            rows = [row for row in rows if last is None or int(row["round"] or 0) <= last]
        except FileNotFoundError:
            rows = []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error):
            raise CadenError(f"{self.metrics} is missing or damaged.") from None
        if not rows:
            raise CadenError(f"{self.path} has no recorded rounds yet.")
        if rows[0].get("round") != 0:
            raise CadenError(f"{self.metrics} is missing or damaged: its first row is not round 0.")
        return rows

    # The whole run.

    def record(self) -> Record:
        """Read a run, complete or not."""
        try:
            versions = json.loads((self.path / "versions.json").read_text(encoding="utf-8"))
            table = _read_toml(self.config) if self.config.exists() else {}
            summary = json.loads(self.summary.read_text(encoding="utf-8")) if self.summary.exists() else {}
            if not isinstance(versions, dict) or not isinstance(summary, dict):
                raise ValueError
        except (OSError, ValueError):
            raise CadenError(f"{self.path} is not a run directory, or it is damaged.") from None
        rows, target = self.read(), table.get("target")
        target = target if isinstance(target, float) else None
        if not {"round", "stopped"} <= set(summary):  # none, or not one of ours
            summary = summarise(rows, target, "unfinished")
        return Record(self.path, table, rows, summary, versions)

    def graph(self) -> Graph | None:
        """Return the graph of the run, from its edges; None if the directory has none."""
        try:
            table = json.loads(self.graph_file.read_text(encoding="utf-8"))
            return from_edges(table["edges"], table["agents"], str(table["name"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def complete(self) -> bool:
        """Return whether the run has ended and its weights can be read."""
        if not self.weights.exists():
            return False
        try:
            checkpoint.load(self.weights)
        except CadenError as error:
            warnings.warn(f"{error} The run is not complete.", stacklevel=2)
            return False
        return True

    def summarise(self, result: Result) -> None:
        """Write the summary of a complete run, or of one that diverged."""
        durable.replace_text(self.summary, json.dumps(jsonable(result.summary()), indent=1) + "\n")

    def finish(self, result: Result, picture: bool = True) -> None:
        """Write the picture, the summary, the model and, last, the weights, which mark the run as complete."""
        if picture:
            self._draw(result)
        if self.metrics.exists():
            durable.sync(self.metrics)
        self.summarise(result)
        if result.times is not None:
            result.agents.to_csv(self.path / "agents.csv", index_label="agent")
            result.waiting.to_csv(self.path / "waiting.csv", index=False)
        state = result.problem.state_dict(result.mean)
        if state is not None:
            checkpoint.write_tensors(self.model, state)
        checkpoint.save(self.weights, {"x": result.x, "mean": result.mean}, {"agents": len(result.x)})

    def _draw(self, result: Result) -> None:
        """Draw the history; a picture that cannot be written never loses the result."""
        try:
            draw(figures({"": [result.history]}, result.target), self.path / "curves.png", title=_title(self.path))
        except (OSError, ValueError, RuntimeError) as error:
            warnings.warn(f"The picture {self.path / 'curves.png'} could not be drawn: {error}", stacklevel=2)


def _read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file, or raise an error that says why it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CadenError(f"Cannot read {path}: {error}.") from None


def _title(run_dir: Path) -> str:
    """Return a title with the method and data of a run, or the directory's name if its configuration lacks them."""
    try:
        config = tomllib.loads((run_dir / "config.toml").read_text())
        problem = config["problem"]
        return f"{config['method']['name']} on {problem.get('data', problem['name'])}, {problem['agents']} agents"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return run_dir.name


def environment() -> dict[str, str]:
    """Return the versions of Python and the packages, and the machine."""
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
