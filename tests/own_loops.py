"""Training loops of one's own for tests: what each agent runs, under torchrun or as a peer, and the same simulated."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import caden

AGENTS, SEED = 3, 4


def network():
    """A CNN with dropout for the embedded digits."""
    return caden.problems.cnn(1, 8, 10, hidden=16, dropout=0.2, seed=1)


def digits(agents=AGENTS, batch_size=16):
    """The same problem for the simulator: its draws are those of `train`."""
    train, test = caden.data.load("digits")
    train = train[0][:600], train[1][:600]
    options = {"agents": agents, "partition": "shards", "batch_size": batch_size, "seed": SEED}
    return caden.problems.classification(network(), train, test, **options)


def simulated(method, rounds, steps, agents=AGENTS, **options):
    """The models of all agents after some rounds in the simulator."""
    graph = caden.graphs.exponential(agents)
    options = {"local_steps": steps, "deterministic": True, "seed": SEED, **options}
    return caden.simulate(method, digits(agents), graph, rounds, **options).x


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


def train(agent, model, optimizer, until, agents=AGENTS, after=None):
    """A loop of one's own: mini-batches and dropout masks by `caden.draws`, so that they can be repeated."""
    shard = digits(agents).shards[agent.agent]
    while agent.steps < until and not agent.is_over:
        chosen = caden.draws.batch(SEED, agent.round, agent.step, agent.agent, shard.count, 16)
        inputs, targets = shard.read(chosen)
        with caden.draws.randomness(SEED, agent.round, agent.step, agent.agent):
            loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if after is not None:
            after(agent)


def digest(rows):
    return hashlib.sha1(rows.contiguous().numpy().tobytes()).hexdigest()


def gathered(agent):
    return agent._result.x


def networks():
    """{name: hash of all agents' models}: methods, sleep, overlap, weights of AdamW and SGD."""
    found = {}
    cases = {
        "caden": ("caden", {"mu_z": 0.1}),
        "relaxed": ("caden", {"mu_z": 0.1, "relax": 0.9, "participation": 0.5}),
        "radmm": ("radmm", {"rho": 0.1}),
        "adapd": ("adapd", {"eta": 5.0}),
        "dinno": ("dinno", {"rho": 0.1}),
        "fedadmm": ("fedadmm", {"rho": 0.1}),
        "dpsgd": ("dpsgd", {}),
        "bits": ("caden", {"mu_z": 0.1, "messages": {"bits": 4}}),
        "overlap": ("caden", {"mu_z": 0.1, "overlap": True}),
    }
    for name, (method, options) in cases.items():
        model = network()
        optimizer = adamw(model.parameters())
        agent = caden.Agent(model, optimizer, method, 3, deterministic=True, seed=SEED, **options)
        awake = options.get("participation", 1.0) == 1.0
        train(agent, model, optimizer, until=12 if awake else 10**6) if awake else train(agent, model, optimizer, 6)
        agent.finish()
        found[name] = [digest(gathered(agent)), len(agent.history), float(agent.history["round"].iloc[-1])]
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        found[name].append(bool(torch.equal(flat, gathered(agent).mean(0))))
    return found


if __name__ == "__main__":
    found = globals()[sys.argv[1]]()
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(found))
    os._exit(0)
