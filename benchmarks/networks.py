"""Compare methods on networks trained with mini-batches: accuracy or loss after equally many communications.

    python benchmarks/networks.py [SETTING ...] [--quick] [--jobs 2] [--store FOLDER]

Without settings, all of them. In the tuned ones every method gets the same number of trials, points of a Halton
sequence in its own space, each a whole run judged on held-out samples. The best is run with three seeds and judged on
the test set. Local training and the methods with a local solver choose among the same optimizers. In the other settings
every method runs with the parameters that were best in a tuned one, with one seed unless told. Runs are kept in the
store and not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
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
    validation: int = 0  # held-out samples of a trial; 0: not tuned
    metric: str = "accuracy"
    penalties: float = 1.0  # factor of the ranges of mu_z, 1/eta and rho
    rates: float = 1.0  # factor of those of learning rates
    relax: tuple[float, ...] = (0.5, 0.9)
    optimizers: tuple[str, ...] = ("Muon", "Adam", "SGD")
    like: str = "small"  # the tuned setting whose best parameters are taken if this one is not tuned


def fashion(samples: int, agents: int = 10, alpha: float | None = 0.1, **options: Any) -> dict[str, Any]:
    split = "iid" if alpha is None else {"name": "dirichlet", "alpha": alpha}
    data = {"data": "fashion_mnist", "samples": samples, "partition": split, "agents": agents}
    return data | {"model": "cnn", "batch_size": 32} | options


# Trial runs of CADEN and D-PSGD on SOTU gave the ranges: learning rates 2.5 times, penalties 0.004 times the CNN's.
SOTU = {"data": "sotu", "agents": 20, "batch_size": 16, "test_samples": 300}
WORDS: dict[str, Any] = {"penalties": 0.004, "rates": 2.5, "relax": (0.9,), "optimizers": ("Muon",)}
SETTINGS = {
    "small": Setting(fashion(3000), "ring", 0.5, 60, 5, 1000),
    "skewed": Setting(fashion(55_000), "ring", 0.5, 100, 10, 2000, optimizers=("Muon",)),
    "skewed, half": Setting(fashion(55_000), "ring", 0.5, 50, 10, optimizers=("Muon",), like="skewed"),
    "awake": Setting(fashion(6000, test_samples=2000), "ring", 1.0, 40, 10),
    "iid": Setting(fashion(6000, alpha=None, test_samples=2000), "ring", 1.0, 40, 10),
    "random graph": Setting(fashion(6000, agents=20, test_samples=2000), "erdos_renyi", 0.5, 60, 5),
    "batch norm": Setting(fashion(3000, norm="batch", dropout=0.2, test_samples=2000), "ring", 0.5, 60, 5),
    "transformer": Setting(SOTU, "erdos_renyi", 0.5, 20, 5, 300, "validation_loss", **WORDS),
    "transformer, long": Setting(SOTU, "erdos_renyi", 0.5, 60, 5, 0, "validation_loss", **WORDS, like="transformer"),
    "transformer, more steps": Setting(
        SOTU, "erdos_renyi", 0.5, 20, 15, 0, "validation_loss", **WORDS, like="transformer"
    ),
}
# The number of the trial that won; of local training on "small" only that it was one with Muon was kept.
BEST = {
    "small": {
        "CADEN": 0,
        "CADEN, SGD": 3,
        "ADAPD": 8,
        "DiNNO": 8,
        "D-PSGD": 8,
        "LED": 2,
        "K-GT": 6,
        "GT": 3,
        "local": 8,
    },
    "skewed": {"CADEN": 0, "CADEN, SGD": 0, "ADAPD": 0, "DiNNO": 0, "D-PSGD": 0, "LED": 2, "K-GT": 2},
    "transformer": {"CADEN": 2, "DiNNO": 1, "D-PSGD": 2},
}
RATES = {"Muon": (0.003, 0.03), "Adam": (0.0005, 0.01), "SGD": (0.01, 0.3)}


def between(u: float, low: float, high: float) -> float:
    return float(f"{low * (high / low) ** u:.3g}")


def penalty(u: float, low: float, high: float, setting: Setting) -> float:
    return between(u, low * setting.penalties, high * setting.penalties)


def one_of(values: tuple[Any, ...], u: float) -> Any:
    return values[int(len(values) * u)]


def optimizer(u: float, v: float, names: tuple[str, ...], factor: float) -> dict[str, Any]:
    """Return one of the optimizers, and a learning rate from its own range; it falls to 0 over the run."""
    name = one_of(names, u)
    low, high = RATES[name]
    rate = between(v, low * factor, high * factor)
    table = {"name": "torch_optim", "optimizer": name, "lr": rate, "schedule": "cosine"}
    return table | ({"momentum": 0.9} if name == "SGD" else {})


# What a method's name means: the method, communications per directed edge and round, whether it has a local solver, and
# its other parameters from four numbers in [0, 1) and the setting.
METHODS: dict[str, tuple[str, int, bool, Any]] = {
    "CADEN": ("caden", 1, True, lambda u, s: {"mu_z": penalty(u[2], 0.02, 1, s), "relax": one_of(s.relax, u[3])}),
    "ADAPD": ("adapd", 1, True, lambda u, s: {"eta": between(u[2], 0.3 / s.penalties, 30 / s.penalties)}),
    "DiNNO": ("dinno", 1, True, lambda u, s: {"rho": penalty(u[2], 0.01, 0.5, s)}),
    "D-PSGD": ("dpsgd", 1, True, lambda u, s: {}),
    "LED": ("led", 1, False, lambda u, s: {"beta": one_of((0.05, 0.1, 0.2, 0.5), u[3])}),
    "K-GT": ("kgt", 2, False, lambda u, s: {"gamma": one_of((0.5, 0.75, 1.0), u[3])}),
    "GT": ("gt", 2, False, lambda u, s: {"form": one_of(("atc", "semi_b"), u[3])}),
    "local": ("local", 1, True, lambda u, s: {}),
}
METHODS["CADEN, SGD"] = METHODS["CADEN"]


def trial(name: str, u: Any, setting: Setting) -> dict[str, Any]:
    """Return the parameters of a method at a point of its space."""
    _, _, solves, others = METHODS[name]
    names = ("SGD",) if name.endswith("SGD") and name != "D-PSGD" else setting.optimizers
    low, high = 0.01 * setting.rates, 0.5 * setting.rates
    step = {"solver": optimizer(u[0], u[1], names, setting.rates)} if solves else {"alpha": between(u[1], low, high)}
    return step | others(u, setting)


def run(
    setting: Setting, name: str, parameters: dict[str, Any], seed: int, validation: int, store: str
) -> dict[str, Any]:
    """Run one method, or read what it gave; nothing if it diverged."""
    method, exchanges, *_ = METHODS[name]
    problem = {**setting.problem, "seed": seed, "validation": validation}
    key = json.dumps([problem, setting[1:5], method, parameters], sort_keys=True)
    file = Path(store) / f"{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.json"
    if file.exists():
        return dict(json.loads(file.read_text()))
    torch.set_num_threads(1)
    built = problems.PROBLEMS["language" if problem["data"] == "sotu" else "classification"](**problem)
    make = {"ring": graphs.ring, "erdos_renyi": lambda m: graphs.erdos_renyi(m, p=0.2, seed=seed)}[setting.graph]
    options = {"participation": setting.participation, "local_steps": setting.steps, "progress": False}
    rounds = max(1, setting.rounds // exchanges)
    row: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # biased methods are compared on purpose
        with contextlib.suppress(caden.Diverged):
            result = caden.simulate(
                getattr(methods, method)(**parameters),
                built,
                make(built.agents),
                rounds,
                seed=seed,
                record_every=rounds,
                **options,
            )
            row = {k: result.rows[-1][k] for k in (setting.metric, "communications", "bytes", "gradients", "seconds")}
            mean = result.mean.expand(built.agents if built.model.normalised else 1, -1)  # statistics of each agent
            row["of the mean"] = float(built.evaluate(mean)[setting.metric].mean())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(row) + "\n")
    return row


def score(setting: Setting, row: dict[str, Any]) -> float:
    """Return what a trial is judged by: more is better."""
    if not row:
        return -math.inf
    return float(row["accuracy"] if setting.metric == "accuracy" else -row[setting.metric])


def line(name: str, setting: Setting, rows: list[dict[str, Any]], parameters: dict[str, Any]) -> str:
    """Return a row of the table: means over the seeds, and their spread."""
    if not all(rows):
        return f"| {name} | diverged | | | | | | {json.dumps(parameters)} |"
    form = "{:.1%}" if setting.metric == "accuracy" else "{:.3f}"
    values, of_mean, seconds = ([row[key] for row in rows] for key in (setting.metric, "of the mean", "seconds"))
    spread = f" ({form.format(min(values))} to {form.format(max(values))})" if len(rows) > 1 else ""
    first = rows[0]
    return (
        f"| {name} | {form.format(np.mean(values))}{spread} | {form.format(np.mean(of_mean))} "
        f"| {first['communications']:,} | {first['bytes'] / 1e6:,.0f} | {first['gradients']:,} "
        f"| {np.mean(seconds):.0f} | {json.dumps(parameters)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", default=list(SETTINGS), help=", ".join(SETTINGS))
    parser.add_argument("--quick", action="store_true", help="a thirtieth of the rounds, not tuned, one seed")
    parser.add_argument("--untuned", action="store_true", help="take the parameters of `like` in all settings")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--seeds", type=int, help="3 where parameters are tuned, else 1")
    parser.add_argument("--rounds", type=int, help="instead of the setting's own")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(METHODS))
    parser.add_argument("--store", default="runs/networks")
    options = parser.parse_args()
    points = qmc.Halton(4, seed=0).random(max(options.trials, 9))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        for title in options.settings:
            setting = SETTINGS[title]
            if options.quick:
                problem, rounds = setting.problem | {"test_samples": 50}, max(2, setting.rounds // 30)
                setting = setting._replace(problem=problem, rounds=rounds, validation=0)
            setting = setting._replace(rounds=options.rounds or setting.rounds)
            tuned = setting.validation > 0 and not options.untuned
            seeds = options.seeds or (3 if tuned else 1)
            print(f"\n{title}{'' if tuned else f' (parameters of {setting.like})'}: {setting}\n", flush=True)
            columns = "method", setting.metric, "of the mean model", "communications", "MB", "gradients", "seconds"
            print(f"| {' | '.join(columns)} | parameters |\n|{'---|' * (len(columns) + 1)}", flush=True)
            names = [name for name in options.only if tuned or name in BEST[setting.like]]
            spaces = setting if tuned else SETTINGS[setting.like]
            tried = {name: [trial(name, u, spaces) for u in points] for name in names}
            best = {} if tuned else {name: tried[name][BEST[setting.like][name]] for name in names}
            submit = partial(pool.submit, run, setting)
            if tuned:
                done = {
                    name: [submit(name, c, 0, setting.validation, options.store) for c in candidates[: options.trials]]
                    for name, candidates in tried.items()
                }
                for name, trials in done.items():
                    best[name] = tried[name][int(np.argmax([score(setting, f.result()) for f in trials]))]
            final = {name: [submit(name, best[name], s, 0, options.store) for s in range(seeds)] for name in tried}
            for name, runs in final.items():
                print(line(name, setting, [f.result() for f in runs], best[name]), flush=True)


if __name__ == "__main__":
    main()
