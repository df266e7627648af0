"""What makes CADEN good on mini-batches? One choice changed at a time.

    python benchmarks/ablations.py [--seeds 3] [--jobs 2]

Setting "small" of networks.py, judged on 1,000 held-out training images. "Mean of the last ten rounds" averages each
agent's models and costs nothing else.
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from networks import SETTINGS

import caden
from caden import graphs, methods, problems

MUON = {"name": "torch_optim", "optimizer": "Muon", "lr": 0.01, "schedule": "cosine"}
BASE = {"mu_z": 0.05, "relax": 0.9}
LAST = 10  # rounds
# What changes: of the method, of its solver, local steps.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "Muon 0.01, cosine, mu_z 0.05, relax 0.9": ({}, {}, None),
    "constant learning rate": ({}, {"schedule": "constant"}, None),
    "linear learning rate": ({}, {"schedule": "linear"}, None),
    "learning rate 0.003": ({}, {"lr": 0.003}, None),
    "moments forgotten every round": ({}, {"carry": False}, None),
    "clipped at norm 1": ({}, {"clip": 1.0}, None),
    "weight decay 0.1": ({}, {"weight_decay": 0.1}, None),
    "start at x_i": ({"start": "own"}, {}, None),
    "relax 0.5": ({"relax": 0.5}, {}, None),
    "mu_z 0.005": ({"mu_z": 0.005}, {}, None),
    "mu_z 0.5": ({"mu_z": 0.5}, {}, None),
    'mu_z "auto"': ({"mu_z": "auto"}, {}, None),
    "mu_z from 0.02, growing 3 % per round": ({"mu_z": 0.02, "growth": 1.03}, {}, None),
    "duals 100 times slower (mu_y 0.0005)": ({"mu_y": 0.0005}, {}, None),
    "2 local steps": ({}, {}, 2),
    "10 local steps": ({}, {}, 10),
    "20 local steps": ({}, {}, 20),
}


def run(name: str, seed: int) -> list[float]:
    """Return the accuracy of the local models, of the mean model, and of the agents' means over the last rounds."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    setting, (method, solver, steps) = SETTINGS["small"], VARIANTS[name]
    problem = problems.PROBLEMS["classification"](**setting.problem, seed=seed, validation=setting.validation)
    tail: list[torch.Tensor] = []

    def keep(row: Any, state: Any) -> bool:
        tail.append(state.x.clone())
        return False

    try:
        result = caden.simulate(
            methods.caden(**{**BASE, **method}, solver={**MUON, **solver}),
            problem,
            graphs.ring(problem.agents),
            setting.rounds,
            participation=setting.participation,
            local_steps=steps or setting.steps,
            seed=seed,
            progress=False,
            callbacks=[keep],
        )
    except caden.Diverged:
        return [float("nan")] * 3
    models = result.x, result.mean[None], torch.stack(tail[-LAST:]).mean(0)
    return [float(problem.evaluate(x)["accuracy"].mean()) for x in models]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    options = parser.parse_args()
    print("| variant | local models | mean model | mean of the last ten rounds |\n|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        found = {name: [pool.submit(run, name, seed) for seed in range(options.seeds)] for name in options.only}
        for name, runs in found.items():
            columns = zip(*(future.result() for future in runs))
            cells = [f"{sum(c) / len(c):.1%} ({min(c):.1%} to {max(c):.1%})" for c in map(list, columns)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
