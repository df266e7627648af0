"""Checkpoints from a different number of processes: their parts are merged and redistributed.

A tensor of a part belongs to hosted agents, edges or arcs, or is the same in all processes. Its size in every part and
in the initial state of this process determines which. If two kinds fit, the run is refused.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from caden.engine.checkpoint import Part
from caden.errors import CadenError
from caden.graphs import Graph
from caden.networks.layout import Layout

SUMMED = ("gradients", "rejected", "fallbacks", "stalled", "wire_bytes")  # counted by each process for itself


class _Kind:
    """How a kind of tensor is distributed: where the entries of each part belong in the whole, and who owns them."""

    def __init__(self, total: int, places: Sequence[Tensor], owned: Sequence[Tensor], here: Tensor):
        self.total, self._places, self._owned, self._here = total, places, owned, here

    def fits(self, parts: Sequence[Tensor], wanted: Tensor | None, axis: int) -> bool:
        """Return whether the sizes of the parts, and of the tensor wanted here, match this kind."""
        if any(part.ndim <= axis or part.shape[axis] != len(p) for part, p in zip(parts, self._places)):
            return False
        return wanted is None or (wanted.ndim > axis and wanted.shape[axis] == len(self._here))

    def deal(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Merge the parts and return the entries of this process."""
        shape = list(parts[0].shape)
        shape[axis] = self.total
        whole = parts[0].new_zeros(shape)
        for part, places, owned in zip(parts, self._places, self._owned):
            whole.index_copy_(axis, places[owned], part.index_select(axis, owned))
        return whole.index_select(axis, self._here)


def _kinds(graph: Graph, layouts: Sequence[Layout], here: Layout) -> dict[str, _Kind]:
    def everything(places: Tensor) -> Tensor:
        return torch.arange(len(places))

    hosted = [layout.hosted for layout in layouts]
    known = [layout.rows.cpu() for layout in layouts]
    edges = [layout.edges.cpu() for layout in layouts]
    arcs = [layout.arcs.cpu() for layout in layouts]
    owned = [torch.isin(layout.owners.cpu(), layout.hosted).nonzero().flatten() for layout in layouts]
    own_rows = [torch.arange(layout.agents) for layout in layouts]
    return {
        "hosted": _Kind(graph.agents, hosted, list(map(everything, hosted)), here.hosted),
        "known": _Kind(graph.agents, known, own_rows, here.rows.cpu()),
        "edges": _Kind(len(graph.edges), edges, list(map(everything, edges)), here.edges.cpu()),
        "arcs": _Kind(2 * len(graph.edges), arcs, owned, here.arcs.cpu()),
    }


def redeal(parts: Sequence[Part], state: Mapping[str, Tensor], here: Layout, first: bool) -> Part:
    """Return the part of this process, given all parts of a checkpoint and the initial state."""
    graph = here.graph
    layouts = [Layout(graph, part.facts["hosted"]) for part in parts]
    kinds = _kinds(graph, layouts, here)
    tensors = {name: _one(name, [p.tensors[name] for p in parts], state.get(name), kinds) for name in parts[0].tensors}

    def by_arc(name: str) -> bool:
        return _network_kind(name, [p.tensors[name] for p in parts], kinds)[0] == "arcs"

    for name in [n for n in tensors if re.fullmatch(r"network\.broadcast\d+", n)]:
        if len(here.rows) > here.agents and f"{name}.rows" not in tensors and by_arc(name):
            raise CadenError("With lossy or changing links, a run of one process cannot be resumed by several.")
    numbers = dict(parts[0].numbers)
    for name in SUMMED:
        if name in numbers:
            numbers[name] = sum(part.numbers[name] for part in parts) if first else 0
    return Part(tensors, numbers, parts[0].facts)


def _one(name: str, parts: Sequence[Tensor], wanted: Tensor | None, kinds: Mapping[str, _Kind]) -> Tensor:
    """Redistribute one tensor."""
    if name.startswith("network."):
        kind, axis = _network_kind(name, parts, kinds)
        return parts[0] if kind is None else kinds[kind].deal(parts, axis)
    if name == "curvature":
        return kinds["hosted"].deal(parts, 0)
    fitting = [kind for kind in ("hosted", "edges", "arcs") if kinds[kind].fits(parts, wanted, 0)]
    same = wanted is not None and all(part.shape == wanted.shape for part in parts)
    if same and not fitting:
        return parts[0]
    if len(fitting) != 1 or same:
        raise CadenError(
            f"This checkpoint can only be resumed by {len(parts)} processes: {name} could be dealt in several ways."
        )
    return kinds[fitting[0]].deal(parts, 0)


def _network_kind(name: str, parts: Sequence[Tensor], kinds: Mapping[str, _Kind]) -> tuple[str | None, int]:
    """Return the kind of a network buffer, None if it is the same in all processes, and the axis of its entries."""
    buffer = name.rpartition(".")[2]
    if buffer in ("queue", "due"):
        return "arcs", 1
    if buffer == "sent":
        return None, 0
    if buffer == "newest" or "exchange" in name:
        return "arcs", 0
    return ("known" if kinds["known"].fits(parts, None, 0) else "arcs"), 0
