"""Compare methods on networks trained with mini-batches: accuracy after equally many communications.

    python benchmarks/networks.py [SETTING ...] [--quick] [--jobs 2] [--store FOLDER]

Every method gets the same number of trials, points of a Halton sequence in its own space, each a whole run judged on
samples held out from the training set. The best is run with other seeds and judged on the test set. Local training and
the methods with a local solver choose among the same optimizers. Runs are kept in the store and not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import qmc

import caden
from caden import graphs, methods, problems


class Setting(NamedTuple):
    problem: dict[str, Any]
    graph: str
    participation: float
    rounds: int
    steps: int
    validation: int


def fashion(samples: int, agents: int = 10, alpha: float | None = 0.1, **network: Any) -> dict[str, Any]:
    split = "iid" if alpha is None else {"name": "dirichlet", "alpha": alpha}
    data = {"data": "fashion_mnist", "samples": samples, "partition": split, "agents": agents}
    return data | {"model": "cnn", "batch_size": 32} | network


SETTINGS = {
    "small": Setting(fashion(3000), "ring", 0.5, 60, 5, 1000),
    "skewed": Setting(fashion(55_000), "ring", 0.5, 100, 10, 2000),
    "skewed, half": Setting(fashion(55_000), "ring", 0.5, 50, 10, 2000),
    "awake": Setting(fashion(6000), "ring", 1.0, 40, 10, 1000),
    "iid": Setting(fashion(6000, alpha=None), "ring", 1.0, 40, 10, 1000),
    "random graph": Setting(fashion(6000, agents=20), "erdos_renyi", 0.5, 60, 5, 1000),
    "batch norm": Setting(fashion(3000, norm="batch", dropout=0.2), "ring", 0.5, 60, 5, 1000),
}
RATES = {"Muon": (0.003, 0.03), "Adam": (0.0005, 0.01), "SGD": (0.01, 0.3)}


def between(u: float, low: float, high: float) -> float:
    return float(f"{low * (high / low) ** u:.3g}")


def optimizer(u: float, v: float) -> dict[str, Any]:
    """Return one of the three optimizers, and a learning rate from its own range; it falls to 0 over the run."""
    name = list(RATES)[int(u * len(RATES))]
    table = {"name": "torch_optim", "optimizer": name, "lr": between(v, *RATES[name]), "schedule": "cosine"}
    return table | ({"momentum": 0.9} if name == "SGD" else {})


# Name, communications per directed edge and round, and parameters from four numbers in [0, 1).
METHODS: dict[str, tuple[str, int, Any]] = {
    "CADEN": (
        "caden",
        1,
        lambda u: {"solver": optimizer(u[0], u[1]), "mu_z": between(u[2], 0.02, 1), "relax": [0.5, 0.9][int(2 * u[3])]},
    ),
    "CADEN, SGD": (
        "caden",
        1,
        lambda u: {"solver": optimizer(0.99, u[1]), "mu_z": between(u[2], 0.02, 1), "relax": [0.5, 0.9][int(2 * u[3])]},
    ),
    "ADAPD": ("adapd", 1, lambda u: {"solver": optimizer(u[0], u[1]), "eta": between(u[2], 0.3, 30)}),
    "DiNNO": ("dinno", 1, lambda u: {"solver": optimizer(u[0], u[1]), "rho": between(u[2], 0.01, 0.5)}),
    "D-PSGD": ("dpsgd", 1, lambda u: {"solver": optimizer(u[0], u[1])}),
    "LED": ("led", 1, lambda u: {"alpha": between(u[1], 0.01, 0.5), "beta": [0.05, 0.1, 0.2, 0.5][int(4 * u[3])]}),
    "K-GT": ("kgt", 2, lambda u: {"alpha": between(u[1], 0.01, 0.5), "gamma": [0.5, 0.75, 1.0][int(3 * u[3])]}),
    "GT": ("gt", 2, lambda u: {"alpha": between(u[1], 0.01, 0.5), "form": ["atc", "semi_b"][int(2 * u[3])]}),
    "local": ("local", 1, lambda u: {"solver": optimizer(u[0], u[1])}),
}


def run(
    setting: Setting, name: str, parameters: dict[str, Any], seed: int, validation: int, store: str
) -> dict[str, Any]:
    """Run one method, or read what it gave."""
    method, exchanges, _ = METHODS[name]
    problem = {**setting.problem, "seed": seed, "validation": validation}
    key = json.dumps([problem, setting[1:5], method, parameters], sort_keys=True)
    file = Path(store) / f"{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.json"
    if file.exists():
        return dict(json.loads(file.read_text()))
    torch.set_num_threads(1)
    built = problems.PROBLEMS["classification"](**problem)
    make = {"ring": graphs.ring, "erdos_renyi": lambda m: graphs.erdos_renyi(m, p=0.2, seed=seed)}[setting.graph]
    options = {"participation": setting.participation, "local_steps": setting.steps, "progress": False}
    rounds = setting.rounds // exchanges
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # biased methods are compared on purpose
        try:
            result = caden.simulate(
                getattr(methods, method)(**parameters),
                built,
                make(built.agents),
                rounds,
                seed=seed,
                record_every=rounds,
                **options,
            )
            row = {k: result.rows[-1][k] for k in ("accuracy", "communications", "bytes", "gradients", "seconds")}
            row["of the mean"] = float(built.evaluate(result.mean.expand(built.agents, -1))["accuracy"].mean())
        except caden.Diverged:
            row = {"accuracy": 0.0}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(row) + "\n")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", default=["small"], help=", ".join(SETTINGS))
    parser.add_argument("--quick", action="store_true", help="a third of the rounds, three trials, one seed")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(METHODS))
    parser.add_argument("--store", default="runs/networks")
    options = parser.parse_args()
    trials, seeds = (3, 1) if options.quick else (options.trials, options.seeds)
    points = qmc.Halton(4, seed=0).random(trials)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        for title in options.settings:
            setting = SETTINGS[title]
            if options.quick:
                setting = setting._replace(rounds=setting.rounds // 3)
            print(f"\n{title}: {setting}\n", flush=True)
            columns = "method", "accuracy", "of the mean model", "communications", "MB", "gradients", "parameters"
            print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
            for name in options.only:
                candidates = [METHODS[name][2](u) for u in points]
                done = [pool.submit(run, setting, name, c, 0, setting.validation, options.store) for c in candidates]
                best = candidates[int(np.argmax([f.result()["accuracy"] for f in done]))]
                final = [pool.submit(run, setting, name, best, s, 0, options.store) for s in range(seeds)]
                rows = [f.result() for f in final]
                value = [row["accuracy"] for row in rows]
                spread = f" ({min(value):.1%} to {max(value):.1%})" if seeds > 1 else ""
                first = rows[0]
                print(
                    f"| {name} | {np.mean(value):.1%}{spread} | {np.mean([r['of the mean'] for r in rows]):.1%} "
                    f"| {first['communications']:,} | {first['bytes'] / 1e6:,.0f} | {first['gradients']:,} | "
                    f"{json.dumps(best)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
