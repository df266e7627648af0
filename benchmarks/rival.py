"""Compare speed with decent-bench 0.3, another simulator: gradient tracking and LT-ADMM on the same data.

decent-bench needs Python 3.13, so it runs in a separate process:

    python3.13 -m venv rival && rival/bin/pip install decent-bench==0.3.0 torch==2.13.0
    python benchmarks/rival.py --python rival/bin/python [--rounds 20] [--repeats 5] [--only 20x10x50] [--cpu]

Both sides start at the same point, run the same rounds and take turns. The iterates must agree every time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STEP, BETA, L2 = 0.05, 0.01, 0.01
CLOCKS = {False: time.perf_counter, True: time.process_time}


def answer(folder: Path) -> None:
    """Serve the other side: for each line read, run a method for some rounds and print the seconds it took."""
    import networkx as nx
    import torch
    from decent_array import interoperability as iop
    from decent_array.types import Devices, Frameworks
    from decent_bench.agents import Agent
    from decent_bench.algorithms import p2p
    from decent_bench.benchmark import configure
    from decent_bench.costs import L2RegularizerCost, LogisticRegressionCost, PyTorchCost
    from decent_bench.networks import P2PNetwork

    given = np.load(folder / "problem.npz")
    features, labels, start = given["features"], given["labels"], given["start"]
    hidden = int(given["hidden"])
    configure(Frameworks.PYTORCH if hidden else Frameworks.NUMPY, Devices.CPU, log_level=40)

    def cost(rows, targets):
        if hidden:
            model = torch.nn.Sequential(
                torch.nn.Linear(rows.shape[1], hidden, bias=False),
                torch.nn.ReLU(),
                torch.nn.Linear(hidden, 10, bias=False),
            )
            data = list(zip(torch.from_numpy(rows), torch.from_numpy(targets)))
            return PyTorchCost(data, model, torch.nn.CrossEntropyLoss())
        data = [(iop.from_numpy(a), iop.from_numpy(b.reshape(1))) for a, b in zip(rows, targets)]
        return LogisticRegressionCost(data) + L2 * L2RegularizerCost(rows.shape[1:])

    agents = [Agent(cost(a, b), state_snapshot_period=10**9) for a, b in zip(features, labels)]
    network = P2PNetwork(nx.cycle_graph(len(agents)), agents)
    first = iop.from_numpy(start)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["method"] == "gt":
            method = p2p.ATC_Tracking(step_size=STEP, x0=first)
        else:
            method = p2p.LT_ADMM(step_size=STEP, aux_step_size=BETA, penalty=1.0, relaxation=0.5, x0=first)
        clock = CLOCKS[asked["cpu"]]
        began = clock()
        method.run(network, asked["rounds"])
        seconds = clock() - began
        np.save(folder / "x.npy", np.stack([iop.to_numpy(agent.x) for agent in network.agents()]))
        print(json.dumps(seconds), flush=True)


def compare(python: str, rounds: int, repeats: int, only: str, cpu: bool) -> None:
    import torch

    from caden import graphs, methods
    from caden.experiments import bench

    ours = {"gt": methods.gt(STEP, form="semi_b"), "lt_admm": methods.lt_admm(STEP, BETA, rho=1.0, alpha=0.5)}
    for name, (make, size, _) in bench.CASES.items():
        if only not in name:
            continue
        problem, graph = make(*size).problem, graphs.ring(size[0])
        start = torch.zeros(problem.dim, dtype=problem.dtype)
        if hidden := size[3] if len(size) > 3 else 0:
            start = 0.05 * torch.randn(problem.dim, generator=torch.Generator().manual_seed(1))
            features, labels = (torch.stack([shard[i] for shard in problem.shards]).numpy() for i in (0, 1))
        else:  # labels take both values; the signs of the features are flipped to match
            labels = np.tile(np.arange(size[1]) % 2.0, (size[0], 1))
            features = problem.signed.numpy() * (2 * labels - 1)[:, :, None]
        turns = min(rounds, 5) if hidden else rounds  # decent-bench's LT-ADMM on networks slows down over the rounds
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            np.savez(folder / "problem.npz", features=features, labels=labels, start=start.numpy(), hidden=hidden)
            command = [python, __file__, "--answer", str(folder)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
                assert other.stdin is not None and other.stdout is not None
                for label, method in ours.items():
                    ratios = []
                    for repeat in range(repeats + 1):
                        other.stdin.write(json.dumps({"method": label, "rounds": turns, "cpu": cpu}) + "\n")
                        other.stdin.flush()
                        theirs = json.loads(other.stdout.readline() or "null")
                        if theirs is None:
                            raise SystemExit(f"{python} cannot run decent-bench; see the docstring of {__file__}.")
                        began = CLOCKS[cpu]()
                        run = bench.Rounds(method, problem, graph, start)
                        for _ in range(turns):
                            run()
                        mine = CLOCKS[cpu]() - began
                        apart = float(np.abs(run.x.numpy() - np.load(folder / "x.npy")).max())
                        moved = float((run.x - start).abs().max())
                        if not apart < (1e-9 if problem.dtype == torch.float64 else 1e-3) * moved:
                            raise SystemExit(f"{name}, {label}: iterates moved {moved:.1e} and differ by {apart:.1e}.")
                        if repeat:  # the first repeat warms up both sides
                            ratios.append(theirs / mine)
                    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
                    print(f"{name}, {label}: {statistics.median(ratios):.1f} times faster ({spread})", flush=True)
                other.stdin.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="rival/bin/python", help="Python 3.13 interpreter with decent-bench")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="run only sizes whose name contains this")
    parser.add_argument("--cpu", action="store_true", help="compare CPU time, which varies less on a busy machine")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    answer(asked.answer) if asked.answer else compare(asked.python, asked.rounds, asked.repeats, asked.only, asked.cpu)
