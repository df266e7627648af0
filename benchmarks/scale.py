"""What a step takes in a wide-area network of 1,000 agents and more, by the simulator's clock.

    python benchmarks/scale.py [--agents 1000 10000]

Random 4-regular graph. An agent takes 1 s for the 5 gradients of a step on average: lognormal over the agents, or drawn
anew in every round. Latency 50 ms; an agent needs 0.8 s to send its four messages over its own connection (a million
float32 parameters at 160 Mbit/s). Small quadratics stand for the models: times depend on the sizes that the clock is
given, not on what is computed.
"""

from __future__ import annotations

import argparse
import warnings

import caden

DIM, MESSAGE = 4, 0.8
SPEED = {"name": "lognormal", "mean": 0.2, "spread": 0.5}
MODES = {
    "wait": {"mode": "wait"},
    "deadline, quantile 0.8": {"mode": "deadline", "deadline": {"quantile": 0.8}},
    "free": {"mode": "free", "tick": 0.25},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="*", default=[1000, 10_000])
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| agents | diameter | max-consensus, s | machines | mode | s per step | idle | idle, most |")
    print("|---|---|---|---|---|---|---|---|")
    for agents in options.agents:
        graph = caden.graphs.regular(agents, 4)
        problem = caden.problems.quadratic(agents=agents, dim=DIM)
        low, high = graph.diameter_bounds
        flood = f"{0.05 * low:.2f} to {0.05 * high:.2f}"
        for machines, per in (("differ", "agent"), ("vary", "round")):
            for name, mode in MODES.items():
                link = {"latency": 0.05, "up": 4 * DIM * 8 / MESSAGE}  # four messages of DIM float64
                clock = {"compute": {**SPEED, "per": per}, "pull": True, **link, **mode}  # old messages are skipped
                method = caden.methods.caden(mu_z=0.5, solver=caden.solvers.gd(0.3))
                settings = {"local_steps": 5, "clock": clock, "record_every": options.rounds, "progress": False}
                result = caden.simulate(method, problem, graph, options.rounds, **settings)
                row, steps = result.rows[-1], float(result.agents["steps"].mean())
                took = (row["time"] - result.rows[0]["time"]) / steps
                cells = f"{machines} | {name} | {took:.2f} | {row['idle']:.0%} | {row['idle_most']:.0%}"
                print(f"| {agents:,} | {low} to {high} | {flood} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
