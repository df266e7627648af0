"""Real networks: reproducible randomness, any optimizer as local solver, data that are read when they are used."""

import copy
import hashlib
import math
import random
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset

import caden
from caden import draws, graphs, methods, problems, solvers
from caden.engine.process import deterministic_mode
from caden.errors import CadenError
from caden.experiments.bench import Rounds
from caden.methods import _auto
from caden.problems import _module

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "weight_decay": 0.01},
    "Adafactor": {"lr": 0.01},
}


def images(count=120, side=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    pixels = torch.randn(count, 1, side, side, generator=generator)
    return pixels + labels[:, None, None, None] / 2, labels


def small(norm="group", dropout=0.0):
    return problems.cnn(1, 8, 3, hidden=12, norm=norm, dropout=dropout)


def make(model=None, data=None, agents=3, **options):
    settings = {"batch_size": 8, "seed": 4, **options}
    return problems.classification(
        small() if model is None else model, data or images(), images(40, seed=1), agents, **settings
    )


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain_loop(model, optimizer, shard, agent, rounds, steps, size, seed=4):
    """A training loop of one's own with the public draws."""
    model, (inputs, targets) = copy.deepcopy(model), shard
    optimizer = optimizer(model.parameters())
    for round in range(rounds):
        for step in range(steps):
            chosen = draws.batch(seed, round, step, agent, len(targets), size)
            with draws.randomness(seed, round, step, agent):
                loss = cross_entropy(model(inputs[chosen]), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return flat(model)


# Draws.


def test_a_batch_has_no_repetitions_and_every_sample_its_chance():
    for samples, size in ((30, 7), (500, 7), (5, 9)):
        counts, share = np.zeros(samples), min(size, samples) / samples
        for step in range(600):
            chosen = draws.batch(0, 2, step, 1, samples, size)
            assert len(set(chosen.tolist())) == min(size, samples) and list(chosen) == sorted(chosen)
            counts[chosen] += 1
        deviation = ((counts - 600 * share) ** 2).mean()
        assert deviation <= 600 * share * (1 - share) * (1 + 5 * (2 / samples) ** 0.5)  # five sigma of chi-square
    kinds = {tuple(draws.batch(s, r, k, a, 99, 9)) for s in (0, 1) for r in (0, 1) for k in (0, 1) for a in (0, 1)}
    assert len(kinds) == 16


def test_randomness_is_the_same_again_and_leaves_no_trace():
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    expected = torch.rand(2), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    drawn = []
    for agent in (0, 0, 1):
        with draws.randomness(0, 1, 2, agent, of="data"):
            drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))  # noqa: NPY002
    assert drawn[0] == drawn[1] and all(a != b for a, b in zip(drawn[0], drawn[2]))
    assert torch.equal(torch.rand(2), expected[0]) and (np.random.rand(), random.random()) == expected[1:]  # noqa: NPY002


# Optimizers.


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["dropout", "batch norm"])
def test_without_communication_it_is_a_plain_loop_to_the_bit(name, kind):
    model = small(dropout=0.3) if kind == "dropout" else small(norm="batch")
    problem, optimizer = make(model), getattr(torch.optim, name)
    method = methods.local(solver={"name": "torch_optim", "optimizer": name, **OPTIMIZERS[name]})
    result = caden.simulate(method, problem, graphs.ring(3), 3, local_steps=2, deterministic=True)
    with deterministic_mode(True):
        for agent in range(3):
            expected = plain_loop(
                model, lambda p: optimizer(p, **OPTIMIZERS[name]), problem.shards[agent], agent, 3, 2, 8
            )
            assert torch.equal(result.x[agent], expected)
    assert result.rows[-1]["communications"] == 0


class Counting(torch.optim.Optimizer):
    """Steps that depend on a count kept in the groups, and on sums in nested lists; `beta` has no exact float32."""

    def __init__(self, parameters, lr, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "form": "sum"})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["sums"] = [[], [torch.zeros_like(p), p.new_zeros(len(p))]]
                whole, rows = state["sums"][1]
                whole.mul_(group["beta"]).add_(p.grad)
                rows.add_(p.grad.flatten(1).abs().mean(1) if p.ndim > 1 else p.grad.abs())
                scale = 1 / (group["count"] * (1 + rows)).reshape(-1, *[1] * (p.ndim - 1))
                p.sub_(whole * scale, alpha=group["lr"])


class Secretive(torch.optim.SGD):
    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["secret"] = object()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_optimizer_from_elsewhere_keeps_nested_state_and_what_its_groups_count(dtype):
    model, problem = small().to(dtype), make(dtype=dtype)
    method = methods.local(solver=solvers.torch_optim(Counting, lr=0.05))
    result = caden.simulate(method, problem, graphs.ring(3), 3, local_steps=2, deterministic=True)
    with deterministic_mode(True):
        expected = plain_loop(model, lambda p: Counting(p, lr=0.05), problem.shards[1], 1, 3, 2, 8)
    assert torch.equal(result.x[1], expected)
    fresh = methods.local(solver=solvers.torch_optim(Counting, lr=0.05, carry=False))
    forgetful = caden.simulate(fresh, problem, graphs.ring(3), 3, local_steps=2, deterministic=True)
    assert not torch.equal(forgetful.x, result.x)


class Late(torch.optim.SGD):
    """Keeps a mean of its gradients from its second step on."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if state.get("seen"):
                    state["mean"] = p.grad.clone()
                state["seen"] = 1
        super().step()


def test_state_that_comes_later_is_refused_instead_of_dropped():
    def run(**options):
        method = methods.local(solver=solvers.torch_optim(Late, lr=0.1, **options))
        return caden.simulate(method, make(), graphs.ring(3), 2, local_steps=2)

    with pytest.raises(CadenError, match="other state after later steps"):
        run()
    run(carry=False)


class NoRate(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        return None


def test_an_optimizer_without_a_rate_is_refused():
    with pytest.raises(CadenError, match="no learning rate"):
        caden.simulate(methods.local(solver=solvers.torch_optim(NoRate)), make(), graphs.ring(3), 2)


def test_an_optimizer_whose_state_cannot_be_kept_is_refused():
    method = methods.local(solver=solvers.torch_optim(Secretive, lr=0.1))
    with pytest.raises(CadenError, match="value of type object"):
        caden.simulate(method, make(), graphs.ring(3), 1)


def test_muon_takes_kernels_as_matrices():
    model = small()

    def split(parameters):
        parameters = list(parameters)
        matrices = [nn.Parameter(p.data.view(len(p), -1)) for p in parameters if p.ndim > 1]
        pairs = list(zip([p for p in parameters if p.ndim > 1], matrices))
        muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW([p for p in parameters if p.ndim < 2], lr=0.02, weight_decay=0.0)

        class Both:
            def zero_grad(self):
                for p in parameters:
                    p.grad = None

            def step(self):
                for whole, matrix in pairs:
                    matrix.grad = whole.grad.view_as(matrix)
                muon.step(), adam.step()

        return Both()

    problem = make(model)
    method = methods.local(solver=solvers.torch_optim(torch.optim.Muon, lr=0.02))
    result = caden.simulate(method, problem, graphs.ring(3), 3, local_steps=2, deterministic=True)
    with deterministic_mode(True):
        expected = plain_loop(model, split, problem.shards[1], 1, 3, 2, 8)
    assert torch.equal(result.x[1], expected)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Rprop", "NAdam"])
@pytest.mark.parametrize("awake", [1.0, 0.5])
def test_elementwise_optimizers_of_many_rows_are_those_of_each(name, awake):
    problem, options = make(agents=6), {"lr": 0.01}
    method = methods.caden(0.1, solver=solvers.torch_optim(getattr(torch.optim, name), **options))
    runs = [
        caden.simulate(method, problem, graphs.ring(6), 4, participation=awake, local_steps=2, deterministic=alone)
        for alone in (False, True)
    ]
    torch.testing.assert_close(runs[0].x, runs[1].x, rtol=1e-3, atol=2e-5)


def test_the_state_of_a_sleeping_agent_rests():
    """An agent that is awake in every other round takes the steps that it would take in half as many rounds."""
    quadratic = problems.quadratic(agents=2, dim=3)  # no draws: rounds do not matter
    method = methods.local(solver=solvers.torch_optim(torch.optim.Adam, lr=0.1))
    awake = [[True, True], [True, False]] * 3
    half = caden.simulate(method, quadratic, graphs.path(2), 6, participation=lambda t, draw: np.array(awake[t]))
    both = caden.simulate(method, quadratic, graphs.path(2), 6)
    third = caden.simulate(method, quadratic, graphs.path(2), 3)
    torch.testing.assert_close(half.x[0], both.x[0])
    torch.testing.assert_close(half.x[1], third.x[1])


def test_state_is_carried_or_not():
    quadratic = problems.quadratic(agents=2, dim=3)
    ends = {}
    for carry in (True, False):
        method = methods.local(solver=solvers.torch_optim(torch.optim.SGD, lr=0.05, momentum=0.9, carry=carry))
        ends[carry] = caden.simulate(method, quadratic, graphs.path(2), 4, local_steps=1).x
    plain = caden.simulate(methods.local(lr=0.05, momentum=0.0), quadratic, graphs.path(2), 4, local_steps=1).x
    together = caden.simulate(methods.local(lr=0.05, momentum=0.9), quadratic, graphs.path(2), 1, local_steps=4).x
    torch.testing.assert_close(ends[False], plain)  # the first step of momentum is a plain one
    torch.testing.assert_close(ends[True], together)


def test_schedule_and_clip():
    quadratic, steps = problems.quadratic(agents=2, dim=3), []
    solver = solvers.torch_optim(torch.optim.SGD, lr=1.0, schedule="linear", clip=0.01)
    caden.simulate(
        methods.local(solver=solver),
        quadratic,
        graphs.path(2),
        4,
        local_steps=1,
        callbacks=[lambda row, state: steps.append(state.x.clone())],
    )
    lengths = torch.stack([(b - a).norm(dim=1) for a, b in zip([torch.zeros(2, 3), *steps[:-1]], steps)])
    torch.testing.assert_close(lengths[:, 0], torch.tensor([4.0, 3.0, 2.0, 1.0]).double() / 400, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "Adamm"}, "did you mean 'Adam'"),
        ({"optimizer": torch.optim.LBFGS}, "needs a closure"),
        ({"optimizer": "SGD", "lr": -1}, "does not accept these options"),
        ({"optimizer": "SGD", "rate": 1}, "does not accept these options"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"clip": 0}, "clip"),
        ({"optimizer": 3}, "class of torch.optim"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(CadenError, match=message) as caught:
        solvers.torch_optim(**options)
    assert "\n" not in str(caught.value)


def test_the_number_of_steps_cannot_be_found_in_noise():
    method = methods.caden(0.1, solver={"name": "torch_optim", "lr": 0.01})
    with pytest.raises(CadenError, match="noise"):
        caden.simulate(method, make(), graphs.ring(3), 2, local_steps="auto")


@pytest.mark.parametrize("awake", [1.0, 0.5])
def test_dpsgd_is_two_lines(awake):
    quadratic, graph = problems.quadratic(agents=5, dim=3), graphs.ring(5)
    result = caden.simulate(
        methods.dpsgd(0.02, momentum=0.0), quadratic, graph, 6, local_steps=2, participation=awake, seed=3
    )
    x, adjacency = torch.zeros(5, 3, dtype=torch.float64), torch.from_numpy(graph.adjacency).double()
    for round in range(6):
        up = torch.from_numpy(draws.Draw(3, 5).uniform("participation", round) < awake)
        for _ in range(2):
            x = torch.where(up[:, None], x - 0.02 * quadratic.value_and_grad(x)[1], x)
        links = adjacency * up[:, None] * up
        degree = links.sum(1)
        weights = links / (1 + torch.maximum(degree[:, None], degree))
        x = x + weights @ x - weights.sum(1, keepdim=True) * x
    torch.testing.assert_close(result.x, x)


def test_optimizers_may_stop_at_different_steps_where_nothing_is_drawn():
    quadratic = problems.quadratic(agents=5, dim=3)
    method = methods.caden(0.5, solver=solvers.torch_optim("SGD", lr=0.2))
    result = caden.simulate(method, quadratic, graphs.ring(5), 300, local_steps="auto")
    assert float((result.x - quadratic.solution).abs().max()) < 1e-6
    with pytest.raises(CadenError, match="bias"):
        caden.simulate(methods.dpsgd(), quadratic, graphs.ring(5), 2, local_steps="auto")


def test_one_solver_serves_problems_of_other_types_and_shapes():
    solver = solvers.torch_optim("AdamW", lr=0.01)
    for dtype in (torch.float32, torch.float64):
        caden.simulate(methods.local(solver=solver), make(dtype=dtype), graphs.ring(3), 1, local_steps=1)


# Where local steps begin.


@pytest.mark.parametrize("make_method", [lambda **o: methods.caden(0.4, **o), lambda **o: methods.dinno(0.2, 1.0, **o)])
@pytest.mark.parametrize("awake", [1.0, 0.6])
def test_the_limit_does_not_depend_on_the_start(make_method, awake):
    quadratic = problems.quadratic(agents=6, dim=3)
    method = make_method(solver="gd", start="anchor")
    result = caden.simulate(method, quadratic, graphs.ring(6), 900, participation=awake, record_every=900)
    assert float((result.x - quadratic.solution).abs().max()) < 1e-5


def test_anchor_of_the_first_round_by_hand():
    """One gradient step of size a from the mean of (x_i + x_j)/2, with phi = 0 and no pull there."""
    quadratic, graph = problems.quadratic(agents=4, dim=3), graphs.ring(4)
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    method = methods.caden(0.4, solver={"name": "gd", "step_size": 0.1}, start="anchor")
    result = caden.simulate(method, quadratic, graph, 1, x0=x, local_steps=1)
    anchor = (2 * x + x.roll(1, 0) + x.roll(-1, 0)) / 4
    expected = anchor - 0.1 * quadratic.value_and_grad(anchor)[1]
    torch.testing.assert_close(result.x, expected)


@pytest.mark.parametrize("name", ["caden", "dinno", "adapd"])
def test_an_awake_agent_without_local_steps_stays(name):
    quadratic = problems.quadratic(agents=4, dim=3)
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    method = getattr(methods, name)(solver="gd", start="anchor")
    result = caden.simulate(method, quadratic, graphs.ring(4), 1, x0=x, local_steps=[0, 2, 2, 2])
    assert torch.equal(result.x[0], x[0]) and not torch.equal(result.x[1], x[1])
    assert result.rows[-1]["objective"] == pytest.approx(float(quadratic.value_and_grad(result.x)[0].sum()))


def test_anchor_is_refused_where_agents_do_not_know_it():
    with pytest.raises(CadenError, match="does not know its anchors"):
        caden.simulate(
            methods.caden(0.4, start="anchor"), problems.quadratic(4, 3), graphs.ring(4), 2, messages={"loss": 0.1}
        )


def test_anchor_is_refused_with_a_rule_that_measures_from_x():
    with pytest.raises(CadenError, match="start"):
        caden.simulate(
            methods.caden(0.4, start="anchor"), problems.quadratic(4, 3), graphs.ring(4), 2, local_steps="auto"
        )


# Data and models.


class Noisy(Dataset):
    """A data set with a random transform, which counts how often it is read."""

    def __init__(self, noise=0.1):
        self.inputs, self.targets = images()
        self.noise, self.reads = noise, 0

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        self.reads += 1
        return self.inputs[i] + self.noise * torch.randn(1, 8, 8) + random.random() * self.noise, int(self.targets[i])


def test_random_transforms_are_drawn_anew_and_again_the_same():
    problem = make(data=Noisy())
    one, same, other, later = problem.at(2), problem.at(2), problem.at(3), problem.at(2).redraw(1)
    assert torch.equal(one.batch(1)[0], same.batch(1)[0])
    clean = images()[0][problem.shards[1].indices]
    noise = one.batch(1)[0] - clean[one.indices(1)]
    assert 0.05 < float(noise.std()) < 0.2
    assert not torch.equal(one.batch(1)[0], other.batch(1)[0]) and not torch.equal(one.batch(1)[0], later.batch(1)[0])
    results = [caden.simulate(methods.dpsgd(), problem, graphs.ring(3), 3, deterministic=True).x for _ in range(2)]
    assert torch.equal(*results)


def test_every_sample_is_read_once_for_each_use():
    data = Noisy()
    problem = make(data=data)
    before = data.reads
    caden.simulate(
        methods.dpsgd(), problem, graphs.ring(3), 4, local_steps=2, participation=0.5, warmup=None, record_every=4
    )
    counted = caden.simulate(methods.dpsgd(), problem, graphs.ring(3), 4, local_steps=2, participation=0.5)
    assert data.reads - before == 2 * 8 * counted.rows[-1]["gradients"]
    assert counted.rows[-1]["read_seconds"] > 0


def test_without_batches_a_quiet_data_set_is_read_once_and_a_noisy_one_in_every_round():
    quiet, noisy = Noisy(noise=0.0), Noisy()
    problem = make(data=quiet, batch_size=None)
    reads = quiet.reads
    assert torch.equal(problem.batch(0)[0], images()[0][: len(problem.batch(0)[0])] * 0 + problem.batch(0)[0])
    problem.value_and_grad(problem.start.expand(3, -1))
    assert quiet.reads == reads and not problem.lazy
    again = make(data=noisy, batch_size=None)
    assert again.at(0).stochastic and not torch.equal(again.at(0).batch(0)[0], again.at(1).batch(0)[0])


def test_memmaps_in_dictionaries_are_read_when_they_are_used(tmp_path):
    inputs, targets = images()
    on_disk = np.memmap(tmp_path / "x", np.float32, "w+", shape=inputs.shape)
    on_disk[:] = inputs.numpy()
    for nested in ((on_disk,), {"input": on_disk}):
        problem = problems.classification(nn.Sequential(small()), (nested, targets.numpy()), agents=3, batch_size=5)
        assert problem.lazy
        plain = make(nn.Sequential(small()), batch_size=5, seed=0)
        x = plain.start.expand(3, -1)
        torch.testing.assert_close(problem.at(1).value_and_grad(x), plain.at(1).value_and_grad(x))


def test_a_problem_with_some_agents_does_not_hold_the_data_of_others():
    """The samples on which the model is tried are copies."""
    problem = make(data=images(3000), agents=100, hosted=[3])
    stored = [t.untyped_storage().nbytes() for t in (problem.shards[0].inputs, problem.model.inputs)]
    assert stored == [30 * 64 * 4, 8 * 64 * 4]


def test_a_memmap_gives_what_the_array_gives(tmp_path):
    inputs, targets = images()
    for name, array in (("x", inputs.numpy()), ("y", targets.numpy())):
        np.save(tmp_path / f"{name}.npy", array)
    mapped = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")
    for batch_size in (8, None):
        ends = [
            caden.simulate(methods.caden(0.1), make(data=data, batch_size=batch_size), graphs.ring(3), 3).x
            for data in ((inputs, targets), mapped)
        ]
        torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    found = [problems.classification(small(), images(), test, 3) for test in ((inputs, targets), mapped)]
    x = found[0].start.expand(3, -1)
    assert torch.equal(*(problem.evaluate(x)["accuracy"] for problem in found))


class Numbered(IterableDataset):
    """Images that are all n or, for the second agent, all -n, for n = 1, 2, ... up to 5,000."""

    def __init__(self, sign):
        self.sign, self.given = sign, 0

    def __iter__(self):
        for n in range(1, 5001):
            self.given = n
            yield torch.full((1, 8, 8), float(self.sign * n)), n % 3


@pytest.mark.parametrize("batched", [True, False])
def test_streams_give_their_next_samples_to_their_own_agent(batched):
    sources = [Numbered(1), Numbered(-1)]
    with pytest.warns(UserWarning, match="sees other samples"):
        streams = caden.data.Streams([DataLoader(s, batch_size=5) for s in sources] if batched else sources)
    problem = make(data=streams, agents=2)
    for view in (problem.at(0), problem.at(0).redraw(1), problem.at(1)):
        for agent, sign in enumerate((1, -1)):
            inputs, targets = view.batch(agent)
            first = int(inputs[0].abs().max())
            numbers = torch.arange(first, first + 8)
            assert torch.equal(inputs[:, 0, 0, 0], sign * numbers.float()) and torch.equal(targets, numbers % 3)
            assert torch.equal(view.batch(agent)[0], inputs)  # the functions of a step do not change
    following = int(problem.at(2).batch(0)[0].min())
    assert following == int(problem.at(1).batch(0)[0].max()) - 15  # the views of two rounds read one after the other
    before = sources[1].given
    first_only = {"participation": lambda t, draw: np.array([True, False]), "local_steps": 2}
    result = caden.simulate(methods.dpsgd(), problem, graphs.path(2), 3, **first_only)
    assert result.rows[-1]["gradients"] == 6 and sources[1].given == before


@pytest.mark.filterwarnings("ignore:Streams cannot be read again")
def test_streams_that_cannot_be_used_are_one_line():
    inputs, targets = images()
    pairs = list(zip(inputs, targets))
    short = caden.data.Streams([pairs[:3]] * 3)  # begins anew
    assert make(data=short).at(0).batch(0)[0].shape == (8, 1, 8, 8)
    for streams, message in (
        ([], "one iterable per agent"),
        ([pairs] * 2, "`agents` must be 2"),
        ([[]] * 3, "no samples"),
    ):
        with pytest.raises(CadenError, match=message):
            make(data=caden.data.Streams(streams))
    with pytest.raises(CadenError, match="`window` of the streams"):
        make(data=caden.data.Streams([pairs] * 3, window=4))
    with pytest.raises(CadenError, match="ended and cannot be iterated again"):
        make(data=caden.data.Streams([iter(pairs[:9])] * 3))
    with pytest.raises(CadenError, match="is a DataLoader: pass its `dataset`"):
        make(data=DataLoader(list(zip(inputs, targets))))


def test_a_hugging_face_dataset_gives_what_the_arrays_give():
    datasets = pytest.importorskip("datasets")
    inputs, targets = images()
    columns = {"pixels": inputs.numpy().tolist(), "label": targets.tolist()}
    plain = datasets.Dataset.from_dict(columns)
    method = methods.caden(0.1, solver={"name": "torch_optim", "lr": 0.01})
    ends = [
        caden.simulate(
            method, make(data=data, partition="dirichlet", **options), graphs.ring(3), 3, deterministic=True
        ).x
        for data, options in (
            ((inputs, targets), {}),
            (plain, {}),
            (plain.with_format("torch"), {}),
            (plain.with_format("numpy").rename_column("label", "digit"), {"label": "digit"}),
        )
    ]
    assert all(torch.equal(ends[0], end) for end in ends[1:])
    with pytest.raises(CadenError, match="choose one of 'train'"):
        make(data=datasets.DatasetDict({"train": plain}))
    with pytest.raises(CadenError, match="Streams"):
        make(data=plain.to_iterable_dataset())


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, left, right):
        return self.left(left) + self.right(right)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_dictionaries_and_tuples_are_arguments(execution, batch_size):
    generator = torch.Generator().manual_seed(0)
    left, right, y = (
        torch.randn(30, 4, generator=generator),
        torch.randn(30, 2, generator=generator),
        torch.randint(3, (30,)),
    )
    torch.manual_seed(0)
    model = TwoInputs()
    options = {"agents": 3, "execution": execution, "batch_size": batch_size}
    named = problems.classification(model, ({"right": right, "left": left}, y), **options).at(1)
    ordered = problems.classification(model, ((left, right), y), **options).at(1)
    x = named.start.expand(3, -1)
    torch.testing.assert_close(named.value_and_grad(x), ordered.value_and_grad(x))
    inputs, targets = ordered.batch(2)
    loss = cross_entropy(model(*inputs), targets)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(ordered.value_and_grad(x)[1][2], expected)


class Language(nn.Module):
    """Tied weights and a sequence of outputs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.embed(tokens).cumsum(1))


def test_tied_weights_and_sequences():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, (40, 9), generator=generator)
    torch.manual_seed(0)
    model = Language()
    problem = problems.classification(
        model, (tokens[:, :-1], tokens[:, 1:]), (tokens[:, :-1], tokens[:, 1:]), agents=4, batch_size=6
    )
    assert problem.dim == 35
    result = caden.simulate(methods.caden(0.1, solver={"name": "torch_optim", "lr": 0.02}), problem, graphs.ring(4), 5)
    trained = result.module()
    assert trained.out.weight is trained.embed.weight
    torch.testing.assert_close(trained.embed.weight.flatten(), result.mean)
    expected = (trained(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]).float().mean()
    torch.testing.assert_close(problem.evaluate(result.mean.expand(4, -1))["accuracy"][0], expected)


def test_batch_normalisation_is_calibrated_on_the_agents_own_data():
    problem = make(small(norm="batch"), agents=3)
    x = problem.start.expand(3, -1) + 0.01
    scores = problem.evaluate(x)["accuracy"]
    model = small(norm="batch")
    nn.utils.vector_to_parameters(x[1], model.parameters())
    inputs = problem.shards[1].inputs
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0  # the statistics of the last batch
    model(inputs)
    held_out, labels = images(40, seed=1)
    torch.testing.assert_close(scores[1], (model.eval()(held_out).argmax(1) == labels).float().mean())
    handed_out = problem.module(x[0])
    assert handed_out.training and float(handed_out[1].running_mean.abs().max()) > 0
    assert all(torch.equal(a, b) for a, b in zip(problem.evaluate(x).values(), problem.evaluate(x).values()))


def test_batch_normalisation_of_the_mean_model_sees_how_agents_differ():
    """Two agents around +5 and -5: the variance of all samples is not the mean of the agents' variances."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.cat([torch.randn(60, 3, generator=generator) + 5, torch.randn(60, 3, generator=generator) - 5])
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    labels = (torch.arange(120) >= 60).long()
    problem = problems.classification(model, (inputs, labels), agents=2, partition=[range(60), range(60, 120)])
    found = problem.module(problem.start)[0]
    torch.testing.assert_close(found.running_mean, inputs.mean(0))
    torch.testing.assert_close(found.running_var, inputs.var(0))


def test_group_norm_replaces_batch_normalisation():
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Sequential(nn.BatchNorm2d(6, affine=False)))
    model[1].weight.data.fill_(3.0)
    new = problems.group_norm(model)
    assert isinstance(new[1], nn.GroupNorm) and new[1].num_groups == 6 and bool((new[1].weight == 3).all())
    assert isinstance(new[2][0], nn.GroupNorm) and new[2][0].weight is None
    assert isinstance(model[1], nn.BatchNorm2d)


def test_group_norm_replaces_a_layer_that_is_used_twice():
    norm = nn.BatchNorm2d(6)
    new = problems.group_norm(nn.Sequential(nn.Conv2d(1, 6, 3), norm, nn.ReLU(), norm, nn.Sequential(norm)))
    assert isinstance(new[1], nn.GroupNorm) and new[1] is new[3] is new[4][0]


def test_microbatches_add_up_and_a_promise_permits_parts():
    whole, parts = make(batch_size=20, dtype=torch.float64), make(batch_size=20, microbatch=3, dtype=torch.float64)
    x = whole.start.expand(3, -1)
    torch.testing.assert_close(whole.at(1).value_and_grad(x), parts.at(1).value_and_grad(x))

    def loss(output, target):
        return cross_entropy(output, target)

    assert make(loss=loss, batch_size=None).training.is_mean is False
    promised = make(loss=loss, loss_is_mean=True, batch_size=None, dtype=torch.float64)
    assert promised.training.is_mean
    torch.testing.assert_close(promised.value_and_grad(x), make(batch_size=None, dtype=torch.float64).value_and_grad(x))


@pytest.mark.parametrize(
    ("loss", "known"),
    [
        (nn.CrossEntropyLoss(), True),
        (nn.CrossEntropyLoss(label_smoothing=0.1), True),
        (nn.functional.nll_loss, True),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), False),
        (nn.CrossEntropyLoss(reduction="sum"), False),
    ],
)
def test_losses_of_torch_are_known_to_be_means(loss, known):
    assert make(loss=loss, batch_size=None).training.is_mean is known
    if known:
        parts = make(loss=loss, microbatch=7, batch_size=None, dtype=torch.float64)
        x = parts.start.expand(3, -1)
        torch.testing.assert_close(
            parts.value_and_grad(x), make(loss=loss, batch_size=None, dtype=torch.float64).value_and_grad(x)
        )


class Pairs(Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.labels = inputs, targets

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


@pytest.mark.parametrize("loss", [cross_entropy, nn.CrossEntropyLoss(ignore_index=2)])
def test_parts_of_a_mean_that_leaves_out_targets_are_refused(loss):
    inputs, targets = images()
    if loss is cross_entropy:
        targets = targets.where(targets < 2, torch.tensor(-100))
    data = Pairs(inputs, targets)
    x = make(data=data, loss=loss).start.expand(3, -1)
    whole = make(data=data, loss=loss, loss_is_mean=False, batch_size=20).at(0)
    _, gradient = whole.value_and_grad(x)
    chosen, labels = whole.batch(1)
    model = small()
    nn.utils.vector_to_parameters(x[1], model.parameters())
    index = {"ignore_index": -100 if loss is cross_entropy else 2}
    expected = torch.autograd.grad(cross_entropy(model(chosen), labels, **index), list(model.parameters()))
    torch.testing.assert_close(gradient[1], torch.cat([g.flatten() for g in expected]))
    with pytest.raises(CadenError, match="left out of the loss"):
        make(data=data, loss=loss, batch_size=20, microbatch=5).at(0).value_and_grad(x)


class Wide(nn.Module):
    """Keeps (n, 500) four times for its backward pass: three outputs of tanh, and one of the constant layer."""

    def __init__(self, frozen=False):
        super().__init__()
        self.first, self.last = nn.Linear(4, 500, bias=False), nn.Linear(500, 3, bias=False)
        self.first.weight.requires_grad_(not frozen)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = x.tanh()
        return self.last(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_sample_costs_in_memory_is_counted(frozen):
    """tanh keeps its outputs (the last one is also what the last layer keeps), cross entropy the logarithms."""
    data = (torch.randn(40, 4), torch.randint(3, (40,)))
    model = problems.classification(Wide(frozen), data, agents=2).model
    outputs, entropy, inputs = 3 * 500 * 4, 3 * 4 + 8, 4 * 4
    expected = entropy + (500 * 4 if frozen else outputs + inputs)  # without a gradient, only the last layer keeps
    assert model.bytes_per_sample() == expected
    halves = problems.classification(Wide(frozen), data, agents=2, autocast="bfloat16").model
    assert halves.bytes_per_sample() <= expected


def test_counting_leaves_nothing_behind():
    kept = []

    class Kept(nn.Module):
        def forward(self, x):
            kept.append(weakref.ref(x))
            return x

    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), Kept())
    problem = problems.classification(model, (torch.randn(400, 4), torch.randint(3, (400,))), agents=2)
    problem.model.bytes_per_sample()
    assert len(kept) > 4 and all(one() is None for one in kept)


def test_full_gradients_are_computed_in_parts_and_mini_batches_as_they_are(monkeypatch):
    data = images(400)
    model = small(dropout=0.3)
    whole = make(model.eval(), data, batch_size=None, dtype=torch.float64)
    monkeypatch.setattr(_module, "_KEPT", 1)
    parts = make(model, data, batch_size=None, dtype=torch.float64)
    x = whole.start.expand(3, -1)
    assert (whole.chunk, parts.chunk) == (134, 64)
    torch.testing.assert_close(parts.value_and_grad(x), whole.value_and_grad(x))
    model.train()
    method = methods.local(solver={"name": "torch_optim", "optimizer": "SGD", "lr": 0.1})
    problem = make(model, data, batch_size=100)
    result = caden.simulate(method, problem, graphs.ring(3), 2, local_steps=2, deterministic=True)
    with deterministic_mode(True):
        expected = plain_loop(model, lambda p: torch.optim.SGD(p, lr=0.1), problem.shards[1], 1, 2, 2, 100)
    assert torch.equal(result.x[1], expected)


def test_rare_and_foreign_randomness_is_found():
    """A layer that is dropped once in a hundred times, by a generator of Python."""

    class Dropped(nn.Module):
        def forward(self, x):
            return x * (random.random() > 0.01)

    problem = make(nn.Sequential(small(), Dropped()), images())
    assert problem.random and problem.execution == "turns"


def test_outputs_may_hold_other_objects():
    class Answer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, x):
            return {"logits": self.inner(x), "cache": None, "name": "answer"}

    def loss(output, targets):
        return cross_entropy(output["logits"], targets)

    metrics = {"accuracy": lambda output, targets: problems.accuracy(output["logits"], targets)}
    problem = make(Answer(), loss=loss, loss_is_mean=True, metrics=metrics)
    plain = make()
    x = plain.start.expand(3, -1)
    assert torch.equal(problem.evaluate(x)["accuracy"], plain.evaluate(x)["accuracy"])


def test_autocast_is_near_and_keeps_rows_in_float32():
    plain, half = make(), make(autocast="bfloat16")
    x = plain.start.expand(3, -1)
    (a, ga), (b, gb) = plain.at(0).value_and_grad(x), half.at(0).value_and_grad(x)
    assert gb.dtype == torch.float32 and not torch.equal(ga, gb)
    torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
    assert float((ga - gb).norm() / ga.norm()) < 0.05


def test_dropout_is_one_function_for_line_searches_and_off_for_exact_metrics():
    problem = make(small(dropout=0.5), batch_size=None)
    x = problem.start.expand(3, -1)
    view = problem.at(1)
    assert view.stochastic and torch.equal(view.value_and_grad(x)[0], view.value_and_grad(x)[0])
    assert not torch.equal(view.value_and_grad(x)[0], view.redraw(1).value_and_grad(x)[0])
    model = problem.module(problem.start).eval()
    expected = [cross_entropy(model(a), b).detach() for a, b in problem.shards]
    torch.testing.assert_close(problem.value_and_grad(x)[0], torch.stack(expected))


def flat_norm():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1, 8, 8), 0


class Torn(Noisy):
    def __getitem__(self, i):
        raise OSError("the disk is gone")


class Named(Noisy):
    """`labels` are the names of the classes, not one label per sample."""

    labels = ("cat", "dog", "owl")

    def __init__(self):
        super().__init__()
        self.classes = self.targets
        del self.targets

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, i):
        return self.inputs[i], int(self.classes[i])


def test_names_of_classes_are_no_targets():
    assert sum(shard.count for shard in make(data=Named()).shards) == 120


def test_a_random_loss_is_drawn_like_a_mask():
    def noisy(output, target):
        return cross_entropy(output + torch.randn_like(output), target)

    problem = make(loss=noisy, loss_is_mean=True)
    x, view = problem.start.expand(3, -1), problem.at(1)
    assert problem.random and torch.equal(view.value_and_grad(x)[0], problem.at(1).value_and_grad(x)[0])


class Langevin(torch.optim.SGD):
    """Its steps are random."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data += 0.01 * torch.randn_like(p)


def two_rounds(optimizer=torch.optim.SGD, metrics=None, **options):
    solver = solvers.torch_optim(optimizer, lr=0.01, **options)
    caden.simulate(methods.dpsgd(solver=solver), make(metrics=metrics), graphs.ring(3), 2)


def with_test(inputs, targets):
    return problems.classification(small(), images(), (inputs, targets), 3)


def with_computed_tensor():
    model = small()
    model.scale = 2 * torch.ones(1, requires_grad=True)
    return model


def broken_images():
    inputs, targets = images(40)
    inputs[3] = torch.nan
    return inputs, targets


class Nameless(Noisy):
    def __getitem__(self, i):
        return {"pixels": self.inputs[i], "digit": int(self.targets[i])}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make(data=Stream()), "no samples by index"),
        (lambda: make(data=Torn()), r"Sample \d+ cannot be read \(OSError: the disk is gone\)"),
        (lambda: make(data=Nameless()), "no `label`"),
        (lambda: make(small(dropout=0.3), execution="vmap"), "vmap"),
        (lambda: make(flat_norm(), partition=[range(9), [9], range(10, 120)]), "Agents 1 have a single sample"),
        (lambda: make(flat_norm(), batch_size=1), "Agents 0, 1, 2 have a single sample"),
        (lambda: make(small(norm="batch"), microbatch=2), "couple"),
        (lambda: make(loss=lambda o, t: cross_entropy(o, t, reduction="sum"), microbatch=2), "loss_is_mean"),
        (lambda: make(data=(np.zeros((5, 1, 8, 8)), np.zeros(4, int))), "5 inputs but 4 targets"),
        (lambda: make(metrics={"a": lambda o, t: o.wrong}), "wrong"),
        (lambda: solvers.torch_optim(lambda p: None), "does not make an optimizer"),
        (lambda: solvers.torch_optim(lambda p: torch.optim.SGD(p[:1], lr=1)), "leaves out"),
        (lambda: solvers.torch_optim("SGD", lr=0.1, schedule=0.5), "schedule"),
        (lambda: make(autocast="float16"), "bfloat16"),
        (lambda: make(compile="no"), "`compile` must be true or false"),
        (lambda: make(loss_is_mean="no"), "`loss_is_mean` must be true or false"),
        (lambda: make(seed=-1), "`seed` must be"),
        (lambda: make(with_computed_tensor()), "cannot be copied"),
        (lambda: with_test(*broken_images()), "inputs of test sample 3 are not finite"),
        (lambda: with_test(images(40)[0], images(40)[1] + 7), "labels lie in"),
        (lambda: make(data={"image": images()[0]}), "pair"),
        (lambda: solvers.torch_optim("AdamW", betas=[0.9]), "does not accept these options"),
        (lambda: two_rounds(Langevin), "draw random numbers"),
        (lambda: two_rounds(torch.optim.SGD, schedule=lambda e: 1 / (e - 0.5)), "`schedule` fails after 0.5"),
        (lambda: two_rounds(metrics={"round": lambda o, t: o.mean()}), "cannot be named `round`"),
        (lambda: problems.classification(small(), images(), DataLoader([]), 3), "its `dataset` and `batch_size`.$"),
        (lambda: make(microbatch=0), "microbatch"),
        (lambda: problems.cnn(1, 8, 3, norm="layer"), "norm"),
    ],
)
def test_what_cannot_be_trained_is_one_line(build, message):
    with pytest.raises(CadenError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


# Runs.


def test_auto_penalty_stays_under_mini_batches():
    result = caden.simulate(methods.caden(), make(), graphs.ring(3), 14, local_steps=2)
    first = caden.simulate(methods.caden(), make(), graphs.ring(3), 1, local_steps=2)
    assert result.scalars["mu_z"] == first.scalars["mu_z"]


def test_metrics_in_between_are_cheap_and_the_last_row_is_complete():
    problem = make()
    method = methods.caden(0.1, solver={"name": "torch_optim", "lr": 0.01})
    result = caden.simulate(method, problem, graphs.ring(3), 20, local_steps=2)
    history = result.history
    assert history.objective.isna().all() and history.relative_error.isna().all()
    every = 9  # 40 test samples / 3 / batches of 8 / 2 steps, for a tenth of the time
    assert list(history["round"][history.accuracy.notna()]) == [0, every, 2 * every, 20]
    assert list(history.test_samples) == [40 if t % every == 0 or t == 20 else 0 for t in range(21)]
    assert history.batch_loss.iloc[1:].notna().all() and history.consensus.notna().all()
    exact = caden.simulate(method, problem, graphs.ring(3), 20, local_steps=2, metrics="exact")
    assert exact.history.relative_error.notna().all() and torch.equal(exact.x, result.x)
    assert exact.rows[-1]["accuracy"] == result.rows[-1]["accuracy"]
    assert exact.rows[-1]["gradients"] == result.rows[-1]["gradients"]


@pytest.mark.parametrize("checkpoint_every", [4, 25])  # the checkpoint relies on the last row, or there is none
def test_a_run_that_stops_early_ends_with_all_test_data(tmp_path, checkpoint_every):
    problem, folder = make(), tmp_path / "run"
    options = {"local_steps": 2, "directory": folder, "checkpoint_every": checkpoint_every, "picture": False}
    stop = [lambda row, state: row["round"] == 4]
    result = caden.simulate(methods.dpsgd(), problem, graphs.ring(3), 20, callbacks=stop, **options)
    assert result.stopped == "callback"
    everything = pytest.approx(float(problem.evaluate(result.x)["accuracy"].mean()))
    assert result.summary()["accuracy"] == everything
    rows = pd.read_csv(folder / "metrics.csv")
    assert list(rows["round"]) == [0, 1, 2, 3, 4] and rows["accuracy"].iloc[-1] == everything
    if checkpoint_every == 4:
        longer = caden.simulate(methods.dpsgd(), problem, graphs.ring(3), 6, resume=True, **options)
        assert list(longer.history["round"]) == list(range(7)) and longer.rows[4]["accuracy"] == everything


def test_recorded_rounds_are_those_that_are_tested():
    result = caden.simulate(methods.dpsgd(), make(), graphs.ring(3), 30, local_steps=2, record_every=5)
    assert list(result.history["round"][result.history.accuracy.notna()]) == [0, 10, 20, 30]


def test_an_object_with_draws_of_its_own_is_a_problem():
    class Drawn:
        def __init__(self, round=None):
            self.inner, self.stochastic, self.shift = problems.quadratic(3, 2), round is not None, (round or 0) % 3
            self.agents, self.dim, self.dtype, self.device = 3, 2, self.inner.dtype, self.inner.device

        def value_and_grad(self, x, rows=None):
            value, gradient = self.inner.value_and_grad(x, rows)
            return value, gradient + 0.01 * self.shift

        def at(self, round):
            return Drawn(round)

    for method in (methods.caden(0.3, solver="adam"), methods.fedavg(0.02), methods.caden(0.3, solver="gd")):
        assert bool(caden.simulate(method, Drawn(), graphs.ring(3), 3).x.isfinite().all())


def test_an_interrupted_run_ends_in_the_same_bytes(tmp_path):
    """Dropout, batch normalisation, random transforms and AdamW, with sleeping agents."""
    model = nn.Sequential(small(norm="batch", dropout=0.3))
    method = methods.caden(0.1, solver={"name": "torch_optim", "optimizer": "AdamW", "lr": 0.01, "schedule": "cosine"})
    options = {"participation": 0.6, "local_steps": 2, "deterministic": True, "checkpoint_every": 3}
    whole = caden.simulate(method, make(model, Noisy()), graphs.ring(3), 10, directory=tmp_path / "whole", **options)

    class Stop(Exception):
        pass

    def stop(row, state):
        if row["round"] == 7:
            raise Stop

    with pytest.raises(Stop):
        caden.simulate(
            method,
            make(model, Noisy()),
            graphs.ring(3),
            10,
            directory=tmp_path / "part",
            callbacks=[stop],
            **options,
        )
    rest = caden.simulate(
        method, make(model, Noisy()), graphs.ring(3), 10, directory=tmp_path / "part", resume=True, **options
    )
    assert torch.equal(rest.x, whole.x)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert files[0] == files[1]
    timeless = [r.history.drop(columns=["seconds", "read_seconds"]) for r in (rest, whole)]
    assert timeless[0].equals(timeless[1])


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import caden
from test_networks import Noisy, graphs, make, methods, nn, small
def kill(row, state):
    if row["round"] == 7 and sys.argv[3] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
method = methods.caden(0.1, solver={"name": "torch_optim", "optimizer": "AdamW", "lr": 0.01, "schedule": "cosine"})
caden.simulate(method, make(nn.Sequential(small(norm="batch", dropout=0.3)), Noisy()), graphs.ring(3), 10,
    directory=sys.argv[2], participation=0.6, local_steps=2, deterministic=True, checkpoint_every=3, callbacks=[kill],
    resume=sys.argv[3] == "resume", picture=False)
"""


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_bytes(tmp_path):
    """Dropout, batch normalisation, random transforms and AdamW, with sleeping agents, killed in between."""

    def run(folder, what):
        command = [sys.executable, "-c", KILLED, Path(__file__).parent, tmp_path / folder, what]
        return subprocess.run(command, timeout=300, check=False).returncode

    assert run("whole", "") == 0 and run("part", "kill") == -9 and run("part", "resume") == 0
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert models[0] == models[1]
    rows = [pd.read_csv(tmp_path / name / "metrics.csv", dtype=str) for name in ("whole", "part")]
    timeless = [table.drop(columns=["seconds", "read_seconds"]) for table in rows]
    assert timeless[0].equals(timeless[1])


def test_caden_learns_where_gossip_does_not():
    """One class per agent: what the neighbours know must come through the duals."""
    inputs, labels = images(240)
    parts = [np.flatnonzero(labels.numpy() == i % 3) for i in range(6)]
    halves = [part[: len(part) // 2] if i < 3 else part[len(part) // 2 :] for i, part in enumerate(parts)]
    problem = problems.classification(
        small(), (inputs, labels), images(200, seed=1), 6, partition=halves, batch_size=16, seed=1
    )
    adam = {"name": "torch_optim", "optimizer": "Adam", "lr": 0.01, "schedule": "cosine"}
    ends = {}
    for name, method in (("caden", methods.caden(0.1, solver=adam)), ("gossip", methods.dpsgd(solver=adam))):
        result = caden.simulate(method, problem, graphs.ring(6), 30, participation=0.5, local_steps=5, record_every=30)
        ends[name] = result.rows[-1]["accuracy"]
    assert ends["caden"] > ends["gossip"] + 0.15


# Texts.


@pytest.fixture
def speeches(tmp_path, monkeypatch):
    """Three presidents, two of whom spoke twice; the files and their checksums are made here."""
    folder = tmp_path / "sotu"
    folder.mkdir()
    lines = []
    for year, name in ((1801, "ada_one"), (1802, "ada_one"), (1803, "bob_two"), (1804, "cy_three"), (1805, "cy_three")):
        words = f"{name} speaks in {year} of peace and trade. " * (20 if name == "bob_two" else 40)
        (folder / f"{year}_{name}_n.txt").write_text(words, encoding="utf-8")
        lines.append(f"{hashlib.sha256(words.encode()).hexdigest()}  {year}_{name}_n.txt")
    (tmp_path / "list").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("caden.data._LISTED", tmp_path / "list")
    monkeypatch.setenv("CADEN_DATA", str(tmp_path))
    return folder


def test_texts_are_split_by_author_and_their_ends_are_held_out(speeches):
    problem = problems.language(agents=2, context=8, width=8, layers=1, heads=2, test_samples=20, batch_size=4)
    texts = caden.data.load_texts("sotu")
    assert list(texts) == ["ada_one", "bob_two", "cy_three"] and texts["ada_one"].startswith("ada_one speaks in 1801")
    alphabet = sorted({c for text in texts.values() for c in text})
    shard = problem.shards[1]  # the two longest go to different agents, the third to the one with less
    decoded = "".join(alphabet[i] for i in [*shard.inputs[0].tolist(), int(shard.targets[0, -1])])
    longest = sorted(texts.values(), key=len, reverse=True)
    assert decoded == longest[1][:9]
    assert torch.equal(shard.inputs[0, 1:], shard.targets[0, :-1])
    seen = sum(s.count for s in problem.shards) * 8
    assert 0.85 < seen / sum(map(len, texts.values())) < 0.91
    muon = {"name": "torch_optim", "optimizer": "Muon", "lr": 0.02}
    result = caden.simulate(methods.caden(0.1, solver=muon), problem, graphs.path(2), 8, local_steps=5)
    losses = result.history.validation_loss.dropna()
    assert losses.iloc[-1] < losses.iloc[0] - 0.3


def test_a_changed_text_is_refused(speeches, monkeypatch):
    (speeches / "1801_ada_one_n.txt").write_text("something else")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CadenError, match="wrong checksum"):
        caden.data.load_texts("sotu")


def test_a_transformer_sees_only_the_past():
    model = problems.transformer(11, 6, width=8, layers=2, heads=2).double()
    tokens = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def anonymous_memory():
    """MB of this process that are not pages of files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_memmap_ten_times_larger_than_what_may_be_used(tmp_path):
    inputs = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (150_000, 1000))  # 600 MB, sparse
    targets = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", np.int64, (150_000,))
    inputs[::1000], targets[:] = 1.0, np.arange(150_000) % 3
    before = anonymous_memory()
    mapped = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")
    problem = problems.classification(nn.Linear(1000, 3), mapped, mapped, agents=4, batch_size=32)
    caden.simulate(methods.caden(0.1), problem, graphs.ring(4), 10)
    problem.value_and_grad(problem.start.expand(4, -1))  # all samples, in pieces
    assert anonymous_memory() - before < 60


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_gives_the_same_gradients():
    """Compilation needs a C++ compiler; where there is none, one line says so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    data = torch.randn(40, 4), torch.randint(2, (40,))
    plain = caden.problems.classification(model, data, agents=3, batch_size=8)
    try:
        compiled = caden.problems.classification(model, data, agents=3, batch_size=8, compile=True)
    except caden.CadenError as error:
        pytest.skip(str(error))
    x = plain.start.expand(3, -1).clone()
    for got, expected in zip(compiled.at(0).value_and_grad(x), plain.at(0).value_and_grad(x)):
        torch.testing.assert_close(got, expected)


def trial_by_hand(problem, rate):
    """Each agent's five gradients at the start, and the way of five plain steps, in a loop of its own."""
    gradients, ways = [], []
    for agent, shard in enumerate(problem.shards):

        def gradient(row, step, agent=agent, shard=shard):
            chosen = draws.batch(4, -1, step, agent, shard.count, 8)
            row = row.clone().requires_grad_()
            loss = problem.model.function()(problem.model.views(row), *shard.read(chosen))
            return torch.autograd.grad(loss, row)[0]

        row = problem.start.clone()
        for step in range(5):
            row = row - rate * gradient(row, step)
        ways.append(float((row - problem.start).norm()))
        gradients.append(torch.stack([gradient(problem.start, step) for step in range(5)]))
    return torch.stack(gradients), ways


def test_auto_mu_on_mini_batches_is_disagreement_of_gradients_over_way():
    """The largest disagreement without noise, over the longest way of two steps, over twenty times the degree."""
    problem, rate = make(dtype=torch.float64), 0.05
    method = methods.caden(solver=solvers.torch_optim("SGD", lr=rate))
    result = caden.simulate(method, problem, graphs.path(3), 1, local_steps=2)
    gradients, ways = trial_by_hand(problem, rate)
    sizes = []
    for agent, neighbours in enumerate([[1], [0, 2], [1]]):
        mean, noise = gradients.mean(1), gradients.var(1).sum(1) / 5
        squares = [(mean[agent] - mean[j]).square().sum() - noise[agent] - noise[j] for j in neighbours]
        apart = float(sum(squares) / (2 * len(neighbours)))
        sizes.append(max(math.sqrt(max(apart, 0)), float(mean[agent].norm()) / 100))
    assert result.summary()["mu_z"] == pytest.approx(max(sizes) / (max(ways) * 2 / 5) / (20 * 4 / 3), rel=1e-9)


def test_auto_mu_where_messages_are_compressed_is_mean_gradient_over_way():
    problem, rate = make(dtype=torch.float64), 0.05
    method = methods.caden(solver=solvers.torch_optim("SGD", lr=rate))
    result = caden.simulate(method, problem, graphs.ring(3), 1, local_steps=2, messages={"bits": 8})
    gradients, ways = trial_by_hand(problem, rate)
    ratios = [float(mean.norm()) / way for mean, way in zip(gradients.mean(1), ways)]
    assert result.summary()["mu_z"] == pytest.approx(min(ratios) / (2 / 5) / 20, rel=1e-9)


def test_a_run_with_auto_mu_is_the_run_with_that_number():
    def run(mu_z):
        method = methods.caden(mu_z, solver=solvers.torch_optim("SGD", lr=0.05))
        return caden.simulate(method, make(dtype=torch.float64), graphs.ring(3), 9, participation=0.5, local_steps=2)

    auto = run("auto")
    assert torch.equal(auto.x, run(auto.summary()["mu_z"]).x)


def test_the_trial_of_auto_mu_leaves_nothing_in_checkpoints():
    method = methods.caden(solver=solvers.torch_optim("SGD", lr=0.05))
    begun = Rounds(method, make(), graphs.ring(3), participation=0.5).run
    kept = {name for name in begun.flatten()[0] if name.startswith("network.broadcast")}
    assert kept == {"network.broadcast0"}


def test_auto_mu_is_small_where_agents_hold_the_same_data():
    """Ten times smaller, at least, than where each class is with one agent."""
    torch.manual_seed(0)
    y = torch.arange(300) % 3
    x = torch.randn(300, 5) + 2 * nn.functional.one_hot(y, 5)
    x, y, model = x.repeat(3, 1), y.repeat(3), nn.Linear(5, 3)
    alike = np.split(np.arange(900), 3)
    apart = [np.flatnonzero(y.numpy() == label) for label in range(3)]
    values = []
    for shards in (alike, apart):
        problem = problems.classification(model, (x, y), (x, y), 3, shards, batch_size=64)
        method = methods.caden(solver=solvers.torch_optim("SGD", lr=0.05))
        values.append(caden.simulate(method, problem, graphs.ring(3), 1).summary()["mu_z"])
    assert 10 * values[0] < values[1]


def test_the_time_spent_on_reading_goes_on_after_a_resume(tmp_path):
    def run(rounds, resume):
        method, problem = methods.dpsgd(solver=solvers.torch_optim("SGD", lr=0.01)), make(data=Noisy())
        options = {"directory": tmp_path / "run", "resume": resume, "checkpoint_every": 1}
        return caden.simulate(method, problem, graphs.ring(3), rounds, **options).history["read_seconds"]

    assert run(3, False).iloc[-1] > 0
    assert run(5, True).is_monotonic_increasing


def test_a_run_that_is_resumed_with_another_optimizer_says_so(tmp_path):
    def run(optimizer, rounds, resume):
        method = methods.dpsgd(solver=solvers.torch_optim(optimizer, lr=0.01))
        options = {"directory": tmp_path / "run", "resume": resume, "checkpoint_every": 1}
        caden.simulate(method, make(), graphs.ring(3), rounds, **options)

    run("Adam", 2, False)
    run("Adam", 3, True)  # without a warning, which would be an error
    with pytest.warns(UserWarning, match=r"optimizer = 'torch_optim\(AdamW, lr=0.01\)' \(was 'torch_optim\(Adam, "):
        run("AdamW", 4, True)


def test_agents_that_do_not_move_do_not_count_in_a_trial():
    together = SimpleNamespace(maximum=torch.max)
    assert float(_auto.smallest(torch.tensor([0.0, 3.0, 2.0]), together)) == 2.0
    assert float(_auto.smallest(torch.zeros(3), together)) == 0.0


def test_a_resumed_run_does_not_try_steps_again(tmp_path, monkeypatch):
    def run(rounds, resume):
        method = methods.caden(solver=solvers.torch_optim("SGD", lr=0.01))
        options = {"directory": tmp_path / "run", "resume": resume, "checkpoint_every": 1, "local_steps": 2}
        return caden.simulate(method, make(), graphs.ring(3), rounds, **options).rows[-1]

    first = run(2, False)
    assert first["gradients"] == 3 * (5 + 5 + 2 * 2)  # steps and gradients of the trial, two rounds of two steps
    draws_seen = []
    monkeypatch.setattr(_module.Module, "redraw", lambda self, step: draws_seen.append(step) or self)
    run(2, True)
    assert draws_seen == []
