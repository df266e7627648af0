"""A store of many runs: looked up by content, resumed where they stopped, with the time left."""

import hashlib
import json
import multiprocessing
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import Any

import torch

from caden import launcher
from caden._version import __version__
from caden.core import Problem
from caden.engine.checkpoint import Checkpoints
from caden.engine.options import Callback
from caden.engine.progress import PlanBar
from caden.engine.run_directory import Record, RunDirectory
from caden.errors import CadenError, Diverged, Interrupted, require_integer
from caden.experiments.config import Experiment, experiment
from caden.graphs import Graph
from caden.networks.clock import Clock
from caden.networks.transport import Memory


def digest(config: Experiment) -> str:
    """Return a name for what a run computes, whatever its checkpoint interval."""
    content = config.model_dump(exclude_defaults=True, exclude={"checkpoint_every", "compare", "tune", "clock"})
    if (clock := Clock.from_spec(config.clock)) is not None:
        content["clock"] = clock.fingerprint()
    text = json.dumps([__version__, content], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def workers(jobs: int, threads: int) -> ProcessPoolExecutor:
    """Return processes for runs, with so many threads each. They end with this process, even if it is killed."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, context, _begin, (threads, os.getpid()))


def _begin(threads: int, parent: int) -> None:
    launcher.end_with(parent)
    torch.set_num_threads(threads)


class RunStore:
    """Runs under one folder: complete runs are read, interrupted ones are resumed, the rest are run.

    `jobs` processes share the cores, each with one run at a time. For runs of this library's size that is faster than
    one process on all cores.
    """

    def __init__(self, folder: Path, progress: bool | None = None, jobs: int = 1):
        self.folder, self._progress, self._jobs = folder, progress, require_integer("jobs", jobs, least=1)
        self._built: tuple[str, tuple[Problem, Graph]] | None = None
        self._pool: ProcessPoolExecutor | None = None
        self.seen: dict[Path, Record] = {}  # all runs requested, in order
        self.curvatures: dict[str, float] = {}  # by digest of the problem that methods were tuned on

    def path(self, config: Experiment) -> Path:
        """Return the run directory of an experiment, existing or not."""
        problem = config.problem.get("data", config.problem["name"])
        name = f"{config.method['name']}-{problem}-{digest(config)}"
        return self.folder / name.replace(":", ".").replace("/", ".")

    def find(self, config: Experiment) -> Record | None:
        """Return the record of a complete run, if there is one. A diverged run is complete."""
        run_dir = RunDirectory(self.path(config))
        try:
            return run_dir.record() if run_dir.summary.exists() else None
        except CadenError:  # damaged: run it again
            return None

    def build(self, config: Experiment) -> tuple[Problem, Graph]:
        """Return problem and graph of an experiment; those of the last one are cached."""
        settings = (config.problem, config.graph, config.seed, config.dtype, config.device, config.deterministic)
        key = json.dumps(settings, sort_keys=True)
        if self._built is None or self._built[0] != key:
            self._built = None  # free the old data before the new data are loaded
            self._built = key, config.model_copy(deep=True).build()[1:]
        return self._built[1]

    def run(self, title: str, plans: Mapping[str, Experiment]) -> dict[str, Record]:
        """Return the records of all experiments, after running those that are not complete."""
        # By path, since a run may have two names.
        todo = {self.path(c): (name, c) for name, c in plans.items() if self.find(c) is None}
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
        """Run experiments in several processes, which are kept for the next plan."""
        if self._pool is None:
            threads = max(1, torch.get_num_threads() // self._jobs)
            self._pool = workers(self._jobs, threads)
        waiting = {self._pool.submit(_work, self.folder, config.model_dump()): (name, config) for name, config in todo}
        try:
            for done in as_completed(waiting):
                name, config = waiting[done]
                done.result()
                bar.end(name, config.rounds, RunDirectory(self.path(config)).record())
        except BaseException as error:
            for process in list(self._pool._processes.values()):  # their work is in their checkpoints
                process.terminate()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
            if isinstance(error, KeyboardInterrupt | BrokenProcessPool):
                raise Interrupted("Interrupted; run the same command again to continue.") from None
            raise

    def one(self, config: Experiment, callbacks: Sequence[Callback] = ()) -> Record:
        """Run an experiment, or resume it."""
        run_dir = RunDirectory(self.path(config))
        begun = run_dir.path.exists()
        config = experiment(run_dir.path / "config.toml", defaults={}) if begun else config.model_copy(deep=True)
        try:
            with warnings.catch_warnings():  # plans use the paper's rule on purpose
                warnings.filterwarnings("ignore", message='`dual="paper"` does not reach')
                config.run(run_dir.path, begun, self.build(config), progress=False, picture=False, callbacks=callbacks)
        except Diverged:
            if not run_dir.summary.exists():  # diverged before the first round: there is no record
                raise
        except CadenError as error:
            raise CadenError(f"{run_dir.path.name}: {error}") from None
        Checkpoints(run_dir.path, Memory()).clear()  # large, and no longer needed
        return run_dir.record()


@cache
def _store(folder: Path) -> RunStore:
    return RunStore(folder)  # one per process, to cache the problem that it built last


def _work(folder: Path, config: dict[str, Any]) -> None:
    _store(folder).one(Experiment.model_validate(config))
