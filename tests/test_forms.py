"""CADEN's three forms: equal where all is well, and the arc form where messages are lost or late."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import caden
from caden import methods
from caden.methods._auto import adopt, first_news
from conftest import masks, scheduled

IN_ARCS = {"messages": {"loss": 1e-12}}  # the network guarantees nothing, but everything arrives


@pytest.fixture
def setting():
    problem, graph = caden.problems.quadratic(agents=12, dim=4, seed=2), caden.graphs.erdos_renyi(12, edges=20, seed=3)
    return problem, graph, torch.randn(12, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def iterates(method, setting, rounds=30, **options):
    problem, graph, x0 = setting
    states = []
    options |= {"x0": x0, "callbacks": [lambda row, state: states.append(state)]}
    caden.simulate(method, problem, graph, rounds, local_steps=3, **options)
    return states


@pytest.mark.parametrize("relax", [0.5, 0.9])
@pytest.mark.parametrize("solver", ["exact", {"name": "gd", "step_size": 0.3}])
def test_the_forms_agree_when_everyone_is_awake_and_everything_arrives(setting, relax, solver):
    everyone = scheduled(masks(12, 30, 1.0))
    forms = [
        iterates(methods.caden(0.3, relax=relax, solver=solver), setting, **options)
        for options in ({}, {"participation": everyone}, IN_ARCS)
    ]
    agents, edges, arcs = forms
    assert (
        edges[0].s is not None and edges[0].z is None and arcs[0].z is not None and agents[0].s is agents[0].z is None
    )
    for agent, edge, arc in zip(agents, edges, arcs, strict=True):
        torch.testing.assert_close(edge.x, agent.x, atol=1e-11, rtol=0)
        torch.testing.assert_close(arc.x, agent.x, atol=1e-11, rtol=0)
        # phi of the arc form is the whole pull on x_i.
        torch.testing.assert_close(arc.phi, agent.phi + 0.3 * agent.gap, atol=1e-11, rtol=0)


@pytest.mark.parametrize("relax", [0.5, 0.9])
@pytest.mark.parametrize(
    "options", [{"messages": {"loss": 0.3}}, {"messages": {"delay": 4, "loss": 0.1}, "participation": 0.5}]
)
def test_the_arc_form_is_relaxed_admm(setting, relax, options):
    ours = iterates(methods.caden(0.3, relax=relax, solver="exact"), setting, **options)
    theirs = iterates(methods.radmm(0.3, relax, solver="exact"), setting, **options)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.x, other.x, atol=1e-11, rtol=0)
        torch.testing.assert_close(mine.z, other.z, atol=1e-11, rtol=0)


@pytest.mark.parametrize("messages", [{"loss": 0.2}, {"delay": 2}, {"delay": 10}, {"delay": 5, "loss": 0.3}], ids=str)
@pytest.mark.parametrize(("mu_z", "relax", "p"), [(0.4, 0.5, 1.0), (0.4, 0.9, 0.5), ("auto", 0.5, 0.5)])
def test_it_is_exact_whatever_is_lost_or_late(setting, messages, mu_z, relax, p):
    problem, graph, _ = setting
    method = methods.caden(mu_z, relax=relax, solver="exact")
    result = caden.simulate(
        method, problem, graph, 6000, messages=messages, participation=p, record_every=50, tolerance=1e-22
    )
    assert float((result.x - problem.solution).norm(dim=1).max()) < 1e-7, result


def test_a_new_mu_z_leaves_a_solution_alone(setting):
    """At the minimiser with its duals, a change of mu_z by gossip moves nothing."""
    problem, graph, _ = setting
    method = methods.caden("auto", solver="exact")
    states = []
    tighter = [lambda row, state: states.append(state)]
    caden.simulate(method, problem, graph, 600, **IN_ARCS, callbacks=tighter)
    changes = [t for t, (a, b) in enumerate(pairwise(states)) if not torch.equal(a.mu_z, b.mu_z)]
    assert len(changes) >= 2
    for state in states:
        pull = problem.value_and_grad(state.x)[1]
        assert state.mu_z.shape == (12, 1)
    assert float((states[-1].x - problem.solution).norm(dim=1).max()) < 1e-9
    assert float((pull + states[-1].phi).norm()) < 1e-8  # stationary
    assert len(states[-1].mu_z.unique()) == 1  # all agree


def test_news_of_the_latest_check_win_then_the_larger_mu_z():
    """A path 0 - 1 - 2: agent 1 hears both neighbours, one of which is a check ahead."""
    from caden.core import Edges

    first, second = torch.tensor([0, 1]), torch.tensor([1, 2])
    awake = torch.ones(2, 1, dtype=torch.bool)
    edges = Edges(first, second, awake, awake, 3, torch.tensor([[1], [2], [1]]))
    own = first_news(torch.tensor([[1.0], [5.0], [3.0]]))
    own[0] = torch.tensor([1.0, 1.0, 7.0, 0.0, 0.0])  # agent 0 has passed a check and lowered mu_z
    # arcs: 0 hears 1, 1 hears 2, 1 hears 0, 2 hears 1
    received = own[[1, 2, 0, 1]]
    news, usable = adopt(own, received, torch.ones(4, 1, dtype=torch.bool), edges)
    assert news[0].tolist() == [1, 1, 7, 0, 0]  # its own is the latest
    assert news[1].tolist() == [1, 1, 7, 0, 0]  # a later check wins over a larger mu_z
    assert news[2].tolist() == [0, 5, 0, 0, 0]  # of the same check the larger mu_z
    assert usable.squeeze(1).tolist() == [False, False, True, True]
    news, usable = adopt(own, received, torch.zeros(4, 1, dtype=torch.bool), edges)
    assert torch.equal(news, own) and not usable.any()
    for lie in ([1e30, 9, 0, 0, 0], [2.5, 9, 0, 0, 0], [3, -5, 0, 0, 0], [3, 0, 0, 0, 0], [3, 9, -1, 0, 0]):
        false = torch.tensor([lie] * 4)
        news, usable = adopt(own, false, torch.ones(4, 1, dtype=torch.bool), edges)
        assert torch.equal(news, own) and not usable.any()


def test_what_the_arc_form_cannot_do_is_refused(setting):
    problem, graph, _ = setting
    for parameters, word in (({"mu_y": 0.5}, "mu_y"), ({"growth": 1.01}, "growth")):
        with pytest.raises(caden.CadenError, match=f"`{word}` must be .* where messages may be lost"):
            caden.simulate(methods.caden(0.4, **parameters), problem, graph, 1, **IN_ARCS)
    caden.simulate(methods.caden(0.4, mu_y=0.4), problem, graph, 1, **IN_ARCS)
    with pytest.warns(UserWarning, match="stationary point"):
        caden.simulate(methods.caden(0.4, dual="paper"), problem, graph, 1, **IN_ARCS)


def test_numbers_that_travel_with_messages_count_as_bytes_only(setting):
    problem, graph, _ = setting
    auto = caden.simulate(methods.caden(solver="exact"), problem, graph, 4, **IN_ARCS).rows[-1]
    fixed = caden.simulate(methods.caden(0.4, solver="exact"), problem, graph, 4, **IN_ARCS).rows[-1]
    assert auto["communications"] == fixed["communications"] == 4 * 40
    assert fixed["bytes"] == 4 * 40 * 4 * 8 and auto["bytes"] == fixed["bytes"] + 4 * 40 * 5 * 8


def test_a_run_in_arcs_is_resumed_to_the_bit(setting, tmp_path):
    problem, graph, x0 = setting
    options = {"messages": {"loss": 0.2, "delay": 2}, "participation": 0.5, "x0": x0, "local_steps": 2}
    whole = caden.simulate(methods.caden(), problem, graph, 40, **options)
    caden.simulate(methods.caden(), problem, graph, 17, directory=tmp_path / "r", checkpoint_every=5, **options)
    part = tmp_path / "r"
    (part / "weights.safetensors").unlink(), (part / "summary.json").unlink()
    again = caden.simulate(methods.caden(), problem, graph, 40, directory=part, resume=True, **options)
    assert torch.equal(whole.x, again.x)
    assert np.array_equal(whole.history["objective"], again.history["objective"])


@pytest.mark.parametrize("options", [{"participation": 0.5}, {"messages": {"loss": 0.2}}, {"clock": {"mode": "free"}}])
@pytest.mark.parametrize("mu_z", [0.4, "auto"])
def test_wide_rows_are_updated_a_few_columns_at_a_time(setting, options, mu_z, monkeypatch):
    problem, graph, _ = setting
    method, ends = methods.caden(mu_z, relax=0.7), []
    for width in (1 << 22, 2 * len(graph.edges)):
        monkeypatch.setattr("caden.methods._caden._SLICE", width)
        ends.append(caden.simulate(method, problem, graph, 12, progress=False, **options).x)
    assert torch.equal(*ends)
