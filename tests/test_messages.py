from __future__ import annotations

import numpy as np
import pytest
import torch

import caden
import oracles
from caden import methods
from caden.draws import Draw
from caden.networks.messages import Messages
from caden.solvers import exact
from conftest import distance


@pytest.fixture(scope="module")
def setting():
    return caden.problems.quadratic(agents=12, dim=4, seed=2), caden.graphs.erdos_renyi(12, edges=20, seed=3)


def arrived(loss, rounds, arcs=40, seed=0):
    return np.array([loss.arrives(Draw(seed, 12), t, 0, arcs).squeeze(1).numpy() for t in range(rounds)])


def test_losses_have_their_frequency_and_are_reproducible():
    for loss in (Messages(0.2), Messages(0.2, burst=5)):
        seen = arrived(loss, 2000)
        assert seen.mean() == pytest.approx(0.8, abs=0.02)
        assert np.array_equal(seen, arrived(loss, 2000))
        assert not np.array_equal(seen, arrived(loss, 2000, seed=1))


def test_bursts_come_in_runs_and_not_all_at_once():
    seen = arrived(Messages(0.2, burst=5), 1000)
    changes = (seen[1:] != seen[:-1]).mean()
    assert changes == pytest.approx(2 * 0.2 * 0.8 / 5, rel=0.2)  # only at the borders of blocks
    borders = {t % 5 for t in np.flatnonzero((seen[1:, :1] != seen[:-1, :1]).ravel())}
    assert len(borders) == 1
    assert len({tuple(np.unique(np.flatnonzero(seen[1:, a] != seen[:-1, a]) % 5)) for a in range(40)}) > 1


@pytest.mark.parametrize("messages", [{"loss": 0.2}, {"loss": 0.2, "burst": 4}])
@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("name", ["radmm", "lt_admm"])
def test_arc_methods_stay_exact_under_loss(setting, name, p, messages):
    problem, graph = setting
    method = {"radmm": methods.radmm(0.4, 0.7, solver=exact()), "lt_admm": methods.lt_admm(0.2, 0.1, 0.4)}[name]
    assert distance(method, problem, graph, 2200, 1e-7, participation=p, local_steps=3, messages=messages) < 1e-6


@pytest.mark.filterwarnings("ignore:.*stationary point")
@pytest.mark.parametrize("name", ["caden, paper", "gt", "exact_diffusion"])
def test_broadcast_methods_are_biased_under_loss(setting, name):
    problem, graph = setting
    method = {"caden, paper": methods.caden(0.4, dual="paper", solver=exact()), "gt": methods.gt(0.2)}.get(
        name, methods.exact_diffusion(0.3)
    )
    result = caden.simulate(method, problem, graph, 600, messages={"loss": 0.2}, record_every=600)
    assert (result.mean - problem.solution).norm() / problem.solution.norm() > 1e-3


def test_relaxed_admm_under_loss_equals_its_textbook_loop(setting):
    """The same losses, arc by arc."""
    problem, graph = setting
    edges = [tuple(e) for e in graph.edges.tolist()]
    solve = oracles.exact_solver(problem.hessian.numpy(), problem.linear.numpy())
    near = oracles.neighbours(edges, 12)
    x = np.random.default_rng(1).normal(size=(12, 4))
    arcs = edges + [(j, i) for i, j in edges]  # (owner, peer): the message at an arc comes from its peer
    seen = []
    caden.simulate(
        methods.radmm(0.3, 0.6, solver=exact()),
        problem,
        graph,
        20,
        x0=torch.tensor(x),
        seed=4,
        messages=Messages(0.3),
        callbacks=[lambda row, state: seen.append(state.x.numpy().copy())],
    )
    z = {(i, j): 0.15 * (x[i] + x[j]) for i in range(12) for j in near[i]}
    for t, found in enumerate(seen):
        through = Messages(0.3).arrives(Draw(4, 12), t, 0, len(arcs)).squeeze(1).tolist()
        for i in range(12):
            x[i] = solve(i, x[i], -sum(z[i, j] for j in near[i]), 0.3 * len(near[i]))
        sent = {(i, j): 0.6 * x[i] - z[i, j] for i, j in z}
        for (owner, peer), ok in zip(arcs, through):
            if ok:
                z[owner, peer] = 0.4 * z[owner, peer] + 0.6 * sent[peer, owner]
        np.testing.assert_allclose(found, x, atol=1e-10, rtol=0)


def test_lost_messages_are_counted_and_nothing_changes_without_loss(setting):
    problem, graph = setting
    lossy = caden.simulate(methods.gt(0.2), problem, graph, 5, messages={"loss": 0.5})
    plain = caden.simulate(methods.gt(0.2), problem, graph, 5)
    none = caden.simulate(methods.gt(0.2), problem, graph, 5, messages={"loss": 0.0})
    assert lossy.history.communications.tolist() == plain.history.communications.tolist()
    assert torch.equal(plain.x, none.x)
    assert not torch.equal(plain.x, lossy.x)


def test_edge_variables_are_refused_and_bad_input_is_told(setting):
    problem, graph = setting
    with pytest.raises(caden.CadenError, match="use `caden`"):
        caden.simulate(methods.admm_edges(0.4), problem, graph, 3, messages={"loss": 0.1})
    for spec, message in (
        ({"los": 0.1}, "did you mean 'messages.loss'"),
        ({"loss": 1.0}, r"\[0, 1\)"),
        ({"burst": 0}, "burst"),
    ):
        with pytest.raises(caden.CadenError, match=message):
            caden.simulate(methods.gt(), problem, graph, 1, messages=spec)


def test_delayed_relaxed_admm_equals_its_textbook_loop(setting):
    """A mailbox per arc: messages carry the round in which they were sent, the newest one that arrived counts."""
    problem, graph = setting
    edges = [tuple(e) for e in graph.edges.tolist()]
    solve = oracles.exact_solver(problem.hessian.numpy(), problem.linear.numpy())
    near = oracles.neighbours(edges, 12)
    x = np.random.default_rng(1).normal(size=(12, 4))
    arcs = edges + [(j, i) for i, j in edges]
    model, seen = Messages(loss=0.1, delay=3), []
    caden.simulate(
        methods.radmm(0.3, 0.6, solver=exact()),
        problem,
        graph,
        40,
        x0=torch.tensor(x),
        seed=4,
        messages=model,
        callbacks=[lambda row, state: seen.append(state.x.numpy().copy())],
    )
    z = {(i, j): 0.15 * (x[i] + x[j]) for i in range(12) for j in near[i]}
    post, newest, ages = [], dict.fromkeys(arcs, -1), set()
    for t, found in enumerate(seen):
        through = model.arrives(Draw(4, 12), t, 0, len(arcs)).squeeze(1).tolist()
        late = model.takes(Draw(4, 12), t, 0, len(arcs)).squeeze(1).tolist()
        for i in range(12):
            x[i] = solve(i, x[i], -sum(z[i, j] for j in near[i]), 0.3 * len(near[i]))
        for (owner, peer), ok, days in zip(arcs, through, late):
            if ok:
                post.append((t, t + days, (owner, peer), 0.6 * x[peer] - z[peer, owner]))
        for arc in arcs:
            due = [(sent, message) for sent, when, a, message in post if a == arc and when == t]
            if due and max(due, key=lambda m: m[0])[0] > newest[arc]:
                newest[arc], message = max(due, key=lambda m: m[0])
                ages.add(t - newest[arc])
                z[arc] = 0.4 * z[arc] + 0.6 * message
        np.testing.assert_allclose(found, x, atol=1e-10, rtol=0)
    assert ages == {0, 1, 2, 3}


def test_delayed_gradient_tracking_runs_on_what_is_known(setting):
    """Broadcasts: an agent mixes with the newest row that came in this round; without delay nothing changes."""
    problem, graph = setting
    plain = caden.simulate(methods.gt(0.2), problem, graph, 20)
    none = caden.simulate(methods.gt(0.2), problem, graph, 20, messages={"delay": 0})
    late = caden.simulate(methods.gt(0.05), problem, graph, 400, messages={"delay": 2}, record_every=400)
    assert torch.equal(plain.x, none.x)
    away = (late.mean - problem.solution).norm() / problem.solution.norm()
    assert 1e-6 < away < 1  # biased, not lost


@pytest.mark.parametrize("p", [1.0, 0.5])
def test_relaxed_admm_under_delay_reaches_the_minimiser(setting, p):
    """Not covered by its theory; what we see."""
    problem, graph = setting
    method = methods.radmm(0.4, 0.5, solver=exact())
    assert distance(method, problem, graph, 3000, 1e-7, participation=p, messages={"delay": 3}) < 1e-6


def test_compressed_dgd_equals_its_textbook_loop(setting):
    """x <- x - sum_j w_ij (c_i - c_j) - alpha grad with public copies c, the first message whole."""
    problem, graph = setting
    model, seen = Messages(top=0.5), []
    x = np.random.default_rng(2).normal(size=(12, 4))
    caden.simulate(
        methods.dgd(0.1),
        problem,
        graph,
        20,
        x0=torch.tensor(x),
        messages=model,
        callbacks=[lambda row, state: seen.append(state.x.numpy().copy())],
    )
    edges = [tuple(e) for e in graph.edges.tolist()]
    W, public = oracles.metropolis(edges, np.ones(12, bool)), None
    for found in seen:
        if public is None:
            public = x.copy()
        else:
            for i in range(12):
                change = x[i] - public[i]
                for a in np.argsort(-abs(change))[:2]:
                    public[i, a] += change[a]
        gradient = np.einsum("mij,mj->mi", problem.hessian.numpy(), x) - problem.linear.numpy()
        x = x + W @ public - public - 0.1 * gradient
        np.testing.assert_allclose(found, x, atol=1e-10, rtol=0)


@pytest.mark.parametrize("messages", [{"top": 0.5}, {"bits": 6}])
@pytest.mark.parametrize("name", ["caden", "caden asleep", "gt", "radmm", "exact_diffusion"])
def test_error_feedback_keeps_methods_exact(setting, name, messages):
    problem, graph = setting
    method = {
        "gt": methods.gt(0.1),
        "radmm": methods.radmm(0.4, 0.5, solver=exact()),
        "exact_diffusion": methods.exact_diffusion(0.2),
    }.get(name, methods.caden(0.4, solver=exact()))
    asleep = name == "caden asleep"
    options = {"participation": 0.5 if asleep else 1.0, "local_steps": 3, "messages": messages}
    assert distance(method, problem, graph, 3000 if asleep else 1500, 1e-7, **options) < 1e-6


def test_bytes_are_counted_as_sent(setting):
    problem, graph = setting
    arcs = 2 * len(graph.edges)
    whole_ = caden.simulate(methods.gt(0.1), problem, graph, 5).history
    top = caden.simulate(methods.gt(0.1), problem, graph, 5, messages={"top": 0.25}).history
    bits = caden.simulate(methods.gt(0.1), problem, graph, 5, messages={"bits": 8}).history
    assert whole_.bytes.iloc[-1] == 5 * 2 * arcs * 4 * 8
    # The first message is whole. Then one entry of 8 bytes and a bit for each; and a byte for each with a scale.
    assert top.bytes.iloc[-1] == 2 * arcs * 32 + 4 * 2 * arcs * 9
    assert bits.bytes.iloc[-1] == 2 * arcs * 32 + 4 * 2 * arcs * 12
    assert whole_.communications.iloc[-1] == top.communications.iloc[-1] == 5 * 2 * arcs


@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("name", ["gt", "diging", "caden", "radmm", "exact_diffusion", "adapd"])
def test_methods_stay_exact_on_graphs_that_change(setting, name, p):
    problem, graph = setting
    method = {
        "gt": methods.gt(0.2),
        "diging": methods.diging(0.1),
        "caden": methods.caden(0.4, solver=exact()),
        "radmm": methods.radmm(0.4, 0.6, solver=exact()),
        "exact_diffusion": methods.exact_diffusion(0.3),
        "adapd": methods.adapd(2.0, solver=exact()),
    }[name]
    assert distance(method, problem, graph, 3000, 1e-7, participation=p, links=0.5) < 1e-6


def test_gradient_tracking_on_two_graphs_in_turn_equals_its_textbook_loop(setting):
    problem, _ = setting
    one, two = caden.graphs.path(12), caden.graphs.star(12)
    both, seen = caden.graphs.union([one, two]), []
    x = np.random.default_rng(1).normal(size=(12, 4))
    result = caden.simulate(
        methods.diging(0.1),
        problem,
        both,
        30,
        x0=torch.tensor(x),
        links=lambda t, draw: [one, two][t % 2],
        callbacks=[lambda row, state: seen.append(state.x.numpy().copy())],
    )
    grad = oracles.gradient(problem.hessian.numpy(), problem.linear.numpy())
    G = oracles.stacked(grad, x)
    g = G.copy()
    for t, found in enumerate(seen):
        W = oracles.metropolis([tuple(e) for e in [one, two][t % 2].edges.tolist()], np.ones(12, bool))
        x = W @ x - 0.1 * g
        new = oracles.stacked(grad, x)
        g, G = W @ g + new - G, new
        np.testing.assert_allclose(found, x, atol=1e-10, rtol=0)
    assert result.history.communications.iloc[-1] == 30 * 2 * 22  # both graphs have 11 edges; DIGing sends two vectors


def test_caden_on_a_changing_graph_equals_half_steps_on_the_links_that_are_up(setting):
    problem, graph = setting
    edges = [tuple(e) for e in graph.edges.tolist()]
    solve = oracles.exact_solver(problem.hessian.numpy(), problem.linear.numpy())
    up = [np.random.default_rng(t).random(len(edges)) < 0.5 for t in range(30)]
    x, seen = np.random.default_rng(1).normal(size=(12, 4)), []
    caden.simulate(
        methods.caden(0.3, solver=exact()),
        problem,
        graph,
        30,
        x0=torch.tensor(x),
        links=lambda t, draw: up[t] if t < 30 else up[0],
        callbacks=[lambda row, state: seen.append(state.x.numpy().copy())],
    )
    s = {e: (x[e[0]] + x[e[1]]) / 2 for e in edges}
    y = {e: np.zeros(4) for e in edges}
    for mask, found in zip(up, seen, strict=True):
        for i in range(12):
            mine = [e for e in edges if i in e]
            phi = sum(y[e] if e[0] == i else -y[e] for e in mine)
            x[i] = solve(i, x[i], phi - 0.3 * sum(s[e] for e in mine), 0.3 * len(mine))
        for e, on in zip(edges, mask):
            if on:
                a, b = x[e[0]] - s[e], x[e[1]] - s[e]
                s[e], y[e] = s[e] + (a + b) / 2, y[e] + 0.15 * (a - b)
        np.testing.assert_allclose(found, x, atol=1e-10, rtol=0)


def test_message_models_refuse_what_cannot_work(setting):
    problem, graph = setting
    for options, message in (
        ({"messages": {"bits": 8}, "links": 0.5}, "must stay equal"),
        ({"messages": {"bits": 0}}, "1..16"),
        ({"messages": {"top": 0}}, r"\(0, 1\]"),
        ({"messages": {"delay": -1}}, "delay"),
        ({"links": 0.0}, r"`links` must lie in \(0, 1\]"),
        ({"links": [0.5, 0.5]}, "one value per edge"),
        ({"links": lambda t, draw: caden.graphs.complete(12)}, "graphs.union"),
    ):
        with pytest.raises(caden.CadenError, match=message):
            caden.simulate(methods.gt(), problem, graph, 1, **options)
    for options in ({"messages": {"loss": 0.1}}, {"messages": {"bits": 8}}, {"links": 0.5}):
        with pytest.raises(caden.CadenError, match="through a server"):
            caden.simulate(methods.fedavg(), problem, graph, 1, **options)


MODELS = [{"messages": m} for m in ({"loss": 0.3, "burst": 2}, {"delay": 3, "loss": 0.1}, {"top": 0.5})] + [
    {"links": 0.5}
]


@pytest.mark.parametrize("options", MODELS)
@pytest.mark.parametrize("method", [methods.gt(0.2), methods.radmm(0.3)], ids=["gt", "radmm"])
def test_resume_with_message_models(setting, tmp_path, method, options):
    problem, graph = setting
    options = options | {"participation": 0.6}
    whole_ = caden.simulate(method, problem, graph, 12, **options)

    class Stop(Exception):
        pass

    def crash(row, state):
        if row["round"] == 7:
            raise Stop

    kept = {"directory": tmp_path / "r", "checkpoint_every": 3}
    with pytest.raises(Stop):
        caden.simulate(method, problem, graph, 12, callbacks=[crash], **kept, **options)
    rest = caden.simulate(method, problem, graph, 12, resume=True, **kept, **options)
    assert torch.equal(rest.x, whole_.x)


# Triggers.


def triggered(setting, method, **options):
    problem, graph = setting
    result = caden.simulate(method, problem, graph, 400, local_steps=3, record_every=10, tolerance=1e-24, **options)
    return float((result.x - problem.solution).norm(dim=1).max()), result


DECAYING = {"trigger": {"first": 1.0, "decay": 0.9}}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("caden", {}),
        ("caden", {"participation": 0.5}),
        ("radmm", {}),
        ("radmm", {"participation": 0.5}),
        ("gt", {}),
    ],
    ids=str,
)
def test_a_decaying_trigger_is_exact_and_sends_less(setting, name, options):
    method = {
        "caden": methods.caden(0.8, relax=0.7, solver=exact()),
        "radmm": methods.radmm(0.8, 0.7, solver=exact()),
        "gt": methods.gt(0.2),
    }[name]
    away, plain = triggered(setting, method, **options)
    less, result = triggered(setting, method, **{**options, "messages": {**options.get("messages", {}), **DECAYING}})
    assert away < 1e-7 and less < 1e-7
    rows = {row["round"]: row["communications"] for row in plain.rows}
    assert result.rows[5]["communications"] < 0.9 * rows[50]


def test_a_constant_trigger_leaves_an_error_of_its_order_and_counts_notices(setting):
    problem, graph = setting
    errors = {}
    for threshold in (0.1, 0.001):
        errors[threshold], result = triggered(
            setting, methods.caden(0.8, solver=exact()), messages={"trigger": threshold}
        )
        last = result.rows[-1]
        sent = last["communications"]
        assert last["bytes"] == sent * problem.dim * 8 + (last["round"] * 2 * len(graph.edges) - sent)  # a byte each
    assert 1e-5 < errors[0.001] < 0.02 < errors[0.1] < 2


def test_triggered_arcs_equal_a_textbook_loop(setting):
    """Arc by arc: send 2 mu x_i - z_ij if it moved since it was last sent; the other end continues with what it has."""
    problem, graph = setting
    A, b, mu, relax = problem.hessian.numpy(), problem.linear.numpy(), 0.8, 0.7
    arcs = [tuple(e) for e in graph.edges.tolist()]
    arcs += [(j, i) for i, j in arcs]
    degree = np.bincount([i for i, _ in arcs])
    x, z, last, sent, seen = np.zeros((12, 4)), {a: np.zeros(4) for a in arcs}, {}, 0, []
    caden.simulate(
        methods.radmm(mu, relax, solver=exact()),
        problem,
        graph,
        40,
        messages=DECAYING,
        callbacks=[lambda row, state: seen.append((state.x.numpy().copy(), row["communications"]))],
    )
    for t, (expected, counted) in enumerate(seen):
        pull = {i: sum(z[a] for a in arcs if a[0] == i) for i in range(12)}
        x = np.array([np.linalg.solve(A[i] + mu * degree[i] * np.eye(4), b[i] + pull[i]) for i in range(12)])
        messages = {(i, j): 2 * mu * x[i] - z[i, j] for i, j in arcs}
        for (i, j), q in messages.items():
            if (i, j) not in last or np.linalg.norm(q - last[i, j]) > 0.9**t:
                last[i, j], sent = q, sent + 1
            z[j, i] = (1 - relax) * z[j, i] + relax * last[i, j]
        np.testing.assert_allclose(expected, x, atol=1e-10, rtol=0)
        assert counted == sent


def test_wrong_triggers_are_refused(setting):
    for trigger, word in (
        (0, "trigger"),
        ({"first": 1.0, "decay": 2.0}, "decay"),
        ({"last": 1.0}, "last"),
        ("x", "trig"),
    ):
        with pytest.raises(caden.CadenError, match=word):
            caden.simulate(methods.caden(), *setting, 1, messages={"trigger": trigger})
