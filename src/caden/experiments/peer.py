"""One agent of a fleet: the same run as in the simulator, over a link, with a checkpoint after every step.

A message depends only on the state in the last checkpoint, and is published after that checkpoint was written. A peer
that was killed therefore sends the same message again and continues. `versions.jsonl` records what each step read; a
step whose checkpoint is missing never happened.
"""

import json
import math
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from caden import schedules
from caden.core import Method, Problem
from caden.engine import durable
from caden.engine.checkpoint import Part
from caden.engine.history import Result, Row
from caden.engine.metrics import batch_loss, on_test_data
from caden.engine.options import Conditions
from caden.engine.process import deterministic_mode
from caden.engine.recorder import Recorder
from caden.engine.run import Run
from caden.engine.run_directory import RunDirectory
from caden.engine.simulate import prepare, warn_outside
from caden.engine.warmup import Warmup
from caden.errors import CadenError, Diverged, Interrupted, LoopEnded, RunError
from caden.experiments.config import Experiment
from caden.graphs import Graph
from caden.networks.messages import Messages
from caden.networks.peers.certificates import link_errors
from caden.networks.peers.fleet import Fleet
from caden.networks.peers.link import ZenohLink
from caden.networks.peers.transports import HEADER, Free, Link, Lockstep
from caden.networks.peers.wire import AGREED, FINISHED, SERVED

ASK_WHY = 4.0  # seconds after which a peer finds out why it has not heard from a neighbour
SYNC_EVERY = 1.0  # seconds between two checkpoints that are forced to disk; every step writes one
ENDS = ("", "rounds", "seconds", "tolerance", "loop")  # why a peer ends
Show = Callable[[dict[str, Any]], None]


class Owner(Protocol):
    """A training loop of the user's own that a peer works for: it brings the method and the problem."""

    def build(self, config: Experiment, graph: Graph) -> tuple[Method, Problem]:
        """Return what takes the place of the method and the problem of the fleet file."""

    def attach(self, recorder: Recorder) -> None:
        """Called when the run is prepared."""

    def introduce(self) -> None:
        """Called before a new run begins, when the link is there."""

    def conclude(self, mean: Tensor) -> None:
        """Called after the last round, with the mean of the models of those present."""


def prepare_peer(
    config: Experiment, agent: int, built: tuple[Method, Problem, Graph], link: Link
) -> tuple[Run, Tensor, Free | Lockstep]:
    """Return the run of one agent of a fleet, its start, and its transport; shared by a peer and its replay."""
    fleet, (method, problem, graph) = Fleet.of(config), built
    transport: Free | Lockstep
    transport = Free(agent, link, fleet.clip) if fleet.mode == "free" else Lockstep(agent, link)
    conditions = Conditions(schedules.from_spec(config.participation), config.workload, config.messages)
    run, start = prepare(method, problem, graph, conditions, config.seed, transport)
    run.rounds, run.record_every = config.rounds, config.record_every
    return run, start, transport


def run_peer(
    config: Experiment,
    agent: int,
    folder: Path,
    stop: threading.Event | None = None,
    show: Show | None = None,
    home: Path = Path(),
    link_type: type[ZenohLink] = ZenohLink,
    owner: Owner | None = None,
) -> Result:
    """Run one agent of a fleet until all are done; if `folder` has a checkpoint, continue from it.

    `home` is the folder of the fleet file; `fleet.certificates` is relative to it. `link_type` is for experiments with
    faulty peers.
    """
    fleet, stop = Fleet.of(config), stop or threading.Event()
    run_dir, text = RunDirectory(folder), config.to_toml()
    built = _build(config, fleet, agent, owner)
    _, problem, graph = built
    if folder.exists():
        saved_config = folder / "config.toml"
        if not saved_config.is_file() or saved_config.read_text() != text:
            raise CadenError(f"{folder} belongs to another fleet file; choose another `--out`.")
        if run_dir.complete():
            raise CadenError(f"Agent {agent} has finished; its model is in {run_dir.weights}.")
    else:
        run_dir.create(text, config.seed, graph)
        run_dir.lock.release()  # the recorder takes it
    with deterministic_mode(config.deterministic):
        width = problem.dim + (HEADER if fleet.mode == "free" else 0)
        like = torch.empty(width, dtype=problem.dtype, device=problem.device)
        link = link_type(fleet, graph, agent, like, home, folder, stop, Messages.from_spec(config.messages).codec)
        missing = _MissingNeighbours(fleet, graph, agent, home, link)
        try:
            peer = _Peer(config, fleet, agent, built, link, missing, folder, stop, show, owner)
            with closing(peer.recorder):
                return peer.work()
        finally:
            missing.close()
            link.close()


def _build(config: Experiment, fleet: Fleet, agent: int, owner: Owner | None) -> tuple[Method, Problem, Graph]:
    if owner is None:
        return config.build(lambda graph: fleet.hosted_agents(graph, agent))
    graph = config.build_graph(len(fleet.endpoints))
    fleet.hosted_agents(graph, agent)
    return *owner.build(config, graph), graph


class _MissingNeighbours:
    """Finds out why a peer has not heard from some of its neighbours, while the peer works or waits."""

    def __init__(self, fleet: Fleet, graph: Graph, agent: int, home: Path, link: ZenohLink):
        self._arguments, self._agent, self._link = (fleet, graph, agent, home), agent, link
        self.causes: dict[int, str] = {}
        self._closing = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Look once, after a while, and warn."""
        if not self._closing.wait(ASK_WHY) and self.look():
            warnings.warn(f"Agent {self._agent} has heard nothing from {self.text()}.", stacklevel=2)

    def look(self) -> list[int]:
        """Return the neighbours from which nothing has come, and store the causes."""
        missing = self._link.never_heard()
        if missing:
            errors = link_errors(*self._arguments, only=missing)
            answers = {j: self._link.refusal(j) or errors[j] for j in missing}
            self.causes = {j: cause or "it answers, but sends nothing" for j, cause in answers.items()}
        return missing

    def text(self) -> str:
        """Return the missing neighbours with the causes, as text."""
        return "; ".join(f"agent {j} ({cause})" for j, cause in self.causes.items())

    def close(self) -> None:
        self._closing.set()


class _Peer:
    """A running peer: steps, checkpoints, log, status, end."""

    def __init__(
        self,
        config: Experiment,
        fleet: Fleet,
        agent: int,
        built: tuple[Method, Problem, Graph],
        link: ZenohLink,
        missing: _MissingNeighbours,
        folder: Path,
        stop: threading.Event,
        show: Show | None,
        owner: Owner | None = None,
    ):
        self.run, self.start, self.transport = prepare_peer(config, agent, built, link)
        self.owner = owner
        self.recorder = Recorder(self.run, folder, self._history_row, config.metrics == "exact")
        self.config, self.fleet, self.agent, self.link, self.missing = config, fleet, agent, link, missing
        self.stop, self.show, self.shown_at, self.synced_at = stop, show, 0.0, 0.0
        self.clock, self.calm, self.change, self.time_is_up, self.reason = 0.0, 0, math.inf, False, ""
        self.heard_in_sweep: set[int] = set()  # neighbours from which a row arrived since the last sweep
        self.log = folder / "versions.jsonl"
        if owner is not None:
            owner.attach(self.recorder)

    def work(self) -> Result:
        run, link, recorder = self.run, self.link, self.recorder
        try:
            self._begin()
        except LoopEnded:
            raise CadenError("The loop ended before its first round: make more steps, or `every` smaller.") from None
        link.report_progress(run.index, self._life, self.calm)
        began = time.monotonic() - self.clock
        while not self.reason:
            self.reason = self._reason_to_end()
            if self.reason:
                self._save()
                break
            if self.stop.is_set():
                raise Interrupted(
                    f"Agent {self.agent} stopped after round {run.index}; run the same command to continue."
                )
            try:
                self._step()
            except LoopEnded:
                self.reason = "loop"
                self._save()
                break
            self.clock = time.monotonic() - began
            self.time_is_up = self.fleet.seconds is not None and self.clock >= self.fleet.seconds
            if isinstance(self.transport, Free):
                self._count_calm_sweeps(self.transport.fresh, self.transport.members - link.finished())
                self._log_step(run.index - 1)
            self._save()
            link.report_progress(run.index, self._life, self.calm)
            if run.index % self.config.record_every == 0:
                recorder.record()
            self._show_status("runs", every=0.25)
        return self._end()

    def _end(self) -> Result:
        """Find the mean of all for the owner, stay while the neighbours need this peer, and write the result."""
        run, link, recorder = self.run, self.link, self.recorder
        if isinstance(self.transport, Free):
            link.await_word(link.neighbours, ASK_WHY)  # it may have been resumed just now
        if (isinstance(self.transport, Free) or run.index == 0) and self.missing.look():
            self.reason = ""
            self._save()  # not an end: the same command continues
            raise RunError(
                f"Agent {self.agent} never heard from {self.missing.text()}, so it is not done: run the same command "
                "to continue."
            )
        end = time.monotonic() + self.fleet.patience
        agreed = self.fleet.mode == "free" and self.reason == "tolerance"
        flags = FINISHED | (AGREED if agreed else 0)
        link.report_progress(run.index, self._life, self.calm, flags)
        if self.owner is not None:
            self.owner.conclude(self._mean_of_all(end))
            link.report_progress(run.index, self._life, self.calm, flags | SERVED)
        if recorder.rows[-1]["round"] != run.index:
            recorder.record()
        self._show_status("done")
        link.linger(self.stop, end, FINISHED if self.owner is None else SERVED)
        recorder.complete()
        assert recorder.run_dir is not None
        folder, target = recorder.run_dir.path, self.config.target
        result = Result(run.state.x, recorder.rows, run.problem.whole, target, folder, {}, self.reason)
        recorder.run_dir.finish(result, picture=False)
        return result

    def _mean_of_all(self, end: float) -> Tensor:
        """Return the mean of all agents' models; of free-running ones, those that finish in time."""
        row: Tensor = self.run.state.x[0]
        if isinstance(self.transport, Lockstep):
            return self.transport.mean(row, self.run.index)
        if self.fleet.clip is not None:  # others are not trusted
            return row
        return self.link.mean_of_last_rows(self.transport.marked(row), end)[: len(row)]

    @property
    def _life(self) -> int:
        return self.transport.life if isinstance(self.transport, Free) else 0

    def _begin(self) -> None:
        """Begin from the start, or from the last checkpoint."""
        warn_outside(self.run)
        parts = self.recorder.load()
        if parts is None:
            self.log.unlink(missing_ok=True)
            if self.owner is not None:
                self.owner.introduce()
            self.run.begin(self.start, Warmup.from_spec(self.config.warmup))
            self._log_step(-1)
            self._save()
        else:
            self._resume(parts[0])
        if not self.recorder.rows:
            self.recorder.record()

    def _step(self) -> None:
        """Make one round, and measure the largest change of model or arc variables relative to their size."""
        if isinstance(self.transport, Free):
            self.link.wait_for_rows(self.fleet.pace)
        else:
            self.link.wait_for_slower_neighbours(self.run.index)
        before = [part.clone() for part in self._variables()]
        self.run.step()
        if self.run.diverged():
            raise Diverged(
                f"Agent {self.agent} diverged in round {self.run.index}; check `mu_z`, `rho` or the step size."
            )
        self.change = max(
            float((new - old).abs().max() / (1 + old.abs().max())) for new, old in zip(self._variables(), before)
        )

    def _variables(self) -> list[Tensor]:
        """Return the model and the edge and arc variables of the state, but not what `mu_z = "auto"` counts."""
        fields = self.run.state._asdict().items()
        counted = ("mu_z", "tally", "news")
        return [part for name, part in fields if isinstance(part, Tensor) and part.ndim == 2 and name not in counted]

    def _reason_to_end(self) -> str:
        """Return why to end here, or "". In lockstep all agents decide the same in the same round."""
        index, tolerance = self.run.index, self.config.tolerance
        if self.run.problem.whole.ended:
            return "loop"
        if index >= self.config.rounds:
            return "rounds"
        if isinstance(self.transport, Free):
            agreed = tolerance is not None and self.link.agreed(self.fleet.calm)
            if agreed and self.link.never_heard() and self.clock < self.fleet.patience:
                return ""  # a neighbour may still be starting
            return "tolerance" if agreed else "seconds" if self.time_is_up else ""
        if (tolerance is None and self.fleet.seconds is None) or index == 0 or index % self.config.record_every:
            return ""
        change, late = self.transport.agree(index, self.change, float(self.time_is_up))
        unsent = Messages.from_spec(self.config.messages).threshold(index)  # changes up to this are not sent
        return "tolerance" if tolerance is not None and max(change, unsent) < tolerance else "seconds" if late else ""

    def _count_calm_sweeps(self, fresh: dict[int, int], members: set[int]) -> None:
        """Count the sweeps without a change above the tolerance, each over all neighbours that are still running."""
        self.heard_in_sweep |= set(fresh)
        if self.config.tolerance is None or self.change >= self.config.tolerance:
            self.calm, self.heard_in_sweep = 0, set()
        elif members <= self.heard_in_sweep and (members or self.transport.neighbours):
            self.calm, self.heard_in_sweep = self.calm + 1, set()

    def _log_step(self, step: int) -> None:
        """Log the versions that a step read."""
        if isinstance(self.transport, Free):
            read = {str(j): version for j, version in self.transport.fresh.items()}
            line = {"step": step, "life": self._life, "members": sorted(self.transport.members), "read": read}
            if any(self.transport.paths.values()):  # compressed: a row depends on those fetched before it
                line["paths"] = {str(j): path for j, path in self.transport.paths.items()}
            with self.log.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _save(self) -> None:
        self.transport.wire_bytes = self.link.wire_bytes
        tensors = {f"link.{name}": tensor for name, tensor in self.link.buffers().items()}
        numbers = {"calm": self.calm, "late": self.time_is_up, "why": ENDS.index(self.reason), "change": self.change}
        sync = time.monotonic() - self.synced_at > SYNC_EVERY or bool(self.reason)
        self.synced_at = time.monotonic() if sync else self.synced_at
        self.recorder.save(tensors, sync, **{**numbers, "seconds": self.clock})

    def _resume(self, part: Part) -> None:
        tensors, numbers, _ = part
        self.transport.quiet = True
        self.run.restore(self.start, [part])
        self.transport.quiet = False
        buffers = {name.removeprefix("link."): t for name, t in tensors.items() if name.startswith("link.")}
        self.link.restore(buffers, self.transport.members if isinstance(self.transport, Free) else set())
        if isinstance(self.transport, Free):  # do they know of steps that were lost here?
            self.link.await_word(self.transport.members, ASK_WHY / 2)
        self.link.wire_bytes = self.transport.wire_bytes
        self.clock, self.change = numbers["seconds"], numbers["change"]
        self.calm, self.time_is_up, self.reason = int(numbers["calm"]), bool(numbers["late"]), ENDS[int(numbers["why"])]
        self.recorder.reopen(part)
        if self.log.exists():
            lines = [line for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
            text = "".join(line for line in lines if json.loads(line)["step"] < self.run.index)
            durable.replace_text(self.log, text)

    def _show_status(self, state: str, every: float = 0.0) -> None:
        """Show the status, at most once in `every` seconds."""
        if self.show is None or time.monotonic() - self.shown_at < every:
            return
        self.shown_at, link, last = time.monotonic(), self.link, self.recorder.rows[-1]
        up = self._neighbours_up()
        self.show(
            {
                "agent": self.agent,
                "round": self.run.index,
                "objective": last["objective"] if last["objective"] is not None else last.get("batch_loss"),
                "accuracy": last.get("accuracy"),
                "change": self.change,
                "up": up,
                "down": [j for j in link.neighbours if j not in up],
                "causes": {str(j): cause for j, cause in self.missing.causes.items() if j not in up},
                "stale": link.stale(),
                "wire_bytes": link.wire_bytes,
                "refused": sum(link.refused.values()),
                "state": state,
            }
        )

    def _neighbours_up(self) -> list[int]:
        return [j for j in self.link.neighbours if self.link.silent(j) < 2.0]

    def _history_row(self, run: Run, exact: bool, last: bool) -> Row:
        """Return a history row with what this agent alone can measure."""
        value, x = run.info.value, run.state.x
        if value is None and exact:
            value = run.problem.whole.value_and_grad(x)[0]
        return {
            "round": run.index,
            "seconds": self.clock,
            "communications": run.network.communications,
            "bytes": run.network.bytes,
            "wire_bytes": self.link.wire_bytes,
            "gradients": run.problem.gradients,
            "objective": None if value is None else float(value.sum()),
            **({"batch_loss": batch_loss(run.info.seen)} if run.problem.stochastic else {}),
            "change": self.change,
            "up": len(self._neighbours_up()),
            "stale": self.link.stale(),
            "slowest_publish": self.link.slowest,
            "refused": sum(self.link.refused.values()),
            **on_test_data(run, exact or last),
        }
