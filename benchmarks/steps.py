"""Rounds / gradients to the target of each problem of benchmarks/auto.py, with fixed local steps and with "auto".

python benchmarks/steps.py
"""

import argparse

from auto import WARMUP, cases

import caden
from caden import methods
from caden.engine.warmup import start_point, warm_up
from caden.schedules import auto

SPECS = {
    "5 steps": 5,
    '"auto", at most 5': auto(most=5),
    '"auto"': auto(),
    '"auto", at most 15': auto(most=15),
    "accuracy 0.3, at most 15": auto(0.3, 15),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"| problem | {' | '.join(SPECS)} |\n|{'---|' * (1 + len(SPECS))}")
    for case in cases(mnist=False):
        x = start_point(case.problem, None)
        if case.target is not None:
            x, _ = warm_up(case.problem, x, WARMUP)
        tolerance = 1e-9 * float(case.problem.value_and_grad(x)[1].sum(0).norm() ** 2)
        goal = {"tolerance": tolerance} if case.target is None else {"target": case.target, "stop_at_target": True}
        goal |= {"warmup": None if case.target is None else WARMUP, "progress": False}
        cells = []
        for steps in SPECS.values():
            result = caden.simulate(methods.caden(), case.problem, case.graph, 800, local_steps=steps, **goal)
            cells.append(f"{result.rows[-1]['round']} / {result.rows[-1]['gradients']:,}")
        print(f"| {case.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
