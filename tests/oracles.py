"""Textbook versions of what the library does: plain loops over agents and edges, dense matrices, no cleverness.

Nothing here imports the code that it checks.
"""

from __future__ import annotations

import numpy as np


def neighbours(edges, agents):
    """Lists of neighbours from pairs."""
    found = [[] for _ in range(agents)]
    for i, j in edges:
        found[i].append(j)
        found[j].append(i)
    return [sorted(n) for n in found]


def exact_solver(A, b):
    """(agent, linear, quadratic) -> argmin of f_i(v) + linear.v + quadratic/2 |v|^2 for f_i = v'A_i v/2 - b_i'v."""

    def solve(i, v, linear, quadratic):
        return np.linalg.solve(A[i] + quadratic * np.eye(len(b[i])), b[i] - linear)

    return solve


def gd_solver(A, b, steps, step):
    """The same by a few gradient steps from v."""

    def solve(i, v, linear, quadratic):
        for _ in range(steps):
            v = v - step * (A[i] @ v - b[i] + linear + quadratic * v)
        return v

    return solve


def caden_paper(x, edges, solve, mu_z, mu_y, awake):
    """Algorithm 1 of the paper, agent by agent; `awake` is a list of masks. Returns x and phi after every round."""
    agents = len(x)
    near = neighbours(edges, agents)
    x, phi, out = x.copy(), np.zeros_like(x), []
    for mask in awake:
        old = x.copy()
        for i in range(agents):
            if mask[i]:
                anchors = sum((old[i] + old[j]) / 2 for j in near[i])
                x[i] = solve(i, old[i], phi[i] - mu_z * anchors, mu_z * len(near[i]))
        for i in range(agents):
            if mask[i]:
                phi[i] = phi[i] + mu_y / 2 * sum(x[i] - x[j] for j in near[i])
        out.append((x.copy(), phi.copy()))
    return out


def caden_half_steps(x, edges, solve, mu_z, mu_y, relax, awake):
    """The paper's edge variables moved by whichever end is awake, edge by edge."""
    agents = len(x)
    x, out = x.copy(), []
    s = {(i, j): (x[i] + x[j]) / 2 for i, j in edges}
    y = {(i, j): np.zeros_like(x[0]) for i, j in edges}
    for mask in awake:
        for i in range(agents):
            if mask[i]:
                mine = [e for e in s if i in e]
                phi = sum(y[e] if e[0] == i else -y[e] for e in mine)
                x[i] = solve(i, x[i], phi - mu_z * sum(s[e] for e in mine), mu_z * len(mine))
        for (i, j), middle in s.items():
            u = x[i] - middle if mask[i] else 0
            w = x[j] - middle if mask[j] else 0
            s[i, j] = middle + relax * (u + w)
            y[i, j] = y[i, j] + relax * mu_y * (u - w)
        phi = np.array([sum((y[e] if e[0] == i else -y[e]) for e in y if i in e) for i in range(agents)])
        out.append((x.copy(), phi))
    return out


def relaxed_admm(x, edges, solve, rho, alpha, awake):
    """Asynchronous relaxed ADMM (Bastianello et al.) with a variable per arc, started like CADEN."""
    agents = len(x)
    near = neighbours(edges, agents)
    x, out = x.copy(), []
    z = {(i, j): rho / 2 * (x[i] + x[j]) for i in range(agents) for j in near[i]}
    for mask in awake:
        sent = {}
        for i in range(agents):
            if mask[i]:
                x[i] = solve(i, x[i], -sum(z[i, j] for j in near[i]), rho * len(near[i]))
                sent |= {(i, j): 2 * rho * x[i] - z[i, j] for j in near[i]}
        for (i, j), message in sent.items():
            z[j, i] = (1 - alpha) * z[j, i] + alpha * message
        out.append(x.copy())
    return out


def dense_bfgs(pairs, gamma):
    """The inverse BFGS matrix from pairs (s, y), oldest first, starting at gamma I."""
    d = len(pairs[0][0]) if pairs else 0
    H = gamma * np.eye(d)
    for s, y in pairs:
        r = 1 / (s @ y)
        V = np.eye(d) - r * np.outer(y, s)
        H = V.T @ H @ V + r * np.outer(s, s)
    return H


def two_loop(pairs, g, gamma):
    """H g by the two-loop recursion (Nocedal and Wright, Algorithm 7.4)."""
    q, alphas = g.copy(), []
    for s, y in reversed(pairs):
        a = (s @ q) / (s @ y)
        q = q - a * y
        alphas.append(a)
    r = gamma * q
    for (s, y), a in zip(pairs, reversed(alphas)):
        r = r + s * (a - (y @ r) / (s @ y))
    return r
