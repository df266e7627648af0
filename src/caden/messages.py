"""Messages that do not arrive: each directed edge loses its message with a probability, alone or in bursts.

Every draw is a pure function of (seed, round, arc). A lost message is sent and counted all the same. What a method can
do about it depends on its form:

- arc methods (`Round.exchange`: relaxed ADMM, LT-ADMM) leave the arc as it was, and stay exact;
- a broadcast leaves the receiver with the sender's last message that did arrive. `laplacian` and `mix` then differ
  between the two ends of an edge, sums are no longer kept, and the method is biased;
- edge variables (`Heard.ends`) must be equal at both ends, which nobody can promise here: refused.
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


class Loss(NamedTuple):
    """Messages are lost with probability `loss`, in runs of `burst` rounds."""

    loss: float = 0.0
    burst: int = 1

    @classmethod
    def from_spec(cls, spec: Loss | Mapping[str, Any] | None) -> Loss | None:
        """Checked; None if nothing is ever lost."""
        if spec is None:
            return None
        if isinstance(spec, Mapping):
            for key in spec:
                choose("key", f"messages.{key}", [f"messages.{field}" for field in cls._fields])
            spec = cls(**spec)
        if not 0 <= number("messages.loss", spec.loss) < 1:
            raise CadenError(f"`messages.loss` must lie in [0, 1), got {spec.loss}.")
        whole("messages.burst", spec.burst, least=1)
        return spec if spec.loss > 0 else None

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


class LossyHeard(NamedTuple):
    """`core.Heard` where each arc's owner knows of its peer what last arrived."""

    rows: Tensor  # (k, d) each agent's own row
    known: Tensor  # (2e, d) at arc (i, j): what i last heard from j
    fresh: Tensor  # (2e, 1) bool: both ends are awake and this round's message arrived
    edges: Edges

    def laplacian(self) -> Tensor:
        return self.edges.arc_sum(self.rows[self.edges.owner()] - self.known)

    def mix(self, weights: Tensor | None = None) -> Tensor:
        edges, weight = self.edges, self.edges.mixing(self.rows, weights)
        pull = torch.cat([weight, weight]) * (self.rows[edges.owner()] - self.known)
        return self.rows - edges.arc_sum(torch.where(self.fresh, pull, 0))

    def ends(self) -> tuple[Tensor, Tensor]:
        raise CadenError("Edge variables need messages that arrive: without `messages.loss`, or use `radmm`.")
