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


def metropolis(edges, awake):
    """(m, m) Metropolis weights of the awake subgraph, identity for sleepers."""
    agents = len(awake)
    live = [(i, j) for i, j in edges if awake[i] and awake[j]]
    near = neighbours(live, agents)
    W = np.zeros((agents, agents))
    for i, j in live:
        W[i, j] = W[j, i] = 1 / (1 + max(len(near[i]), len(near[j])))
    return W + np.diag(1 - W.sum(axis=1))


def gradient(A, b):
    """(i, v) -> gradient of f_i at v."""
    return lambda i, v: A[i] @ v - b[i]


def stacked(grad, x):
    return np.array([grad(i, v) for i, v in enumerate(x)])


def gradient_tracking(x, edges, grad, alpha, form, awake):
    """The four forms, agent by agent on the awake subgraph."""
    x, out = x.copy(), []
    G = stacked(grad, x)
    g = G.copy()
    for mask in awake:
        W, on = metropolis(edges, mask), mask[:, None]
        step = np.where(on, alpha * g, 0)
        x = W @ (x - step) if form in ("atc", "semi_b") else W @ x - step
        new = np.where(on, stacked(grad, x), G)
        D = new - G
        g = W @ (g + D) if form in ("atc", "semi_a") else W @ g + D
        G = new
        out.append(x.copy())
    return out


def adapd(x, edges, solve, grad, eta, awake, variant=None, mix=None):
    """ADAPD with x0 = x at the start; `solve(i, v, linear, quadratic)` as elsewhere; `mix(mask, v)` may replace W v."""
    agents = len(x)
    mix = mix or (lambda mask, v: metropolis(edges, mask) @ v)
    x, x0, y, z, out = x.copy(), x.copy(), np.zeros_like(x), np.zeros_like(x), []
    q = mix(np.ones(agents, bool), x0)
    for mask in awake:
        new, send = x.copy(), x0.copy()
        for i in np.flatnonzero(mask):
            if variant == "og":
                new[i] = x0[i] - eta * (grad(i, x[i]) + y[i])
            else:
                new[i] = solve(i, x[i], y[i] - x0[i] / eta, 1 / eta)
            send[i] = (new[i] + q[i] + eta * (y[i] - z[i])) / 2
            y[i] = y[i] + (new[i] - send[i]) / eta
        mixed = mix(mask, send)
        for i in np.flatnonzero(mask):
            q[i] = mixed[i]
            z[i] = z[i] + (send[i] - q[i]) / eta
        x, x0 = new, send
        out.append(x.copy())
    return out


def dgd(x, edges, grad, alpha, awake):
    x, out = x.copy(), []
    for mask in awake:
        x = metropolis(edges, mask) @ x - np.where(mask[:, None], alpha * stacked(grad, x), 0)
        out.append(x.copy())
    return out


def exact_diffusion(x, edges, grad, alpha, awake, mix_first):
    x, q, out = x.copy(), np.zeros_like(x), []
    for t, mask in enumerate(awake):
        z = np.where(mask[:, None], x - alpha * stacked(grad, x) - q, x)
        x = z if t == 0 and not mix_first else (z + metropolis(edges, mask) @ z) / 2
        q = q + z - x
        out.append(x.copy())
    return out


def extra(x, edges, grad, alpha, awake):
    x, out = x.copy(), []
    m = (x + metropolis(edges, np.ones(len(x), bool)) @ x) / 2
    q = x - m
    for mask in awake:
        on = mask[:, None]
        x = np.where(on, m - alpha * stacked(grad, x) - q, x)
        m = np.where(on, (x + metropolis(edges, mask) @ x) / 2, m)
        q = np.where(on, q + x - m, q)
        out.append(x.copy())
    return out


def proxskip(x, edges, grad, alpha, p, chi, coins, awake):
    x, y, out = x.copy(), np.zeros_like(x), []
    for coin, mask in zip(coins, awake):
        z = np.where(mask[:, None], x - alpha * stacked(grad, x) - y, x)
        if coin < p:
            W = metropolis(edges, mask)
            x = z - (z - W @ z) / (2 * chi)
            y = y + p * (z - x)
        else:
            x = z
        out.append(x.copy())
    return out


def local_steps(grad, i, v, alpha, steps, correction):
    for _ in range(steps):
        v = v - alpha * (grad(i, v) + correction)
    return v


def led(x, edges, grad, alpha, beta, steps, awake, lazy=True):
    x, y, out = x.copy(), np.zeros_like(x), []
    for mask in awake:
        v = x.copy()
        for i in np.flatnonzero(mask):
            v[i] = local_steps(grad, i, x[i], alpha, steps, beta / alpha * y[i])
        mixed = metropolis(edges, mask) @ v
        x = (v + mixed) / 2 if lazy else mixed
        y = y + v - x
        out.append(x.copy())
    return out


def kgt(x, edges, grad, alpha, gamma, steps, awake, published=False):
    G = stacked(grad, x)
    x, c, out = x.copy(), G.mean(axis=0) - G if published else np.zeros_like(x), []
    for mask in awake:
        z = np.zeros_like(x)
        for i in np.flatnonzero(mask):
            z[i] = (x[i] - local_steps(grad, i, x[i], alpha, steps, c[i])) / (steps * alpha)
        W = metropolis(edges, mask)
        c = c - z + W @ z
        x = W @ (x - gamma * steps * alpha * z)
        out.append(x.copy())
    return out


def lt_admm(x, edges, grad, gamma, beta, rho, alpha, steps, awake):
    agents = len(x)
    near = neighbours(edges, agents)
    x, out = x.copy(), []
    z = {(i, j): rho / 2 * (x[i] + x[j]) for i in range(agents) for j in near[i]}
    for mask in awake:
        sent, old = {}, x.copy()
        for i in np.flatnonzero(mask):
            pull = rho * len(near[i]) * old[i] - sum(z[i, j] for j in near[i])
            x[i] = local_steps(grad, i, old[i], gamma, steps, beta / gamma * pull)
            sent |= {(i, j): z[i, j] - 2 * rho * x[i] for j in near[i]}
        for (i, j), message in sent.items():
            z[j, i] = (1 - alpha) * z[j, i] - alpha * message
        out.append(x.copy())
    return out


def dinno(x, edges, solve, rho, growth, awake):
    """The dual on edges with both ends awake, anchors with what each agent last sent."""
    agents, zero = len(x), np.zeros(x.shape[1])
    near = neighbours(edges, agents)
    x, sent, p, out = x.copy(), x.copy(), np.zeros_like(x), []
    for t, mask in enumerate(awake):
        now = rho * growth ** (t + 1)
        sent[mask] = x[mask]
        for i in np.flatnonzero(mask):
            p[i] = p[i] + now * sum((sent[i] - sent[j] for j in near[i] if mask[j]), zero)
        for i in np.flatnonzero(mask):
            anchors = sum((sent[i] + sent[j]) / 2 for j in near[i])
            x[i] = solve(i, sent[i], p[i] - 2 * now * anchors, 2 * now * len(near[i]))
        out.append(x.copy())
    return out


def fedavg(x, grad, alpha, steps, awake):
    x, out = x.copy(), []
    theta = x.mean(axis=0)
    for mask in awake:
        on = np.flatnonzero(mask)
        theta = np.mean([local_steps(grad, i, theta, alpha, steps, 0) for i in on], axis=0)
        x[on] = theta
        out.append(x.copy())
    return out


def scaffold(x, grad, alpha, gamma, steps, awake):
    x, out, agents = x.copy(), [], len(x)
    theta, c, ci = x.mean(axis=0), np.zeros(x.shape[1]), np.zeros_like(x)
    for mask in awake:
        on = np.flatnonzero(mask)
        v = {i: local_steps(grad, i, theta, alpha, steps, c - ci[i]) for i in on}
        new = {i: ci[i] - c + (theta - v[i]) / (steps * alpha) for i in on}
        change = np.mean([new[i] - ci[i] for i in on], axis=0)
        theta = theta + gamma * np.mean([v[i] - theta for i in on], axis=0)
        c = c + len(on) / agents * change
        for i in on:
            ci[i], x[i] = new[i], theta
        out.append(x.copy())
    return out


def fedadmm(x, solve, rho, awake):
    w, out, agents = x.copy(), [], len(x)
    theta, a = w.mean(axis=0), np.zeros_like(x)
    for mask in awake:
        total = np.zeros(x.shape[1])
        for i in np.flatnonzero(mask):
            new = solve(i, w[i], a[i] - rho * theta, rho)
            dual = a[i] + rho * (new - theta)
            total += new - w[i] + (dual - a[i]) / rho
            w[i], a[i] = new, dual
        theta = theta + total / agents
        out.append(w.copy())
    return out


def newton_tracking(x, edges, A, b, alpha, eps, rounds):
    """With the Hessians inverted and u carried as in the paper."""
    agents, d = x.shape
    W, grad = metropolis(edges, np.ones(agents, bool)), gradient(A, b)
    x, out = x.copy(), []
    H = [A[i] + eps * np.eye(d) for i in range(agents)]
    start = stacked(grad, x) + alpha * (x - W @ x)
    u = np.array([np.linalg.solve(H[i], start[i]) for i in range(agents)])
    for _ in range(rounds):
        new = x - u
        change = stacked(grad, new) - stacked(grad, x) + 2 * alpha * (new - W @ new) - alpha * (x - W @ x)
        u = np.array([np.linalg.solve(H[i], H[i] @ u[i] + change[i]) for i in range(agents)])
        x = new
        out.append(x.copy())
    return out


def splitting(x, edges, A, b, awake, alpha, order, eps=None):
    """ESOM-K (eps given) or Network Newton NN-K (eps None), with dense matrices."""
    agents, d = x.shape
    grad = gradient(A, b)
    everyone = np.ones(agents, bool)
    x, q, out = x.copy(), np.zeros_like(x), []
    apart = x - metropolis(edges, everyone) @ x
    for mask in awake:
        W, on = metropolis(edges, mask), mask[:, None]
        own = np.diag(W)[:, None]
        G = stacked(grad, x)
        if eps is None:
            g, scale, coupling, diagonal = x - W @ x + alpha * G, alpha, 1.0, 2 * (1 - own)
        else:
            g, scale, coupling, diagonal = G + q + alpha * apart, 1.0, alpha, eps + 2 * alpha * (1 - own)
        D = [scale * A[i] + diagonal[i] * np.eye(d) for i in range(agents)]

        def solve(right, D=D, on=on):
            return np.where(on, np.array([np.linalg.solve(D[i], right[i]) for i in range(agents)]), 0)

        p = solve(-g)
        for _ in range(order):
            p = solve(coupling * (p - 2 * own * p + W @ p) - g)
        x = x + p
        apart = np.where(on, x - W @ x, apart)
        if eps is not None:
            q = np.where(on, q + alpha * apart, q)
        out.append(x.copy())
    return out


def prox_diffusion(x, edges, grad, alpha, l1, awake):
    x, q, out = x.copy(), np.zeros_like(x), []
    for mask in awake:
        on = mask[:, None]
        z = np.where(on, x - alpha * stacked(grad, x) - q, x)
        mixed = (z + metropolis(edges, mask) @ z) / 2
        x = np.where(on, np.where(abs(mixed) > alpha * l1, mixed - alpha * l1 * np.sign(mixed), 0), x)
        q = q + z - mixed
        out.append(x.copy())
    return out


def gt_lbfgs(x, edges, grad, curvature, alpha, eps, memory, awake):
    """Gradient tracking along two-loop directions, with Powell's damping in its usual form."""
    x, out = x.copy(), []
    G = stacked(grad, x)
    g, pairs = G.copy(), [[] for _ in x]
    for mask in awake:
        W, old, p = metropolis(edges, mask), x, np.zeros_like(x)
        for i in np.flatnonzero(mask):
            gamma = 1 / (eps + curvature[i])
            if pairs[i]:
                s, y = pairs[i][-1]
                gamma = (s @ y) / (y @ y)
            p[i] = -two_loop(pairs[i], g[i], gamma)
        x = W @ (old + alpha * p)
        new = np.where(mask[:, None], stacked(grad, x), G)
        g = W @ (g + new - G)
        for i in np.flatnonzero(mask):
            s = x[i] - old[i]
            y, B = new[i] - G[i] + eps * s, eps * np.eye(len(s))
            if s @ y < 0.25 * s @ B @ s:
                theta = 0.75 * (s @ B @ s) / (s @ B @ s - s @ y)
                y = theta * y + (1 - theta) * B @ s
            pairs[i] = [*pairs[i], (s, y)][-memory:]
        G = new
        out.append(x.copy())
    return out


def druid_lbfgs(x, edges, A, b, mu, eps, memory, awake):
    """One quasi-Newton step on the whole block a round, CADEN's half-step rule on the edges."""
    grad, pairs = gradient(A, b), [[] for _ in x]

    def step(i, v, linear, quadratic):
        shift = quadratic + eps
        gamma = 1 / shift
        known = [(s, f + shift * s) for s, f in pairs[i]]
        if known:
            s, y = known[-1]
            gamma = (s @ y) / (y @ y)
        new = v - two_loop(known, grad(i, v) + linear + quadratic * v, gamma)
        pairs[i] = [*pairs[i], (new - v, grad(i, new) - grad(i, v))][-memory:]
        return new

    return [v for v, _ in caden_half_steps(x, edges, step, mu, mu, 0.5, awake)]


def fista(A, b, steps, step):
    """Beck and Teboulle's constant-step scheme on f_i(v) + linear.v + quadratic/2 |v|^2, from v."""

    def solve(i, v, linear, quadratic):
        old, w, t = v, v, 1.0
        for _ in range(steps):
            new = w - step * (A[i] @ w - b[i] + linear + quadratic * w)
            after = (1 + np.sqrt(1 + 4 * t**2)) / 2
            w, old, t = new + (t - 1) / after * (new - old), new, after
        return old

    return solve


def dino(x, A, b, theta, phi, rho, rounds):
    x, d, out = x.mean(axis=0), x.shape[1], []
    H, c = A.mean(axis=0), b.mean(axis=0)
    for _ in range(rounds):
        g = H @ x - c
        p = np.zeros(d)
        for Ai in A:
            v = np.linalg.lstsq(np.vstack([Ai, phi * np.eye(d)]), np.r_[g, np.zeros(d)], rcond=None)[0]
            if v @ g < theta * g @ g:
                w = np.linalg.solve(Ai @ Ai + phi**2 * np.eye(d), g)
                v = v + (theta * g @ g - v @ g) / (w @ g) * w
            p -= v / len(A)
        length = 1.0
        while (
            length * p @ g + length**2 * p @ H @ p / 2 > length * rho * p @ g
        ):  # the change of f, without cancellation
            length /= 2
        x = x + length * p
        out.append(x)
    return out


def c2eden(x, A, b, alpha, step, rounds):
    """`step(g, H)` after the first d rounds; on quadratics the Hessian is the same at every snapshot."""
    x, d, out = x.mean(axis=0), x.shape[1], []
    H, c = A.mean(axis=0), b.mean(axis=0)
    for t in range(rounds):
        g = H @ x - c
        x = x - alpha * g if t < d else x + step(g, H)
        out.append(x)
    return out


def dual_newton(x, edges, A, b, rounds, step):
    """Newton on the dual function of Lap x = 0, with a dense pseudo-inverse."""
    agents, d = x.shape
    Lap = np.zeros((agents, agents))
    for i, j in edges:
        Lap[[i, j], [i, j]] += 1
        Lap[[i, j], [j, i]] -= 1
    big, l, out = np.kron(Lap, np.eye(d)), np.zeros(agents * d), []
    inverse = np.zeros((agents * d, agents * d))
    for i in range(agents):
        inverse[i * d : (i + 1) * d, i * d : (i + 1) * d] = np.linalg.inv(A[i])
    for _ in range(rounds):
        v = inverse @ (b.ravel() - big @ l)
        out.append(v.reshape(agents, d))
        l = l + step * np.linalg.pinv(big @ inverse @ big, rcond=1e-10) @ big @ v  # gradient Lap x over -Hessian
    return out


def accelerate(z, F, q, rounds):
    """Zhou, Alexander and Lange on a map of vectors; the state after every evaluation of F."""
    U, V, out = [], [], []
    for _ in range(rounds // 2):
        first = F(z)
        second = F(first)
        U, V = [*U, first - z][-q:], [*V, second - first][-q:]
        u, v = np.array(U).T, np.array(V).T
        z = first - v @ np.linalg.solve(u.T @ u - u.T @ v, u.T @ (z - first))
        out += [first, z]
    return out


def clipped_gossip(x, edges, grad, alpha, faulty, awake):
    """Self-centred clipping, agent by agent; the radius is the distance of the (faulty + 1)-th farthest neighbour."""
    agents, x, out = len(x), x.copy(), []
    near = neighbours(edges, agents)
    sent = x.copy()  # the last row that each agent sent
    for mask in awake:
        W = metropolis(edges, mask)
        v = np.array([x[i] - alpha * grad(i, x[i]) if mask[i] else x[i] for i in range(agents)])
        sent = np.array([v[i] if mask[i] else sent[i] for i in range(agents)])
        for i in range(agents):
            apart = {j: sent[j] - v[i] for j in near[i]}
            radius = sorted((np.linalg.norm(u) for u in apart.values()), reverse=True)[faulty]
            x[i] = v[i]
            for j, u in apart.items():
                x[i] = x[i] + W[i, j] * u * min(1.0, radius / max(np.linalg.norm(u), 1e-300))
        out.append(x.copy())
    return out
