"""Partitions of the samples over agents.

A partition is a function (labels, agents, seed) -> one index array per agent. Every sample goes to exactly one agent,
and the same seed gives the same parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from caden.errors import CadenError, require_integer, require_positive
from caden.registry import make

Partition = Callable[[np.ndarray, int, int], list[np.ndarray]]


def iid() -> Partition:
    """Random parts whose sizes differ by at most one sample."""

    def split(labels: np.ndarray, agents: int, seed: int) -> list[np.ndarray]:
        return np.array_split(np.random.default_rng(seed).permutation(len(labels)), agents)

    return split


def dirichlet(alpha: float = 0.3) -> Partition:
    """Each class split over the agents by a draw from Dirichlet(alpha): the smaller alpha, the larger the skew."""
    require_positive("alpha", alpha)

    def split(labels: np.ndarray, agents: int, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        parts: list[list[int]] = [[] for _ in range(agents)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            cuts = (np.cumsum(rng.dirichlet(np.full(agents, alpha)))[:-1] * len(members)).astype(int)
            for part, chunk in zip(parts, np.split(members, cuts)):
                part.extend(chunk.tolist())
        for part in parts:  # an empty part gets a sample of the largest one
            if not part:
                part.append(max(parts, key=len).pop())
        return [np.array(sorted(part)) for part in parts]

    return split


def shards(classes: int = 2) -> Partition:
    """Samples sorted by label and cut into agents x `classes` pieces; each agent gets `classes` random pieces."""
    require_integer("classes", classes, least=1)

    def split(labels: np.ndarray, agents: int, seed: int) -> list[np.ndarray]:
        if agents * classes > len(labels):
            raise CadenError(f"{agents} agents x {classes} classes need more than {len(labels)} samples.")
        rng = np.random.default_rng(seed)
        shuffled = rng.permutation(len(labels))
        pieces = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], agents * classes)
        order = rng.permutation(agents * classes)
        return [np.concatenate([pieces[k] for k in order[i * classes : (i + 1) * classes]]) for i in range(agents)]

    return split


def sizes(sizes: Sequence[float]) -> Partition:
    """Random parts whose sizes are proportional to the given numbers."""
    try:
        weights = np.asarray(sizes, dtype=float)
    except (TypeError, ValueError):
        weights = np.empty(0)
    if weights.ndim != 1 or len(weights) == 0 or not (weights > 0).all():
        raise CadenError("`sizes` must be a list of positive numbers.")

    def split(labels: np.ndarray, agents: int, seed: int) -> list[np.ndarray]:
        if len(weights) != agents:
            raise CadenError(f"`sizes` has {len(weights)} entries for {agents} agents.")
        spare = len(labels) - agents  # every agent gets one sample, the rest is split in proportion
        cuts = np.floor(np.cumsum(weights)[:-1] / weights.sum() * spare + 0.5).astype(int) + np.arange(1, agents)
        return np.split(np.random.default_rng(seed).permutation(len(labels)), cuts)

    return split


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "sizes": sizes,
}


def needs_labels(spec: Any) -> bool:
    """Return whether a partition looks at the targets, and not only at how many there are."""
    name = spec.get("name") if isinstance(spec, dict) else spec
    return callable(spec) or (isinstance(name, str) and name in ("dirichlet", "shards"))


def partition_from_spec(spec: Any, labels: np.ndarray, agents: int, seed: int) -> list[np.ndarray]:
    """Split the samples as `spec` asks, and check that every agent has samples and none is assigned twice."""
    if agents > len(labels):
        raise CadenError(f"{agents} agents need at least {agents} samples, got {len(labels)}.")
    if isinstance(spec, str):
        spec = {"name": spec}
    if isinstance(spec, dict):
        if needs_labels(spec) and (labels.ndim != 1 or labels.dtype.kind not in "iu"):
            raise CadenError(f"Partition {spec['name']!r} needs class labels as targets.")
        spec = make("partition", PARTITIONS, spec)
    if not callable(spec) and not isinstance(spec, Sequence):
        raise CadenError(f"`partition` must be a name, a table, a function or index arrays, got {spec!r}.")
    parts = [np.asarray(p) for p in (spec(labels, agents, seed) if callable(spec) else spec)]
    if len(parts) != agents:
        raise CadenError(f"The partition has {len(parts)} parts for {agents} agents.")
    if any(len(p) == 0 for p in parts):
        raise CadenError(f"The partition leaves agent {[len(p) for p in parts].index(0)} without samples.")
    everything = np.concatenate(parts)
    if len(np.unique(everything)) != len(everything) or everything.min() < 0 or everything.max() >= len(labels):
        raise CadenError("The partition assigns a sample twice, or one that does not exist.")
    return parts
