"""Replay a free-running fleet in one process: every step reads the versions recorded in its log."""

import json
import threading
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden.engine import checkpoint
from caden.engine.process import deterministic_mode
from caden.engine.run_directory import RunDirectory
from caden.engine.warmup import Warmup
from caden.errors import CadenError
from caden.experiments.config import experiment
from caden.experiments.peer import prepare_peer
from caden.networks.codec import Codec
from caden.networks.messages import Messages
from caden.networks.peers.fleet import Fleet
from caden.networks.peers.offers import apply_difference, pack_difference
from caden.networks.peers.transports import Received
from caden.networks.peers.wire import LIFE
from caden.networks.transport import Memory


class Replayed(NamedTuple):
    """The result of replaying one agent."""

    agent: int
    steps: int
    x: Tensor  # (1, d)
    same: bool  # x equals the peer's own result to the bit


class _RowsInTransit:
    """The rows in transit; each is stored until the step that needs it has read it."""

    def __init__(self, logs: dict[int, dict[int, Any]]):
        self.changed, self.rows = threading.Condition(), dict[tuple[int, int, int], Tensor]()
        self.needed = Counter(
            (int(j), agent, version)
            for agent, log in logs.items()
            for line in log.values()
            for j in line["read"]
            for version, _ in _path(line, j)
        )
        self.waiting: dict[int, tuple[int, int, int]] = {}
        self.unfinished = set(logs)
        self.unpublished = ""

    def stuck(self) -> bool:
        """Whether every running agent waits for a row that does not exist."""
        return self.unfinished <= set(self.waiting) and not any(key in self.rows for key in self.waiting.values())


def _path(line: Mapping[str, Any], neighbour: str) -> list[tuple[int, int]]:
    """Return the versions that a step's row depends on, each with its base (-1: the whole row)."""
    path: list[tuple[int, int]] = line.get("paths", {}).get(neighbour) or [(line["read"][neighbour], -1)]
    return path


class _EndOfLog(Exception):
    """The end of an agent's log."""


class _RecordedLink:
    """A link that delivers the rows recorded in the logs."""

    def __init__(self, agent: int, log: dict[int, Any], transit: _RowsInTransit, codec: Codec | None, dim: int):
        self._agent, self._log, self._transit = agent, log, transit
        self._codec, self._dim, self._copies = codec, dim, dict[int, Tensor]()

    def publish(self, version: int, rows: Mapping[int, Tensor]) -> None:
        with self._transit.changed:
            for j, row in rows.items():
                key = (self._agent, j, version)
                if key in self._transit.needed:
                    self._transit.rows[key] = row.clone()
            self._transit.changed.notify_all()

    def life(self, step: int, own: int) -> int:
        return int(self._log[step]["life"]) if step in self._log else own

    def members(self, step: int) -> set[int]:
        return set(self._log[step]["members"])

    def read(self, step: int) -> dict[int, Received]:
        received: dict[int, Received] = {}
        if step not in self._log:
            raise _EndOfLog
        for name, version in self._log[step]["read"].items():
            j = int(name)
            for fetched, base in _path(self._log[step], name):
                row = self._wait_for(j, fetched, step)
                if base >= 0:
                    if self._codec is None or j not in self._copies:
                        raise CadenError(f"The logs are inconsistent: agent {self._agent} did not have version {base}.")
                    copy = self._copies[j]
                    row = apply_difference(
                        copy, pack_difference(row, copy, self._codec, self._dim), self._codec, self._dim
                    )
                self._copies[j] = row
            received[j] = Received(version, self._copies[j], [])
        return received

    def _wait_for(self, neighbour: int, version: int, step: int) -> Tensor:
        """Return a row of a neighbour as soon as that has been replayed up to it."""
        transit, key = self._transit, (neighbour, self._agent, version)
        with transit.changed:
            transit.waiting[self._agent] = key
            while key not in transit.rows:
                if not transit.unpublished and transit.stuck():
                    said = f"step {step} of agent {self._agent} read version {version} of agent {neighbour}"
                    transit.unpublished = said
                    transit.changed.notify_all()
                if transit.unpublished:
                    raise CadenError(f"The logs are inconsistent: {transit.unpublished}, which was not published.")
                transit.changed.wait(60)
            del transit.waiting[self._agent]
            transit.needed[key] -= 1  # a peer that was restarted may have fetched a row twice
            return transit.rows[key] if transit.needed[key] else transit.rows.pop(key)

    def wait(self, neighbour: int, version: int, like: Tensor) -> Tensor:
        raise NotImplementedError


def replay(folder: Path) -> list[Replayed]:
    """Replay a fleet's directory from its logs, and compare the results."""
    run_dirs = [path for path in folder.glob("agent-*") if path.name.removeprefix("agent-").isdigit()]
    run_dirs.sort(key=lambda path: int(path.name.removeprefix("agent-")))
    if not run_dirs:
        raise CadenError(f"{folder} contains no agent-* folders: it is not the directory of a fleet.")
    config = experiment(run_dirs[0] / "config.toml")
    if Fleet.of(config).mode != "free":
        raise CadenError("A fleet in lockstep needs no replay: `caden run` on its file gives the same numbers.")
    logs = {int(path.name.removeprefix("agent-")): _read_log(path) for path in run_dirs}
    _require_messages(logs)
    codec = Messages.from_spec(config.messages).codec
    transit, results = _RowsInTransit(logs), dict[int, Replayed | BaseException]()
    built = {agent: config.build(partial(Fleet.of(config).hosted_agents, agent=agent)) for agent in logs}

    def replay_agent(agent: int, path: Path) -> None:
        try:
            link = _RecordedLink(agent, logs[agent], transit, codec, built[agent][1].dim)
            run, start, _ = prepare_peer(config, agent, built[agent], link)
            run.begin(start, Warmup.from_spec(config.warmup))
            for _ in range(len(logs[agent]) - 1):
                run.step()
            x, run_dir = run.state.x.clone(), RunDirectory(path)
            if run_dir.weights.exists():
                final = checkpoint.load(run_dir.weights).tensors["x"]
            else:
                final = _last_checkpoint(path)[0].tensors["state.x"]
            results[agent] = Replayed(agent, run.index, x, torch.equal(final, x))
            run.step()  # the peer may have published a step that it did not complete
        except _EndOfLog:
            pass
        except BaseException as error:
            results[agent] = error
        finally:
            with transit.changed:
                transit.unfinished.discard(agent)
                transit.changed.notify_all()

    with deterministic_mode(config.deterministic):
        threads = [threading.Thread(target=replay_agent, args=pair, daemon=True) for pair in zip(logs, run_dirs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [result for _, result in sorted(results.items()) if isinstance(result, Replayed)]


def _require_messages(logs: dict[int, dict[int, Any]]) -> None:
    """Refuse logs in which some agent read steps that the sender lost, with its log."""
    last_life = {agent: max((line["life"] for line in log.values()), default=0) for agent, log in logs.items()}
    written = {agent: {line["life"] * LIFE + step + 1 for step, line in log.items()} for agent, log in logs.items()}
    for log in logs.values():
        for line in log.values():
            for sender, version in ((int(j), version) for j in line["read"] for version, _ in _path(line, j)):
                if version // LIFE < last_life.get(sender, 0) and version not in written[sender]:
                    raise CadenError(
                        f"Agent {sender} lost steps that its neighbours had read (its directory was replaced, or the "
                        "power failed), so this fleet cannot be replayed."
                    )


def _last_checkpoint(run_dir: Path) -> list[checkpoint.Part]:
    return checkpoint.Checkpoints(run_dir, Memory()).load() or []


def _read_log(run_dir: Path) -> dict[int, Any]:
    """Return the log of an agent by step, up to its checkpoint; later steps do not count."""
    path, saved = run_dir / "versions.jsonl", _last_checkpoint(run_dir)
    if not saved:
        return {}
    last = int(saved[0].numbers["round"])
    try:
        text = path.read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        log = {line["step"]: {"life": 0, **line} for line in lines if line["step"] < last}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CadenError(f"Cannot read {path}: {error}.") from None
    if sorted(log) != list(range(-1, last)):
        raise CadenError(f"{path} does not contain all steps.")
    return log
