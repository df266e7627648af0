"""Compiled loops against torch: the same solves, values, gradients and sums, with and without the extra `fast`."""

import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import caden
from caden._tensor import compiled, parallel
from caden.core import Objective
from caden.engine.run import CountingProblem
from caden.problems._perceptron import Perceptron
from caden.problems._traced import Traced
from caden.solvers import lbfgs

if not compiled.installed():
    pytest.skip("numba is missing or switched off", allow_module_level=True)
F64 = torch.float64


def barrier(agent, dim):
    """Not a number outside a small ball, where two agents start: rejected trials, fallbacks, stalls."""
    centre = 0.005 * agent
    return lambda x: 100 * x.sum() - (0.03**2 - ((x - centre) ** 2).sum()).log()


def steep(agent, dim):
    """Curvature that explodes away from the start."""
    return lambda x: (x**4).sum() * 1e3 * (1 + agent) + x.sum() * 0.1


def wavy(agent, dim):
    """Not convex: pairs that must not be stored."""
    return lambda x: (3 * x + agent).sin().sum() + 0.01 * (x**2).sum()


PROBLEMS = {
    "quadratic": lambda: caden.problems.quadratic(6, 7, seed=1),
    "quadratic float32": lambda: caden.problems.quadratic(6, 7, seed=1, dtype=torch.float32),
    "logistic": lambda: caden.problems.logistic(6, 9, samples=11, alpha=0.2, l2=0.05, seed=2),
    "barrier": lambda: caden.problems.functions([barrier(i, 3) for i in range(6)], dim=3),
    "steep": lambda: caden.problems.functions([steep(i, 3) for i in range(6)], dim=3),
    "wavy": lambda: caden.problems.functions([wavy(i, 4) for i in range(6)], dim=4),
}


@pytest.fixture
def by_torch(monkeypatch):
    """A switch: True leaves everything to torch."""
    known = compiled.installed()

    def switch(off):
        monkeypatch.setattr(compiled, "installed", lambda: known and not off)

    return switch


def solves(problem, solver, work, accuracy, count=4):
    """Several solves in a row, with carried pairs, another rho in each, and a slope; of the third, half are asleep."""
    generator = torch.Generator().manual_seed(3)
    x = 0.001 * torch.randn(problem.agents, problem.dim, generator=generator, dtype=F64).to(problem.dtype)
    memory, found = solver.init(problem, x, None), []
    for n in range(count):
        slope = 0.01 * torch.randn(x.shape, generator=generator, dtype=F64).to(x.dtype)
        objective = Objective(problem, slope, torch.full((len(x), 1), 0.3 * (n + 1), dtype=x.dtype), accuracy)
        asked = work if n != 2 else torch.where(torch.arange(len(x)) % 2 == 0, work, 0)
        solved = solver.solve(objective, x, asked, memory)
        x, memory = solved.x.clone(), solved.memory
        found.append(solved)
    return found


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    ("options", "work", "accuracy"),
    [
        ({}, [3] * 6, None),
        ({"memory": 2}, [1, 2, 3, 4, 0, 6], None),
        ({"carry": False}, [4] * 6, None),
        ({"eps": 0.5}, [3] * 6, None),
        ({"line_search": "none"}, [2] * 6, None),
        ({}, [6] * 6, 0.5),
    ],
    ids=["plain", "unequal work", "dropped pairs", "eps", "no search", "accuracy"],
)
def test_solves_are_those_of_torch(name, options, work, accuracy, by_torch):
    """Iterates, values, gradients, steps, numbers of pairs, rejected trials, fallbacks and stalls."""
    problem, work, found = PROBLEMS[name](), torch.tensor(work), []
    for off in (True, False):
        by_torch(off)
        counted = CountingProblem(problem)
        found.append((solves(counted, lbfgs(**options), work, accuracy), counted.gradients))
    assert found[0][1] == found[1][1]
    small = 1e-10 if problem.dtype == F64 else 1e-5
    for a, b in zip(found[0][0], found[1][0]):
        for part in ("rejected", "fallbacks", "stalled"):
            assert getattr(a.info, part) == getattr(b.info, part)
        assert torch.equal(a.info.steps, b.info.steps)
        assert torch.equal(a.memory.stored, b.memory.stored)
        for one, other in ((a.x, b.x), (a.memory.value, b.memory.value), (a.memory.gradient, b.memory.gradient)):
            near = small * (1 + float(one.nan_to_num().abs().max()))
            torch.testing.assert_close(one, other, rtol=0, atol=near, equal_nan=True)


def test_the_cases_above_meet_what_they_are_meant_to():
    """Rejected trials, fallbacks, pairs that are refused, and accuracy that ends a solve early."""
    six = torch.full((6,), 6)
    assert any(s.info.fallbacks for s in solves(PROBLEMS["barrier"](), lbfgs(), six, None))
    assert any(s.info.rejected for s in solves(PROBLEMS["steep"](), lbfgs(), six, None))
    assert any((s.memory.stored < s.info.steps).any() for s in solves(PROBLEMS["wavy"](), lbfgs(), six, None, 1))
    assert any((s.info.steps < 6).any() for s in solves(PROBLEMS["quadratic"](), lbfgs(), six, 0.5, 1))


def test_rows_that_stall_are_those_of_torch(by_torch):
    """A function that exists at the start only: no point is acceptable, and no caution is carried on."""
    f = lambda x: torch.where(x > 0, torch.nan, x).sum()  # noqa: E731
    problem = caden.problems.functions([f, lambda x: (x**2).sum()], dim=1)

    class Uphill(caden.Problem):
        agents, dim, dtype, device = 2, 1, F64, torch.device("cpu")

        def value_and_grad(self, x, rows=None):
            value, gradient = problem.value_and_grad(x, rows)
            gradient[[] if rows is not None and 0 not in rows.tolist() else 0] = -1.0
            return value, gradient

    found = []
    for off in (True, False):
        by_torch(off)
        solver, x = lbfgs(), torch.tensor([[0.0], [1.0]], dtype=F64)
        objective = Objective(Uphill(), torch.zeros_like(x), torch.full((2, 1), 0.1, dtype=F64))
        found.append(solver.solve(objective, x, torch.tensor([3, 3]), solver.init(Uphill(), x, None)))
    for solved in found:
        assert solved.info.stalled == (0,)
        assert torch.equal(solved.x[0], torch.zeros(1, dtype=F64))
    torch.testing.assert_close(found[0].x, found[1].x)
    torch.testing.assert_close(found[0].memory.curvature[0], found[1].memory.curvature[0])
    assert found[0].info.rejected == found[1].info.rejected


@pytest.mark.parametrize("first", [True, False])
def test_a_run_changes_over_in_the_middle(first, by_torch, quadratic, graph):
    """Pairs that one path stored serve the other: a checkpoint is resumed where the extra is missing, or new."""
    from caden.experiments.bench import Rounds

    runs = []
    for paths in ([True] * 3, [first] * 2 + [not first]):  # later, more pairs than dimensions amplify rounding errors
        run = Rounds(caden.methods.caden(mu_z=0.5), quadratic, graph)
        for off in paths:
            by_torch(off)
            run()
        runs.append(run.x)
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_values_and_gradients_are_those_of_torch(dtype, by_torch, monkeypatch):
    """All agents and some; unequal shards; margins from which softplus is linear; an agent's samples in pieces."""
    rng = np.random.default_rng(0)
    sizes = (9, 40, 1, 23)
    shards = [rng.normal(size=(n, 6)) * 8 for n in sizes], [np.sign(rng.normal(size=n)) for n in sizes]
    cases = [
        caden.problems.quadratic(4, 6, dtype=dtype),
        caden.problems.logistic(features=shards[0], labels=shards[1], alpha=0.3, l2=0.2, dtype=dtype),
        caden.problems.logistic(features=shards[0], labels=shards[1], alpha=0.0, dtype=dtype),
    ]
    x = torch.from_numpy(rng.normal(size=(4, 6))).to(dtype)
    scale = 1e3 * torch.finfo(dtype).eps
    from caden.problems import _compiled

    for problem in cases:
        for rows in (None, torch.tensor([2]), torch.tensor([1, 3])):
            points = x if rows is None else x[rows]
            by_torch(True)
            expected = problem.value_and_grad(points, rows)
            by_torch(False)
            for piece in (1 << 17, 50):
                monkeypatch.setattr(_compiled, "_PIECE", piece)
                for a, b in zip(problem.value_and_grad(points, rows), expected):
                    torch.testing.assert_close(a, b, rtol=scale, atol=scale)


def test_bits_do_not_depend_on_threads_or_on_other_rows(by_torch, monkeypatch):
    """An agent alone, among others and on any number of threads: what ranks and deterministic runs rely on."""
    monkeypatch.setattr(parallel, "_SLICE", 1)  # everything is worth a thread
    problem = caden.problems.logistic(7, 21, samples=13, l2=0.01)
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    x = torch.randn(7, 21, generator=generator, dtype=F64)
    work = torch.tensor([4, 3, 5, 0, 4, 2, 4])
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(solves(problem, lbfgs(), work, None)[-1].x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    for i in range(7):
        part = problem.take([i])
        alone, together = part.value_and_grad(x[i : i + 1]), problem.value_and_grad(x)
        assert torch.equal(alone[0][0], together[0][i]) and torch.equal(alone[1][0], together[1][i])


def test_sums_over_edges_have_the_bits_of_torch(by_torch, graph):
    from caden.experiments.bench import Rounds

    problem = caden.problems.quadratic(20, 5, dtype=torch.float32)
    run = Rounds(caden.methods.gt(0.1), problem, graph).run
    rows = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    found = []
    for off in (True, False):
        by_torch(off)
        everyone, work = torch.ones(20, dtype=torch.bool), torch.ones(20, dtype=torch.int64)
        heard = run.network.round(0, everyone, work, run.problem).broadcast(rows)
        found.append((heard.laplacian(), heard.mix()))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_a_traced_network_has_the_bits_of_the_first_calls():
    """Some agents only are computed among all of them; shapes that come seldom are not traced."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(60, 5, generator=generator), torch.randint(3, (60,), generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    problem = caden.problems.classification(model, data, agents=6, execution="vmap")
    x = problem.start + torch.randn(6, problem.dim, generator=generator)
    first = problem.value_and_grad(x)
    for _ in range(12):
        last = problem.value_and_grad(x)
    assert [isinstance(trace, torch.fx.GraphModule) for trace in problem._batch._traces.values()] == [True]
    assert torch.equal(first[0], last[0]) and torch.equal(first[1], last[1])
    rows = torch.tensor([1, 4])
    some = problem.value_and_grad(x[rows], rows)
    torch.testing.assert_close(some[0], first[0][rows])
    torch.testing.assert_close(some[1], first[1][rows])
    one = (x[1].clone().requires_grad_(), *problem.batch(1))
    cross_entropy(
        torch.func.functional_call(problem.model.module, problem.model.views(one[0]), one[1]), one[2]
    ).backward()
    torch.testing.assert_close(last[1][1], one[0].grad)


NETWORKS = {
    "one layer": (nn.Linear(5, 3),),
    "biases": (nn.Flatten(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)),
    "three layers": (nn.Linear(5, 4, bias=False), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)),
}
OTHERS = {
    "another activation": (nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
    "activation at the end": (nn.Linear(5, 3), nn.ReLU()),
    "frozen layer": (nn.Linear(5, 4).requires_grad_(False), nn.Linear(4, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", [*NETWORKS, *OTHERS])
def test_a_gradient_that_is_written_out_is_that_of_autograd(name, dtype):
    """Shards of two sizes, all agents and some of them."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(62, 5, generator=generator), torch.randint(3, (62,), generator=generator)
    model = nn.Sequential(*(NETWORKS | OTHERS)[name])
    problem = caden.problems.classification(model, data, agents=6, execution="vmap", dtype=dtype)
    assert isinstance(problem._some, Perceptron) == (name in NETWORKS)
    x = problem.start + torch.randn(6, problem.dim, generator=generator, dtype=dtype)
    value, gradient = problem.value_and_grad(x)
    problem.execution = "loop"
    expected = problem.value_and_grad(x)
    problem.execution = "vmap"
    torch.testing.assert_close((value, gradient), expected)
    rows = torch.tensor([0, 1, 4])
    torch.testing.assert_close(problem.value_and_grad(x[rows], rows), (value[rows], gradient[rows]))


def test_hooks_are_called():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    data = torch.randn(12, 5), torch.arange(12) % 3
    assert not isinstance(caden.problems.classification(model, data, agents=2)._some, Perceptron)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_steps_at_once_are_steps_one_by_one(by_torch, dtype):
    problem = CountingProblem(caden.problems.logistic(6, 9, samples=11, alpha=0.2, l2=0.05, seed=2, dtype=dtype))
    x, correction = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0), dtype=F64).to(dtype)
    work = torch.tensor([3, 0, 1, 5, 2, 5])
    expected = x.clone()
    for i, steps in enumerate(work.tolist()):
        for _ in range(steps):
            gradient = problem.value_and_grad(expected[i : i + 1], torch.tensor([i]))[1][0]
            expected[i] -= 0.1 * (gradient + correction[i])
    problem.forget()
    assert problem.by_agent.sum() == 0
    torch.testing.assert_close(problem.descend(x, 0.1, correction, work), expected)
    assert problem.gradients == 16 and problem.by_agent.tolist() == work.tolist()
    by_torch(True)
    assert problem.descend(x, 0.1, correction, work) is None


def test_what_cannot_be_traced_is_called():
    def stubborn(x):
        return x * float(x.sum())  # a number in the middle ends the trace

    calls = Traced(stubborn)
    assert all(torch.equal(calls(torch.ones(2)), torch.full((2,), 2.0)) for _ in range(15))
    assert torch.equal(calls(torch.zeros(2)), torch.zeros(2))


def test_the_command_line_does_not_load_it_and_it_can_be_switched_off(monkeypatch):
    code = "import caden.cli, sys; assert 'caden._tensor.compiled' not in sys.modules and 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert compiled.installed.__wrapped__()
    monkeypatch.setenv("CADEN_COMPILED", "off")
    assert not compiled.installed.__wrapped__()


def test_layers_of_ones_own_may_change_what_they_compute():
    """A recorded gradient would go on computing what it was recorded with."""

    class Scaled(torch.nn.Linear):
        factor = 1.0

        def forward(self, inputs):
            return self.factor * super().forward(inputs)

    inputs, targets = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2
    problem = caden.problems.classification(Scaled(3, 2), (inputs, targets), agents=4, execution="vmap")
    x = torch.randn(4, problem.dim, generator=torch.Generator().manual_seed(1))
    before = [problem.value_and_grad(x)[0] for _ in range(15)]
    Scaled.factor = 3.0
    after = problem.value_and_grad(x)[0]
    fresh = caden.problems.classification(Scaled(3, 2), (inputs, targets), agents=4, execution="vmap").value_and_grad(
        x
    )[0]
    assert torch.equal(before[0], before[-1])
    assert torch.equal(after, fresh) and not torch.equal(after, before[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.value_and_grad(torch.ones(4, 5, dtype=torch.float64)),
        lambda p: p.value_and_grad(torch.ones(4, 2, dtype=torch.float64)),
        lambda p: p.value_and_grad(torch.ones(6, 3, dtype=torch.float64)),
        lambda p: p.value_and_grad(torch.ones(1, 3, dtype=torch.float64)),
        lambda p: p.value_and_grad(torch.ones(4, 3, dtype=torch.float32)),
        lambda p: p.value_and_grad(torch.ones(1, 3, dtype=torch.float64), torch.tensor([9])),
        lambda p: p.value_and_grad(torch.ones(1, 3, dtype=torch.float64), torch.tensor([-1])),
    ],
)
@pytest.mark.parametrize("make", ["quadratic", "logistic"])
def test_rows_that_do_not_fit_are_refused(make, call):
    """Compiled loops would read and write beyond the end."""
    problem = getattr(caden.problems, make)(agents=4, dim=3)
    with pytest.raises(caden.CadenError, match="must"):
        call(problem)


def test_a_broadcast_of_too_few_rows_is_refused():
    def step(state, round):
        return state._replace(x=state.x - round.broadcast(state.x[:4]).laplacian()), caden.core.Info()

    class State(NamedTuple):
        x: torch.Tensor

    method = caden.core.Method(lambda x, round: State(x), step)
    problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    with pytest.raises(caden.CadenError, match="each of the 6 agents"):
        caden.simulate(method, problem, graph, rounds=1, progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinite_numbers_are_those_of_torch(dtype):
    problems = (
        caden.problems.logistic(
            agents=2, features=[[[1.0, 0.5]], [[1.0, 0.5]]], labels=[[1], [1]], alpha=0.0, dtype=dtype
        ),
        caden.problems.quadratics([np.eye(2)[None][0].tolist()] * 2, [[1.0, 1.0]] * 2, dtype=dtype),
    )
    for problem in problems:
        for point in ([torch.inf, 1.0], [1.0, torch.inf], [-torch.inf, 1.0], [torch.nan, 1.0]):
            x = torch.tensor([point, [1.0, 2.0]], dtype=dtype)
            fast = problem.value_and_grad(x)
            with compiled.left_to_torch():
                plain = problem.value_and_grad(x)
            for a, b in zip(fast, plain):
                assert torch.allclose(a, b, equal_nan=True), (point, a, b)


def test_what_autograd_records_is_left_to_torch():
    problem = caden.problems.quadratic(agents=2, dim=3)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    value, gradient = problem.value_and_grad(x)
    assert torch.allclose(torch.autograd.grad(value.sum(), x)[0], gradient)


def run_python(code, **environment):
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


QUADRATIC = """
import caden
p = caden.problems.quadratic(agents=2, dim=2)
print(float(p.value_and_grad(p.linear)[0][0]))
"""


def test_without_a_place_for_the_cache_loops_are_compiled_all_the_same(tmp_path):
    code = f"import numba.core.caching as c; c.CacheImpl._locator_classes = []; c._CacheImpl = c.CacheImpl\n{QUADRATIC}"
    done = run_python(code, NUMBA_CACHE_DIR="/proc/nowhere")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(float(run_python(QUADRATIC, CADEN_COMPILED="0").stdout))


def test_a_broken_numba_warns_and_torch_computes(tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less')\n")
    done = run_python(QUADRATIC, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and "numba cannot be used (Numba needs NumPy" in done.stderr


def test_a_wrong_switch_is_refused():
    done = run_python(QUADRATIC, CADEN_COMPILED="perhaps")
    assert done.returncode != 0 and "CADEN_COMPILED" in done.stderr
