"""Runs reduced to what they came to: one small JSON file each, looked up by content."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from caden._tensor import compiled
from caden.engine.durable import replace_text
from caden.engine.history import Result, Row
from caden.engine.lock import DirectoryLock
from caden.engine.options import Callback
from caden.engine.run_directory import jsonable
from caden.errors import CadenError, Diverged, Interrupted, require_integer
from caden.experiments.config import Experiment
from caden.experiments.store import RunStore, digest, workers

EFFORTS = ("communications", "bytes", "gradients", "time")
POINTS = 40  # of a curve
COMPUTING = (  # parts of the package
    *("_tensor", "data", "engine", "methods", "networks", "problems", "solvers", "theory"),
    *("arena/_outcomes.py", "experiments/config.py", "experiments/theory.py"),
)
MOST = 2  # a run ends at so many times the gradients of all local steps; Hessians can take far more


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    reached: bool = False  # its goal: the target accuracy or the tolerance
    stopped: str = ""  # "callback": by `MOST`
    efforts: dict[str, float] = field(default_factory=dict)  # spent until the end, which is the goal if it was reached
    rounds: int = 0
    measure: float | None = None  # smaller is better: the best accuracy, negated, or the last relative error
    curve: list[list[float]] = field(default_factory=list)  # (communications, measure)
    refused: str = ""  # why it could not run
    seconds: float = 0.0  # that it took

    def score(self, effort: str) -> tuple[float, float]:
        """Return the sort key among runs to one goal, smaller is better: the effort to reach it, then closeness."""
        if self.refused or self.stopped == "diverged" or self.measure is None:
            return math.inf, math.inf
        return (self.efforts[effort] if self.reached else math.inf), self.measure


class Outcomes:
    """The outcomes under one folder; those not yet there are computed by `jobs` processes. To be used with `with`."""

    def __init__(self, folder: Path, jobs: int = 1):
        self.folder, self._jobs = folder, require_integer("jobs", jobs, least=1)
        self._pool: ProcessPoolExecutor | None = None
        self._lock = DirectoryLock(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CadenError(f"Cannot write to {folder}: {error.strerror}.") from None
        self._lock.acquire()

    def find(self, config: Experiment) -> Outcome | None:
        """Return the outcome of a run, if it is known."""
        try:
            outcome = Outcome(**json.loads((self.folder / f"{key_of(config)}.json").read_text()))
        except (OSError, ValueError, TypeError):  # missing or damaged: run it
            return None
        return None if outcome.refused else outcome  # the reason may be gone

    def facts(self, config: Experiment, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return facts about the problem of an experiment, measured once."""
        path = self.folder / f"facts-{key_of(config.model_copy(update={'method': {'name': ''}}))}.json"
        try:
            return dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            known = measure()
            replace_text(path, json.dumps(known))
            return known

    def run(self, plans: Sequence[Experiment], ended: Callable[[Experiment], None]) -> list[Outcome]:
        """Return the outcomes of all experiments; `ended` is called after each, also after those that were known."""
        keys = [key_of(config) for config in plans]
        done: dict[str, Outcome] = {}
        todo: dict[str, Experiment] = {}
        for key, config in zip(keys, plans):
            if (known := self.find(config)) is None:
                todo[key] = config
            else:
                done[key] = known
                ended(config)
        for key, outcome in self._work_off(todo):
            done[key] = outcome
            ended(todo[key])
        return [done[key] for key in keys]

    def _work_off(self, todo: Mapping[str, Experiment]) -> Iterator[tuple[str, Outcome]]:
        if self._jobs == 1 or len(todo) < 2:
            yield from ((key, _work(self.folder, key, config.model_dump())) for key, config in todo.items())
            return
        left = dict(todo)
        try:
            for key, outcome in self._share(todo, self._jobs):
                del left[key]
                yield key, outcome
        except BrokenProcessPool:  # a run ended its process: find out which one
            for key, config in left.items():
                self.close(kill=True)
                try:
                    yield from self._share({key: config}, 1)
                except BrokenProcessPool:
                    yield key, Outcome(refused="It ended its process: out of memory, or a crash.")
            self.close(kill=True)

    def _share(self, todo: Mapping[str, Experiment], jobs: int) -> Iterator[tuple[str, Outcome]]:
        """Run experiments in the processes, which are kept."""
        if self._pool is None:
            self._pool = workers(jobs, threads=1)
        waiting = {self._pool.submit(_work, self.folder, key, c.model_dump()): key for key, c in todo.items()}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BaseException as error:
            self.close(kill=True)
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("Interrupted; run the same command again to continue.") from None
            raise

    def close(self, kill: bool = False) -> None:
        """End the processes; the next run starts others."""
        if self._pool is not None:
            for process in list(self._pool._processes.values()) if kill else []:
                process.terminate()
            self._pool.shutdown(wait=not kill, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(kill=error is not None)
        self._lock.release()


def key_of(config: Experiment) -> str:
    """Return the name of an outcome: of what is computed and by which code, also that beside a method from a file."""
    code = _own_code()
    source = config.method["name"].rpartition(":")[0]
    if source.endswith(".py"):
        code += _code(Path(source).parent.glob("*.py"))
    elif source and (spec := find_spec(source)) is not None and spec.origin is not None:
        code += _code(Path(spec.origin).parent.glob("*.py"))
    return f"{digest(config)}-{hashlib.blake2b(code.encode(), digest_size=6).hexdigest()}"


def _code(paths: Iterable[Path]) -> str:
    """Return a digest of some files."""
    content = hashlib.blake2b(digest_size=8)
    for path in sorted(paths):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()


@cache
def _own_code() -> str:
    """Return a digest of the parts of this package that compute, and of what they compute with."""
    package = Path(__file__).parents[1]
    parts = [package / part for part in COMPUTING]
    files = [path for part in parts for path in (part.rglob("*.py") if part.is_dir() else [part])]
    return f"{torch.__version__} {np.__version__} {compiled.installed()} {_code([*package.glob('*.py'), *files])}"


@cache
def _builder(folder: Path) -> RunStore:
    return RunStore(folder)  # one per process, to cache the problem that it built last


def _work(folder: Path, key: str, table: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a run, and keep it unless it is refused: then it is tried again next time."""
    began = time.perf_counter()
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):  # what a method prints is not a result
            warnings.simplefilter("ignore")
            result, config = _run(folder, table)
    except Interrupted:
        raise
    except CadenError as error:
        return Outcome(refused=str(error))
    except (Exception, SystemExit) as error:  # a fault of one method does not end the arena
        return Outcome(refused=f"{type(error).__name__}: {error}".splitlines()[0])
    outcome = replace(_reduce(result, config), seconds=round(time.perf_counter() - began, 2))
    replace_text(folder / f"{key}.json", json.dumps(jsonable(asdict(outcome)), separators=(",", ":")))
    return outcome


def _run(folder: Path, table: Mapping[str, Any]) -> tuple[Result, Experiment]:
    config = Experiment.model_validate(table)
    built = _builder(folder).build(config)
    try:
        return config.run(built=built, progress=False, callbacks=[_limit(config, built[0].agents)]), config
    except Diverged as error:
        if error.result is None:
            raise
        return error.result, config


def _limit(config: Experiment, agents: int) -> Callback:
    """Return a callback that ends a run whose gradients are too many."""
    most = MOST * config.rounds * int(config.workload) * agents
    return lambda row, _: float(row["gradients"] or 0) > most


def _reduce(result: Result, config: Experiment) -> Outcome:
    """Return the outcome of a run, with a curve of a few points."""
    rows, accurate = result.rows, config.target is not None
    column, sign = ("accuracy", -1.0) if accurate else ("relative_error", 1.0)
    known = [
        (float(r["communications"] or 0), float(v))
        for r in rows
        if (v := r.get(column)) is not None and math.isfinite(v)
    ]
    best = min((sign * value for _, value in known), default=None) if accurate else (known[-1][1] if known else None)
    last: Row = rows[-1]
    step = max(1, math.ceil(len(known) / POINTS))
    thinned = known[:1] + known[1:][::-1][::step][::-1]  # with both ends
    return Outcome(
        reached=result.stopped in ("target", "tolerance"),
        stopped=result.stopped,
        efforts={name: float(last[name] or 0) for name in EFFORTS},
        rounds=int(last["round"] or 0),
        measure=best,
        curve=[[x, float(f"{y:.4g}")] for x, y in thinned],
    )
