"""Time `caden --help`, `--version`, a usage error and `caden list` against importing typer and rich, or torch.

    python benchmarks/startup.py [--repeats 9]

Each command runs alternately with its reference, in its own process. The goal is a ratio of at most 3, and at most 1.3
for the list, whose reference imports torch and the other libraries that it needs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

LIGHT, HEAVY = "import typer, rich", "import typer, rich, torch, pandas, scipy.sparse.linalg, networkx, pydantic"
CASES = {
    "caden --help": (["--help"], LIGHT, 3.0),
    "caden run --help": (["run", "--help"], LIGHT, 3.0),
    "caden --version": (["--version"], LIGHT, 3.0),
    "caden run --no-such-option": (["run", "--no-such-option"], LIGHT, 3.0),
    "caden list": (["list"], HEAVY, 1.3),
}


def seconds(*arguments: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    print("| command | time over its reference | least | most | goal |\n|---|---|---|---|---|")
    for name, (command, reference, goal) in CASES.items():
        seconds("-m", "caden", *command), seconds("-c", reference)  # fill the caches
        ratios = [seconds("-m", "caden", *command) / seconds("-c", reference) for _ in range(repeats)]
        print(f"| `{name}` | {statistics.median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f} | {goal} |")


if __name__ == "__main__":
    main()
