"""The rows that a peer offers to its neighbours, who fetch them when they like.

In lockstep a neighbour asks for a version. Free-running peers ask for whatever is newer than what they have. If
messages are compressed, the answer is then the compressed difference to that, provided this peer still knows it;
otherwise it is the whole row. So a neighbour may skip versions, and after a lost reply or a restart both ends agree
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from caden.networks.codec import Codec
from caden.networks.peers.transports import KEPT_ROUNDS, LANES
from caden.networks.peers.wire import LAST


class Offer(NamedTuple):
    """An answer to a neighbour: a row, or the difference to its version `base` if that is not negative."""

    version: int
    base: int
    data: Tensor  # numbers, or bytes


def pack_difference(row: Tensor, copy: Tensor, codec: Codec, dim: int) -> Tensor:
    """Return the bytes of a compressed difference to `copy`; the numbers after the first `dim` are sent whole."""
    difference = codec.pack((row[:dim] - copy[:dim]).unsqueeze(0)).squeeze(0)
    return torch.cat([difference, row[dim:].contiguous().view(torch.uint8)])


def apply_difference(copy: Tensor, data: Tensor, codec: Codec, dim: int) -> Tensor:
    """Return the copy after a difference that `pack_difference` has packed."""
    size = codec.size(dim, copy.element_size())
    row = copy[:dim] + codec.unpack(data[:size].unsqueeze(0), dim, copy.dtype).squeeze(0)
    return torch.cat([row, data[size:].clone().view(copy.dtype)])


class Offers:
    """Rows by version and neighbour; `codec` is for free-running peers, whose rows begin with `dim` numbers."""

    def __init__(self, free: bool, codec: Codec | None, dim: int):
        self._free, self._codec, self._dim = free, codec, dim
        self._rows: dict[int, dict[int, Tensor]] = {}  # version -> neighbour -> row
        self.last_rows: dict[int, Tensor] = {}  # of agents that have finished, this one and others
        self._answers: dict[int, Offer] = {}  # the last answer to each neighbour, which may fetch it in pieces
        self._copies: dict[int, dict[int, Tensor]] = {}  # neighbour -> version -> what it has of that, if it has it

    @property
    def newest(self) -> int:
        return max(self._rows, default=-1)

    def add(self, version: int, rows: Mapping[int, Tensor]) -> None:
        """Offer a copy of each row, and forget rows that nobody needs any more."""
        copies: dict[int, Tensor] = {}
        for j, row in rows.items():
            same = next((copies[k] for k in copies if rows[k] is row), None)
            copies[j] = row.detach().clone() if same is None else same
        if copies:
            self._rows[version] = copies
        # A neighbour is at most one round behind, and may have to repeat a round; free ones need the newest.
        oldest = version - 1 if self._free else (version // LANES - KEPT_ROUNDS) * LANES
        for old in [v for v in self._rows if v < oldest]:
            kept = {j: row for j, row in self._rows[old].items() if self._free and self._newest_for(j) == old}
            self._rows[old] = kept
            if not kept:
                del self._rows[old]

    def _newest_for(self, neighbour: int) -> int:
        return max((v for v, rows in self._rows.items() if neighbour in rows), default=-1)

    def answer(self, neighbour: int, version: int, base: int, offset: int) -> Offer | None:
        """Return what a neighbour that has version `base` gets for `version`, or for the newest one if that is -1."""
        if version >= LAST:
            return _whole(version, self.last_rows.get(version - LAST))
        last = self._answers.get(neighbour)
        if version >= 0:
            if offset and last is not None and (last.version, last.base) == (version, base):
                return last
            row = self._rows.get(version, {}).get(neighbour)
            return last if row is None and last is not None and last.version == version else _whole(version, row)
        newest = self._newest_for(neighbour)
        if newest < 0:
            return None
        if newest <= base:
            return Offer(base, base, torch.empty(0, dtype=torch.uint8))
        if last is not None and (last.version, last.base) == (newest, base):
            return last
        row, known = self._rows[newest][neighbour], self._copies.get(neighbour, {})
        if self._codec is None or base not in known:
            self._answers[neighbour] = Offer(newest, -1, row)
            self._copies[neighbour] = {newest: row}
        else:
            data = pack_difference(row, known[base], self._codec, self._dim)
            self._answers[neighbour] = Offer(newest, base, data)
            self._copies[neighbour] = {
                base: known[base],
                newest: apply_difference(known[base], data, self._codec, self._dim),
            }
        return self._answers[neighbour]

    def buffers(self) -> dict[str, Tensor]:
        """Return the rows, for a checkpoint."""
        return {f"{v}.{j}": row for v, by_agent in self._rows.items() for j, row in by_agent.items()}

    def restore(self, buffers: Mapping[str, Tensor]) -> None:
        """Restore what `buffers` returned."""
        for name, row in buffers.items():
            version, neighbour = map(int, name.split("."))
            self._rows.setdefault(version, {})[neighbour] = row


def _whole(version: int, row: Tensor | None) -> Offer | None:
    return None if row is None else Offer(version, -1, row)
