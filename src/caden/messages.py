"""Messages that get lost, come late, or carry less than a whole vector; every draw is a pure function of (seed, round,
arc). Whatever becomes of a message, it is sent and counted. What a method can do about it depends on its form.

Loss and delay. The receiver goes on with the newest message that did arrive.

- arc methods (`Round.exchange`: relaxed ADMM, LT-ADMM) leave the arc as it was, and stay exact under loss;
- a broadcast leaves `laplacian` and `mix` different at the two ends of an edge: sums are no longer kept, and the method
  is biased;
- edge variables (`Heard.ends`) must be equal at both ends, which nobody can promise here: refused.

Compression with error feedback. Sender and receivers keep a public copy of the row. What is sent is the compressed
difference between the row and its copy, and all copies move by it; so whatever was left out is in the next difference,
and an entry that settles is known exactly in the end. The first message of a kind is sent whole; the copy of an
agent that slept through that round starts at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from caden.core import Edges
from caden.errors import CadenError, choose, number, whole
from caden.schedules import Draw


class Messages(NamedTuple):
    """What happens to messages; the default is nothing."""

    loss: float = 0.0  # probability that a message does not arrive
    burst: int = 1  # rounds that a run of losses lasts
    delay: int = 0  # a message arrives after 0 .. delay rounds, each equally likely; newer ones may overtake it
    top: float | None = None  # send only this fraction of the entries, the largest ones
    bits: int | None = None  # send every entry in so many bits

    @classmethod
    def from_spec(cls, spec: Messages | Mapping[str, Any] | None) -> Messages:
        """Checked."""
        if isinstance(spec, Mapping):
            for key in spec:
                choose("key", f"messages.{key}", [f"messages.{field}" for field in cls._fields])
            spec = cls(**spec)
        spec = spec or cls()
        if not 0 <= number("messages.loss", spec.loss) < 1:
            raise CadenError(f"`messages.loss` must lie in [0, 1), got {spec.loss}.")
        whole("messages.burst", spec.burst, least=1), whole("messages.delay", spec.delay)
        if spec.top is not None and not 0 < number("messages.top", spec.top) <= 1:
            raise CadenError(f"`messages.top` must lie in (0, 1], got {spec.top}.")
        if spec.bits is not None and not 2 <= whole("messages.bits", spec.bits) <= 16:
            raise CadenError(f"`messages.bits` must lie in 2..16, got {spec.bits}.")
        if spec.top is not None and spec.bits is not None:
            raise CadenError("`messages.top` and `messages.bits` are two ways to compress: choose one.")
        if spec.compressed and spec.unreliable:
            raise CadenError("Compressed differences must all arrive: without `messages.loss` and `messages.delay`.")
        return spec

    @property
    def unreliable(self) -> bool:
        return self.loss > 0 or self.delay > 0

    @property
    def compressed(self) -> bool:
        return self.top is not None or self.bits is not None

    def arrives(self, draw: Draw, round: int, exchange: int, arcs: int) -> Tensor:
        """(arcs, 1) bool: which messages get through. Bursts start at another round on each arc."""
        if self.burst == 1:
            kept = draw.uniform(f"loss/{exchange}", round, arcs) >= self.loss
        else:
            phase = np.floor(draw.uniform("loss/phase", 0, arcs) * self.burst).astype(int)
            block = (round + phase) // self.burst
            kept = np.empty(arcs, bool)
            for number_ in np.unique(block):
                mine = block == number_
                kept[mine] = draw.uniform("loss/burst", int(number_), arcs)[mine] >= self.loss
        return torch.from_numpy(kept).unsqueeze(1)

    def takes(self, draw: Draw, round: int, exchange: int, arcs: int) -> Tensor:
        """(arcs, 1) int64: how many rounds each message is on its way."""
        late = np.floor(draw.uniform(f"delay/{exchange}", round, arcs) * (self.delay + 1)).astype(np.int64)
        return torch.from_numpy(late).unsqueeze(1)

    def compress(self, rows: Tensor) -> Tensor:
        """What the receiver reads from the compressed rows: (n, d) -> (n, d)."""
        if self.top is not None:
            kept = rows.abs().topk(self._kept(rows.shape[1]), dim=1).indices
            return torch.zeros_like(rows).scatter_(1, kept, rows.gather(1, kept))
        assert self.bits is not None
        levels = 2 ** (self.bits - 1) - 1
        scale = rows.abs().amax(1, keepdim=True) / levels
        return torch.where(scale > 0, (rows / scale).round() * scale, 0)

    def size(self, width: int, itemsize: int) -> int:
        """Bytes of one compressed row: entries and their 4-byte places, or the bits and a scale."""
        if self.top is not None:
            return self._kept(width) * (itemsize + 4)
        assert self.bits is not None
        return -(-width * self.bits // 8) + itemsize

    def _kept(self, width: int) -> int:
        return max(1, round(float(self.top or 0) * width))


class ArcHeard(NamedTuple):
    """`core.Heard` where each arc's owner knows of its peer what last arrived."""

    rows: Tensor  # (k, d) each agent's own row
    known: Tensor  # (2e, d) at arc (i, j): what i last heard from j
    fresh: Tensor  # (2e, 1) bool: both ends are awake and a message arrived
    edges: Edges
    agreed: bool  # both ends of an edge know what the other has heard

    def laplacian(self) -> Tensor:
        return self.edges.arc_sum(self.rows[self.edges.owner()] - self.known)

    def mix(self, weights: Tensor | None = None) -> Tensor:
        edges, weight = self.edges, self.edges.mixing(self.rows, weights)
        pull = torch.cat([weight, weight]) * (self.rows[edges.owner()] - self.known)
        return self.rows - edges.arc_sum(torch.where(self.fresh, pull, 0))

    def disagreement(self) -> Tensor:
        square = (self.rows[self.edges.owner()] - self.known).square().sum(1, keepdim=True)
        return self.edges.arc_sum(square).squeeze(1)

    def ends(self) -> tuple[Tensor, Tensor]:
        if not self.agreed:
            raise CadenError(
                "Edge variables need messages that arrive: use `radmm`, or no `messages.loss` and `messages.delay`."
            )
        return self.rows[self.edges.first], self.rows[self.edges.second]
