from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import caden
from caden import CadenError
from caden.problems import classification, factorisation, functions, logistic, mlp, pca, quadratic, quadratics, robust

F64 = torch.float64


def data(n=60, d=7, classes=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=rng, dtype=F64), torch.randint(classes, (n,), generator=rng)


def late_label():
    """One label too many, in the last sample."""
    inputs, targets = data()
    targets[-1] = 7
    return inputs, targets


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def make_module(**options):
    options = {"agents": 4, "dtype": F64, "execution": "loop"} | options
    return classification(network(), data(), data(20, seed=1), **options)


PROBLEMS = {
    "quadratic": lambda: quadratic(4, 6, seed=1),
    "logistic": lambda: logistic(4, 6, samples=9, alpha=0.3, l2=0.1, seed=1, execution="bmm"),
    "logistic loop": lambda: logistic(4, 6, samples=9, alpha=0.3, l2=0.1, seed=1, execution="loop"),
    "logistic l1": lambda: logistic(4, 6, samples=9, l1=0.3, seed=1),
    "factorisation": lambda: factorisation(4, 3, 4, rank=2, seed=1),
    "pca": lambda: pca(4, 3, 2, seed=1),
    "robust": lambda: robust(4, 6, samples=9, seed=1),
    "functions": lambda: functions([lambda x, i=i: ((x - i) ** 4).sum() + x[0] * x[1] for i in range(4)], dim=6),
    "module loop": make_module,
    "module vmap": lambda: make_module(execution="vmap"),
    "module weighted": lambda: make_module(weight="samples", partition={"name": "sizes", "sizes": [1, 2, 3, 4]}),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_and_hessian_products_are_those_of_the_values(name):
    """Central differences, row by row; and a subset of rows gives the same numbers."""
    problem = PROBLEMS[name]()
    rng = torch.Generator().manual_seed(3)
    x, v = (torch.randn(4, problem.dim, generator=rng, dtype=F64) / 2 for _ in range(2))
    value, gradient = problem.value_and_grad(x)
    e = 1e-5
    up, down = problem.value_and_grad(x + e * v), problem.value_and_grad(x - e * v)
    torch.testing.assert_close((gradient * v).sum(1), (up[0] - down[0]) / (2 * e), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(problem.hvp(x, v), (up[1] - down[1]) / (2 * e), rtol=1e-5, atol=1e-7)
    rows = torch.tensor([1, 3])
    some = problem.value_and_grad(x[rows], rows)
    torch.testing.assert_close(some[0], value[rows])
    torch.testing.assert_close(some[1], gradient[rows])
    torch.testing.assert_close(problem.hvp(x[rows], v[rows], rows), problem.hvp(x, v)[rows])
    part = problem.take([3, 1])
    torch.testing.assert_close(part.value_and_grad(x[[3, 1]])[1], gradient[[3, 1]])
    assert (part.agents, part.dim) == (2, problem.dim)


def test_logistic_value_is_the_formula():
    rng = np.random.default_rng(0)
    A, labels, x = rng.normal(size=(9, 4)), np.sign(rng.normal(size=9)), rng.normal(size=4)
    problem = logistic(features=[A, A[:5]], labels=[labels, labels[:5]], alpha=0.3, l2=0.2)
    found = problem.value_and_grad(torch.tensor(np.stack([x, x])))[0]
    for n, value in zip((9, 5), found):
        loss = np.mean(np.log1p(np.exp(-labels[:n] * (A[:n] @ x))))
        assert float(value) == pytest.approx(loss + 0.3 * np.sum(x**2 / (1 + x**2)) + 0.1 * x @ x)


def test_quadratic_solution_and_condition():
    problem = quadratic(8, 6, seed=2, condition=25.0)
    x = problem.solution.expand(8, 6)
    assert problem.value_and_grad(x)[1].sum(0).abs().max() < 1e-12
    values = torch.linalg.eigvalsh(problem.hessian)
    torch.testing.assert_close(values[:, -1] / values[:, 0], torch.full((8,), 25.0, dtype=F64))


def test_module_gradient_is_plain_backward():
    """Against a textbook loop: load the row, mean loss over the shard, backward."""
    problem = make_module(agents=3)
    x = torch.randn(3, problem.dim, dtype=F64, generator=torch.Generator().manual_seed(1))
    value, gradient = problem.value_and_grad(x)
    for i, (inputs, targets) in enumerate(problem.shards):
        model = network().double()
        nn.utils.vector_to_parameters(x[i], model.parameters())
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        torch.testing.assert_close(value[i], loss.detach())
        torch.testing.assert_close(gradient[i], torch.cat([p.grad.flatten() for p in model.parameters()]))


@pytest.mark.parametrize("agents", [4, 7])
def test_vmap_equals_loop_also_with_unequal_shards(agents):
    one, other = (make_module(agents=agents, execution=b) for b in ("loop", "vmap"))
    x = torch.randn(agents, one.dim, dtype=F64, generator=torch.Generator().manual_seed(1))
    for rows in (None, torch.tensor([0, 2, 3])):
        at = x if rows is None else x[rows]
        for a, b in zip(one.value_and_grad(at, rows), other.value_and_grad(at, rows)):
            torch.testing.assert_close(a, b)


def test_pieces_of_a_shard_add_up(monkeypatch):
    whole = make_module()
    x = whole.start.expand(4, -1)
    monkeypatch.setattr("caden.problems._module._CHUNK", 1)
    pieces = classification(network(), data(400), agents=2, dtype=F64, execution="loop")
    assert pieces.chunk == 64
    monkeypatch.undo()
    together = classification(network(), data(400), agents=2, dtype=F64, execution="loop")
    assert together.chunk == 200
    for a, b in zip(pieces.value_and_grad(x[:2]), together.value_and_grad(x[:2])):
        torch.testing.assert_close(a, b)


def test_what_is_no_mean_over_samples_is_never_taken_in_pieces(monkeypatch):
    monkeypatch.setattr("caden.problems._module._CHUNK", 1)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 20.0, 3.0], dtype=F64))
    assert classification(network(), data(400), agents=2, dtype=F64, loss=weighted).chunk == 200
    coupled = nn.Sequential(nn.BatchNorm1d(7, track_running_stats=False), network())
    problem = classification(coupled, data(400), agents=2, dtype=F64, execution="loop")
    assert problem.chunk == 200


def test_integer_labels_of_any_width_and_models_that_vmap_cannot_run():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(7, 3)

        def forward(self, x):
            out = self.layer(x)
            return out if out.sum().item() > -1e9 else -out

    inputs, targets = data()
    problem = classification(Branching(), (inputs.numpy(), targets.numpy().astype(np.uint8)), agents=4)
    assert problem.execution == "loop"


def test_frozen_parameters_stay_frozen():
    model = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    problem = classification(model, data(), agents=4)
    assert problem.dim == 58 - 35
    result = caden.simulate(caden.methods.caden(mu_z=0.5), problem, caden.graphs.ring(4), rounds=3)
    trained = result.module()
    assert torch.equal(trained[0].weight, before)
    assert not torch.equal(trained[2].weight, model[2].weight)


def test_threads_give_the_same_bits():
    problem = make_module(agents=6)
    x = torch.randn(6, problem.dim, dtype=F64, generator=torch.Generator().manual_seed(1))
    alone = problem.value_and_grad(x)
    torch.set_num_threads(2)
    try:
        together = problem.value_and_grad(x)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])


def test_weights_of_samples_make_the_sum_the_pooled_loss():
    parts = {"name": "sizes", "sizes": [1, 2, 3, 4]}
    problem = make_module(weight="samples", partition=parts)
    x = problem.start.expand(4, -1)
    pooled = classification(network(), data(), agents=1, dtype=F64).value_and_grad(problem.start[None])
    torch.testing.assert_close(problem.value_and_grad(x)[0].mean(), pooled[0][0])
    torch.testing.assert_close(problem.value_and_grad(x)[1].mean(0), pooled[1][0])


def test_arrays_tensors_and_datasets_are_the_same_data():
    inputs, targets = data()
    results = [
        classification(network(), given, agents=3, dtype=F64, execution="loop").value_and_grad(
            torch.ones(3, 58, dtype=F64)
        )[0]
        for given in ((inputs, targets), (inputs.numpy(), targets.numpy()), TensorDataset(inputs, targets))
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_accuracy_and_module_round_trip():
    problem = make_module()
    accuracy = problem.evaluate(problem.start.expand(4, -1))["accuracy"]
    inputs, targets = data(20, seed=1)
    model = problem.module(problem.start)
    expected = (model(inputs).argmax(1) == targets).double().mean()
    torch.testing.assert_close(accuracy, expected.expand(4))
    assert type(model) is nn.Sequential


def test_regression_with_its_own_loss_and_metric():
    inputs, _ = data()
    model = nn.Linear(7, 1)
    problem = classification(
        model,
        (inputs, inputs.sum(1, keepdim=True)),
        (inputs, inputs.sum(1, keepdim=True)),
        agents=4,
        loss=nn.functional.mse_loss,
        metrics={"error": nn.functional.l1_loss},
    )
    result = caden.simulate(caden.methods.caden(mu_z=0.5), problem, caden.graphs.ring(4), rounds=60)
    assert result.history.error.iloc[-1] < 1e-2
    assert "accuracy" not in result.history


def test_the_users_model_is_not_touched():
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    problem = classification(model, data(), agents=4)
    caden.simulate(caden.methods.caden(mu_z=0.5), problem, caden.graphs.ring(4), rounds=2)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert problem.dtype == torch.float32


def test_auto_batching_follows_the_shapes(monkeypatch):
    """The same shapes give the same way every time: small shards together, large ones and convolutions one by one."""
    assert classification(network(), data(), agents=4).execution == "vmap"
    assert (
        classification(
            nn.Sequential(nn.Unflatten(1, (1, 7)), nn.Conv1d(1, 3, 7), nn.Flatten()), data(), agents=4
        ).execution
        == "loop"
    )
    assert logistic(4, 6, samples=9).execution == "bmm"
    assert logistic(2, 500, samples=300).execution == "turns"
    monkeypatch.setattr("caden.problems._module._LARGE", 10)
    assert classification(network(), data(), agents=4).execution == "loop"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: classification(nn.utils.spectral_norm(nn.Linear(7, 3)), data(), agents=4), "buffers"),
        (lambda: classification(nn.Linear(9, 3), data(), agents=4), "does not accept these data"),
        (lambda: classification(network(), (data()[0], data()[1] + 1), agents=4), "out of bounds"),
        (lambda: classification(network(), late_label(), agents=2, partition=[range(30), range(30, 60)]), "0..7"),
        (lambda: classification(nn.LSTM(7, 3), data(), agents=4), "does not accept these data"),
        (lambda: classification(network().requires_grad_(False), data(), agents=4), "to train"),
        (lambda: classification(nn.Flatten(), data(), agents=4), "with parameters"),
        (lambda: classification(network(), data(), agents=61), "61 agents need at least 61 samples"),
        (lambda: classification(network(), data(), agents=0), "at least 1"),
        (lambda: classification(network(), (data()[0], data()[1][:5]), agents=2), "60 inputs but 5 targets"),
        (lambda: classification(network(), 7, agents=2), "pair"),
        (lambda: classification(network(), data(), (torch.zeros(3, 2), torch.zeros(3)), agents=2), "`test` inputs"),
        (lambda: classification(network(), data(), agents=2, weight="mass"), "Unknown weight"),
        (lambda: classification(network(), data(), agents=2, execution="lop"), "did you mean 'loop'"),
        (lambda: quadratics(np.eye(3)[None], np.ones((2, 3))), "shape"),
        (lambda: quadratics([[[0.0, 1.0], [0.0, 0.0]]], [[1.0, 1.0]]), "symmetric"),
        (lambda: quadratic(condition=0.5), "at least 1"),
        (lambda: quadratic(dim="x"), "whole number"),
        (lambda: logistic(features=[np.ones((2, 2))]), "go together"),
        (lambda: logistic(features=[np.ones((2, 2))], labels=[np.ones(3)]), "n_i"),
        (lambda: logistic(alpha=-1), "negative"),
        (lambda: functions([], dim=2), "non-empty"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(CadenError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_constant_buffers_are_fine():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))
            self.layer = nn.Linear(7, 3)

        def forward(self, x):
            return self.layer(x) * self.scale

    assert classification(Scaled(), data(), agents=4).dim == 24


def test_the_papers_network_has_its_dimension():
    assert sum(p.numel() for p in mlp(784, 10).parameters()) == 101_632


def present(device):
    there = torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()
    return pytest.param(device, marks=pytest.mark.skipif(not there, reason=f"no {device} device"))


@pytest.mark.parametrize("device", [present("cuda"), present("mps")])
def test_other_devices_train_or_say_what_they_lack(device):
    def make(device):
        return classification(network(), data(), data(20, seed=1), agents=4, batch_size=5, device=device)

    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except TypeError:  # as on Apple's GPUs
        with pytest.raises(CadenError, match="float64"):
            make(device)
        return
    problem, reference = make(device), make("cpu")
    x = reference.start.expand(4, -1)
    for got, expected in zip(problem.at(1).value_and_grad(x.to(device)), reference.at(1).value_and_grad(x)):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-4)
    for solver in ("lbfgs", {"name": "torch_optim", "optimizer": "Muon", "lr": 0.01}):
        for participation in (1.0, 0.5):
            method = caden.methods.caden(mu_z=0.5, solver=solver)
            result = caden.simulate(method, problem, caden.graphs.ring(4), rounds=3, participation=participation)
            assert result.x.device.type == device and bool(result.x.isfinite().all())


def test_the_batch_of_a_round_depends_on_seed_round_and_agent_alone():
    problem = make_module(batch_size=3, partition={"name": "sizes", "sizes": [1, 2, 3, 4]}, seed=5)
    part = problem.take([1, 3])
    for round in (0, 7):
        whole, some = problem.at(round), part.at(round)
        for place, agent in enumerate((1, 3)):
            assert torch.equal(some.batch(place)[0], whole.batch(agent)[0])
        for (x, y), (own, labels) in zip(map(whole.batch, range(4)), problem.shards):
            assert len(x) == min(3, len(own))
            places = [next(n for n in range(len(own)) if torch.equal(own[n], row)) for row in x]
            assert len(set(places)) == len(places) and torch.equal(labels[places], y)  # without repetition
    drawn = {tuple(problem.at(round).batch(3)[1].tolist()) for round in range(20)}
    assert len(drawn) > 3
    hosted = make_module(batch_size=3, partition={"name": "sizes", "sizes": [1, 2, 3, 4]}, seed=5, hosted=[3])
    assert torch.equal(hosted.at(2).batch(0)[0], problem.at(2).batch(3)[0])


def test_the_gradient_of_a_batch_is_right_on_average():
    problem = make_module(batch_size=4)
    x = problem.start.expand(4, -1)
    mean = torch.stack([problem.at(round).value_and_grad(x)[1] for round in range(400)]).mean(0)
    full = problem.value_and_grad(x)[1]
    one = problem.at(0).value_and_grad(x)[1]
    assert float((mean - full).norm()) < 0.15 * float((one - full).norm())


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize("solver", ["lbfgs", "gd"])
def test_a_batch_of_everything_gives_the_run_without_batches(execution, solver):
    """Up to the gradient at the start of each round, which is then taken again."""
    graph, method = caden.graphs.ring(4), caden.methods.caden(mu_z=0.3, solver=solver)
    whole, all_of_it = make_module(execution=execution), make_module(execution=execution, batch_size=10_000)
    results = [caden.simulate(method, p, graph, 5, participation=0.5) for p in (whole, all_of_it)]
    torch.testing.assert_close(results[0].x, results[1].x, rtol=1e-9, atol=1e-11)
    assert results[1].rows[-1]["gradients"] > results[0].rows[-1]["gradients"]
    small = caden.simulate(method, make_module(execution=execution, batch_size=2), graph, 5, participation=0.5)
    assert not torch.allclose(small.x, results[0].x)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_calls_every_item_once_and_hands_on_errors(threads):
    from caden._tensor.parallel import run_in_threads

    before, called = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        run_in_threads(called.append, range(50))
        assert sorted(called) == list(range(50))
        for bad in (0, 49):
            called.clear()
            with pytest.raises(ZeroDivisionError):
                run_in_threads(lambda i, bad=bad: called.append((time.sleep(0.001), 1 // (i - bad))), range(50))
            assert torch.get_num_threads() == threads
            assert len(called) < 49 or threads == 1  # an error ends the work of all
    finally:
        torch.set_num_threads(before)


def test_a_window_is_what_picking_gives_and_a_view_only_if_rows_follow_each_other():
    from caden._tensor.rows import take_rows, view_rows

    data = torch.arange(12.0).reshape(6, 2)
    for rows in ([0], [1, 2, 3], [0, 2, 1, 3], [3, 2], [1, 1, 3], [0, 1, 2, 3, 4, 5]):
        found = view_rows(data, torch.tensor(rows))
        assert torch.equal(found, take_rows(data, torch.tensor(rows)))
        assert (found.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()) == (
            rows in ([1, 2, 3], [*range(6)])
        )
