"""Compare carrying the L-BFGS memory over rounds with restarting it, on full MNIST in the paper's setting.

python benchmarks/carry.py [--rounds 60]
"""

from __future__ import annotations

import argparse

import caden
from caden.experiments.config import experiment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    base = experiment(settings=["problem.data=mnist", "problem.execution=loop"])
    _, problem, graph = base.build()
    print("mu_z  relax  steps            carry  to 93%  final acc  mean loss  V        gradients  s/round")
    red = caden.schedules.switch(5, 1, at=10)
    for mu_z, relax, steps, name in ((0.1, 0.5, 5, "5"), (0.07, 0.9, 5, "5"), (0.1, 0.5, red, "5, 1 from 10")):
        for carry in (True, False):
            method = caden.methods.caden(mu_z=mu_z, relax=relax, solver=caden.solvers.lbfgs(carry=carry))
            result = caden.simulate(
                method, problem, graph, rounds, local_steps=steps, warmup=base.warmup, target=0.93, progress=False
            )
            last = result.summary()
            print(
                f"{mu_z:<5} {relax:<6} {name:16s} {carry!s:6} {last['rounds_to_target']!s:7} {last['accuracy']:<10.4f} "
                f"{last['objective'] / 20:<10.4f} {last['lyapunov']:<8.2f} {last['gradients']:<10} "
                f"{last['seconds'] / rounds:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
