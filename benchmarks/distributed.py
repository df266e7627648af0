"""Measure the cost of spreading agents over processes on full MNIST.

The result is the seconds per round of 2 ranks with one thread each over those of the simulator with two threads,
measured alternately: `python benchmarks/distributed.py [--rounds 6] [--repeats 3] [--set ...]`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise


def seconds_per_round(rounds: int, processes: int, settings: list[str]) -> float:
    """Return the median over the rounds after the first two, without metrics."""
    command = [sys.executable, "-m", "caden", "run", "--json", "--out", f"runs/bench-{os.getpid()}-{processes}"]
    for setting in (f"rounds={rounds}", "problem.execution=loop", *settings):
        command += ["--set", setting]
    if processes > 1:
        command += ["--processes", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, 2 // processes))}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=3600)
    subprocess.run(["rm", "-r", command[6]], check=True)
    clock = [row["seconds"] for row in json.loads(done.stdout)["history"]]
    return statistics.median(b - a for a, b in pairwise(clock[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    given = parser.parse_args()
    settings = ["problem.data=mnist", *given.settings]
    ratios = []
    for _ in range(given.repeats):
        one, two = (seconds_per_round(given.rounds, processes, settings) for processes in (1, 2))
        ratios.append(two / one)
        print(f"one process, 2 threads: {one:.2f} s per round; 2 ranks: {two:.2f} s; ratio {two / one:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f})")


if __name__ == "__main__":
    main()
