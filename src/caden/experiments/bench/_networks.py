"""Networks on mini-batches: rounds against plain loops of PyTorch, and the time that metrics take."""

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from caden import draws, graphs, methods, problems, solvers
from caden.core import LocalSolver
from caden.engine.simulate import simulate
from caden.experiments.bench._measure import MU, STEPS, Measure, Rounds


class Shifted(Dataset[tuple[Tensor, int]]):
    """Images that are shifted at random whenever they are read."""

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.targets = images, labels.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].roll(int(torch.randint(-2, 3, ())), -1), self.targets[index]


class PlainLoops:
    """A training loop per agent as one would write it; a call runs the steps of one round and returns its seconds."""

    def __init__(self, model: torch.nn.Module, problem: problems.Module, size: int, dataset: Shifted | None = None):
        self._shards, self._size, self._dataset = problem.shards, size, dataset
        self._models = [copy.deepcopy(model) for _ in range(problem.agents)]
        self._optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in self._models]

    def __call__(self, round: int) -> float:
        began = time.perf_counter()
        for agent, (model, optimizer) in enumerate(zip(self._models, self._optimizers)):
            for step in range(STEPS):
                inputs, targets = self._batch(agent, round, step)
                output = model(inputs)
                loss = cross_entropy(output.flatten(0, -2), targets.flatten())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return time.perf_counter() - began

    def _batch(self, agent: int, round: int, step: int) -> tuple[Tensor, Tensor]:
        shard = self._shards[agent]
        chosen = draws.batch(0, round, step, agent, shard.count, self._size)
        if self._dataset is None:
            inputs, targets = shard.read(slice(None))
            return inputs[chosen], targets[chosen]
        samples = [self._dataset[i] for i in shard.indices[chosen]]  # type: ignore[attr-defined]
        return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])


def _share_of_metrics(problem: problems.Module, solver: LocalSolver) -> list[float]:
    """Return the share of the time that metrics take in a run, and all else between rounds, but for the last row."""
    times = list[tuple[float, float]]()

    def note(row: dict[str, Any], state: Any) -> bool:
        times.append((time.perf_counter(), row["seconds"]))
        return False

    options: dict[str, Any] = {"local_steps": STEPS, "progress": False, "callbacks": [note]}
    simulate(methods.caden(mu_z=MU, solver=solver), problem, graphs.ring(problem.agents), 40, **options)
    (began, first), (ended, last) = times[0], times[-2]
    return [1 - (last - first) / (ended - began)]


def networks(repeats: int) -> Iterator[Measure]:
    """Measure a round of CADEN with AdamW against plain loops that train the same models one after another."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3000, 1, 28, 28, generator=generator), torch.randint(10, (3000,), generator=generator)
    tokens = torch.randint(90, (800, 65), generator=generator)
    cnn, noisy_cnn = problems.cnn(1, 28, 10), problems.cnn(1, 28, 10, norm="batch", dropout=0.2)
    cases: dict[str, tuple[torch.nn.Module, Any, int, int]] = {
        "CNN": (cnn, images, 10, 32),
        "CNN with batch norm and dropout, from a Dataset": (noisy_cnn, Shifted(*images), 10, 32),
        "transformer": (problems.transformer(90, 64), (tokens[:, :-1], tokens[:, 1:]), 4, 16),
    }
    solver = solvers.torch_optim(torch.optim.AdamW, lr=1e-3)
    for name, (model, data, agents, size) in cases.items():
        problem = problems.classification(model, data, agents=agents, batch_size=size)
        run = Rounds(methods.caden(mu_z=MU, solver=solver), problem, graphs.ring(agents))
        plain = PlainLoops(model, problem, size, data if isinstance(data, Shifted) else None)
        run(), plain(0)
        ratios = [run() / plain(round) for round in range(1, repeats + 1)]
        yield Measure(f"networks: a round, over plain loops, {name}", ratios, "< 1.15")
    problem = problems.classification(cnn, images, images, agents=10, batch_size=32)
    yield Measure("networks: share of the time for metrics, CNN", _share_of_metrics(problem, solver), "< 0.1")
