"""Measure the time from MNIST's raw files to 93 % mean test accuracy.

CADEN with default parameters runs against gradient tracking and ADAPD as tuned by `caden reproduce tuned`
(docs/results), one after the other in one process.

    python benchmarks/time_to_accuracy.py [--repeats 3] [--also]

The seconds include reading the files, building the problem, the warm-up and the rounds, but not measuring the accuracy.
`--also` adds other ways to run CADEN and ADAPD.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from caden.engine.warmup import start_point, warm_up
from caden.experiments.config import experiment

CADEN = "CADEN, default parameters"
RIVALS = {
    "GT, tuned": ["method.name=gt", "method.alpha=0.328"],
    "ADAPD, tuned": ["method.name=adapd", "method.eta=16.9", 'method.solver.name="adam"'],
}
OTHERS = {
    "CADEN, tuned": ["method.mu_z=0.0639", "method.relax=0.7"],
    "CADEN, 8 local steps": ["local_steps=8"],
    "CADEN, 12 local steps": ["local_steps=12"],
    "ADAPD, tuned, 8 local steps": [*RIVALS["ADAPD, tuned"], "local_steps=8"],
    "ADAPD, tuned, 12 local steps": [*RIVALS["ADAPD, tuned"], "local_steps=12"],
    "CADEN, no warm-up": ["warmup.steps=0"],
    "CADEN, batches of 500": ["problem.batch_size=500", "rounds=60"],
    "CADEN, batches of 1000": ["problem.batch_size=1000", "rounds=60"],
}
VECTOR = 101_632 * 4  # bytes


def once(settings: list[str]) -> dict[str, Any]:
    began = time.perf_counter()
    common = ["problem.data=mnist", "problem.execution=loop", "rounds=100", "target=0.93", "stop_at_target=true"]
    config = experiment(settings=[*common, *settings])
    _, problem, graph = config.build()
    if config.warmup["steps"]:  # only to time it: a run counts only the seconds of its rounds
        warm_up(problem, start_point(problem, None), config.warmup)
    start = time.perf_counter() - began
    last = config.run(built=(problem, graph), progress=False).summary()
    return {**last, "all_seconds": start + last["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--also", action="store_true")
    arguments = parser.parse_args()
    cases = {CADEN: [], **RIVALS, **(OTHERS if arguments.also else {})}
    runs_of: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for _ in range(arguments.repeats):
        for name, settings in cases.items():
            runs_of[name].append(once(settings))
    print(f"{'':30}{'rounds':>8}{'communications':>16}{'gradients':>11}{'time over CADEN':>20}")
    for name, runs in runs_of.items():
        ratios = [r["all_seconds"] / c["all_seconds"] for r, c in zip(runs, runs_of[CADEN])]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
        row = runs[0]
        rounds = row["rounds_to_target"] or "never"
        print(f"{name:30}{rounds!s:>8}{row['communications']:>16,.0f}{row['gradients']:>11,}{spread:>20}")
    for name in RIVALS:
        mine, theirs = runs_of[CADEN], runs_of[name]
        vectors = mine[0]["communications"] / theirs[0]["communications"]
        seconds = statistics.median(c["all_seconds"] / r["all_seconds"] for c, r in zip(mine, theirs))
        print(
            f"CADEN over {name}: {vectors:.2f} of the communications, {seconds:.2f} of the time without network cost; ",
            end="",
        )
        later = statistics.median(c["all_seconds"] - r["all_seconds"] for c, r in zip(mine, theirs))
        if later <= 0:
            print("faster at any bandwidth.")
        else:  # where seconds + communications per directed edge x bytes / bandwidth are equal
            fewer = (theirs[0]["communications"] - mine[0]["communications"]) / 74 * VECTOR * 8
            print(f"faster below {fewer / later / 1e6:,.0f} Mbit/s per edge.")


if __name__ == "__main__":
    main()
