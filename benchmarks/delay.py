"""Search for settings in which CADEN's arc form diverges because messages are late: a plain loop on random quadratics.

    python benchmarks/delay.py [--trials 1500]

Prints every setting that diverges, and what cures it.
"""

import argparse
from typing import NamedTuple

import numpy as np
from rich.progress import track

ROUNDS = 3000


class Setting(NamedTuple):
    graph: str
    agents: int
    dim: int
    condition: float
    negative: float  # one curvature of every f_i is minus this, if it is positive
    mu: float
    relax: float
    delay: tuple[str, int]  # "fixed" on all arcs, "unequal" but fixed, or "random"; largest delay in rounds
    loss: float
    awake: float
    steps: int  # gradient steps per round; 0: exact solves
    seed: int


def edges_of(graph: str, agents: int) -> list[tuple[int, int]]:
    return {
        "path": [(i, i + 1) for i in range(agents - 1)],
        "ring": [(i, (i + 1) % agents) for i in range(agents)],
        "star": [(0, i) for i in range(1, agents)],
        "complete": [(i, j) for i in range(agents) for j in range(i)],
    }[graph]


def diverges(s: Setting) -> bool | None:
    """Return whether the iterates grow; None if the sum or a subproblem is not convex."""
    rng = np.random.default_rng(s.seed)
    edges = edges_of(s.graph, s.agents)
    arcs, half = np.array(edges + [(j, i) for i, j in edges]), len(edges)
    owner, reverse = arcs[:, 0], np.r_[half : 2 * half, 0:half]
    degree = np.bincount(owner, minlength=s.agents)
    H = np.empty((s.agents, s.dim, s.dim))
    for i in range(s.agents):
        Q = np.linalg.qr(rng.normal(size=(s.dim, s.dim)))[0]
        curvature = np.geomspace(1 / s.condition, 1, s.dim)
        if s.negative:
            curvature[0] = -s.negative
        H[i] = Q @ np.diag(curvature) @ Q.T
    P = H + s.mu * degree[:, None, None] * np.eye(s.dim)
    if np.linalg.eigvalsh(H.sum(0))[0] <= 0 or min(np.linalg.eigvalsh(p)[0] for p in P) <= 0:
        return None
    solve = np.linalg.inv(P)
    x = rng.normal(size=(s.agents, s.dim))
    z = s.mu / 2 * (x[owner] + x[owner[reverse]])
    kind, most = s.delay
    fixed = {"fixed": np.full(2 * half, most), "unequal": rng.integers(0, most + 1, 2 * half)}.get(kind)
    arriving: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in range(ROUNDS + most + 1)]
    newest = np.full(2 * half, -1)
    for t in range(ROUNDS):
        awake = rng.random(s.agents) < s.awake
        pull = np.zeros_like(x)
        np.add.at(pull, owner, z)
        for i in np.flatnonzero(awake):
            if s.steps == 0:
                x[i] = solve[i] @ pull[i]
            for _ in range(s.steps):
                x[i] = x[i] - (P[i] @ x[i] - pull[i]) / (1 + s.mu * degree[i])
        messages = 2 * s.mu * x[owner] - z
        late = rng.integers(0, most + 1, 2 * half) if fixed is None else fixed
        kept = rng.random(2 * half) >= s.loss
        for a in np.flatnonzero(awake[owner] & kept):
            arriving[t + late[a]].append((a, t, messages[a].copy()))
        for a, sent, message in arriving[t]:
            if sent > newest[a]:
                newest[a], other = sent, reverse[a]
                z[other] = (1 - s.relax) * z[other] + s.relax * message
        if np.abs(x).max() > 1e8:
            return True
    return bool(np.abs(x).max() > 50)


def drawn(rng: np.random.Generator, seed: int) -> Setting:
    return Setting(
        str(rng.choice(["path", "ring", "star", "complete"])),
        int(rng.integers(3, 8)),
        int(rng.integers(1, 5)),
        float(10 ** rng.uniform(0, 4)),
        float(rng.choice([0, 0, 0.05, 0.3])),
        float(10 ** rng.uniform(-3, 2)),
        float(rng.choice([0.5, 0.9, 0.99])),
        (str(rng.choice(["fixed", "unequal", "random"])), int(rng.integers(0, 11))),
        float(rng.choice([0, 0.3])),
        float(rng.choice([1, 0.5])),
        int(rng.choice([0, 1, 3])),
        seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1500)
    rng, tried, lost = np.random.default_rng(1), {"convex": 0, "not convex": 0}, list[Setting]()
    for seed in track(range(parser.parse_args().trials), "settings", transient=True):
        setting = drawn(rng, seed)
        outcome = diverges(setting)
        if outcome is not None:
            tried["not convex" if setting.negative else "convex"] += 1
        if outcome:
            lost.append(setting)
            print(setting, flush=True)
    convex = sum(not setting.negative for setting in lost)
    print(
        f"diverged: {convex} of {tried['convex']} with convex f_i, {len(lost) - convex} of {tried['not convex']} others"
    )
    for cure, change in (
        ("no delay", lambda s: s._replace(delay=(s.delay[0], 0))),
        ("relax = 0.5", lambda s: s._replace(relax=0.5)),
        ("mu_z x 4", lambda s: s._replace(mu=4 * s.mu)),
        ("mu_z x 10", lambda s: s._replace(mu=10 * s.mu)),
    ):
        print(f"converge with {cure}: {sum(not diverges(change(s)) for s in lost)} of {len(lost)}")


if __name__ == "__main__":
    main()
