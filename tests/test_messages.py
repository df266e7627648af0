from __future__ import annotations

import numpy as np
import pytest
import torch

import caden
import oracles
from caden import methods
from caden.messages import Loss
from caden.schedules import Draw
from caden.solvers import exact


@pytest.fixture(scope="module")
def setting():
    return caden.problems.quadratic(agents=12, dim=4, seed=2), caden.graphs.erdos_renyi(12, edges=20, seed=3)


def arrived(loss, rounds, arcs=40, seed=0):
    return np.array([loss.arrives(Draw(seed, 12), t, 0, arcs).squeeze(1).numpy() for t in range(rounds)])


def test_losses_have_their_frequency_and_are_reproducible():
    for loss in (Loss(0.2), Loss(0.2, burst=5)):
        seen = arrived(loss, 2000)
        assert seen.mean() == pytest.approx(0.8, abs=0.02)
        assert np.array_equal(seen, arrived(loss, 2000))
        assert not np.array_equal(seen, arrived(loss, 2000, seed=1))


def test_bursts_come_in_runs_and_not_all_at_once():
    seen = arrived(Loss(0.2, burst=5), 1000)
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
    result = caden.simulate(
        method, problem, graph, 2200, participation=p, local_steps=3, messages=messages, record_every=2200
    )
    assert (result.x - problem.solution).norm(dim=1).max() / problem.solution.norm() < 1e-6


@pytest.mark.parametrize("name", ["caden", "gt", "exact_diffusion"])
def test_broadcast_methods_are_biased_under_loss(setting, name):
    problem, graph = setting
    method = {"caden": methods.caden(0.4, solver=exact()), "gt": methods.gt(0.2)}.get(
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
        messages=Loss(0.3),
        callbacks=[lambda row, state: seen.append(state.x.numpy().copy())],
    )
    z = {(i, j): 0.15 * (x[i] + x[j]) for i in range(12) for j in near[i]}
    for t, found in enumerate(seen):
        through = Loss(0.3).arrives(Draw(4, 12), t, 0, len(arcs)).squeeze(1).tolist()
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
    with pytest.raises(caden.CadenError, match="radmm"):
        caden.simulate(methods.caden(0.4), problem, graph, 3, participation=0.5, messages={"loss": 0.1})
    for spec, message in (
        ({"los": 0.1}, "did you mean 'messages.loss'"),
        ({"loss": 1.0}, r"\[0, 1\)"),
        ({"burst": 0}, "burst"),
    ):
        with pytest.raises(caden.CadenError, match=message):
            caden.simulate(methods.gt(), problem, graph, 1, messages=spec)


def test_resume_under_loss(setting, tmp_path):
    problem, graph = setting
    options = {"messages": {"loss": 0.3, "burst": 2}, "participation": 0.6}
    whole = caden.simulate(methods.gt(0.2), problem, graph, 12, **options)

    class Stop(Exception):
        pass

    def crash(row, state):
        if row["round"] == 7:
            raise Stop

    with pytest.raises(Stop):
        caden.simulate(
            methods.gt(0.2),
            problem,
            graph,
            12,
            directory=tmp_path / "r",
            checkpoint_every=3,
            callbacks=[crash],
            **options,
        )
    rest = caden.simulate(methods.gt(0.2), problem, graph, 12, directory=tmp_path / "r", resume=True, **options)
    assert torch.equal(rest.x, whole.x)
