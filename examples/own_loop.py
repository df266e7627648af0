"""A training loop of your own joins a network: `torchrun --nproc-per-node 4 examples/own_loop.py`.

Every process trains on its own classes only; together they learn all of them, without a server.
"""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import caden
from caden import launcher

if launcher.launched() is None:  # without torchrun: start four processes here
    sys.exit(launcher.start([sys.executable, __file__], 4))

torch.manual_seed(0)  # the same first parameters everywhere
model = caden.problems.cnn(1, 8, 10, hidden=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
agent = caden.Agent(model, optimizer, method="caden", every=10, relax=0.9)

(images, labels), (test_images, test_labels) = caden.data.load("digits")
mine = labels % agent.agents == agent.agent  # agent 1 of 4 has the digits 1, 5 and 9
loader = DataLoader(TensorDataset(images[mine], labels[mine]), batch_size=32, shuffle=True, drop_last=True)

while agent.round < 40:  # the first loop to end ends the run
    for inputs, targets in loader:
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
agent.finish()  # the mean of all agents is now in `model`

accuracy = (model(test_images).argmax(1) == test_labels).double().mean()
if agent.agent == 0:
    print(f"{accuracy:.1%} on all classes after {agent.steps} steps and {agent.history['round'].max()} rounds")
