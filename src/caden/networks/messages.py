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

from caden.errors import CadenError, require_choice, require_integer, require_number
from caden.networks.layout import Layout
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
                require_choice("key", f"messages.{key}", [f"messages.{field}" for field in cls._fields])
            spec = cls(**spec)
        spec = spec or cls()
        if not 0 <= require_number("messages.loss", spec.loss) < 1:
            raise CadenError(f"`messages.loss` must lie in [0, 1), got {spec.loss}.")
        require_integer("messages.burst", spec.burst, least=1), require_integer("messages.delay", spec.delay)
        if spec.top is not None and not 0 < require_number("messages.top", spec.top) <= 1:
            raise CadenError(f"`messages.top` must lie in (0, 1], got {spec.top}.")
        if spec.bits is not None and not 2 <= require_integer("messages.bits", spec.bits) <= 16:
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


class Delivery:
    """Messages on their way over the arcs that a process holds: lost, late or compressed, as the model says."""

    def __init__(self, model: Messages, draw: Draw, layout: Layout):
        self.model, self._draw = model, draw
        self._arcs, self._total = layout.arcs.cpu(), 2 * layout.ends.shape[1]
        self.known: dict[str, Tensor] = {}  # what was heard, is under way, or has been made public: for the checkpoint

    def encode(self, channel: str, rows: Tensor, speaking: Tensor) -> tuple[Tensor, int]:
        """What everybody knows of the rows (n, d) after those that are `speaking` were sent, and bytes per message."""
        width, model = rows.shape[1], self.model
        if not model.compressed:
            return rows, width * rows.element_size()
        before = self.known.get(f"{channel}.public")
        if before is None:
            public, size = torch.where(speaking, rows, 0), width * rows.element_size()
        else:
            public = torch.where(speaking, before + model.compress(rows - before), before)
            size = model.size(width, rows.element_size())
        self.known[f"{channel}.public"] = public
        return public, size

    def deliver(
        self, channel: str, exchange: int, index: int, messages: Tensor, spoke: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Arc by arc: the newest message that its owner has, and whether one came in this round.

        `messages` (2e, d) is what peers say now where they `spoke` (2e, 1); `before` holds if none ever came.
        """
        if index < 0:
            self.known[channel] = messages
            return messages, spoke
        through = spoke & self.model.arrives(self._draw, index, exchange, self._total)[self._arcs].to(spoke.device)
        known = self.known.get(channel, before)
        if self.model.delay == 0:
            self.known[channel] = torch.where(through, messages, known)
            return self.known[channel], through
        late = self.model.takes(self._draw, index, exchange, self._total)[self._arcs].to(spoke.device)
        self.known[channel], came = self._queue(channel, index, messages, torch.where(through, index + late, -1), known)
        return self.known[channel], came

    def _queue(
        self, channel: str, index: int, messages: Tensor, arrival: Tensor, known: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put messages under way until the round `arrival` (-1: lost), and take what is due; newer ones overtake."""
        depth, arcs, device = self.model.delay + 1, len(messages), messages.device
        queue = self.known.setdefault(f"{channel}.queue", messages.new_zeros(depth, arcs, messages.shape[1]))
        due = self.known.setdefault(f"{channel}.due", torch.full((depth, arcs, 1), -1, device=device))
        newest = self.known.get(f"{channel}.newest", torch.full((arcs, 1), -1, device=device))
        sent = self.known.setdefault(f"{channel}.sent", torch.full((depth,), -1, device=device))
        came, here = torch.zeros(arcs, 1, dtype=torch.bool, device=device), index % depth

        def take(slot: int) -> None:
            nonlocal known, newest, came
            hit = (due[slot] >= 0) & (due[slot] <= index)
            due[slot] = torch.where(hit, -1, due[slot])
            hit &= sent[slot] > newest
            known, newest, came = torch.where(hit, queue[slot], known), torch.where(hit, sent[slot], newest), came | hit

        for slot in sent.argsort().tolist():
            take(slot)
        queue[here], due[here], sent[here] = messages, arrival, index
        take(here)
        self.known[f"{channel}.newest"] = newest
        return known, came
