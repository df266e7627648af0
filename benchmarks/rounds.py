"""CPU time per round of small problems, where single calls of Python and torch count; also of another copy, in turns.

    python benchmarks/rounds.py [--against ../other/src] [--only logistic] [--rounds 500] [--repeats 5]

Every copy of the library runs in a process of its own with one thread, and waits while the other one works. `bits` says
whether both ended at the same iterates. CADEN_COMPILED=off measures without compiled loops.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LOGISTIC = ("gt", "lt_admm", "caden", "dgd", "exact_diffusion", "radmm", "adapd")
CASES = [("logistic", name) for name in LOGISTIC]
CASES += [(size, name) for size in ("64-32-10", "64-4-10") for name in ("gradients", "gt", "caden")]


def answer() -> None:
    """Serve one copy: for each line read, run a case for some rounds and print the microseconds of each."""
    import torch

    import caden

    torch.set_num_threads(1)
    graph, problems = caden.graphs.ring(20), {"logistic": caden.problems.logistic(agents=20, dim=50, samples=10)}
    for line in sys.stdin:
        size, name, rounds = json.loads(line)
        if size not in problems:
            train, _ = caden.data.load("digits")
            inputs, hidden, outputs = map(int, size.split("-"))
            network = caden.problems.mlp(inputs, outputs, hidden)
            problems[size] = caden.problems.classification(network, train, agents=20)
        problem = problems[size]
        began = time.process_time()
        if name == "gradients":
            x = problem.start.repeat(20, 1)
            for _ in range(rounds):
                result = problem.value_and_grad(x)[1]
        else:
            method = getattr(caden.methods, name)()
            result = caden.simulate(method, problem, graph, rounds, progress=False, record_every=rounds).x
        microseconds = (time.process_time() - began) / rounds * 1e6
        print(json.dumps([microseconds, hashlib.sha256(result.numpy().tobytes()).hexdigest()]), flush=True)


def compare(against: Path | None, only: str, rounds: int, repeats: int) -> None:
    here, workers = Path(__file__).parents[1] / "src", {}
    for label, source in {"this": here, "other": against}.items():
        if source is not None:
            names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
            environment = os.environ | dict.fromkeys(names, "1") | {"PYTHONPATH": str(source.resolve())}
            command = [sys.executable, __file__, "--answer"]
            workers[label] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
    for size, name in CASES:
        if only not in f"{size} {name}":
            continue
        times, bits = {label: [] for label in workers}, set()
        for repeat in range(repeats + 1):
            for label, worker in workers.items():
                worker.stdin.write(json.dumps([size, name, rounds]) + "\n")
                worker.stdin.flush()
                microseconds, digest = json.loads(worker.stdout.readline())
                bits.add(digest)
                if repeat:  # the first repeat compiles, and fills caches
                    times[label].append(microseconds)
        medians = {label: statistics.median(values) for label, values in times.items()}
        spread = {label: f"{medians[label]:6.0f} ({min(v):.0f} to {max(v):.0f})" for label, v in times.items()}
        ratio = f", {medians['other'] / medians['this']:.2f} times less" if "other" in medians else ""
        note = "" if len(bits) == 1 else ", other bits"
        print(f"{size:9} {name:16} us per round: {', other '.join(spread.values())}{ratio}{note}", flush=True)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="src of another copy of the library")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    answer() if asked.answer else compare(asked.against, asked.only, asked.rounds, asked.repeats)
