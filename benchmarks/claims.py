"""What each rival's own paper claims, on a small problem of ours: a table with figures.

    python benchmarks/claims.py [RIVAL ...]

Quadratics of 10 agents whose minimisers differ, or the digits over 16 agents on a ring, classes split unevenly. Where a
step size matters, each side takes the best of its own few. Errors are the largest distance of an agent from the
minimiser; accuracies are means of the agents' test accuracies.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import caden
from caden import graphs, methods, problems


class Found(NamedTuple):
    claim: str
    setting: str
    rival: float
    other: float  # what it is compared with
    compared: str
    holds: bool


QUADRATIC = problems.quadratic(agents=10, dim=4, seed=0)
WIDE = problems.quadratic(agents=10, dim=50, seed=0)
GRAPH = graphs.erdos_renyi(10, 0.4, seed=1)


def error(method: Any, rounds: int, problem: Any = QUADRATIC, graph: Any = GRAPH, **options: Any) -> float:
    """Return the largest distance of an agent from the minimiser at the end; infinite if the run diverged."""
    try:
        x = caden.simulate(method, problem, graph, rounds, record_every=rounds, progress=False, **options).x
    except caden.Diverged:
        return math.inf
    return float((x - problem.solution).norm(dim=1).max())


def digits(batch_size: int | None = 32, alpha: float = 0.1, agents: int = 16, seed: int = 0) -> Any:
    train, test = caden.data.load("digits")
    model = problems.mlp(inputs=64, outputs=10, hidden=32)
    split = {"name": "dirichlet", "alpha": alpha}
    return problems.classification(model, train, test, agents, split, batch_size=batch_size, seed=seed)


def best(make: Callable[[float], Any], steps: Iterable[float], rounds: int, problem: Any, **options: Any) -> float:
    """Return the best accuracy at the end over some step sizes."""
    graph, found = graphs.ring(problem.agents), [0.0]
    for step in steps:
        try:
            run = {"record_every": rounds, "progress": False, **options}
            found.append(caden.simulate(make(step), problem, graph, rounds, **run).rows[-1]["accuracy"])
        except caden.Diverged:
            continue
    return max(found)


def rounds_to(accuracy: float, method: Any, problem: Any, column: str = "round", **options: Any) -> float:
    """Return what it takes to reach an accuracy; infinite if 300 rounds are not enough."""
    run = {"target": accuracy, "stop_at_target": True, "progress": False, "metrics": "exact", **options}
    result = caden.simulate(method, problem, graphs.ring(problem.agents), 300, **run)
    return float(result.rows[-1][column]) if result.stopped == "target" else math.inf


def optimizer(name: str, lr: float, **options: Any) -> dict[str, Any]:
    return {"name": "torch_optim", "optimizer": name, "lr": lr, **options}


def atg() -> Found:
    faults = {"participation": 0.5, "messages": {"loss": 0.3}}
    ours, other = error(methods.atg(0.5), 1500, **faults), error(methods.gt(0.05), 1500, **faults)
    return Found("exact with sleeping agents and lost messages", "p = 0.5, 30 % lost", ours, other, "gt", ours < 1e-8)


def lt_admm_vr() -> Found:
    """Agents hold 40 samples each of two classes that overlap, so the minimiser is finite."""
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(400, 3))
    labels = (inputs[:, 0] + 1.5 * rng.normal(size=400) > 0).astype(int)
    options = {"agents": 10, "batch_size": 4, "dtype": torch.float64}
    problem = problems.classification(torch.nn.Linear(3, 2, bias=False), (inputs, labels), **options)

    def stationarity(method: Any) -> float:
        start = torch.zeros(6, dtype=torch.float64)
        run = {"record_every": 300, "progress": False}
        x = caden.simulate(method, problem, GRAPH, 300, x0=start, **run).x
        return float(problem.value_and_grad(x)[1].sum(0).norm() + (x - x.mean(0)).norm())

    ours, other = (stationarity(make(0.5, 0.1, 0.3)) for make in (methods.lt_admm_vr, methods.lt_admm))
    return Found("exact with mini-batches", "4 of 40 samples", ours, other, "lt_admm", ours < 1e-6)


class HeavyTails(caden.Problem):
    """A quadratic whose gradients have noise of infinite variance (Student's t with 1.5 degrees of freedom)."""

    stochastic = False

    def __init__(self, round: int | None = None):
        self.inside, self._round = QUADRATIC, round
        self.agents, self.dim, self.dtype, self.device = 10, 4, torch.float64, torch.device("cpu")
        self.solution, self.stochastic = QUADRATIC.solution, round is not None

    def at(self, round: int) -> HeavyTails:
        return HeavyTails(round)

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        value, gradient = self.inside.value_and_grad(x, rows)
        if self._round is None:
            return value, gradient
        noise = np.random.default_rng([7, self._round + 1]).standard_t(1.5, (10, 4))
        return value, gradient + torch.from_numpy(noise if rows is None else noise[rows.numpy()])


def gt_nsgdm() -> Found:
    problem = HeavyTails()
    steps = (0.1, 0.03, 0.01, 0.003)
    ours = min(error(methods.gt_nsgdm(a, schedule="linear"), 1500, problem, metrics="exact") for a in steps)
    other = min(error(methods.gt(a), 1500, problem, metrics="exact") for a in steps)
    return Found("converges under heavy-tailed noise", "noise t(1.5)", ours, other, "gt", ours < 0.5 * other)


def demuon() -> Found:
    problem = digits()
    ours = best(lambda a: methods.demuon(a, schedule="linear"), (0.1, 0.03, 0.01), 60, problem)
    other = best(lambda a: methods.gt_nsgdm(a, schedule="linear"), (1.0, 0.3, 0.1), 60, problem)
    return Found(
        "orthogonalised steps learn faster than normalised ones", "digits", ours, other, "gt_nsgdm", ours > other
    )


def qg_dsgdm() -> Found:
    steps, pairs = (0.3, 0.1, 0.03), []
    for seed in range(3):
        problem = digits(seed=seed)
        ours = best(lambda a: methods.qg_dsgdm(a, nesterov=True), steps, 150, problem)
        other = best(lambda a: methods.dpsgd(a, momentum=0.9), (0.1, 0.03, 0.01), 150, problem)
        pairs.append((ours, other))
    ours, other = np.median(pairs, axis=0)
    return Found(
        "global momentum beats local momentum on data that differ",
        "digits, 3 seeds",
        ours,
        other,
        "dpsgd, momentum 0.9",
        ours > other,
    )


def gt_adam() -> Found:
    ours = error(methods.gt_adam(0.003, eps=1e-2), 4000)
    other = error(methods.dpsgd(solver=optimizer("Adam", 0.003)), 4000)
    return Found(
        "exact on data that differ, unlike gossip after Adam", "quadratics", ours, other, "dpsgd with Adam", ours < 1e-6
    )


def beer() -> Found:
    few = {"messages": {"top": 0.25}}
    ours, other = error(methods.beer(0.1, 0.2), 3000, **few), error(methods.choco(0.01, 0.2), 3000, **few)
    return Found("exact with compressed messages", "a quarter of the entries", ours, other, "choco", ours < 1e-6)


def choco() -> Found:
    ours = error(methods.choco(0.001, 0.2), 20_000, WIDE, messages={"top": 0.1})
    other = error(methods.choco(0.001, 0.2), 20_000, WIDE)  # what is left is the bias of the step
    return Found(
        "compression costs no accuracy in the limit",
        "a tenth of the entries",
        ours,
        other,
        "whole messages",
        ours < 1.5 * other,
    )


def relay_sgd() -> Found:
    path = graphs.path(10)
    ours, other = error(methods.relay_sgd(0.05), 4000, graph=path), error(methods.dgd(0.05), 4000, graph=path)
    return Found("not affected by data that differ", "path", ours, other, "dgd", ours < 1e-8)


def noloco() -> Found:
    def spread(pull: float) -> float:
        method = methods.noloco(outer_lr=0.7, mu=0.5, pull=pull, solver=optimizer("SGD", 0.05))
        result = caden.simulate(
            method, QUADRATIC, graphs.complete(10), 200, local_steps=5, record_every=200, progress=False
        )
        return float((result.x - result.mean).norm(dim=1).max())

    ours, other = spread(0.7), spread(1e-9)
    return Found(
        "the pull to the partner holds models together",
        "spread, pairs, 5 steps",
        ours,
        other,
        "no pull",
        ours < 0.5 * other,
    )


def diloco() -> Found:
    problem = digits(alpha=100.0)
    inner = optimizer("AdamW", 0.001)
    ours = rounds_to(0.9, methods.diloco(outer_lr=0.7, mu=0.9, solver=inner), problem, local_steps=10)
    other = rounds_to(0.9, methods.diloco(outer_lr=1.0, mu=0.0, nesterov=False, solver=inner), problem, local_steps=10)
    return Found(
        "outer Nesterov momentum needs fewer rounds than averaging",
        "digits, rounds to 90 %",
        ours,
        other,
        "plain averaging",
        ours < other,
    )


def gasloc() -> Found:
    ring = graphs.ring(10)

    def rate(gamma: float) -> float:
        """Return the distance from consensus that is left after 40 rounds of nothing but gossip."""
        start = torch.from_numpy(np.random.default_rng(0).standard_normal((10, 4)))
        x = caden.simulate(
            methods.gasloc(1e-12, gamma=gamma), QUADRATIC, ring, 40, x0=start, record_every=40, progress=False
        ).x
        return float((x - x.mean(0)).norm())

    ours, other = min(map(rate, (0.2, 0.3, 0.4, 0.5))), rate(0.0)
    return Found(
        "momentum speeds up gossip", "ring, distance after 40 rounds", ours, other, "no momentum", ours < 0.5 * other
    )


def lodadac() -> Found:
    problem, short = digits(alpha=1.0), {"messages": {"top": 0.4}}
    ours = min(rounds_to(0.9, methods.lodadac(a), problem, "bytes", local_steps=10, **short) for a in (0.003, 0.01))
    other = min(rounds_to(0.9, methods.lodadac(a), problem, "bytes", local_steps=1) for a in (0.003, 0.01))
    return Found(
        "local steps and compression save bytes",
        "digits, MB to 90 %",
        ours / 1e6,
        other / 1e6,
        "1 step, whole",
        ours < other,
    )


def event_admm() -> Found:
    method, trigger = methods.radmm(0.4, 0.9, solver="exact"), {"trigger": {"first": 1.0, "decay": 0.85}}
    options = {"rounds": 200, "record_every": 200, "progress": False}
    ours = caden.simulate(method, QUADRATIC, GRAPH, messages=trigger, **options)
    other = caden.simulate(method, QUADRATIC, GRAPH, **options)
    off = float((ours.x - QUADRATIC.solution).norm(dim=1).max())
    sent = [float(run.rows[-1]["communications"]) for run in (ours, other)]
    return Found(
        "exact with fewer messages",
        "messages in 200 rounds",
        *sent,
        "every round",
        off < 1e-8 and sent[0] < 0.5 * sent[1],
    )


CLAIMS: dict[str, Callable[[], Found]] = {
    "atg": atg,
    "beer": beer,
    "choco": choco,
    "demuon": demuon,
    "diloco": diloco,
    "radmm, triggered": event_admm,
    "gasloc": gasloc,
    "gt_adam": gt_adam,
    "gt_nsgdm": gt_nsgdm,
    "lodadac": lodadac,
    "lt_admm_vr": lt_admm_vr,
    "noloco": noloco,
    "qg_dsgdm": qg_dsgdm,
    "relay_sgd": relay_sgd,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rivals", nargs="*", default=list(CLAIMS), help=", ".join(CLAIMS))
    warnings.simplefilter("ignore")  # conditions that the other side does not survive
    print("| rival | claim | setting | rival | compared with | | |\n|---|---|---|---|---|---|---|")
    for name in parser.parse_args().rivals:
        found = CLAIMS[name]()
        verdict = "holds" if found.holds else "**not here**"
        sides = f"{found.rival:.3g} | {found.compared} | {found.other:.3g}"
        print(f"| `{name}` | {found.claim} | {found.setting} | {sides} | {verdict} |", flush=True)


if __name__ == "__main__":
    main()
