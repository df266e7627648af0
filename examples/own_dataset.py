"""A torch Dataset of your own with random augmentation: read when used, drawn by (seed, round, step, agent)."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

import caden

(inputs, labels), test = caden.data.load("digits")


class Shifted(Dataset[tuple[Tensor, int]]):
    """Digits, each shifted by up to one pixel whenever it is read."""

    targets = labels  # for partitions by label; without it, all samples are read once

    def __len__(self) -> int:
        return len(inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        by = torch.randint(-1, 2, (2,)).tolist()
        return inputs[i].roll(by, dims=(1, 2)), int(labels[i])


problem = caden.problems.classification(
    caden.problems.cnn(1, 8, 10, hidden=32), Shifted(), test, agents=8, partition="shards", batch_size=16
)
method = caden.methods.caden(0.1, solver=caden.solvers.torch_optim("AdamW", lr=0.003, schedule="cosine"))
result = caden.simulate(method, problem, caden.graphs.ring(8), rounds=25, local_steps=5)
print(result)

# The same batch in a loop of your own:
with caden.draws.randomness(seed=0, round=3, step=1, agent=2, of="data"):
    chosen = caden.draws.batch(seed=0, round=3, step=1, agent=2, samples=problem.shards[2].count, size=16)
    images, _ = problem.shards[2].read(chosen)
assert torch.equal(images, problem.at(3).redraw(1).batch(2)[0])
