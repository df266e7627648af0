"""What an agent costs a training loop: its hooks per step, its memory, and what `overlap` saves.

    python benchmarks/own_loop.py [--repeats 7]
    python benchmarks/namespaces.py --rate 50 benchmarks/own_loop.py --overlap

Starts two ranks on this machine. Ratios are of medians of blocks of steps that alternate in one process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import caden
from caden import launcher


def loop(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, **options: object) -> tuple[Callable, object]:
    """Return a function that makes some steps, with or without an agent."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    agent = caden.Agent(model, optimizer, "caden", mu_z=0.1, **options) if options else None

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return time.perf_counter() - began

    return steps, agent


def alternate(repeats: int, count: int, first: Callable, second: Callable) -> float:
    """Return how much longer the second takes than the first, by medians."""
    first(count), second(count)
    times = [(first(count), second(count)) for _ in range(repeats)]
    return statistics.median(b / a for a, b in times)


def rows_held(agent: object, dim: int) -> float:
    """Return how many rows of the model's size the loop's side holds."""
    steps = agent._steps
    held = {t.data_ptr(): t.numel() for t in vars(steps).values() if isinstance(t, torch.Tensor) and t.numel() > 1}
    return sum(held.values()) / dim


def main(repeats: int) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    images, labels = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
    plain, _ = loop(caden.problems.cnn(1, 28, 10), images, labels)
    hooked, agent = loop(caden.problems.cnn(1, 28, 10), images, labels, every=10**9)
    ratio = alternate(repeats, 30, plain, hooked)
    say(f"hooks, CNN with 207,018 parameters, batches of 32: {ratio:.3f} of a plain step")
    say(f"rows held beside the method's state: {rows_held(agent, agent._parameters.dim):.0f}")
    agent.finish()
    exchanging, agent = loop(caden.problems.cnn(1, 28, 10), images, labels, every=10)
    say(f"an exchange every 10 steps: {alternate(repeats, 30, plain, exchanging):.3f} of plain steps")
    agent.finish()

    os._exit(0)


def overlap(repeats: int) -> None:
    """Compare rounds that wait for their messages with rounds that do not, on a slow link."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, targets = torch.randn(256, 784), torch.randint(10, (256,))
    took = {}
    for late in (False, True, False, True):
        model = nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))
        steps, agent = loop(model, inputs, targets, every=30, overlap=late)
        steps(30)
        took.setdefault(late, []).extend(steps(30) for _ in range(repeats))
        agent.finish()
        if int(os.environ["RANK"]) == 0:
            kind = "with overlap" if late else "waiting"
            print(f"{kind}: {statistics.median(took[late]):.2f} s per round", flush=True)
    if int(os.environ["RANK"]) == 0:
        ratio = statistics.median(took[True]) / statistics.median(took[False])
        size = sum(p.numel() for p in model.parameters())
        print(f"overlap, {size:,} parameters, every 30 steps: {ratio:.2f} of a round that waits", flush=True)
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--overlap", action="store_true", help="rounds that do not wait for their messages")
    options = parser.parse_args()
    if launcher.launched() is None:
        sys.exit(launcher.start([sys.executable, *sys.argv], 2))
    (overlap if options.overlap else main)(options.repeats)
