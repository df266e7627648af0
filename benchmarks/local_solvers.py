"""Which local solver inside CADEN on mini-batches: Muon, AdamW, SOAP, L-BFGS, or L-BFGS on batches that overlap?

    python benchmarks/local_solvers.py [--rounds 60]

Setting "small" of networks.py, judged on held-out training images. SOAP needs the package pytorch-optimizer. L-BFGS of
the library solves on one batch per round. With a new batch for every local step, Berahas, Nocedal and Takac, "A
multi-batch L-BFGS method for machine learning", NeurIPS 2016: a batch shares a quarter of its samples with the one
before, and the curvature pair of a step is computed on those samples alone,

    s_k = v_{k+1} - v_k,   y_k = g_O(v_{k+1}) - g_O(v_k),   v_{k+1} = v_k - alpha H_k g_S(v_k),   O = S_k and S_{k+1}

so a step costs the gradient of one batch, taken in parts.
"""

from __future__ import annotations

import argparse
import warnings
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from networks import SETTINGS
from torch import Tensor

import caden
from caden import draws, graphs, methods, problems
from caden.core import Info, LocalSolver, Objective, Problem, Solved
from caden.solvers._iterate import Memory

MEMORY, SHARED = 10, 8  # pairs; samples that two batches have in common


def two_loops(pairs: list[tuple[Tensor, Tensor]], rho: Tensor, g: Tensor) -> Tensor:
    """Return H g by the two-loop recursion, with rho s added to the stored changes of grad f_i."""
    kept, out = [(s, y + rho * s) for s, y in pairs], g.clone()
    weights = []
    for s, y in reversed(kept):
        weights.append(s @ out / (s @ y))
        out -= weights[-1] * y
    s, y = kept[-1]
    out *= s @ y / (y @ y)
    for (s, y), weight in zip(kept, reversed(weights)):
        out += (weight - y @ out / (s @ y)) * s
    return out


class Overlapping:
    """The local solver; pairs are carried from round to round. It is a sketch: no resume, no counting of gradients."""

    def __init__(self, problem: Any, rate: float, longest: float):
        self.problem, self.rate, self.longest = problem, rate, longest
        self.pairs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(problem.agents)]
        self.shared: list[np.ndarray] = [np.empty(0, np.int64) for _ in range(problem.agents)]
        self.steps = [0] * problem.agents

    def init(self, problem: Problem, x: Tensor, curvature: Tensor | None) -> Memory:
        return Memory(x.new_zeros(len(x)), torch.zeros_like(x), x.new_zeros(len(x)))

    def gradient(self, agent: int, v: Tensor, chosen: np.ndarray) -> Tensor:
        row, samples = v.clone().requires_grad_(), self.problem.shards[agent].read(chosen)
        with torch.enable_grad():
            loss = self.problem.model.function()(self.problem.model.views(row), *samples)
            return torch.autograd.grad(loss, row)[0]

    def parts(self, agent: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the new samples of a step that stay for the next one, and those that do not."""
        count, size = self.problem.shards[agent].count, self.problem.training.batch_size - SHARED
        chosen = draws.batch(self.problem.training.seed, self.steps[agent], 0, agent, count, size)
        chosen = np.random.default_rng(self.steps[agent]).permutation(chosen)
        return chosen[:SHARED], chosen[SHARED:]

    def solve_agent(self, agent: int, x: Tensor, slope: Tensor, rho: Tensor, work: int, factor: float) -> Tensor:
        v, pairs, pending = x.clone(), self.pairs[agent], None
        for _ in range(work):
            old, (stay, leave) = self.shared[agent], self.parts(agent)
            self.steps[agent] += 1
            parts = [part for part in (old, stay, leave) if len(part)]
            gradients = [self.gradient(agent, v, part) for part in parts]
            if pending is not None:
                s, before = pending
                y = gradients[0] - before
                if s @ (y + rho * s) > 1e-4 * (s @ s):
                    pairs.append((s, y))
                    del pairs[:-MEMORY]
            whole = sum(len(part) for part in parts)
            g = sum(len(part) / whole * one for part, one in zip(parts, gradients)) + slope + rho * (v - x)
            direction = two_loops(pairs, rho, g) if pairs else g
            if not direction.isfinite().all() or direction @ g <= 0:
                pairs.clear()
                direction = g
            step = -self.rate * factor * direction
            step *= min(1.0, self.longest * factor / float(step.norm()))
            pending = step, gradients[1 if len(old) else 0]
            self.shared[agent], v = stay, v + step
        return v

    def solve(self, objective: Objective, x: Tensor, work: Tensor, memory: Memory) -> Solved:
        out, factor = x.clone(), (1 + np.cos(np.pi * objective.elapsed)) / 2
        for agent in (work > 0).nonzero().flatten().tolist():
            rho = objective.rho[agent]
            out[agent] = self.solve_agent(agent, x[agent], objective.slope[agent], rho, int(work[agent]), factor)
        return Solved(out, memory, Info(steps=work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    setting = SETTINGS["small"]
    problem = problems.PROBLEMS["classification"](**setting.problem, seed=0, validation=setting.validation)
    small = {"mu_z": 0.065, "relax": 0.9}
    tried: list[tuple[str, Any, dict[str, Any]]] = []
    for optimizer, rate in (("Muon", 0.0034), ("AdamW", 0.003), ("pytorch_optimizer:SOAP", 0.003)):
        package = optimizer.partition(":")[0]
        if package == optimizer or find_spec(package):
            table = {"name": "torch_optim", "optimizer": optimizer, "lr": rate, "weight_decay": 0.0}
            tried.append((f"{optimizer} {rate}", table | {"schedule": "cosine"}, small))
    for mu in (0.065, 0.3, 1.0):
        for start in ("own", "anchor"):
            common = {"mu_z": mu, "relax": 0.5, "start": start}
            tried.append((f"one batch per round, mu_z {mu}, start {start}", "lbfgs", common))
    for rate, longest in ((1.0, 0.3), (1.0, 1.0), (0.3, 1.0), (0.1, 1.0)):
        local = Overlapping(problem, rate, longest)
        solver = LocalSolver(local.init, local.solve, "overlap", fresh=True)
        tried.append((f"overlap, alpha {rate}, steps at most {longest}", solver, small))
    for name, solver, parameters in tried:
        options = {"participation": setting.participation, "local_steps": setting.steps, "record_every": rounds}
        try:
            method = methods.caden(solver=solver, **parameters)
            result = caden.simulate(method, problem, graphs.ring(10), rounds, progress=False, **options)
            print(f"{name}: {result.rows[-1]['accuracy']:.1%}, {result.rows[-1]['seconds']:.0f} s", flush=True)
        except caden.Diverged:
            print(f"{name}: diverged", flush=True)


if __name__ == "__main__":
    main()
