"""Bring your own model, data and loss: a small convolutional network, or any other nn.Module."""

import torch
from torch import nn

import caden

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 6, kernel_size=3, padding=1),
    nn.GroupNorm(2, 6),  # caden refuses batch normalisation, whose state is not a parameter
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(6 * 4 * 4, 10),
)

train, test = caden.data.load("digits")  # any pair (inputs, targets) of arrays or tensors, or a torch Dataset
problem = caden.problems.classification(
    model,
    train,
    test,
    agents=8,
    partition=caden.data.dirichlet(alpha=0.5),  # label-skewed shards of unequal size
    loss=nn.CrossEntropyLoss(label_smoothing=0.05),
)

result = caden.simulate(caden.methods.caden(), problem, caden.graphs.ring(8), rounds=25)
trained = result.module()  # your model, with the consensus parameters

with torch.no_grad():
    accuracy = (trained(test[0]).argmax(1) == test[1]).float().mean()
print(f"{problem.dim:,} parameters, accuracy of the mean model {accuracy:.1%}")
