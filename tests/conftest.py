from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the suite runs on several workers, and they start processes

import numpy as np
import pytest
import torch

import caden

torch.set_num_threads(int(os.environ.get("CADEN_TEST_THREADS", "1")))
SHIFT = int(os.environ.get("CADEN_TEST_SEED", "0"))  # every test must hold for other random numbers, too


def shift_seeds(shift):
    """Let every generator that a test or the library makes start from another seed."""
    numpy_rng, torch_seed = np.random.default_rng, torch.manual_seed

    class Generator(torch.Generator):
        def manual_seed(self, seed):
            return super().manual_seed(seed + shift)

    np.random.default_rng = lambda seed=None: numpy_rng(seed + shift if isinstance(seed, int) else seed)
    torch.manual_seed = lambda seed: torch_seed(seed + shift)
    torch.Generator = Generator


if SHIFT:
    shift_seeds(SHIFT)


LONG = ("test_peers", "test_report", "test_cluster", "test_newcomer", "test_cli", "test_plan")


def pytest_collection_modifyitems(items):
    """What takes long comes first, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="session")
def graph():
    """The paper's: 20 agents, 37 edges."""
    return caden.graphs.erdos_renyi(20, 0.2, edges=37, seed=1)


@pytest.fixture(scope="session")
def quadratic():
    return caden.problems.quadratic(agents=20, dim=5, seed=3)


@pytest.fixture(scope="session")
def setting():
    """Twelve quadratics, a random graph, a start, and the edges as pairs."""
    problem = caden.problems.quadratic(agents=12, dim=4, seed=2)
    graph = caden.graphs.erdos_renyi(12, edges=20, seed=3)
    x0 = np.random.default_rng(7).normal(size=(12, 4))
    return problem, graph, x0, [tuple(e) for e in graph.edges.tolist()]


def masks(agents, rounds, p, seed=0):
    """Who is awake, drawn independently of the library."""
    rng = np.random.default_rng(seed)
    return [rng.random(agents) < p for _ in range(rounds)]


def scheduled(awake):
    """The same masks as a participation schedule."""
    return lambda round, draw: awake[round]


def newest(run_dir):
    """The file of the newest checkpoint of a run directory."""
    return max(run_dir.glob("checkpoint.*.safetensors"), key=lambda path: int(path.name.split(".")[1]))


def distance(method, problem, graph, rounds, enough=0.0, **options):
    """Relative distance from the minimiser after so many rounds, or once it is below `enough`."""

    def away(x):
        return float((x - problem.solution).norm(dim=1).max() / problem.solution.norm())

    callbacks = [lambda row, state: away(state.x) < enough]
    return away(caden.simulate(method, problem, graph, rounds, record_every=50, callbacks=callbacks, **options).x)
