"""A CNN with dropout on mini-batches, trained by Muon inside CADEN; half of the agents sleep in every round."""

import torch
from torch import nn

import caden

train, test = caden.data.load("digits")
torch.manual_seed(0)
model = caden.problems.group_norm(  # or keep batch normalisation: it works, too
    nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )
)
problem = caden.problems.classification(
    model, train, test, agents=10, partition={"name": "dirichlet", "alpha": 0.1}, batch_size=32
)
muon = caden.solvers.torch_optim("Muon", lr=0.01, schedule="cosine")
for name, method in {
    "CADEN": caden.methods.caden(mu_z=0.05, relax=0.9, solver=muon),
    "alone": caden.methods.local(solver=muon),
}.items():
    result = caden.simulate(method, problem, caden.graphs.ring(10), rounds=25, participation=0.5, local_steps=5)
    print(f"{name}: {result.rows[-1]['accuracy']:.1%} after {result.rows[-1]['communications']} communications")
result.module().eval()  # an nn.Sequential with the mean of the local models
