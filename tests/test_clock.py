"""The simulator's clock: formulas for simple networks, textbook loops for others, and numbers that do not change."""

from __future__ import annotations

import heapq
import itertools
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import caden
from caden import CadenError, Clock
from caden.draws import Draw
from caden.experiments.config import experiment
from caden.experiments.store import digest
from caden.networks.clock import Values
from caden.networks.messages import Messages
from caden.networks.transport import Memory, Overlapped
from caden.schedules import switch

AGENTS, DIM = 6, 3


@pytest.fixture
def setting():
    return caden.problems.quadratic(agents=AGENTS, dim=DIM, seed=0), caden.graphs.erdos_renyi(AGENTS, 0.5, seed=1)


def gd(method="caden", **options):
    parameters = {"caden": {"mu_z": 0.5}, "radmm": {"rho": 0.5}}[method]
    return getattr(caden.methods, method)(**parameters, solver=caden.solvers.gd(0.3), **options)


def last(result, *names):
    return [result.rows[-1][name] for name in names]


@pytest.mark.parametrize("method", ["caden", "gt", "adapd", "fedavg", "scaffold", "esom", "kgt"])
def test_waiting_changes_no_number(setting, method):
    problem, graph = setting
    make = caden.methods.METHODS[method]
    parameters = {**caden.methods.CARDS[method].unit_parameters}
    clock = Clock(compute=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], latency=0.05, bandwidth=1e3)
    for participation in (1.0, 0.5):
        plain, timed = (
            caden.simulate(make(**parameters), problem, graph, 8, participation=participation, clock=c)
            for c in (None, clock)
        )
        assert torch.equal(plain.x, timed.x)
        assert "time" not in plain.rows[-1] and timed.rows[-1]["time"] > 0
        assert plain.rows[-1]["communications"] == timed.rows[-1]["communications"]


def test_time_without_messages_is_that_of_the_gradients(setting):
    problem, graph = setting
    result = caden.simulate(gd(), problem, graph, 10, local_steps=4, clock=Clock(compute=0.25))
    time, gradients, idle = last(result, "time", "gradients", "idle")
    assert time == 0.25 * gradients / AGENTS and idle == 0  # no rounding with a quarter
    slow = Clock(compute=[0.25] * 5 + [2.0])
    assert last(caden.simulate(gd(), problem, graph, 10, local_steps=4, clock=slow), "time") == [
        2.0 * gradients / AGENTS
    ]


def test_messages_take_their_latency_and_their_size(setting):
    problem, graph = setting
    clock = {"compute": 0.5, "latency": 0.25, "bandwidth": 8 * DIM * 2}  # half a second for a row
    result = caden.simulate(gd(), problem, graph, 10, local_steps=4, clock=clock)
    start = result.rows[0]["time"]
    assert last(result, "time") == [start + 10 * (4 * 0.5 + 0.25 + 0.5)]
    tracking = caden.simulate(caden.methods.gt(0.05), problem, graph, 10, clock=clock)  # two rows, one gradient
    assert last(tracking, "time")[0] - tracking.rows[0]["time"] == 10 * (0.5 + 2 * 0.75)
    shorter = caden.simulate(gd(), problem, graph, 10, local_steps=4, clock=clock, messages={"bits": 8})
    assert last(shorter, "time")[0] < last(result, "time")[0]
    server = caden.simulate(caden.methods.fedavg(0.02), problem, graph, 10, local_steps=4, clock=clock)
    assert last(server, "time")[0] - server.rows[0]["time"] == pytest.approx(10 * (4 * 0.5 + 2 * 0.75))


def test_an_agents_own_connection_is_shared_by_its_messages(setting):
    problem, _ = setting
    star = caden.graphs.star(AGENTS)  # the hub sends and receives five rows
    for field in ("up", "down"):
        clock = {"compute": 1.0, field: 8.0 * DIM}  # a second for a row
        result = caden.simulate(gd(), problem, star, 4, local_steps=1, clock=clock)
        assert last(result, "time")[0] - result.rows[0]["time"] == 1 + 4 * 5  # the hub's connection is never idle


@pytest.mark.parametrize("mode", ["wait", "free"])
def test_messages_over_a_slow_edge_queue(mode):
    """Two agents: an edge that takes longer for a message than a step takes is what a slow connection is."""
    problem, graph = caden.problems.quadratic(agents=2, dim=2), caden.graphs.path(2)
    found = []
    for field in ("bandwidth", "up"):
        clock = {"compute": 0.125, field: 32.0, "mode": mode}  # half a second for a row
        found.append(caden.simulate(gd(), problem, graph, 12, local_steps=1, clock=clock))
    assert torch.equal(found[0].x, found[1].x)
    assert last(found[0], "time") == last(found[1], "time")
    quick = caden.simulate(gd(), problem, graph, 12, local_steps=1, clock={"compute": 0.125, "mode": mode})
    assert torch.equal(quick.x, found[0].x) is (mode == "wait")


@pytest.mark.parametrize(("serve", "step"), [(0.125, 2.25), (0.25, 2.25), (1.0, 3.0)])
def test_serving_passes_while_messages_travel(setting, serve, step):
    problem, graph = setting
    clock = {"compute": 0.5, "latency": 0.25, "serve": serve}
    result = caden.simulate(gd(), problem, graph, 10, local_steps=4, clock=clock)
    assert last(result, "time")[0] - result.rows[0]["time"] == 10 * step
    alone = caden.simulate(caden.methods.local(0.01), problem, graph, 10, local_steps=4, clock=clock)
    assert last(alone, "time")[0] - alone.rows[0]["time"] == 10 * (2 + serve)  # nothing to wait for
    free = [
        caden.simulate(gd(), problem, graph, 10, local_steps=4, clock={"compute": 0.5, "mode": "free", name: serve})
        for name in ("serve", "overhead")
    ]
    assert last(free[0], "time") == last(free[1], "time")


def test_agents_wait_for_their_neighbours_only():
    """On a path with one slow end, as a loop over agents computes it."""
    problem, graph, rounds = caden.problems.quadratic(agents=5, dim=2), caden.graphs.path(5), 6
    seconds = np.array([3.0, 0.5, 1.0, 0.25, 0.5])
    result = caden.simulate(gd(), problem, graph, rounds, local_steps=2, clock={"compute": seconds, "latency": 0.125})
    now = seconds * result.rows[0]["gradients"] / 5
    for _ in range(rounds):
        sent = now + 2 * seconds
        now = np.array([max([sent[i]] + [sent[j] + 0.125 for j in graph.neighbours(i)]) for i in range(5)])
    assert last(result, "time") == [now.max()]
    waited = result.agents
    assert waited["busy"].idxmax() == 0 and waited["idle"].idxmin() == 0


def test_pulled_messages_are_announced_asked_for_and_sent():
    """On a path, as a loop over agents computes it: who is late asks late, and then waits for two ways."""
    problem, graph, rounds = caden.problems.quadratic(agents=5, dim=2), caden.graphs.path(5), 6
    seconds, latency, size = np.array([3.0, 0.5, 1.0, 0.25, 0.5]), 0.125, 0.5
    clock = {"compute": seconds, "latency": latency, "bandwidth": 8 * 2 / size, "overhead": 0.25, "pull": True}
    result = caden.simulate(gd(), problem, graph, rounds, local_steps=2, clock=clock)
    now = seconds * result.rows[0]["gradients"] / 5
    for _ in range(rounds):
        sent = now + 2 * seconds + 0.25
        asked = {(i, j): max(sent[i], sent[j] + latency) for i in range(5) for j in graph.neighbours(i)}
        now = np.array([max(asked[i, j] + 2 * latency + size for j in graph.neighbours(i)) for i in range(5)])
    assert last(result, "time") == [now.max()]
    assert result.waiting["neighbour"].iloc[result.waiting["seconds"].argmax()] == 0  # all wait for the slowest
    tracking = caden.simulate(caden.methods.fedavg(0.02), problem, graph, 1, local_steps=2, clock=clock)
    assert last(tracking, "time")[0] - tracking.rows[0]["time"] == pytest.approx(2 * 3.0 + 0.25 + 2 * (0.375 + 0.5))


# Deadlines.


def test_who_misses_a_deadline_is_asleep_and_the_numbers_are_those_of_that_schedule(setting):
    """Agents 0 to 4 take 1 s, agent 5 takes 2.5 s, and a gradient before; a round takes 1.25 s, 1 s if all are ready.

    So agent 5 is ready 3.125 s after the start, in the third round, and then in every second one.
    """
    problem, graph = setting
    clock = {"compute": [0.25] * 5 + [0.625], "mode": "deadline", "deadline": 1.25}
    timed = caden.simulate(gd(), problem, graph, 12, local_steps=4, clock=clock)

    def schedule(round, draw):
        return np.array([True] * 5 + [round >= 2 and round % 2 == 0])

    plain = caden.simulate(gd(), problem, graph, 12, local_steps=4, participation=schedule)
    assert torch.equal(plain.x, timed.x)
    assert last(timed, "time") == [11 * 1.25 + 1]
    assert timed.history["active"].tolist()[1:] == [5, 5, *[6, 5] * 5]
    assert timed.agents["steps"].tolist() == [12] * 5 + [5]
    assert last(timed, "participation", "participation_least") == pytest.approx([(5 + 5 / 12) / 6, 5 / 12])


def test_a_round_ends_when_all_are_ready(setting):
    problem, graph = setting
    clock = {"compute": 0.25, "mode": "deadline", "deadline": 10.0}
    result = caden.simulate(gd(), problem, graph, 6, local_steps=4, clock=clock)
    assert last(result, "time") == [6 + 0.25]  # with the gradient before the first round


@pytest.mark.parametrize("name", caden.methods.METHODS)
def test_every_method_runs_by_a_clock(name):
    """Waiting changes no number; a deadline is refused by those that need everyone awake, in one line."""
    problem, graph, card = caden.problems.quadratic(agents=4, dim=2), caden.graphs.ring(4), caden.methods.CARDS[name]
    method = caden.methods.METHODS[name](**card.unit_parameters)
    plain = caden.simulate(method, problem, graph, 3)
    clock = {"compute": [0.1, 0.2, 0.3, 1.0], "latency": 0.01, "bandwidth": 1e4}
    timed = caden.simulate(method, problem, graph, 3, clock=clock)
    assert torch.equal(plain.x, timed.x) and timed.rows[-1]["time"] > 0
    limited = {**clock, "mode": "deadline", "deadline": {"quantile": 0.5}}
    if name in ("accelerated", "admm_edges", "c2eden", "dino", "newton_tracking", "tutunov"):
        with pytest.raises(CadenError, match=r"needs everyone awake.*clock.deadline"):
            caden.simulate(method, problem, graph, 3, clock=limited)
        return
    late = caden.simulate(method, problem, graph, 3, clock=limited)
    assert late.rows[-1]["time"] < timed.rows[-1]["time"] and late.agents["participation"].min() < 1


def test_what_an_agent_has_computed_under_a_deadline_fits_into_the_time():
    """The excess of a step that took longer than it was taken to be is still to come when the run ends."""
    problem, graph = caden.problems.quadratic(agents=4, dim=2), caden.graphs.ring(4)

    def work(round, draw):
        return np.full(4, 50 if round == 19 else 1)

    clock = {"compute": 0.1, "mode": "deadline", "deadline": 1.0}
    result = caden.simulate(gd(), problem, graph, 20, local_steps=work, clock=clock)
    assert result.agents["busy"].max() <= 1 + 1e-12
    wide = {
        "compute": {"name": "lognormal", "mean": 0.2, "spread": 1.5},
        "mode": "deadline",
        "deadline": {"quantile": 0.5},
    }
    for name in ("caden_gd", "gt_lbfgs", "network_newton"):
        method = caden.methods.METHODS[name](**caden.methods.CARDS[name].unit_parameters)
        agents = caden.simulate(method, problem, graph, 3, clock=wide).agents
        assert agents["busy"].max() <= 1 + 1e-12 and agents["idle"].min() >= -1e-12


@pytest.mark.parametrize("method", ["caden", "gt", "fedavg", "atg", "dgd", "esom"])
def test_a_loose_deadline_takes_as_long_as_waiting(setting, method):
    """Everyone is always ready; the first step is taken to be longer or shorter than it is, the second makes up."""
    problem, graph = setting
    make, parameters = caden.methods.METHODS[method], caden.methods.CARDS[method].unit_parameters
    took = {}
    for mode, limit in (("wait", {}), ("deadline", {"deadline": 100.0})):
        clock = {"compute": 0.5, "latency": 0.25, "bandwidth": 48.0, "overhead": 0.125, "mode": mode, **limit}
        result = caden.simulate(make(**parameters), problem, graph, 8, local_steps=4, clock=clock)
        took[mode] = last(result, "time")[0]
        assert result.history["time"].is_monotonic_increasing
        assert result.agents["idle"].min() > -1e-12
    assert took["deadline"] == pytest.approx(took["wait"], rel=1e-12)


@pytest.mark.parametrize("work", ["auto", 3, switch(20, 1, at=3)])
def test_under_a_loose_deadline_every_round_takes_what_was_computed_in_it(work):
    """Two agents with the same function, so that they need equally many steps: no step is charged in advance."""
    problem = caden.problems.quadratics(np.stack([np.diag([1.0, 5.0, 30.0])] * 2), [[1.0, -2.0, 3.0]] * 2)
    clock = {"compute": 0.5, "mode": "deadline", "deadline": 100.0}
    start = torch.tensor([[3.0, 1.0, -2.0]] * 2, dtype=torch.float64)
    method = caden.methods.caden(mu_z=1.0)
    result = caden.simulate(method, problem, caden.graphs.path(2), 8, local_steps=work, clock=clock, x0=start)
    gradients = result.history["gradients"].to_numpy() / 2  # the one before the first round is part of it
    assert np.allclose(result.history["time"][1:], 0.5 * gradients[1:], rtol=1e-12)


def test_deadlines_do_not_expect_the_largest_number_of_steps():
    """Steps that end by themselves begin with an estimate of one gradient: no round is empty."""
    problem, graph = caden.problems.quadratic(agents=4, dim=3), caden.graphs.ring(4)
    clock = {"compute": 0.1, "mode": "deadline", "deadline": 1.0}
    work = caden.schedules.auto(most=100)
    result = caden.simulate(caden.methods.caden(mu_z=1.0), problem, graph, 5, local_steps=work, clock=clock)
    assert (result.history["active"][1:] > 0).all()


@pytest.mark.parametrize("made", [(5, 1), (12, 1), (2, 30)])
def test_a_wrong_estimate_costs_or_gives_the_rounds_in_between(made):
    """An agent takes part in as many rounds as one whose steps are known beforehand."""
    problem, graph = caden.problems.quadratic(agents=4, dim=2), caden.graphs.complete(4)
    first, later = made

    def work(round, draw):
        return np.full(4, first if round == 0 else later)

    clock = {"compute": [1.0, 0.1, 0.1, 0.1], "mode": "deadline", "deadline": 1.0}
    result = caden.simulate(gd(), problem, graph, 60, local_steps=work, clock=clock)
    expected = 60 / later
    assert result.agents["steps"][0] == pytest.approx(expected, abs=2 + first / later)


@pytest.mark.parametrize("unit", [0.1, 0.2, 0.3, 0.7, 1 / 3])
def test_the_unit_of_time_changes_nothing(setting, unit):
    """Sums of equal times differ in their last bits, and still mean the same moment."""
    problem, graph = setting
    ends = []
    for c in (0.25, unit):
        clock = {"compute": [c, c, 3 * c, c, c, 2 * c], "latency": 2 * c, "mode": "free"}
        ends.append(caden.simulate(gd("radmm"), problem, graph, 15, local_steps=1, clock=clock))
    assert torch.equal(ends[0].x, ends[1].x)
    assert last(ends[1], "time")[0] == pytest.approx(last(ends[0], "time")[0] * unit / 0.25, rel=1e-12)


def test_time_never_runs_backwards_and_computing_is_not_idling(setting):
    problem, graph = setting
    compute = {"name": "lognormal", "mean": 0.2, "spread": 2.0}
    result = caden.simulate(caden.methods.dgd(0.05), problem, graph, 12, clock={"compute": compute})
    assert result.history["time"].is_monotonic_increasing
    even = caden.simulate(caden.methods.dgd(0.05), problem, graph, 12, clock={"compute": 0.25})
    assert (even.history["idle"] == 0).all()


def test_sleepers_wait_for_nobody(setting):
    problem, graph = setting
    clock = {"compute": 0.1, "latency": 0.5}
    all_but_one = np.arange(AGENTS) > 0
    result = caden.simulate(gd(), problem, graph, 10, participation=lambda round, draw: all_but_one, clock=clock)
    assert 0 not in set(result.waiting["agent"]) and len(result.waiting)


def test_deadlines_stay_exact(setting):
    problem, graph = setting
    compute = {"name": "lognormal", "mean": 0.2, "spread": 1.0}
    for deadline in (0.5, {"quantile": 0.6}):
        clock = Clock(compute, latency=0.01, mode="deadline", deadline=deadline)
        result = caden.simulate(gd(), problem, graph, 1500, local_steps=3, clock=clock, record_every=1500)
        assert float((result.x - problem.solution).abs().max()) < 1e-9
        assert 0 < result.agents["steps"].min() < 1500
    with pytest.warns(UserWarning, match="does not tolerate sleeping"):
        caden.simulate(caden.methods.dpsgd(0.01), problem, graph, 2, clock=clock)


# Free running.


def test_equal_times_and_no_latency_are_lockstep(setting):
    problem, graph = setting
    free = {"compute": 0.25, "mode": "free"}
    for method in ("caden", "radmm"):
        plain, timed = (
            caden.simulate(gd(method), problem, graph, 15, local_steps=4, clock=c, messages=m)
            for c, m in ((None, {"loss": 1e-12}), (free, None))  # a network that may lose messages asks for arcs
        )
        assert torch.equal(plain.x, timed.x)
    assert last(timed, "time")[0] == 0.25 * last(timed, "gradients")[0] / AGENTS


def test_messages_on_the_way_for_a_step_are_used_one_step_later(setting):
    problem, graph = setting
    free = {"compute": 0.25, "latency": 0.5, "mode": "free"}
    timed = caden.simulate(gd("radmm"), problem, graph, 15, local_steps=4, clock=free)
    late = caden.simulate(gd("radmm"), problem, graph, 15, local_steps=4, transport=Overlapped(Memory()))
    assert torch.equal(timed.x, late.x)


def textbook_free(problem, graph, rho, alpha, compute, latency, steps, begin, codec=None, receive=0.0):
    """Relaxed ADMM with exact solves, event by event, agent by agent; with a codec, both ends of an arc keep a copy.

    `latency` is a function of sender and receiver; each message occupies its receiver's connection for `receive` s.
    """

    def short(change):
        return codec.unpack(codec.pack(torch.from_numpy(change)[None]), DIM, torch.float64)[0].numpy()

    copies = {}
    H, b = problem.hessian.numpy(), -problem.value_and_grad(torch.zeros(AGENTS, DIM, dtype=torch.float64))[1].numpy()
    x, near = np.zeros((AGENTS, DIM)), {i: graph.neighbours(i) for i in range(AGENTS)}
    z = {(i, j): np.zeros(DIM) for i in near for j in near[i]}
    made, inbox, events, order = [0] * AGENTS, [], [], itertools.count()
    busy = [0.0] * AGENTS  # until when each agent's connection is
    for i in range(AGENTS):
        heapq.heappush(events, ((1 + begin) * compute[i], -1, i, None))
    while min(made) < steps:
        now, number, i, letter = heapq.heappop(events)
        if letter is not None:
            busy[i] = max(busy[i], now) + receive
            inbox.append((number, busy[i], letter[0], i, letter[1]))
            continue
        degree = len(near[i])
        matrix = H[i] + rho * degree * np.eye(DIM)
        x[i] = np.linalg.solve(matrix, b[i] + sum(z[i, j] for j in near[i]))
        for j in near[i]:
            message = 2 * rho * x[i] - z[i, j]
            if codec is not None:
                message = copies[i, j] + short(message - copies[i, j]) if (i, j) in copies else message
                copies[i, j] = message
            heapq.heappush(events, (now + latency(i, j), next(order), j, (i, message)))
        for number, arrival, sender, receiver, message in sorted(inbox, key=lambda m: m[0]):
            if receiver == i and arrival <= now:
                newer = [m for m in inbox if m[2:4] == (sender, i) and m[1] <= now and m[0] > number]
                if not newer:
                    z[i, sender] = (1 - alpha) * z[i, sender] + alpha * message
        inbox = [m for m in inbox if not (m[3] == i and m[1] <= now)]
        made[i] += 1
        heapq.heappush(events, (now + compute[i], -1, i, None))
    return x, made


@pytest.mark.parametrize("messages", [None, {"bits": 4}, {"top": 0.4}])
def test_free_running_agents_against_an_event_loop(setting, messages):
    """Times without ties, so that the order of events is unique."""
    problem, graph = setting
    compute, steps = np.array([0.11, 0.13, 0.17, 0.19, 0.23, 1.07]), 12
    clock = Clock(compute=compute, latency=0.291, mode="free")
    method = caden.methods.radmm(0.5, 0.7, solver="exact")
    result = caden.simulate(method, problem, graph, steps, local_steps=1, clock=clock, messages=messages)
    begin = result.rows[0]["time"] / 1.07  # gradients at the start
    codec = Messages.from_spec(messages).codec
    x, made = textbook_free(problem, graph, 0.5, 0.7, compute, lambda i, j: 0.291, steps, begin, codec)
    sent = sum(n * len(graph.neighbours(i)) for i, n in enumerate(made))
    size = 8 * DIM if codec is None else codec.size(DIM, 8)
    assert last(result, "communications", "bytes") == [sent, sent * size + 2 * len(graph.edges) * (8 * DIM - size)]
    assert result.agents["steps"].tolist() == made
    np.testing.assert_allclose(result.x.numpy(), x, atol=1e-12)


def test_free_agents_receive_in_the_order_of_arrival_over_connections_of_their_own(setting):
    """A message from far away holds up nothing that comes before it."""
    problem, graph = setting
    compute, steps, receive = np.array([0.11, 0.13, 0.17, 0.19, 0.23, 1.07]), 12, 0.0413
    latency = 0.05 + 3 * np.random.default_rng(3).random(len(graph.edges)) ** 3
    clock = Clock(compute=compute, latency=latency, down=8 * DIM / receive, mode="free")
    method = caden.methods.radmm(0.5, 0.7, solver="exact")
    result = caden.simulate(method, problem, graph, steps, local_steps=1, clock=clock)
    begin = result.rows[0]["time"] / 1.07
    of_edge = {tuple(edge): float(seconds) for edge, seconds in zip(graph.edges.tolist(), latency)}

    def between(i, j):
        return of_edge[min(i, j), max(i, j)]

    x, made = textbook_free(problem, graph, 0.5, 0.7, compute, between, steps, begin, receive=receive)
    assert result.agents["steps"].tolist() == made
    np.testing.assert_allclose(result.x.numpy(), x, atol=1e-12)
    far, slow = (  # times that are equal but for rounding
        caden.simulate(method, problem, graph, steps, local_steps=1, clock={"compute": 0.1, "mode": "free", **links})
        for links in ({"latency": 1e9}, {"latency": 0.3, "down": 1e-6})
    )
    assert torch.equal(far.x, slow.x)  # nothing arrives
    unlimited, wide = (
        caden.simulate(method, problem, graph, steps, local_steps=1, clock={**vars(clock), "down": down})
        for down in (None, 1e14)
    )
    torch.testing.assert_close(unlimited.x, wide.x)


def textbook_pull(problem, graph, rho, alpha, compute, latency, transfer, steps, begin):
    """The same, with every announcement, request and reply as an event of its own."""
    H, b = problem.hessian.numpy(), -problem.value_and_grad(torch.zeros(AGENTS, DIM, dtype=torch.float64))[1].numpy()
    x, near = np.zeros((AGENTS, DIM)), {i: graph.neighbours(i) for i in range(AGENTS)}
    z = {(i, j): np.zeros(DIM) for i in near for j in near[i]}
    made, events, order, inbox = [0] * AGENTS, [], itertools.count(), {}
    replies = 0
    offer, heard, have, fetching = {}, dict.fromkeys(z, -1), dict.fromkeys(z, -1), dict.fromkeys(z, False)

    def at(time, what, *about):
        heapq.heappush(events, (time, next(order), what, about))

    def ask(now, i, j):  # i asks j, unless it does so already, has not used the last answer, or knows of nothing new
        if not fetching[i, j] and (i, j) not in inbox and heard[i, j] > have[i, j]:
            fetching[i, j] = True
            at(now + latency, "request", j, i)

    for i in range(AGENTS):
        at((1 + begin) * compute[i], "step", i)
    while min(made) < steps:
        now, _, what, (i, *rest) = heapq.heappop(events)
        if what == "step":
            matrix = H[i] + rho * len(near[i]) * np.eye(DIM)
            x[i] = np.linalg.solve(matrix, b[i] + sum(z[i, j] for j in near[i]))
            for j in near[i]:
                offer[i, j] = made[i], 2 * rho * x[i] - z[i, j]
                at(now + latency, "announcement", j, i, made[i])
            for j in near[i]:
                if (i, j) in inbox:
                    z[i, j] = (1 - alpha) * z[i, j] + alpha * inbox.pop((i, j))
                    ask(now, i, j)
            made[i] += 1
            at(now + compute[i], "step", i)
        elif what == "announcement":
            heard[i, rest[0]] = rest[1]
            ask(now, i, rest[0])
        elif what == "request":
            replies += 1
            at(now + latency + transfer, "reply", rest[0], i, *offer[i, rest[0]])
        else:
            j, have[i, j], inbox[i, j] = rest[0], rest[1], rest[2]
            fetching[i, j] = False
    return x, made, replies


@pytest.mark.parametrize("latency", [0.0291, 0.1713])
def test_free_running_agents_that_pull_against_an_event_loop(setting, latency):
    problem, graph = setting
    compute, steps, transfer = np.sqrt([0.011, 0.017, 0.03, 0.037, 0.053, 1.14]), 12, 0.0517  # no ties
    clock = Clock(compute=compute, latency=latency, bandwidth=8 * DIM / transfer, pull=True, mode="free")
    method = caden.methods.radmm(0.5, 0.7, solver="exact")
    result = caden.simulate(method, problem, graph, steps, local_steps=1, clock=clock)
    begin = result.rows[0]["time"] / compute[-1]  # gradients at the start
    x, made, replies = textbook_pull(problem, graph, 0.5, 0.7, compute, latency, transfer, steps, begin)
    assert result.agents["steps"].tolist() == made
    assert result.rows[-1]["communications"] == replies
    np.testing.assert_allclose(result.x.numpy(), x, atol=1e-12)


def test_ticks_round_the_ends_of_steps_up(setting):
    problem, graph = setting
    slow, fast = [0.5] * 3 + [1.5] * 3, [0.45, 0.4, 0.5, 1.3, 1.5, 1.4]
    method = caden.methods.radmm(0.5, solver="exact")  # no gradients before the first step
    exact, ticks = (
        caden.simulate(method, problem, graph, 9, local_steps=1, clock={"compute": c, "mode": "free", **tick})
        for c, tick in ((slow, {}), (fast, {"tick": 0.5}))
    )
    assert torch.equal(exact.x, ticks.x)
    assert exact.agents["steps"].tolist() == ticks.agents["steps"].tolist()


def test_free_running_is_exact_and_faster_than_waiting(setting):
    problem, graph = setting
    slow = [0.1] * 5 + [1.0]
    took = {}
    for mode in ("wait", "free"):
        method = caden.methods.caden(mu_z=0.5, relax=0.9, solver=caden.solvers.gd(0.3))
        clock = {"compute": slow, "latency": 0.02, "mode": mode}
        result = caden.simulate(method, problem, graph, 120, local_steps=3, clock=clock, record_every=4)
        error = [np.sqrt(row["relative_error"]) for row in result.rows]
        took[mode] = next(row["time"] for row, e in zip(result.rows, error) if e < 1e-6)
        assert float((result.x - problem.solution).abs().max()) < 1e-6
    assert took["free"] < 0.7 * took["wait"]
    clock = {"compute": [0.1] * 5 + [0.2], "mode": "free"}
    for messages in (None, {"bits": 4}, {"top": 0.4, "bits": 8}):
        auto = caden.simulate(
            caden.methods.caden(), problem, graph, 300, clock=clock, record_every=300, messages=messages
        )
        assert float((auto.x - problem.solution).abs().max()) < 1e-6


def test_free_running_refuses_what_it_cannot_do(setting):
    problem, graph = setting
    free = {"mode": "free"}
    for options in (
        {"messages": {"trigger": 0.1}},
        {"messages": {"loss": 0.1}},
        {"participation": 0.5},
        {"links": 0.5},
    ):
        with pytest.raises(CadenError, match="has delays of its own"):
            caden.simulate(gd(), problem, graph, 3, clock=free, **options)
    for name in ("gt", "fedavg", "diloco", "esom"):
        method = caden.methods.METHODS[name](**caden.methods.CARDS[name].unit_parameters)
        with pytest.raises(CadenError, match="single exchange over arcs"):
            caden.simulate(method, problem, graph, 3, clock=free)
    with pytest.raises(CadenError, match="must not be 0"):
        caden.simulate(gd(), problem, graph, 3, local_steps=[3] * 5 + [0], clock=free)


# All modes.


@pytest.mark.parametrize("messages", [{}, {"bits": 4}])
@pytest.mark.parametrize(("mode", "pull"), [("wait", False), ("deadline", False), ("free", False), ("free", True)])
def test_a_resumed_run_keeps_the_time(setting, mode, pull, messages, tmp_path):
    problem, graph = setting
    limit = {"deadline": 0.7} if mode == "deadline" else {}
    clock = Clock(
        {"name": "exponential", "mean": 0.2}, latency=0.3, up=200.0, down=150.0, pull=pull, mode=mode, **limit
    )
    options = {"local_steps": 3, "clock": clock, "messages": messages, "checkpoint_every": 1, "picture": False}

    whole = caden.simulate(gd(), problem, graph, 15, directory=tmp_path / "whole", **options)

    class Stop(Exception):
        pass

    def crash(row, state):
        if row["round"] == 7:
            raise Stop

    with pytest.raises(Stop):
        caden.simulate(gd(), problem, graph, 15, directory=tmp_path / "half", callbacks=[crash], **options)
    again = caden.simulate(gd(), problem, graph, 15, directory=tmp_path / "half", resume=True, **options)
    assert torch.equal(whole.x, again.x)
    drop = ["seconds"]
    assert whole.history.drop(columns=drop).equals(again.history.drop(columns=drop))
    assert whole.agents.equals(again.agents) and whole.waiting.equals(again.waiting)


def test_a_run_goes_on_with_its_own_clock_only(setting, tmp_path):
    problem, graph = setting
    (tmp_path / "trace.csv").write_text(",".join("1" * AGENTS))
    clocks = [None, {"compute": 0.1}, {"compute": {"file": str(tmp_path / "trace.csv")}}]
    for number, clock in enumerate(clocks):
        folder = tmp_path / str(number)
        caden.simulate(gd(), problem, graph, 3, directory=folder, clock=clock, picture=False, checkpoint_every=1)
        again = {"directory": folder, "resume": True, "picture": False}
        for other in clocks:
            if other is not clock:
                with pytest.raises(CadenError, match="begun with another clock"):
                    caden.simulate(gd(), problem, graph, 5, clock=other, **again)
    key = digest(experiment(None, [f"clock.compute.file={tmp_path / 'trace.csv'}"]))
    (tmp_path / "trace.csv").write_text(",".join("9" * AGENTS))
    with pytest.raises(CadenError, match="begun with another clock"):
        caden.simulate(gd(), problem, graph, 5, clock=clocks[2], **again)
    assert digest(experiment(None, [f"clock.compute.file={tmp_path / 'trace.csv'}"])) != key


KILLED = """
import os, signal, sys, caden
problem, graph = caden.problems.quadratic(agents=6, dim=3, seed=0), caden.graphs.erdos_renyi(6, 0.5, seed=1)
def kill(row, state):
    if row["round"] == 7 and sys.argv[3] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
clock = {"compute": {"name": "exponential", "mean": 0.2}, "latency": 0.3, "up": 200.0, "down": 150.0}
clock |= {"mode": sys.argv[1]}
clock |= {"deadline": 0.7} if sys.argv[1] == "deadline" else {}
caden.simulate(caden.methods.caden(mu_z=0.5), problem, graph, 15, directory=sys.argv[2], local_steps=3, clock=clock,
    checkpoint_every=1, picture=False, callbacks=[kill], resume=sys.argv[3] == "resume")
"""


def files(folder):
    """Return what a run left, but for the seconds that its rounds took."""
    table = pd.read_csv(folder / "metrics.csv", dtype=str).drop(columns="seconds")
    return [table.to_csv(), *((folder / f"{name}.csv").read_bytes() for name in ("agents", "waiting"))]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["wait", "deadline", "free"])
def test_a_killed_run_ends_in_the_same_files(mode, tmp_path):
    def run(folder, what):
        command = [sys.executable, "-c", KILLED, mode, tmp_path / folder, what]
        return subprocess.run(command, timeout=120, check=False).returncode

    assert run("whole", "") == 0 and run("half", "kill") == -9 and run("half", "resume") == 0
    assert files(tmp_path / "whole") == files(tmp_path / "half")


def test_an_empty_table_is_a_clock_with_defaults(setting):
    found = [caden.simulate(gd(), *setting, 3, clock=clock).rows[-1]["time"] for clock in ({}, Clock())]
    assert found[0] == found[1] > 0


def test_values_by_number_list_distribution_and_file(tmp_path):
    draw = Draw(3, 4)
    for name, spread in (("exponential", 0.5), ("lognormal", 0.7), ("uniform", 0.9)):
        table = {"name": name, "mean": 2.0, **({} if name == "exponential" else {"spread": spread})}
        by_round = Values("compute", table, 4, draw, "agent")
        drawn = np.stack([by_round(t) for t in range(4000)])
        assert drawn.mean() == pytest.approx(2.0, rel=0.05) and (drawn > 0).all()
        fixed = Values("compute", {**table, "per": "agent"}, 4, draw, "agent")
        assert np.array_equal(fixed(0), fixed(9)) and len(set(fixed(0))) == 4
    (tmp_path / "trace.csv").write_text("1,2,3,4\n5,6,7,8\n")
    trace = Values("compute", {"file": str(tmp_path / "trace.csv")}, 4, draw, "agent")
    assert trace(0).tolist() == [1, 2, 3, 4] and trace(3).tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("clock", "message"),
    [
        ({"computing": 1}, "did you mean 'clock.compute'"),
        ({"mode": "fast"}, "clock.mode"),
        ({"deadline": 1.0}, "belongs to the mode"),
        ({"mode": "deadline"}, "needs `clock.deadline`"),
        ({"mode": "deadline", "deadline": -1}, "positive"),
        ({"mode": "deadline", "deadline": {"quantile": 2}}, "quantile"),
        ({"compute": [1, 2]}, "one per agent"),
        ({"compute": -1.0}, "at least 0"),
        ({"bandwidth": 0.0}, "positive"),
        ({"compute": {"name": "normal", "mean": 1}}, "lognormal"),
        ({"compute": {"name": "lognormal"}}, "mean"),
        ({"compute": {"name": "uniform", "mean": 1, "spread": 2}}, r"\(0, 1\]"),
        ({"latency": {"name": "lognormal", "mean": 1, "spread": 40.0}}, r"\(0, 10\]"),
        ({"compute": {"file": "nowhere.csv", "per": "agent"}}, "remove 'per'"),
        ({"compute": {"file": "/dev/null"}}, "is empty"),
        ({"compute": [0, 0, 0, 0, 0, 1], "mode": "deadline", "deadline": {"quantile": 0.5}}, "take no time"),
        ({"tick": 1e-320, "mode": "free"}, "at least 1e-09"),
        ("", "must be a Clock or a table"),
        ({"latency": {"name": "uniform", "mean": 1, "per": "agent"}}, "edge"),
        ({"compute": {"file": "nowhere.csv"}}, "cannot be read"),
        ({"pull": 3}, "clock.pull"),
        ({"compute": "fast"}, "clock.compute"),
        ({"compute": True}, "clock.compute"),
        ({"compute": None}, "at most 1e15"),
        ({"latency": float("inf")}, "clock.latency"),
        ({"bandwidth": "10 MB"}, "clock.bandwidth"),
        ("wait", "must be a Clock or a table"),
        ({"tick": 1.0}, 'belongs to the mode "free"'),
        ({"tick": -1.0, "mode": "free"}, "positive"),
        ({"compute": {"name": "exponential", "mean": 1, "spread": 3}}, "no `spread`"),
        ({"compute": b"1"}, "clock.compute"),
        ({"compute": 1e308}, "at most 1e"),
    ],
)
def test_wrong_clocks_get_one_line(setting, clock, message):
    with pytest.raises(CadenError, match=message) as caught:
        caden.simulate(gd(), *setting, 2, clock=clock)
    assert "\n" not in str(caught.value)


def test_results_from_old_anchors_would_diverge():
    """Why an agent that missed deadlines solves with the anchors of the round in which it is ready."""
    script = Path(__file__).parents[1] / "benchmarks" / "old_anchors.py"
    distance = runpy.run_path(str(script))["distance"]
    for relax, works in ((0.5, True), (0.9, False)):
        ours, other = (distance(old, mu=0.3, relax=relax, slow=2, share=0.3, rounds=300) for old in (False, True))
        assert ours < 1e-8
        assert (other < 1e-8) is works and (other == np.inf) is not works


@pytest.mark.parametrize("name", caden.methods.METHODS)
def test_methods_run_free_if_their_card_says_so(name):
    problem, graph, card = caden.problems.quadratic(agents=4, dim=2), caden.graphs.ring(4), caden.methods.CARDS[name]
    method = caden.methods.METHODS[name](**card.unit_parameters)
    clock = {"compute": [0.1, 0.2, 0.13, 0.3], "latency": 0.07, "mode": "free"}
    if not card.free:
        with pytest.raises(CadenError, match=r"free|everyone awake"):
            caden.simulate(method, problem, graph, 2, clock=clock)
        return
    rounds = 600 if name == "relay_sgd" else 200
    result = caden.simulate(method, problem, graph, rounds, clock=clock, record_every=50)
    if name not in ("local", "clipped_gossip"):  # biased by design
        assert (result.x - problem.solution).norm() < 1e-8


@pytest.mark.parametrize("name", ["fedavg", "kgt", "lt_admm"])
def test_agents_that_sleep_first_count_in_a_quantile_with_their_own_times(name):
    """All are equally fast, so every round is as long as a step, whoever began."""
    method = caden.methods.METHODS[name](**caden.methods.CARDS[name].unit_parameters)
    problem, graph = caden.problems.quadratic(agents=20, dim=3), caden.graphs.ring(20)
    options = {"participation": 0.2, "local_steps": 1, "record_every": 1}
    clock = {"compute": 2.0, "mode": "deadline", "deadline": {"quantile": 0.5}}
    history = caden.simulate(method, problem, graph, 6, clock=clock, **options).history
    assert set(history["time"].diff().dropna().round(9)) == {2.0}


def test_a_number_may_be_an_array(setting):
    times = [caden.simulate(gd(), *setting, 3, clock={"compute": c}).rows[-1]["time"] for c in (np.array(2.0), 2.0)]
    assert times[0] == times[1]
