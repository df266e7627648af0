"""All randomness of a run. Every draw is a pure function of the seed and of what it is for: (round, local step, agent).

So any process can make any draw, and a resumed, distributed or replayed run gets the same ones; a training loop outside
this library can make them too, with `batch` and `randomness`.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

_FEW = 8  # a batch of less than one sample in so many is drawn one by one
_generators = threading.RLock()  # torch, numpy and Python have one generator each for all threads


def _stream(seed: int, label: str, round: int, step: int = 0) -> np.random.Generator:
    key = hashlib.blake2b(f"{seed}/{label}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64), counter=[0, 0, step, round + 1]))


class Draw(NamedTuple):
    """Random numbers by label: `draw.uniform(label, round)` is one number in [0, 1) per agent."""

    seed: int
    agents: int

    def uniform(self, label: str, round: int, count: int | None = None) -> np.ndarray:
        """Return (agents,) numbers; entry i depends only on (seed, label, round, i)."""
        return _stream(self.seed, label, round).random(self.agents if count is None else count)


def batch(seed: int, round: int, step: int, agent: int, samples: int, size: int) -> np.ndarray:
    """Return which `size` of its `samples` an agent sees in a local step, in ascending order; round -1 is the start.

    >>> batch(seed=0, round=3, step=1, agent=2, samples=10, size=4)
    array([0, 1, 4, 8])
    """
    if size >= samples:
        return np.arange(samples)
    stream = _stream(seed, f"batch/{agent}", round, step)
    if _FEW * size >= samples:
        return np.sort(np.argpartition(stream.random(samples), size)[:size])
    chosen = np.empty(0, np.int64)
    while len(chosen) < size:  # without the repetitions; it takes about one pass
        more = (stream.random(size) * samples).astype(np.int64)
        chosen = np.unique(np.concatenate([chosen, more[: size - len(chosen)]]))
    return chosen


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch within the block, for the first parameters of a model; other threads that draw wait meanwhile."""
    with _generators, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _uses_gpus() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def generator_states() -> tuple[object, ...]:
    """Return the states of all generators, to be compared: they differ if anything was drawn in between."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    on_gpu = torch.cuda.get_rng_state_all() if _uses_gpus() else []
    return (
        random.getstate(),
        numpy[1].tobytes(),
        numpy[2:],
        *(s.numpy().tobytes() for s in [torch.get_rng_state(), *on_gpu]),
    )


@contextmanager
def randomness(seed: int, round: int, step: int, agent: int, of: str = "model") -> Iterator[None]:
    """Seed the generators of torch, numpy and Python within the block; afterwards they are as before.

    `of="model"` is for dropout, `of="data"` for random transforms: draws of their own.

    >>> with randomness(seed=0, round=3, step=1, agent=2):
    ...     mask = torch.nn.functional.dropout(torch.ones(8))
    """
    drawn = int(_stream(seed, f"{of}/{agent}", round, step).integers(2**63))
    with _generators:
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        before = torch.get_rng_state()
        on_gpu = torch.cuda.get_rng_state_all() if _uses_gpus() else None
        try:
            torch.default_generator.manual_seed(drawn)
            if on_gpu is not None:
                torch.cuda.manual_seed_all(drawn)
            random.seed(drawn), np.random.seed(drawn % 2**32)  # noqa: NPY002
            yield
        finally:
            torch.set_rng_state(before)
            if on_gpu is not None:
                torch.cuda.set_rng_state_all(on_gpu)
            random.setstate(python), np.random.set_state(numpy)  # noqa: NPY002
