"""Bring your own graph and one data set per agent; check the result against a centralised solver."""

import networkx as nx
import numpy as np
import torch
from scipy.optimize import minimize

import caden

graph = caden.graphs.from_networkx(nx.karate_club_graph())  # 34 people and who knows whom
rng = np.random.default_rng(0)
truth = rng.normal(size=6)
features = [rng.normal(loc=rng.normal(size=6), size=(rng.integers(5, 40), 6)) for _ in range(graph.agents)]
labels = [np.sign(a @ truth + rng.normal(size=len(a))) for a in features]
problem = caden.problems.logistic(features=features, labels=labels, alpha=0.0, l2=0.2)

probability = np.where(graph.degrees > 5, 0.9, 0.3)  # well-connected agents are awake more often
result = caden.simulate(
    caden.methods.caden(mu_z=0.2, relax=0.7), problem, graph, rounds=400, participation=probability, record_every=100
)


def centralised(x: np.ndarray) -> tuple[float, np.ndarray]:
    value, gradient = problem.value_and_grad(torch.tensor(x).expand(graph.agents, -1))
    return float(value.sum()), gradient.sum(0).numpy()


best = minimize(centralised, np.zeros(6), jac=True, options={"gtol": 1e-10}).x
error = np.abs(result.x.numpy() - best).max()
print(f"largest distance of any agent from the centralised minimiser: {error:.1e}")
assert error < 1e-6
