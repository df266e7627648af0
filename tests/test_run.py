from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import caden
from caden import CadenError, Diverged, Info, Interrupted, Method
from caden.engine.metrics import consensus, lyapunov, relative_error
from caden.engine.warmup import Warmup
from conftest import newest


@pytest.fixture
def small():
    return caden.problems.quadratic(6, 3, seed=1), caden.graphs.ring(6)


def test_history_columns_and_row_0(small):
    result = caden.simulate(caden.methods.caden(mu_z=1.0), *small, rounds=4)
    expected = (
        "round seconds communications bytes gradients rejected fallbacks stalled objective relative_error "
        "consensus lyapunov dual_sum active"
    )
    assert list(result.history) == expected.split()
    assert isinstance(result.history, pd.DataFrame)
    assert result.history["round"].tolist() == [0, 1, 2, 3, 4]
    assert result.history.seconds.is_monotonic_increasing


def test_metrics_are_their_formulas(small):
    problem, graph = small
    rng = torch.Generator().manual_seed(0)
    x, phi = (torch.randn(6, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    gradient = problem.value_and_grad(x)[1]
    g, v, f = gradient.numpy(), x.numpy(), phi.numpy()
    expected = np.sum(g.sum(0) ** 2) + sum(np.sum((v[i] - v[i + 1]) ** 2) for i in range(5))
    assert relative_error(x, gradient) == pytest.approx(expected)
    assert consensus(x) == pytest.approx(np.sqrt(np.mean(np.sum((v - v.mean(0)) ** 2, axis=1))))
    energy = sum(np.sum((v[i] - v[j]) ** 2) for i in range(6) for j in graph.neighbours(i)) / 4
    ends = (torch.tensor(graph.edges[:, 0]), torch.tensor(graph.edges[:, 1]))
    assert lyapunov(x, gradient, phi, *ends) == pytest.approx(np.sum((g + f) ** 2) + energy)


def test_recorded_metrics_belong_to_the_recorded_x(small):
    problem, graph = small
    seen = []
    result = caden.simulate(
        caden.methods.caden(mu_z=1.0), problem, graph, 5, callbacks=[lambda row, state: seen.append(state.x.clone())]
    )
    for x, error, objective in zip(seen, result.history.relative_error[1:], result.history.objective[1:]):
        value, gradient = problem.value_and_grad(x)
        assert error == pytest.approx(relative_error(x, gradient), rel=1e-9)
        assert objective == pytest.approx(float(value.sum()))


def test_a_method_without_duals_and_without_cached_values(small):
    """The contract needs nothing but x; the metrics evaluate what they miss, and that is not counted."""
    from typing import NamedTuple

    class State(NamedTuple):
        x: torch.Tensor

    def step(state, round):
        gradient = round.problem.value_and_grad(state.x)[1]
        return State(round.broadcast(state.x).mix() - 0.1 * gradient), Info()

    result = caden.simulate(Method(lambda x, round: State(x), step), *small, rounds=3)
    assert result.history.lyapunov.isna().all()
    assert result.history.dual_sum.isna().all()
    assert result.history.gradients.tolist() == [0, 6, 12, 18]


def test_stops(small):
    method = caden.methods.caden(mu_z=1.0)
    by_tolerance = caden.simulate(method, *small, rounds=500, tolerance=1e-6)
    assert by_tolerance.stopped == "tolerance"
    assert by_tolerance.history.relative_error.iloc[-1] < 1e-6 <= by_tolerance.history.relative_error.iloc[-2]
    by_callback = caden.simulate(method, *small, rounds=500, callbacks=[lambda row, state: row["round"] == 7])
    assert (by_callback.stopped, by_callback.history["round"].iloc[-1]) == ("callback", 7)
    problem = caden.problems.logistic(6, 5, seed=4)
    method = caden.methods.caden(mu_z=0.1)
    target = caden.simulate(method, problem, small[1], rounds=20).history.accuracy.max()  # there is one to reach
    free = caden.simulate(method, problem, small[1], rounds=20, target=target)
    assert len(free.rows) == 21
    reached = free.summary()["rounds_to_target"]
    assert reached is not None
    stopped = caden.simulate(method, problem, small[1], rounds=20, target=target, stop_at_target=True)
    assert (stopped.stopped, stopped.history["round"].iloc[-1]) == ("target", reached)
    assert free.summary()["communications_to_target"] == 12 * reached
    never = caden.simulate(method, problem, small[1], rounds=2, target=1.0).summary()
    assert never["rounds_to_target"] is None


def test_record_every_keeps_the_last_round(small):
    result = caden.simulate(caden.methods.caden(mu_z=1.0), *small, rounds=8, record_every=3)
    assert result.history["round"].tolist() == [0, 3, 6, 8]


def test_start_shapes(small):
    method = caden.methods.caden(mu_z=1.0)
    one = caden.simulate(method, *small, rounds=0, x0=torch.arange(3.0))
    assert torch.equal(one.x, torch.arange(3.0, dtype=torch.float64).expand(6, 3))
    assert torch.equal(one.mean, one.x[0])
    each = torch.randn(6, 3, dtype=torch.float64)
    assert torch.equal(caden.simulate(method, *small, rounds=0, x0=each).x, each)
    with pytest.raises(CadenError, match=r"`x0` must have shape \(3,\) or \(6, 3\), got \(4,\)"):
        caden.simulate(method, *small, rounds=1, x0=torch.zeros(4))


def test_warm_up_is_local_gradient_descent_and_estimates_curvature(small):
    problem, graph = small
    known = []

    def init(x, round):
        known.append(round.curvature)
        return caden.methods.caden(mu_z=1.0).init(x, round)

    method = caden.methods.caden(mu_z=1.0)._replace(init=init)
    result = caden.simulate(method, problem, graph, 0, warmup=Warmup(20, 0.1))
    x = np.zeros((6, 3))
    A, b = problem.hessian.numpy(), problem.linear.numpy()
    ratios, before = [], None
    for _ in range(20):
        g = np.einsum("mij,mj->mi", A, x) - b
        if before is not None:
            ratios.append(np.linalg.norm(g - before[0], axis=1) / np.linalg.norm(x - before[1], axis=1))
        before = (g, x)
        x = x - 0.1 * g
    np.testing.assert_allclose(result.x.numpy(), x, atol=1e-12)
    np.testing.assert_allclose(known[0].numpy(), np.max(ratios, axis=0), rtol=1e-8)
    assert result.history.gradients[0] == 6 * 20 + 6
    for spec, message in (({"stepz": 1}, "stepz"), ({"steps": -1}, "at least 0"), ({"step_size": 0}, "positive")):
        with pytest.raises(CadenError, match=message):
            caden.simulate(method, problem, graph, 0, warmup={"steps": 1} | spec)


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_divergence_stops_with_round_agents_and_advice_and_keeps_the_history(small, tmp_path, participation):
    method = caden.methods.caden(mu_z=1.0, mu_y=200.0, unsafe=True)  # of the kind that Theorem 1 of the paper asks for
    with pytest.raises(Diverged, match=r"round \d+ \(agents .*mu_y") as caught:
        caden.simulate(method, *small, rounds=500, participation=participation, directory=tmp_path / "run")
    kept = caught.value.result
    assert kept.stopped == "diverged"
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == len(kept.rows) + 1 > 2


def test_not_a_number_is_divergence_too(small):
    problem, graph = small

    def step(state, round):
        state.x[2] = float("nan")
        return state, Info()

    method = caden.methods.caden(mu_z=1.0)._replace(step=step)
    with pytest.raises(Diverged, match=r"round 1 \(agents 2\)"):
        caden.simulate(method, problem, graph, 5)


def test_a_loss_that_does_not_exist_at_the_start_is_told(small):
    problem = caden.problems.functions([lambda x: x.log().sum()] + [lambda x: (x**2).sum()] * 5, dim=2)
    with pytest.raises(Diverged, match=r"round 1 \(agents 0\): the loss of agents 0 is not finite even at the start"):
        caden.simulate(caden.methods.caden(mu_z=1.0), problem, small[1], 5, x0=-torch.ones(2))


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        (caden.methods.gt(50.0), "lower `alpha`"),
        (caden.methods.adapd(1e4, solver=caden.solvers.gd(50.0)), "lower `eta`"),
        (caden.methods.radmm(1e-6, solver=caden.solvers.gd(50.0)), "raise `rho`"),
        (caden.methods.caden(1.0, solver=caden.solvers.gd(50.0)), "raise `mu_z`"),
        (caden.methods.accelerated({"name": "gt", "alpha": 50.0}), "lower `alpha`"),
        (caden.methods.gt(50.0)._replace(name="mine"), "shorten its step size"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_advice_belongs_to_the_method(small, method, advice):
    with pytest.raises(Diverged) as caught:
        caden.simulate(method, *small, rounds=500)
    assert advice in str(caught.value)
    assert "mu_y" not in str(caught.value)


def test_a_sample_that_is_not_finite_is_refused_with_its_agent():
    inputs, targets = torch.rand(20, 3), torch.arange(20) % 2
    inputs[13, 1] = float("nan")
    parts = [list(range(0, 10)), list(range(10, 20))]
    with pytest.raises(CadenError, match="training sample 13, which belongs to agent 1"):
        caden.problems.classification(torch.nn.Linear(3, 2), (inputs, targets), agents=2, partition=parts)
    features = [torch.rand(4, 2), torch.full((4, 2), torch.inf)]
    with pytest.raises(CadenError, match="agent 1"):
        caden.problems.logistic(features=features, labels=[torch.ones(4)] * 2)
    with pytest.raises(CadenError, match="agent 0"):
        caden.problems.quadratics([[[float("nan")]]], [[1.0]])


def test_same_seed_same_bits_other_seed_other_bits(small):
    method = caden.methods.caden(mu_z=1.0)
    first, again, other = (
        caden.simulate(method, *small, rounds=10, participation=0.5, seed=s, deterministic=True).x for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.are_deterministic_algorithms_enabled()


def test_run_directory_holds_everything(small, tmp_path):
    result = caden.simulate(
        caden.methods.caden(mu_z=1.0), *small, rounds=30, directory=tmp_path / "a" / "run", config="seed = 0\n"
    )
    place = tmp_path / "a" / "run"
    names = {p.name for p in place.iterdir()}
    assert names == {
        "config.toml",
        "versions.json",
        "metrics.csv",
        "graph.json",
        ".lock",
        "checkpoint.25.0of1.safetensors",
        "weights.safetensors",
        "summary.json",
        "curves.png",
    }
    weights = load_file(place / "weights.safetensors")
    assert torch.equal(weights["x"], result.x)
    assert torch.equal(weights["mean"], result.mean)
    pd.testing.assert_frame_equal(pd.read_csv(place / "metrics.csv"), result.history)
    assert "torch" in json.loads((place / "versions.json").read_text())
    assert (place / "curves.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(CadenError, match="already exists"):
        caden.simulate(caden.methods.caden(mu_z=1.0), *small, rounds=1, directory=place)


def test_a_directory_of_a_python_run_says_its_seed_and_how_to_go_on(small, tmp_path):
    caden.simulate(caden.methods.caden(mu_z=1.0), *small, rounds=1, seed=7, directory=tmp_path / "r")
    assert json.loads((tmp_path / "r" / "versions.json").read_text())["seed"] == "7"
    assert not (tmp_path / "r" / "config.toml").exists()


def test_bad_input_leaves_no_directory(small, tmp_path):
    with pytest.raises(CadenError):
        caden.simulate(
            caden.methods.admm_edges(mu_z=1.0), *small, rounds=1, participation=0.5, directory=tmp_path / "r"
        )
    assert not (tmp_path / "r").exists()


def test_lost_or_damaged_metrics_are_refused(small, tmp_path):
    method = caden.methods.caden(mu_z=1.0)
    caden.simulate(method, *small, rounds=5, directory=tmp_path / "r", checkpoint_every=2)
    for content in (None, b"", b"garbage\n1\n", b"\xff\xfe\x00"):
        path = tmp_path / "r" / "metrics.csv"
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(CadenError, match="missing or damaged"):
            caden.simulate(method, *small, rounds=5, directory=tmp_path / "r", resume=True)


def test_scalars_and_shared_tensors_in_a_state_survive_a_checkpoint(small, tmp_path):
    from typing import NamedTuple

    class State(NamedTuple):
        x: torch.Tensor
        twin: torch.Tensor
        count: int
        factor: float

    def step(state, round):
        x = state.x + 1
        return State(x, x, state.count + 1, state.factor / 2), Info()

    method = Method(lambda x, round: State(x, x, 0, 1.0), step)
    caden.simulate(method, *small, rounds=6, directory=tmp_path / "r", checkpoint_every=4)
    seen = []
    caden.simulate(
        method, *small, rounds=6, directory=tmp_path / "r", resume=True, callbacks=[lambda row, s: seen.append(s)]
    )
    assert (seen[-1].count, seen[-1].factor) == (6, 2.0**-6)
    assert torch.equal(seen[-1].x, torch.full((6, 3), 6.0, dtype=torch.float64))


def test_warm_up_that_diverges_says_so(small):
    with pytest.raises(Diverged, match=r"warmup\.step_size"):
        caden.simulate(caden.methods.caden(mu_z=1.0), *small, rounds=1, warmup=Warmup(2000, 1e3))


def test_the_chosen_mu_is_in_the_summary(small):
    assert caden.simulate(caden.methods.caden(mu_z=0.7), *small, rounds=1).summary()["mu_z"] == pytest.approx(0.7)


def test_ctrl_c_ends_after_the_round_and_can_be_resumed(small, tmp_path):
    method = caden.methods.caden(mu_z=1.0)
    whole = caden.simulate(method, *small, rounds=12, participation=0.5)

    def press(row, state):
        if row["round"] == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="resume=True") as caught:
        caden.simulate(method, *small, rounds=12, participation=0.5, directory=tmp_path / "run", callbacks=[press])
    assert caught.value.result.rows[-1]["round"] == 5
    rest = caden.simulate(method, *small, rounds=12, participation=0.5, directory=tmp_path / "run", resume=True)
    assert torch.equal(rest.x, whole.x)
    drop = ["seconds"]
    pd.testing.assert_frame_equal(rest.history.drop(columns=drop), whole.history.drop(columns=drop))


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_resume_from_any_checkpoint_is_the_same_run(small, tmp_path, participation, carry):
    """Also when rows were written after the checkpoint, and when the last line is cut off."""
    method = caden.methods.caden(solver=caden.solvers.lbfgs(memory=3, carry=carry))
    options = {
        "rounds": 14,
        "participation": participation,
        "warmup": Warmup(3, 0.1),
        "local_steps": [1, 2, 3, 4, 5, 0],
    }
    whole = caden.simulate(method, *small, **options)

    class Stop(Exception):
        pass

    def crash(row, state):
        if row["round"] == 9:
            raise Stop

    with pytest.raises(Stop):
        caden.simulate(method, *small, directory=tmp_path / "r", checkpoint_every=4, callbacks=[crash], **options)
    with (tmp_path / "r" / "metrics.csv").open("a") as file:
        file.write("10,0.1,12")
    rest = caden.simulate(method, *small, directory=tmp_path / "r", resume=True, **options)
    assert torch.equal(rest.x, whole.x)
    drop = ["seconds"]
    pd.testing.assert_frame_equal(rest.history.drop(columns=drop), whole.history.drop(columns=drop))


def test_damaged_checkpoints_are_refused(small, tmp_path):
    method = caden.methods.caden(mu_z=1.0)
    caden.simulate(method, *small, rounds=25, directory=tmp_path / "r")
    path = newest(tmp_path / "r")
    good = path.read_bytes()
    for bad in (good[:-9], good[:-1] + bytes([good[-1] ^ 1]), b"", b"not a checkpoint"):
        path.write_bytes(bad)
        with pytest.raises(CadenError, match="damaged") as caught:
            caden.simulate(method, *small, rounds=30, directory=tmp_path / "r", resume=True)
        assert "\n" not in str(caught.value)
    path.write_bytes(good)
    other = (caden.problems.quadratic(6, 4), small[1])
    with pytest.raises(CadenError, match="does not fit"):
        caden.simulate(method, *other, rounds=30, directory=tmp_path / "r", resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": -1}, "`rounds`"),
        ({"rounds": "ten"}, "`rounds`"),
        ({"participation": 0.0}, "participation"),
        ({"participation": [0.5] * 5}, "one value per agent"),
        ({"local_steps": -2}, "local_steps"),
        ({"tolerance": 0}, "tolerance"),
        ({"target": 93}, "target"),
        ({"record_every": 0}, "record_every"),
        ({"resume": True}, "directory"),
    ],
)
def test_bad_options(small, options, message):
    with pytest.raises(CadenError, match=message):
        caden.simulate(caden.methods.caden(mu_z=1.0), *small, **({"rounds": 1} | options))


def test_result_module_only_for_modules(small):
    result = caden.simulate(caden.methods.caden(mu_z=1.0), *small, rounds=1)
    with pytest.raises(CadenError, match=r"nn\.Module"):
        result.module()


def test_progress_bar_shows_and_ends(small, capsys):
    caden.simulate(caden.methods.caden(mu_z=1.0), *small, rounds=3, progress=True)
    assert "loss" in capsys.readouterr().err
    caden.simulate(caden.methods.caden(mu_z=1.0), *small, rounds=3)
    assert capsys.readouterr().err == ""


def test_a_run_leaves_the_process_as_it_was(small, tmp_path, monkeypatch):
    """What a notebook would notice: threads, kernels, signals, the path, the environment, matplotlib's backend."""
    matplotlib = pytest.importorskip("matplotlib")

    def process():
        backend = dict.__getitem__(matplotlib.rcParams, "backend")  # without choosing one
        torch_state = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
        environment = {name: value for name, value in os.environ.items() if "INDUCTOR" not in name}  # torch's own
        return torch_state, signal.getsignal(signal.SIGINT), list(sys.path), environment, str(backend)

    monkeypatch.setenv("WORLD_SIZE", "4")  # a launcher's, which is none of our business
    monkeypatch.setenv("RANK", "2")
    before = process()
    result = caden.simulate(
        caden.methods.caden(mu_z=1.0), *small, rounds=3, directory=tmp_path / "run", deterministic=True
    )
    assert len(result.x) == 6 and (tmp_path / "run" / "curves.png").exists()
    assert process() == before


def test_options_are_keywords_of_their_groups_and_listed_by_help(small):
    names = set(inspect.signature(caden.simulate).parameters)
    for group in (caden.Conditions, caden.Stopping, caden.Saving):
        assert {field.name for field in dataclasses.fields(group)} <= names
        assert inspect.getdoc(group)
    with pytest.raises(CadenError, match="did you mean 'participation'"):
        caden.simulate(caden.methods.gt(), *small, particpation=0.5)


def test_problems_of_any_class_are_completed(small):
    class Plain:
        agents, dim, dtype, device = 6, 2, torch.float64, torch.device("cpu")

        def value_and_grad(self, x, rows=None):
            return (x**2).sum(1) / 2, x - 1

    result = caden.simulate(caden.methods.gt(0.3), Plain(), small[1], rounds=200)
    torch.testing.assert_close(result.mean, torch.ones(2, dtype=torch.float64), atol=1e-6, rtol=0)
    with pytest.raises(CadenError, match=r"nn\.Module"):
        result.module()
    with pytest.raises(CadenError, match="Hessian"):
        caden.simulate(caden.methods.esom(), Plain(), small[1], rounds=1)
    with pytest.raises(CadenError, match="no `agents`"):
        caden.simulate(caden.methods.gt(), object(), small[1], rounds=1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: ((x * x).sum(1) / 2, x.mean(0, keepdim=True)),
        lambda x: ((x * x).sum(1, keepdim=True) / 2, x),
        lambda x: ((x * x).sum(1).long(), x),
        lambda x: ((x * x).sum(1) / 2, x.float()),
        lambda x: (0.5, x),
    ],
)
def test_values_and_gradients_of_another_shape_or_type_are_refused(wrong):
    """Compiled loops would read beyond their ends."""

    class Wrong(caden.Problem):
        agents, dim, dtype, device = 6, 3, torch.float64, torch.device("cpu")

        def value_and_grad(self, x, rows=None):
            return wrong(x)

    with pytest.raises(CadenError, match=r"`value_and_grad` must return (values|gradients) of shape"):
        caden.simulate(caden.methods.caden(), Wrong(), caden.graphs.ring(6), 2)


def test_values_with_their_graph_are_as_good_as_without():
    class Attached(caden.Problem):
        agents, dim, dtype, device = 6, 3, torch.float64, torch.device("cpu")

        def value_and_grad(self, x, rows=None):
            x = x.clone().requires_grad_()
            value = ((x - 1) ** 2).sum(1) / 2
            return value, torch.autograd.grad(value.sum(), x, create_graph=True)[0]

    result = caden.simulate(caden.methods.caden(), Attached(), caden.graphs.ring(6), 20)
    assert float((result.x - 1).abs().max()) < 1e-6


def test_a_method_shows_its_parameters_even_if_some_are_not_set_yet():
    def make(step_size):
        def init(x, round):
            return step_size, later

        if step_size > 1:
            later = 0
        return caden.Method(init, init, "mine")

    assert make(0.5).parameters() == {"step_size": 0.5}
    assert repr(make(2.0)) == "mine(later=0, step_size=2.0)"
