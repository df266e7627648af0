"""Messages that are lost, delayed, compressed, or sent only if they say something new. Every draw is a pure function of
(seed, round, arc), and every message that is sent is counted, whatever happens to it.

Loss and delay. The receiver continues with the newest message that has arrived.

- Arc methods (`Round.exchange`: CADEN, relaxed ADMM, LT-ADMM) leave the arc unchanged and stay exact under loss.
- After a broadcast, `laplacian` and `mix` differ between the two ends of an edge: sums are no longer preserved, and the
  method is biased.
- Edge variables (`Heard.ends`) must be equal at both ends, which cannot be guaranteed here: they are refused.

Compression and triggers: `copies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from caden.draws import Draw
from caden.errors import CadenError, require_choice, require_integer, require_number, require_positive
from caden.networks.codec import Codec
from caden.networks.layout import Layout


class Messages(NamedTuple):
    """A model of what happens to messages; by default, nothing."""

    loss: float = 0.0  # probability that a message does not arrive
    burst: int = 1  # length of a run of losses, in rounds
    delay: int = 0  # a message arrives after 0 .. delay rounds, each equally likely; newer ones may overtake it
    top: float | None = None  # send only this fraction of the entries, the largest ones
    bits: int | None = None  # send every entry that is sent in this many bits
    trigger: float | Mapping[str, float] | None = None  # send what moved by more than this, or {first, decay}

    @classmethod
    def from_spec(cls, spec: Messages | Mapping[str, Any] | None) -> Messages:
        """Return the checked model that `spec` describes."""
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
        if spec.bits is not None and not 1 <= require_integer("messages.bits", spec.bits) <= 16:
            raise CadenError(f"`messages.bits` must lie in 1..16, got {spec.bits}.")
        spec.threshold(0)
        return spec

    @property
    def unreliable(self) -> bool:
        return self.loss > 0 or self.delay > 0

    @property
    def conditions(self) -> dict[str, bool]:
        """What a method must survive, by the names of `methods.CONDITIONS`."""
        return {"loss": self.loss > 0, "delay": self.delay > 0, "compression": self.shared_copies}

    @property
    def codec(self) -> Codec | None:
        """How rows are compressed, if they are."""
        return None if self.top is None and self.bits is None else Codec(self.top, self.bits)

    @property
    def abridged(self) -> str:
        """ "triggered", "compressed", or "" if every message is sent as it is."""
        return "triggered" if self.trigger is not None else "compressed" if self.codec is not None else ""

    @property
    def shared_copies(self) -> bool:
        """Whether sender and receivers hold a copy of what was sent."""
        return bool(self.abridged)

    def worth_sending(self, round: int, change: Tensor) -> Tensor:
        """Return (n, 1) bool: whether rows that changed by (n, d) since they were last sent are sent in a round."""
        if self.trigger is None:
            return torch.ones_like(change[:, :1], dtype=torch.bool)
        distance: Tensor = torch.linalg.vector_norm(change, dim=1, keepdim=True)
        return distance > self.threshold(round)

    def threshold(self, round: int) -> float:
        """Return the distance that triggers a message in a round."""
        if self.trigger is None:
            return 0.0
        if not isinstance(self.trigger, Mapping):
            return require_positive("messages.trigger", self.trigger)
        for key in self.trigger:
            require_choice("key", f"messages.trigger.{key}", ["messages.trigger.first", "messages.trigger.decay"])
        first = require_positive("messages.trigger.first", self.trigger.get("first", 1.0))
        decay = require_positive("messages.trigger.decay", self.trigger.get("decay", 1.0))
        if decay > 1:
            raise CadenError(f"`messages.trigger.decay` must be at most 1, got {decay}.")
        return float(first * decay**round)

    def arrives(self, draw: Draw, round: int, exchange: int, arcs: int) -> Tensor:
        """Return (arcs, 1) bool: which messages arrive. Bursts start in different rounds on different arcs."""
        if self.burst == 1:
            kept = draw.uniform(f"loss/{exchange}", round, arcs) >= self.loss
        else:
            phase = np.floor(draw.uniform("loss/phase", 0, arcs) * self.burst).astype(int)
            block = (round + phase) // self.burst
            kept = np.empty(arcs, bool)
            for number in np.unique(block):
                in_block = block == number
                kept[in_block] = draw.uniform("loss/burst", int(number), arcs)[in_block] >= self.loss
        return torch.from_numpy(kept).unsqueeze(1)

    def takes(self, draw: Draw, round: int, exchange: int, arcs: int) -> Tensor:
        """Return (arcs, 1) int64: the delay of each message in rounds."""
        late = np.floor(draw.uniform(f"delay/{exchange}", round, arcs) * (self.delay + 1)).astype(np.int64)
        return torch.from_numpy(late).unsqueeze(1)


class Delivery:
    """Delivery of messages over the arcs that a process holds, and what agents know of each other by them."""

    def __init__(self, model: Messages, draw: Draw, layout: Layout):
        self.model, self._draw = model, draw
        self._arcs, self._total = layout.arcs.cpu(), 2 * layout.ends.shape[1]
        self.known: dict[str, Tensor] = {}  # rows received, in transit, and copies: part of the checkpoint

    def deliver(
        self, channel: str, exchange: int, index: int, messages: Tensor, spoke: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return, for each arc, the newest message that its owner has, and whether one arrived in this round.

        `messages` (2e, d) holds what peers send now where they `spoke` (2e, 1). `before` is used if none ever came.
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
        """Queue messages until the round `arrival` (-1: lost), and take those that are due; newer ones overtake."""
        depth, arcs, device = self.model.delay + 1, len(messages), messages.device
        queue = self.known.setdefault(f"{channel}.queue", messages.new_zeros(depth, arcs, messages.shape[1]))
        due = self.known.setdefault(f"{channel}.due", torch.full((depth, arcs, 1), -1, device=device))
        newest = self.known.get(f"{channel}.newest", torch.full((arcs, 1), -1, device=device))
        sent = self.known.setdefault(f"{channel}.sent", torch.full((depth,), -1, device=device))
        came, current = torch.zeros(arcs, 1, dtype=torch.bool, device=device), index % depth

        def take(slot: int) -> None:
            nonlocal known, newest, came
            taken = (due[slot] >= 0) & (due[slot] <= index)
            due[slot] = torch.where(taken, -1, due[slot])
            taken &= sent[slot] > newest
            known, newest = torch.where(taken, queue[slot], known), torch.where(taken, sent[slot], newest)
            came = came | taken

        for slot in sent.argsort().tolist():
            take(slot)
        queue[current], due[current], sent[current] = messages, arrival, index
        take(current)
        self.known[f"{channel}.newest"] = newest
        return known, came
