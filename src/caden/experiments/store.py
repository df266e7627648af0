"""Many runs as one piece of work: found again by their content, resumed where they stopped, with the time left."""

import hashlib
import json
import multiprocessing
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import Any

import torch

from caden._version import __version__
from caden.core import Problem
from caden.engine.history import Record, RunDirectory
from caden.engine.options import Callback
from caden.engine.progress import PlanBar
from caden.errors import CadenError, Diverged, Interrupted, require_integer
from caden.experiments.config import Experiment, experiment
from caden.graphs import Graph


def digest(config: Experiment) -> str:
    """A name for what a run computes; how often it is checkpointed does not count."""
    content = config.model_dump(exclude_defaults=True, exclude={"checkpoint_every", "compare", "tune"})
    text = json.dumps([__version__, content], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


class RunStore:
    """Runs under one folder. What is complete there is read, what was interrupted goes on, the rest is run.

    With several `jobs`, so many processes share the cores and each takes a run at a time; for runs of this library's
    size that is faster than one process on all cores.
    """

    def __init__(self, folder: Path, progress: bool | None = None, jobs: int = 1):
        self.folder, self._progress, self._jobs = folder, progress, require_integer("jobs", jobs, least=1)
        self._built: tuple[str, tuple[Problem, Graph]] | None = None
        self._pool: ProcessPoolExecutor | None = None
        self.seen: dict[Path, Record] = {}  # what was asked for, in order
        self.curvatures: dict[str, float] = {}  # of the problems that methods were tuned on

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
        chosen = (config.problem, config.graph, config.seed, config.dtype, config.device, config.deterministic)
        key = json.dumps(chosen, sort_keys=True)
        if self._built is None or self._built[0] != key:
            self._built = None  # the old data go before the new ones come
            self._built = key, config.model_copy(deep=True).build()[1:]
        return self._built[1]

    def run(self, title: str, plans: Mapping[str, Experiment]) -> dict[str, Record]:
        """The records of all experiments; those that are not there yet are run first."""
        todo = {
            self.path(c): (name, c) for name, c in plans.items() if self.find(c) is None
        }  # a run may have two names
        with PlanBar(title, sum(c.rounds for _, c in todo.values()), len(todo), self._progress) as bar:
            if self._jobs > 1 and len(todo) > 1:
                self._share(list(todo.values()), bar)
            else:
                for name, config in todo.values():
                    bar.begin(name)
                    bar.end(name, config.rounds, self.one(config, [bar.row]))
        records = {name: RunDirectory(self.path(config)).record() for name, config in plans.items()}
        self.seen |= {record.path: record for record in records.values()}
        return records

    def _share(self, todo: list[tuple[str, Experiment]], bar: PlanBar) -> None:
        """Run experiments in several processes, which stay for the next plan."""
        if self._pool is None:
            threads = max(1, torch.get_num_threads() // self._jobs)
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, context, torch.set_num_threads, (threads,))
        waiting = {self._pool.submit(_work, self.folder, config.model_dump()): (name, config) for name, config in todo}
        try:
            for done in as_completed(waiting):
                name, config = waiting[done]
                done.result()
                bar.end(name, config.rounds, RunDirectory(self.path(config)).record())
        except BaseException as error:
            for process in list(self._pool._processes.values()):  # what they have done is in their checkpoints
                process.terminate()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
            if isinstance(error, KeyboardInterrupt | BrokenProcessPool):
                raise Interrupted("Interrupted; the same command goes on where it was.") from None
            raise

    def one(self, config: Experiment, callbacks: Sequence[Callback] = ()) -> Record:
        """Run an experiment, or go on with it."""
        place = RunDirectory(self.path(config))
        begun = place.path.exists()
        config = experiment(place.path / "config.toml", defaults={}) if begun else config.model_copy(deep=True)
        try:
            with warnings.catch_warnings():  # who plans runs with the paper's rule knows what it does
                warnings.filterwarnings("ignore", message='`dual="paper"` with sleeping agents')
                config.run(place.path, begun, self.build(config), progress=False, picture=False, callbacks=callbacks)
        except Diverged:
            if not place.summary.exists():  # before the first round: nothing to show, nothing to keep
                raise
        except CadenError as error:
            raise CadenError(f"{place.path.name}: {error}") from None
        place.checkpoint.unlink(missing_ok=True)  # large, and of no more use
        return place.record()


@cache
def _store(folder: Path) -> RunStore:
    return RunStore(folder)  # a worker's own, which keeps the problem that it built last


def _work(folder: Path, config: dict[str, Any]) -> None:
    _store(folder).one(Experiment.model_validate(config))
