"""Textbook versions of newer rivals: plain loops over agents. Nothing here imports the code that it checks."""

from __future__ import annotations

import numpy as np

from oracles import metropolis, neighbours, stacked


def top(count):
    """The compressor that keeps the `count` largest entries of a row."""

    def keep(v):
        out, chosen = np.zeros_like(v), np.argsort(-abs(v))[:count]
        out[chosen] = v[chosen]
        return out

    return keep


def atg(x, edges, grad, delta, rho, alpha, gamma, awake):
    """ADMM-tracking gradient with a dictionary of arc variables."""
    near, d = neighbours(edges, len(x)), x.shape[1]
    x, out = x.copy(), []
    zy = {(i, j): np.zeros(d) for i in range(len(x)) for j in near[i]}
    zs = {arc: np.zeros(d) for arc in zy}
    for mask in awake:
        sent = {}
        for i in np.flatnonzero(mask):
            y = (x[i] + sum(zy[i, j] for j in near[i])) / (1 + rho * len(near[i]))
            s = (grad(i, x[i]) + sum(zs[i, j] for j in near[i])) / (1 + rho * len(near[i]))
            x[i] = (1 - gamma) * x[i] + gamma * (y - delta * s)
            sent |= {(i, j): (2 * rho * y - zy[i, j], 2 * rho * s - zs[i, j]) for j in near[i]}
        for (i, j), (for_y, for_s) in sent.items():
            zy[j, i] = (1 - alpha) * zy[j, i] + alpha * for_y
            zs[j, i] = (1 - alpha) * zs[j, i] + alpha * for_s
        out.append(x.copy())
    return out


class Shadow:
    """What all know of a row: the first message is whole, later ones are compressed differences."""

    def __init__(self, rows, compress):
        self.known, self.compress, self.begun = np.zeros_like(rows), compress, False

    def send(self, rows, mask):
        for i in np.flatnonzero(mask):
            change = rows[i] - self.known[i]
            self.known[i] += self.compress(change) if self.begun else change
        self.begun = True
        return self.known


def choco(x, edges, grad, alpha, gamma, compress, awake):
    x, out = x.copy(), []
    shadow = Shadow(x, compress)
    for mask in awake:
        half = x - np.where(mask[:, None], alpha * stacked(grad, x), 0)
        known = shadow.send(half, mask)
        x = half + gamma * (metropolis(edges, mask) @ known - known)
        out.append(x.copy())
    return out


def beer(x, edges, grad, alpha, gamma, compress, awake):
    x, out = x.copy(), []
    G = stacked(grad, x)
    v, h, g = G.copy(), Shadow(x, compress), Shadow(x, compress)
    for mask in awake:
        W, on = metropolis(edges, mask), mask[:, None]
        known = h.send(x, mask)
        x = x + gamma * (W @ known - known) - np.where(on, alpha * v, 0)
        new = np.where(on, stacked(grad, x), G)
        known = g.send(v, mask)
        v = v + gamma * (W @ known - known) + new - G
        G = new
        out.append(x.copy())
    return out


def gt_adam(x, edges, grad, alpha, beta1, beta2, eps, ceiling, awake):
    x, m, v, out = x.copy(), np.zeros_like(x), np.zeros_like(x), []
    G = stacked(grad, x)
    s = G.copy()
    for mask in awake:
        W, step = metropolis(edges, mask), np.zeros_like(x)
        for i in np.flatnonzero(mask):
            m[i] = beta1 * m[i] + (1 - beta1) * s[i]
            v[i] = np.minimum(beta2 * v[i] + (1 - beta2) * s[i] ** 2, ceiling)
            step[i] = alpha * m[i] / np.sqrt(v[i] + eps)
        x = W @ x - step
        new = np.where(mask[:, None], stacked(grad, x), G)
        s, G = W @ s + new - G, new
        out.append(x.copy())
    return out


def qg_dsgdm(x, edges, grad, alpha, mu, nu, nesterov, awake):
    x, m, out = x.copy(), np.zeros_like(x), []
    for mask in awake:
        half, old = x.copy(), x
        for i in np.flatnonzero(mask):
            g = grad(i, x[i])
            p = mu * m[i] + g
            half[i] = x[i] - alpha * (g + mu * p if nesterov else p)
        x = metropolis(edges, mask) @ half
        for i in np.flatnonzero(mask):
            m[i] = (1 - nu) * m[i] + nu * (old[i] - x[i]) / alpha
        out.append(x.copy())
    return out


def atc(x, edges, grad, alpha, awake):
    """Adapt, then combine: x <- W (x - alpha grad f(x))."""
    x, out = x.copy(), []
    for mask in awake:
        x = metropolis(edges, mask) @ (x - np.where(mask[:, None], alpha * stacked(grad, x), 0))
        out.append(x.copy())
    return out


def atc_limit(edges, A, b, alpha):
    """Where adapt-then-combine stops: x = W (x - alpha (A x - b)), solved as one linear system."""
    agents, d = b.shape
    W = np.kron(metropolis(edges, np.ones(agents, bool)), np.eye(d))
    H = np.zeros((agents * d, agents * d))
    for i in range(agents):
        H[i * d : (i + 1) * d, i * d : (i + 1) * d] = A[i]
    big = np.eye(agents * d)
    return np.linalg.solve(big - W @ (big - alpha * H), alpha * W @ b.ravel()).reshape(agents, d)
