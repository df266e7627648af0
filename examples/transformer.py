"""A small transformer learns to continue sequences such as 3, 5, 7, 9, 0 (modulo 11); each agent knows one stride."""

import torch

import caden

AGENTS, LENGTH = 5, 8
generator = torch.Generator().manual_seed(0)


def sequences(count: int, stride: int) -> torch.Tensor:
    """Return sequences with a random start."""
    first = torch.randint(11, (count, 1), generator=generator)
    return (first + stride * torch.arange(LENGTH + 1)) % 11


def after_two(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the share of right numbers, from the third on: two show the stride."""
    return (output[:, 1:].argmax(-1) == target[:, 1:]).float().mean()


train = torch.cat([sequences(200, stride) for stride in range(1, AGENTS + 1)])
test = torch.cat([sequences(50, stride) for stride in range(1, AGENTS + 1)])
problem = caden.problems.classification(
    caden.problems.transformer(11, LENGTH, width=32, layers=2),
    (train[:, :-1], train[:, 1:]),
    (test[:, :-1], test[:, 1:]),
    agents=AGENTS,
    partition=list(torch.arange(200 * AGENTS).view(AGENTS, 200).numpy()),
    metrics={"accuracy": after_two},
    batch_size=16,
)
muon = caden.solvers.torch_optim("Muon", lr=0.02, schedule="cosine")
for name, method in {
    "CADEN": caden.methods.caden(0.05, relax=0.9, solver=muon),
    "alone": caden.methods.local(solver=muon),
}.items():
    result = caden.simulate(method, problem, caden.graphs.ring(AGENTS), rounds=40, local_steps=5)
    print(f"{name}: {result.rows[-1]['accuracy']:.1%} of the numbers are right")
