"""Simulated seconds to 93 % on the digits network, 20 agents, 4 of them ten times slower.

    python benchmarks/stragglers.py [--target 0.93]

Waiting, a deadline, and free running, for CADEN, gradient tracking and ADAPD (which cannot run free).
"""

from __future__ import annotations

import argparse
import warnings

import caden

SLOW = [1.0] * 4 + [0.1] * 16  # seconds per gradient
LINK = {"compute": SLOW, "latency": 0.05, "bandwidth": 1e6}
MODES = {
    "wait": {"mode": "wait"},
    "deadline 1 s": {"mode": "deadline", "deadline": 1.0},
    "deadline, quantile 0.7": {"mode": "deadline", "deadline": {"quantile": 0.7}},
    "free": {"mode": "free"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=float, default=0.93)
    parser.add_argument("--rounds", type=int, default=150)
    options = parser.parse_args()
    train, test = caden.data.load("digits")
    model = caden.problems.mlp(64, 10, hidden=32)
    problem = caden.problems.classification(model, train, test, agents=20)
    graph = caden.graphs.erdos_renyi(20, 0.2, edges=37, seed=0)
    methods = {
        "CADEN": caden.methods.caden(mu_z=0.05),
        "GT": caden.methods.gt(0.5),
        "ADAPD": caden.methods.adapd(1.0),
    }
    print("| method | mode | seconds | rounds | communications | gradients | idle |\n|---|---|---|---|---|---|---|")
    for name, method in methods.items():
        for mode, settings in MODES.items():
            if mode == "free" and name != "CADEN":
                continue
            common = {"target": options.target, "stop_at_target": True, "local_steps": 5, "progress": False}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = caden.simulate(method, problem, graph, options.rounds, clock=LINK | settings, **common)
            row = result.rows[-1]
            took = f"{row['time']:.1f}" if row["accuracy"] >= options.target else f"not reached in {row['time']:.0f}"
            counts = " | ".join(f"{row[c]:,}" for c in ("round", "communications", "gradients"))
            print(f"| {name} | {mode} | {took} | {counts} | {row['idle']:.0%} |", flush=True)


if __name__ == "__main__":
    main()
