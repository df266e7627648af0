"""Samples that come one after another, and cannot be read by index."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from caden.data._shards import leaves, over
from caden.errors import CadenError, require_integer


def _samples(stream: Iterable[Any]) -> Iterator[Any]:
    """Yield samples without end: those of the batches of a DataLoader, or what another iterable yields."""
    batched = isinstance(stream, DataLoader) and stream.batch_sampler is not None
    while True:
        count = 0
        for item in stream:
            for i in range(len(leaves(item)[0])) if batched else (None,):
                count += 1
                yield item if i is None else over(item, itemgetter(i))
        if not count:
            raise CadenError("A stream has no samples, or ended and cannot be iterated again.")


class Streams(Dataset[Any]):
    """One iterable per agent, such as a DataLoader or an IterableDataset, as training data: every read takes the next.

    A stream that ends begins anew. What holds for other data does not hold here: a draw cannot be repeated, so a
    resumed, distributed or replayed run sees other samples, and "all samples" of exact metrics are the next `window`.

    Args:
        streams: one per agent; a DataLoader's batches are taken apart, other iterables yield (inputs, target).
        window: how many samples count as all of an agent's.

    >>> import torch
    >>> pairs = [(torch.randn(3), 0), (torch.randn(3), 1)]
    >>> with warnings.catch_warnings(action="ignore"):
    ...     train = Streams([pairs, pairs])
    >>> len(train), int(train[0][1]), int(train[0][1])
    (2048, 0, 1)
    """

    repeats = False

    def __init__(self, streams: Sequence[Iterable[Any]], window: int = 1024):
        if not streams:
            raise CadenError("`streams` must have one iterable per agent, got none.")
        self.window = require_integer("window", window, least=1)
        self._streams = [_samples(stream) for stream in streams]
        self.agents = len(streams)
        warnings.warn("Streams cannot be read again: a resumed or replayed run sees other samples.", stacklevel=2)

    def __len__(self) -> int:
        return self.agents * self.window

    def __getitem__(self, index: int) -> Any:
        return next(self._streams[index // self.window])

    def parts(self) -> list[np.ndarray]:
        """Return which samples belong to each agent."""
        return [np.arange(a * self.window, (a + 1) * self.window) for a in range(self.agents)]
