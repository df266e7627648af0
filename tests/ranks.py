"""What every rank of a test job runs: several methods and participations, results hashed by rank 0 into a file."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

import caden
from caden.networks import cluster

METHODS = {
    "caden": lambda: caden.methods.caden(mu_z=1.0),
    "caden_auto": lambda: caden.methods.caden(relax=0.8),
    "gt": lambda: caden.methods.gt(0.05),
    "adapd": lambda: caden.methods.adapd(0.5),
    "radmm": lambda: caden.methods.radmm(0.5),
    "esom": caden.methods.esom,
    "fedavg": lambda: caden.methods.fedavg(0.02),
    "gasloc": lambda: caden.methods.gasloc(0.02, pairs=True),
    "relay_sgd": lambda: caden.methods.relay_sgd(0.05),
}


def results(transport=None):
    """{method: (hash of all models, communications, gradients, relative error)}, with half of the agents asleep."""
    problem = caden.problems.quadratic(agents=9, dim=6, seed=0)
    graph = caden.graphs.erdos_renyi(9, 0.4, seed=1)
    found = {}
    for name, make in METHODS.items():
        options = {"participation": 0.5, "deterministic": True, "transport": transport}
        result = caden.simulate(make(), problem, graph, 10, **options)
        last = result.rows[-1]
        said = [last["communications"], last["bytes"], last["gradients"], repr(last["relative_error"])]
        found[name] = [hashlib.sha1(result.x.numpy().tobytes()).hexdigest(), *said]
    return found | every_method(transport) | named_problems(transport) | faulty_networks(transport)


def every_method(transport=None):
    """Everyone awake, and rows of an odd length: where a row starts in memory must not matter."""
    problem, graph = caden.problems.quadratic(agents=7, dim=21, seed=2), caden.graphs.ring(7)
    found = {}
    for name, make in caden.methods.METHODS.items():
        method = make(**caden.methods.CARDS[name].unit_parameters)
        result = caden.simulate(method, problem, graph, 4, deterministic=True, record_every=4, transport=transport)
        found[f"every/{name}"] = hashlib.sha1(result.x.numpy().tobytes()).hexdigest()
    return found


def faulty_networks(transport=None):
    """Messages that are lost, late or compressed, and links that are down, with half of the agents asleep."""
    problem, graph = caden.problems.quadratic(agents=9, dim=6, seed=0), caden.graphs.erdos_renyi(9, 0.4, seed=1)
    found = {}
    for name, faults in {
        "loss": {"messages": {"loss": 0.3}},
        "delay": {"messages": {"delay": 2, "loss": 0.1}},
        "top": {"messages": {"top": 0.5}},
        "bits": {"messages": {"bits": 3}},
        "trigger": {"messages": {"trigger": {"first": 0.3, "decay": 0.9}, "bits": 6}},
        "trigger and loss": {"messages": {"loss": 0.2, "trigger": {"first": 0.3, "decay": 0.9}, "top": 0.4}},
        "top and loss": {"messages": {"loss": 0.2, "top": 0.4}},
        "links": {"links": 0.5},
    }.items():
        kinds = {"trigger and loss": ("radmm", "caden"), "top and loss": ("caden_auto",)}
        for kind in kinds.get(name, ("radmm", "gt", "caden")):
            options = {"participation": 0.5, "deterministic": True, "transport": transport, **faults}
            result = caden.simulate(METHODS[kind](), problem, graph, 6, record_every=3, **options)
            digest = hashlib.sha1(result.x.numpy().tobytes()).hexdigest()
            found[f"{kind}, {name}"] = [digest, result.rows[-1]["bytes"], repr(result.rows[-1]["relative_error"])]
    return found


def named_problems(transport=None):
    """Every problem with a name, for many rounds: a last bit that differs once would grow."""
    cases = {
        "quadratic": (caden.problems.quadratic(agents=6, dim=20, seed=0), 60),
        "logistic": (caden.problems.logistic(agents=6, dim=21, samples=13, l2=0.01), 30),
        "classification": (caden.problems.PROBLEMS["classification"](agents=6, hidden=3, samples=200), 20),
    }
    found = {}
    for name, (problem, rounds) in cases.items():
        options = {"participation": 0.5, "deterministic": True, "record_every": rounds, "transport": transport}
        result = caden.simulate(caden.methods.caden(mu_z=1.0), problem, caden.graphs.ring(6), rounds, **options)
        found[name] = hashlib.sha1(result.x.numpy().tobytes()).hexdigest()
    return found | network(transport)


def network(transport=None):
    """A CNN with dropout and batch normalisation on mini-batches, with AdamW; mu_z = "auto" compares gradients."""
    settings = {"model": "cnn", "norm": "batch", "dropout": 0.2, "hidden": 8, "batch_size": 8, "samples": 200}
    problem = caden.problems.PROBLEMS["classification"](agents=6, test_samples=50, **settings)
    solver = {"name": "torch_optim", "optimizer": "AdamW", "lr": 0.01, "schedule": "cosine", "clip": 1.0}
    options = {"participation": 0.5, "deterministic": True, "local_steps": 2, "transport": transport}
    result = caden.simulate(caden.methods.caden(solver=solver), problem, caden.graphs.ring(6), 6, **options)
    said = [result.rows[-1]["accuracy"], result.rows[-1]["batch_loss"], result.rows[-1]["gradients"]]
    return {"network": [hashlib.sha1(result.x.numpy().tobytes()).hexdigest(), *map(repr, said)]}


def fast(transport=None):
    """Without the deterministic mode, and with rows of 100,000 numbers: (models, bytes sent between ranks)."""
    train, test = caden.data.load("digits")
    model = caden.problems.mlp(64, 10, hidden=4)
    digits = caden.problems.classification(model, train, test, agents=9, dtype=torch.float64)
    graph = caden.graphs.erdos_renyi(9, 0.4, seed=1)
    found = {}
    for name in ("caden", "gt", "adapd"):
        for awake in (1.0, 0.5):
            run = caden.simulate(METHODS[name](), digits, graph, 5, participation=awake, transport=transport)
            found[f"{name}/{awake}"] = run.x.tolist()
    wide = caden.problems.logistic(agents=9, samples=3, dim=100_000)
    result = caden.simulate(METHODS["caden"](), wide, graph, 3, local_steps=1, transport=transport)
    return found, result.rows[-1].get("wire_bytes")


if __name__ == "__main__":
    job = cluster.join()
    found = [results(job), *(fast(job) if job.world == 2 else ({}, 0))]
    if job.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    os._exit(0)  # as the command does: threads of torch.distributed can abort an orderly end
