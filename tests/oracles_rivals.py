"""Textbook versions of newer rivals: plain loops over agents. Nothing here imports the code that it checks."""

from __future__ import annotations

import numpy as np

from oracles import local_steps, metropolis, neighbours, stacked


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


def normalised_tracking(x, edges, grad, alpha, beta, normalise, awake):
    """`normalise` maps a row to the direction of its step."""
    x, v, y, out = x.copy(), np.zeros_like(x), np.zeros_like(x), []
    for mask in awake:
        W, old = metropolis(edges, mask), v.copy()
        for i in np.flatnonzero(mask):
            v[i] = beta * v[i] + (1 - beta) * grad(i, x[i])
        y, half = W @ (y + v - old), x.copy()
        for i in np.flatnonzero(mask):
            half[i] = x[i] - alpha * normalise(y[i])
        x = W @ half
        out.append(x.copy())
    return out


def newton_schulz(matrix):
    """Muon's five steps as what they do to the singular values."""
    U, s, V = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return U @ np.diag(s) @ V


def gradient_tracking_mixed_start(x, edges, grad, alpha, rounds):
    """ATC gradient tracking whose tracker starts at W G."""
    W, G, out = metropolis(edges, np.ones(len(x), bool)), stacked(grad, x), []
    g = W @ G
    for _ in range(rounds):
        x = W @ (x - alpha * g)
        new = stacked(grad, x)
        g, G = W @ (g + new - G), new
        out.append(x.copy())
    return out


def random_pairs(edges, number):
    """A maximal matching: edges in random order, each taken if both ends are free."""
    found, busy = [], set()
    for e in np.random.default_rng(int(number * 2**53)).permutation(len(edges)):
        if not busy & set(edges[e]):
            found.append(edges[e])
            busy |= set(edges[e])
    return found


def diloco(x, grad, lr, outer_lr, mu, nesterov, steps, awake):
    x, out = x.copy(), []
    theta = x.mean(axis=0)
    m = np.zeros_like(theta)
    for mask in awake:
        on = np.flatnonzero(mask)
        D = theta - np.mean([local_steps(grad, i, theta, lr, steps, 0) for i in on], axis=0)
        m = mu * m + D
        theta = theta - outer_lr * (D + mu * m if nesterov else m)
        x[on] = theta
        out.append(x.copy())
    return out


def noloco(x, edges, grad, lr, outer_lr, mu, pull, steps, numbers, awake):
    x, m, out = x.copy(), np.zeros_like(x), []
    for mask, number in zip(awake, numbers):
        partner = {i: i for i in range(len(x))}
        for i, j in random_pairs(edges, number):
            if mask[i] and mask[j]:
                partner[i], partner[j] = j, i
        D, old = np.zeros_like(x), x.copy()
        for i in np.flatnonzero(mask):
            D[i] = local_steps(grad, i, x[i], lr, steps, 0) - x[i]
        for i in np.flatnonzero(mask):
            j = partner[i]
            m[i] = mu * m[i] + outer_lr * (D[i] + D[j]) / 2 + pull * ((old[i] + old[j]) / 2 - old[i])
            x[i] = old[i] + m[i]
        out.append(x.copy())
    return out


def gasloc(x, edges, grad, alpha, eta, gamma, weight, steps, awake, numbers=None):
    """With `numbers`, the links of each round are a random matching."""
    x, old, out = x.copy(), x.copy(), []
    for t, mask in enumerate(awake):
        W = metropolis(edges if numbers is None else random_pairs(edges, numbers[t]), mask)
        v = x.copy()
        for i in np.flatnonzero(mask):
            v[i] = x[i] + eta * (local_steps(grad, i, x[i], alpha, steps, 0) - x[i])
        mixed = v - weight * (v - W @ v)
        for i in np.flatnonzero(mask):
            x[i] = mixed[i] + gamma * (v[i] - old[i])
            old[i] = v[i]
        out.append(x.copy())
    return out


def lodadac(x, edges, grad, alpha, beta1, beta2, eps, gamma, amsgrad, steps, compress, awake):
    x, out = x.copy(), []
    m, v, u, shadow = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x), Shadow(x, compress)
    for mask in awake:
        for i in np.flatnonzero(mask):
            for _ in range(steps):
                g = grad(i, x[i])
                m[i] = beta1 * m[i] + (1 - beta1) * g
                x[i] = x[i] - alpha * m[i] / np.sqrt(u[i] + eps)
                v[i] = beta2 * v[i] + (1 - beta2) * g**2
                u[i] = np.maximum(u[i], v[i]) if amsgrad else v[i]
        known = shadow.send(x, mask)
        x = x + gamma * (metropolis(edges, mask) @ known - known)
        out.append(x.copy())
    return out


def relay_sgd(x, tree, grad, alpha, awake):
    """RelaySum on the edges of a tree, with dictionaries of what was last received."""
    agents = len(x)
    near = neighbours(tree, agents)
    start, x, out = x.copy(), x.copy(), []
    M = {(j, i): np.zeros(x.shape[1]) for i in range(agents) for j in near[i]}  # from j, held by i
    c = dict.fromkeys(M, 0)
    for mask in awake:
        v, sent, number = x.copy(), {}, {}
        for i in np.flatnonzero(mask):
            v[i] = x[i] - alpha * grad(i, x[i])
            for j in near[i]:
                sent[i, j] = v[i] + sum((M[k, i] for k in near[i] if k != j), np.zeros(x.shape[1]))
                number[i, j] = 1 + sum(c[k, i] for k in near[i] if k != j)
        M, c = M | sent, c | number
        for i in np.flatnonzero(mask):
            heard = sum(c[j, i] for j in near[i])
            x[i] = (v[i] + sum(M[j, i] for j in near[i]) + (agents - 1 - heard) * start[i]) / agents
        out.append(x.copy())
    return out


def memoryless_bfgs(x, edges, grad, tau0, alpha, rounds):
    """Gradient tracking along -H_i g_i, with H_i from the last pair alone, in closed form."""
    W, G, out = metropolis(edges, np.ones(len(x), bool)), stacked(grad, x), []
    g, pairs = G.copy(), {}
    for _ in range(rounds):
        p = np.zeros_like(x)
        for i, v in enumerate(g):
            if i not in pairs:
                p[i] = tau0[i] * v
                continue
            s, y = pairs[i]
            tau, sy = (s @ y) / (y @ y), s @ y
            p[i] = tau * v - tau * (y * (s @ v) + s * (y @ v)) / sy + (1 + tau * (y @ y) / sy) * s * (s @ v) / sy
        old, x = x, W @ (x - alpha * p)
        new = stacked(grad, x)
        pairs = {i: (x[i] - old[i], new[i] - G[i]) for i in range(len(x))}
        g, G = W @ (g + new - G), new
        out.append(x.copy())
    return out


def lt_admm_vr(x, edges, batch_grad, full_grad, gamma, beta, rho, alpha, steps, awake):
    """`batch_grad(i, v, round, step)` and `full_grad(i, v)`."""
    near = neighbours(edges, len(x))
    x, out = x.copy(), []
    z = {(i, j): rho / 2 * (x[i] + x[j]) for i in range(len(x)) for j in near[i]}
    for t, mask in enumerate(awake):
        sent = {}
        for i in np.flatnonzero(mask):
            pull = rho * len(near[i]) * x[i] - sum(z[i, j] for j in near[i])
            v, whole = x[i], full_grad(i, x[i])
            for step in range(steps):
                g = batch_grad(i, v, t, step) - batch_grad(i, x[i], t, step) + whole
                v = v - gamma * g - beta * pull
            x[i] = v
            sent |= {(i, j): z[i, j] - 2 * rho * v for j in near[i]}
        for (i, j), message in sent.items():
            z[j, i] = (1 - alpha) * z[j, i] - alpha * message
        out.append(x.copy())
    return out
