"""The loop of one peer: the same methods as in the simulator, one agent, a checkpoint after every step.

A message depends on the state that the last checkpoint holds, and is published after it was written: a peer that was
killed says the same again and goes on. In `versions.jsonl` stands what each step read; a step whose checkpoint is
missing never happened.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caden import checkpoint, schedules
from caden.config import Experiment
from caden.core import Method, Problem
from caden.errors import CadenError, Diverged, Interrupted
from caden.graphs import Graph
from caden.history import Result, Row, RunDirectory
from caden.peers._fleet import Fleet
from caden.peers._link import AGREED, FINISHED, ZenohLink
from caden.peers._network import Free, Lockstep
from caden.run import Counted, start_point, threads, warm_up
from caden.schedules import Draw, Participation, Workload

ENDS = ("", "rounds", "seconds", "tolerance")  # why a peer ends
Show = Callable[[dict[str, Any]], None]


class Walk:
    """A method's steps at one agent: what a peer and its replay have in common."""

    def __init__(self, config: Experiment, agent: int, built: tuple[Method, Problem, Graph], link: Any):
        self.config, self.agent, self.fleet = config, agent, Fleet.of(config)
        self.method, self.problem, self.graph = built
        draw = Draw(config.seed, self.graph.agents)
        self._awake = Participation(schedules.from_spec(config.participation), draw)
        self._work = Workload(schedules.from_spec(config.local_steps), draw)
        self.network: Free | Lockstep
        if self.fleet.mode == "free":
            self.network = Free(self.graph, self.problem, draw, agent, link, self.fleet.clip)
        else:
            self.network = Lockstep(self.graph, self.problem, draw, self._awake.may_sleep, agent, link)
        self.counted = Counted(self.problem)
        self.index = 0
        self.curvature: Tensor | None = None

    def begin(self, saved: dict[str, Tensor] | None = None) -> None:
        """Warm up and exchange starting points; with a checkpoint only make a state for it to fill."""
        start = start_point(self.problem, None)
        if saved is not None:
            self.curvature = saved.get("curvature")
        elif self.config.warmup:
            start, self.curvature = warm_up(self.counted, start, self.config.warmup)
        self.network.quiet = saved is not None
        everyone = torch.ones(self.graph.agents, dtype=torch.bool)
        context = self.network.round(-1, everyone, self._work(0), self.counted, self.curvature)
        self.state = self.method.init(start, context)
        self.network.quiet = False
        if saved is not None:
            self.state = checkpoint.restore(self.state, saved, "state")

    def step(self) -> float:
        """One round; the largest change of model or arc variables, relative to their size."""
        active = self._awake(self.index)
        before = [part.clone() for part in self._moving()]
        if self.fleet.mode == "free" or bool(active.any()):
            context = self.network.round(
                self.index, active, self._work(self.index), self.counted.enter(self.index), self.curvature
            )
            self.state, self.info = self.method.step(self.state, context)
        self.index += 1
        if not bool(self.state.x.isfinite().all()):
            raise Diverged(f"Agent {self.agent} diverged in round {self.index}; see `mu_z`, `rho` or the step size.")
        changes = [float((new - old).abs().max() / (1 + old.abs().max())) for new, old in zip(self._moving(), before)]
        return max(changes)

    def _moving(self) -> list[Tensor]:
        """The model and the variables on edges and arcs of a state."""
        return [part for part in self.state if isinstance(part, Tensor) and part.ndim == 2]


def take_part(
    config: Experiment,
    agent: int,
    folder: Path,
    stop: threading.Event | None = None,
    show: Show | None = None,
    home: Path = Path(),
) -> Result:
    """Be one agent of a fleet until all are done; a folder with a checkpoint is gone on with.

    `home` is the folder of the fleet's file, from which the one with the certificates is told.
    """
    fleet, stop = Fleet.of(config), stop or threading.Event()
    place, text = RunDirectory(folder), config.to_toml()
    built = config.build(lambda graph: fleet.check(graph, agent))
    _, problem, graph = built
    if folder.exists():
        there = folder / "config.toml"
        if not there.is_file() or there.read_text() != text:
            raise CadenError(f"{folder} belongs to another fleet file; choose another --out.")
        if place.weights.exists():
            raise CadenError(f"Agent {agent} has finished; its model is in {place.weights}.")
    else:
        RunDirectory.create(folder, text, config.seed)
    saved = checkpoint.load(place.checkpoint) if place.checkpoint.exists() else None
    with threads(config.deterministic):
        like = torch.empty(problem.dim, dtype=problem.dtype, device=problem.device)
        link = ZenohLink(fleet, graph, agent, like, home, folder, stop)
        try:
            return _Session(config, fleet, agent, built, link, place, stop, show).run(saved)
        finally:
            link.close()


class _Session:
    """A peer at work: steps, checkpoints, log, status, end."""

    def __init__(
        self,
        config: Experiment,
        fleet: Fleet,
        agent: int,
        built: tuple[Method, Problem, Graph],
        link: ZenohLink,
        place: RunDirectory,
        stop: threading.Event,
        show: Show | None,
    ):
        self.walk, self.link = Walk(config, agent, built, link), link
        self.config, self.fleet, self.place, self.stop, self.show = config, fleet, place, stop, show
        self.rows: list[Row] = []
        self.clock, self.calm, self.residual, self.late, self.why = 0.0, 0, math.inf, False, ""
        self.swept: set[int] = set()  # neighbours that brought something since the last sweep
        self.log = place.path / "versions.jsonl"

    def run(self, saved: tuple[dict[str, Tensor], dict[str, float]] | None) -> Result:
        walk, link, network = self.walk, self.link, self.walk.network
        if saved is None:
            self.log.unlink(missing_ok=True)
            walk.begin()
            self._note(-1)
            self._save()
            self._record()
        else:
            self._resume(*saved)
        link.say(walk.index, self.calm)
        began, shown = time.monotonic() - self.clock, 0.0
        while not self.why:
            self.why = self._reason()
            if self.why:
                self._save()
                break
            if self.stop.is_set():
                raise Interrupted(f"Agent {walk.agent} stopped after round {walk.index}; the same command goes on.")
            if isinstance(network, Free):
                link.news(self.fleet.pace)
            else:
                link.keep_step(walk.index)
            self.residual = walk.step()
            self.clock = time.monotonic() - began
            self.late = self.fleet.seconds is not None and self.clock >= self.fleet.seconds
            if isinstance(network, Free):
                self._sweep(network.fresh, network.members - link.finished())
                self._note(walk.index - 1)
            self._save()
            link.say(walk.index, self.calm)
            if walk.index % self.config.record_every == 0:
                self._record()
            if self.show is not None and time.monotonic() - shown > 0.25:
                self.show(self._status())
                shown = time.monotonic()
        agreed = self.fleet.mode == "free" and self.why == "tolerance"
        link.say(walk.index, self.calm, FINISHED | (AGREED if agreed else 0))
        if self.rows[-1]["round"] != walk.index:
            self._record()
        if self.show is not None:
            self.show({**self._status(), "state": "done"})
        link.linger(self.stop)
        result = Result(walk.state.x, self.rows, walk.problem, self.config.target, self.place.path, {}, self.why)
        self.place.finish(result, picture=False)
        return result

    def _reason(self) -> str:
        """Why to end here, or nothing. In lockstep all come to the same answer in the same round."""
        index, tolerance = self.walk.index, self.config.tolerance
        if index >= self.config.rounds:
            return "rounds"
        network = self.walk.network
        if isinstance(network, Free):
            calm = tolerance is not None and self.link.agreed(self.fleet.calm)
            return "tolerance" if calm else "seconds" if self.late else ""
        if (tolerance is None and self.fleet.seconds is None) or index == 0 or index % self.config.record_every:
            return ""
        residual, late = network.agree(index, self.residual, float(self.late))
        return "tolerance" if tolerance is not None and residual < tolerance else "seconds" if late else ""

    def _sweep(self, fresh: dict[int, int], members: set[int]) -> None:
        """Count the sweeps in which nothing changed, each over all neighbours that are at work."""
        self.swept |= set(fresh)
        if self.config.tolerance is None or self.residual >= self.config.tolerance:
            self.calm, self.swept = 0, set()
        elif members <= self.swept and (members or self.walk.network.neighbours):
            self.calm, self.swept = self.calm + 1, set()

    def _note(self, step: int) -> None:
        """Log what a step read."""
        network = self.walk.network
        if isinstance(network, Free):
            line = {
                "step": step,
                "members": sorted(network.members),
                "read": {str(j): v for j, v in network.fresh.items()},
            }
            with self.log.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _save(self) -> None:
        walk = self.walk
        tensors = checkpoint.flatten(walk.state, "state")
        tensors |= {f"network.{k}": t for k, t in walk.network.buffers().items()}
        tensors |= {f"link.{k}": t for k, t in self.link.buffers().items()}
        if walk.curvature is not None:
            tensors["curvature"] = walk.curvature
        numbers = {
            "round": walk.index,
            "seconds": self.clock,
            "numbers_sent": walk.network.numbers_sent,
            "bytes": walk.network.bytes,
            "wire_bytes": self.link.wire_bytes,
            "gradients": walk.counted.gradients,
            "residual": self.residual,
            "calm": self.calm,
            "late": self.late,
            "why": ENDS.index(self.why),
        }
        checkpoint.save(self.place.checkpoint, tensors, numbers)

    def _resume(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        walk = self.walk
        walk.begin(tensors)

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}

        walk.network.restore(part("network."), int(numbers["numbers_sent"]), int(numbers["bytes"]))
        network = walk.network
        self.link.restore(part("link."), network.members if isinstance(network, Free) else set())
        walk.index, self.clock = int(numbers["round"]), numbers["seconds"]
        self.residual, self.calm, self.late = numbers["residual"], int(numbers["calm"]), bool(numbers["late"])
        self.why = ENDS[int(numbers["why"])]
        walk.counted.gradients, self.link.wire_bytes = int(numbers["gradients"]), int(numbers["wire_bytes"])
        self.rows = self.place.read(walk.index) if walk.index else []
        self.place.keep(self.rows)
        if not self.rows:
            self._record()
        if self.log.exists():
            lines = [line for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
            scratch = self.log.with_suffix(".tmp")
            scratch.write_text("".join(line for line in lines if json.loads(line)["step"] < walk.index))
            os.replace(scratch, self.log)

    def _status(self) -> dict[str, Any]:
        link, last = self.link, self.rows[-1]
        up = [j for j in link.neighbours if link.silent(j) < 2.0]
        return {
            "agent": self.walk.agent,
            "round": self.walk.index,
            "objective": last["objective"],
            "accuracy": last.get("accuracy"),
            "change": self.residual,
            "up": up,
            "down": [j for j in link.neighbours if j not in up],
            "stale": link.stale(),
            "wire_bytes": link.wire_bytes,
            "refused": sum(link.refused.values()),
            "state": "runs",
        }

    def _record(self) -> None:
        walk, link = self.walk, self.link
        value = getattr(getattr(walk, "info", None), "value", None)
        if value is None:
            value = walk.problem.value_and_grad(walk.state.x)[0]
        row: Row = {
            "round": walk.index,
            "seconds": self.clock,
            "communications": walk.network.communications,
            "bytes": walk.network.bytes,
            "wire_bytes": link.wire_bytes,
            "gradients": walk.counted.gradients,
            "objective": float(value.sum()),
            "change": self.residual,
            "up": sum(link.silent(j) < 2.0 for j in link.neighbours),
            "stale": link.stale(),
            "slowest_publish": link.slowest,
            "refused": sum(link.refused.values()),
        }
        row |= {name: float(values.mean()) for name, values in walk.problem.evaluate(walk.state.x).items()}
        self.rows.append(row)
        self.place.append(row)
