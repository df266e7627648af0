"""A free-running fleet once more, in one process: every step reads the versions that its log says."""

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
from caden.engine.history import RunDirectory
from caden.engine.process import deterministic_mode
from caden.engine.warmup import Warmup
from caden.errors import CadenError
from caden.experiments.config import experiment
from caden.experiments.peer import prepare_peer
from caden.networks.peers.fleet import Fleet


class Replayed(NamedTuple):
    """An agent after its replay."""

    agent: int
    steps: int
    x: Tensor  # (1, d)
    same: bool  # to the bit, as what the peer left


class _Post:
    """The rows on their way; each is kept until the last step that reads it has done so."""

    def __init__(self, logs: dict[int, dict[int, Any]]):
        self.changed, self.rows = threading.Condition(), dict[tuple[int, int, int], Tensor]()
        self.needed = Counter(
            (int(j), agent, version)
            for agent, log in logs.items()
            for line in log.values()
            for j, version in line["read"].items()
        )
        self.waiting: dict[int, tuple[int, int, int]] = {}
        self.walking = set(logs)
        self.broken = ""

    def stuck(self) -> bool:
        """Whether everybody waits for a row that is not there."""
        return self.walking <= set(self.waiting) and not any(key in self.rows for key in self.waiting.values())


class _Over(Exception):
    """The log ends here."""


class _Recorded:
    """A link that delivers what was delivered then."""

    def __init__(self, agent: int, log: dict[int, Any], post: _Post):
        self._agent, self._log, self._post = agent, log, post

    def publish(self, version: int, rows: Mapping[int, Tensor]) -> None:
        with self._post.changed:
            for j, row in rows.items():
                key = (self._agent, j, version)
                if key in self._post.needed:
                    self._post.rows[key] = row.clone()
            self._post.changed.notify_all()

    def members(self, step: int) -> set[int]:
        return set(self._log[step]["members"])

    def read(self, step: int) -> dict[int, tuple[int, Tensor]]:
        post, found = self._post, {}
        if step not in self._log:
            raise _Over
        with post.changed:
            for j, version in self._log[step]["read"].items():
                key = (int(j), self._agent, version)
                post.waiting[self._agent] = key
                while key not in post.rows:
                    if not post.broken and post.stuck():
                        post.broken = f"step {step} of agent {self._agent} read version {version} of agent {j}"
                        post.changed.notify_all()
                    if post.broken:
                        raise CadenError(f"The logs do not fit together: {post.broken}, which was never published.")
                    post.changed.wait(60)
                del post.waiting[self._agent]
                found[int(j)] = (version, post.rows.pop(key))
        return found

    def wait(self, neighbour: int, version: int, like: Tensor) -> Tensor:
        raise NotImplementedError


def replay(folder: Path) -> list[Replayed]:
    """Run a fleet's directory again from its logs, and compare."""
    places = [path for path in folder.glob("agent-*") if path.name.removeprefix("agent-").isdigit()]
    places.sort(key=lambda path: int(path.name.removeprefix("agent-")))
    if not places:
        raise CadenError(f"{folder} has no agent-* folders: it is not the directory of a fleet.")
    config = experiment(places[0] / "config.toml")
    if Fleet.of(config).mode != "free":
        raise CadenError("A fleet in lockstep needs no replay: `caden run` on its file gives the same numbers.")
    logs = {int(place.name.removeprefix("agent-")): _read(place) for place in places}
    post, found = _Post(logs), dict[int, Replayed | BaseException]()
    built = {agent: config.build(partial(Fleet.of(config).hosted_agents, agent=agent)) for agent in logs}

    def walk(agent: int, place: Path) -> None:
        try:
            run, start, _ = prepare_peer(config, agent, built[agent], _Recorded(agent, logs[agent], post))
            run.begin(start, Warmup.from_spec(config.warmup))
            for _ in range(len(logs[agent]) - 1):
                run.step()
            x, left = run.state.x.clone(), RunDirectory(place)
            file, name = (left.weights, "x") if left.weights.exists() else (left.checkpoint, "state.x")
            found[agent] = Replayed(agent, run.index, x, torch.equal(checkpoint.load(file)[0][name], x))
            run.step()  # one that was begun may have been published before the end came
        except _Over:
            pass
        except BaseException as error:
            found[agent] = error
        finally:
            with post.changed:
                post.walking.discard(agent)
                post.changed.notify_all()

    with deterministic_mode(config.deterministic):
        runners = [threading.Thread(target=walk, args=pair, daemon=True) for pair in zip(logs, places)]
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join()
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return [result for _, result in sorted(found.items()) if isinstance(result, Replayed)]


def _read(place: Path) -> dict[int, Any]:
    """The log of an agent by step, up to its checkpoint: what came after it never happened."""
    path, saved = place / "versions.jsonl", RunDirectory(place).checkpoint
    if not saved.exists():
        return {}
    last = int(checkpoint.load(saved)[1]["round"])
    try:
        text = path.read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        found = {line["step"]: line for line in lines if line["step"] < last}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CadenError(f"Cannot read {path}: {error}.") from None
    if sorted(found) != list(range(-1, last)):
        raise CadenError(f"{path} lacks steps.")
    return found
