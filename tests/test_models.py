"""Models, losses and data as practitioners have them: taken as they are meant, or refused in one line."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import caden
from caden.problems._model import is_mean


def test_sequences_are_taken_with_the_classes_last_or_second():
    """torch has them second, language models last; where both fit, the user must say."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(12, 3, 6), torch.randint(5, (12, 6))
    model = nn.Conv1d(3, 5, 1)  # (N, C, T)
    for loss in (cross_entropy, nn.CrossEntropyLoss()):
        problem = caden.problems.classification(model, (inputs, targets), (inputs, targets), agents=2, loss=loss)
        value, _ = problem.value_and_grad(problem.start.expand(2, -1))
        wanted = [cross_entropy(model(x), y) for x, y in ((s.inputs, s.targets) for s in problem.shards)]
        assert torch.allclose(value, torch.stack(wanted))
        right = (model(inputs).argmax(1) == targets).float().mean()
        assert torch.allclose(problem.evaluate(problem.start[None])["accuracy"], right)
        last = caden.problems.classification(
            nn.Linear(3, 5), (inputs.mT, targets), agents=2, loss=loss
        )  # (N, T, C), the same function
        assert last.dim == problem.dim
    with pytest.raises(caden.CadenError, match="which dimension"):
        caden.problems.classification(nn.Conv1d(3, 6, 1), (inputs, targets), agents=2)


def test_a_single_output_has_no_accuracy_by_default():
    x, y = torch.randn(20, 4), torch.randint(2, (20,))
    loss = lambda o, t: functional.binary_cross_entropy_with_logits(o.squeeze(1), t.float())  # noqa: E731
    problem = caden.problems.classification(nn.Linear(4, 1), (x, y), (x, y), agents=2, loss=loss)
    assert problem.evaluate(problem.start[None]) == {}


def test_only_the_losses_of_torch_are_known_to_be_means():
    class Dice(nn.modules.loss._Loss):
        def forward(self, output, target):
            return 1 - 2 * (output.sigmoid() * target).sum() / (output.sigmoid().sum() + target.sum())

    assert is_mean(nn.MSELoss()) and not is_mean(Dice())


def test_tokens_beyond_the_vocabulary_are_refused():
    """Batched over agents, they would read the parameters of the next agent."""
    model = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(20, 3))
    tokens, labels = torch.randint(11, (60, 5)), torch.randint(3, (60,))
    assert caden.problems.classification(model, (tokens, labels), agents=3).execution == "vmap"
    tokens[50, 2] = 11
    with pytest.raises(caden.CadenError, match="out of range"):
        caden.problems.classification(model, (tokens, labels), agents=3)


def test_ignored_targets_are_labels_too():
    inputs, targets = torch.randn(8, 6, 3), torch.randint(4, (8, 6))
    targets[:, 4:] = -100
    problem = caden.problems.classification(nn.Linear(3, 4), (inputs, targets), agents=2)
    assert bool(problem.value_and_grad(problem.start.expand(2, -1))[0].isfinite().all())


def test_parameters_without_dimensions_are_trained():
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.linear(x) * self.scale.exp()

    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    problem = caden.problems.classification(Tempered(), (x, y), agents=2, batch_size=4)
    solver = caden.solvers.torch_optim("AdamW", lr=0.01)
    result = caden.simulate(caden.methods.caden(mu_z=0.1, solver=solver), problem, caden.graphs.path(2), rounds=2)
    assert problem.dim == 16 and float(result.module().scale.detach()) != 0.5


def test_named_outputs_keep_their_names():
    @dataclass
    class Output:
        logits: torch.Tensor
        hidden: None = None

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return Output(self.linear(x))

    x, y = torch.randn(600, 4), torch.randint(3, (600,))
    right = {"right": lambda output, target: (output.logits.argmax(-1) == target).float().mean()}
    loss = lambda output, target: cross_entropy(output.logits, target)  # noqa: E731
    problem = caden.problems.classification(Wrapped(), (x, y), (x, y), agents=2, loss=loss, metrics=right)
    with torch.no_grad():
        wanted = (problem.module(problem.start)(x).logits.argmax(-1) == y).float().mean()
    assert torch.allclose(problem.evaluate(problem.start[None])["right"], wanted)


def test_the_model_of_an_agent_has_the_statistics_of_its_own_samples():
    x = torch.cat([torch.randn(30, 4), torch.randn(30, 4) + 5])
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    data = x, torch.randint(2, (60,))
    problem = caden.problems.classification(model, data, agents=2, partition=[list(range(30)), list(range(30, 60))])
    means = [problem.module(problem.start, agent)[0].running_mean for agent in (0, 1)]
    assert torch.allclose(means[0], x[:30].mean(0)) and torch.allclose(means[1], x[30:].mean(0))
    assert torch.allclose(problem.module(problem.start)[0].running_mean, x.mean(0), atol=1e-5)


class Jittered(torch.utils.data.Dataset):
    """Draws from a generator of its own, which no seed reaches."""

    def __init__(self, count=40):
        self.rng, self.reads, self.count = np.random.default_rng(0), 0, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.reads += 1
        return torch.full((3,), float(index)) + torch.tensor(self.rng.normal(size=3)).float(), index % 2


def test_data_with_generators_of_their_own_warn_and_iid_parts_read_no_labels():
    with pytest.warns(UserWarning, match="generators of their own"):
        caden.problems.classification(nn.Linear(3, 2), Jittered(), agents=2, batch_size=4)
    data = Jittered(4000)
    with pytest.warns(UserWarning, match="generators of their own"):
        caden.problems.classification(nn.Linear(3, 2), data, agents=2, batch_size=4)
    assert data.reads < 200


def test_streams_of_loaders_with_a_batch_sampler_are_taken_apart():
    pairs = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    loader = DataLoader(pairs, batch_sampler=BatchSampler(SequentialSampler(pairs), 3, drop_last=False))
    with pytest.warns(UserWarning, match="cannot be read again"):
        train = caden.data.Streams([loader])
    assert train[0][0].tolist() == [0.0, 1.0] and int(train[0][1]) == 1


def test_a_sample_of_the_test_data_does_not_end_a_run():
    """The target is confirmed on all test samples."""
    torch.manual_seed(0)
    x, y = torch.randn(3000, 5), torch.randint(2, (3000,))
    problem = caden.problems.classification(nn.Linear(5, 2), (x[:50], y[:50]), (x, y), agents=2, batch_size=5)
    sample = float(problem.glance(problem.start[None])["accuracy"])
    exact = float(problem.evaluate(problem.start[None])["accuracy"])
    assert sample != exact
    target, options = max(sample, exact) - 1e-4, {"rounds": 3, "stop_at_target": True, "progress": False}
    method = caden.methods.local(solver=caden.solvers.torch_optim("SGD", lr=1e-12))
    result = caden.simulate(method, problem, caden.graphs.path(2), target=target, **options)
    assert result.stopped == ("target" if exact >= target else "rounds")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: caden.problems.group_norm(nn.Sequential(nn.LazyBatchNorm1d())), "has no shape yet"),
        (lambda: caden.problems.cnn(1, 8, 10, dropout=1.5), "dropout"),
        (lambda: caden.solvers.torch_optim("AdamW", schedule=torch.optim.lr_scheduler.CosineAnnealingLR), "schedule"),
        (lambda: caden.solvers.torch_optim("AdamW", schedule=lambda elapsed: None), "schedule"),
        (lambda: caden.solvers.torch_optim("AdamW", carry="false"), "carry"),
        (lambda: caden.methods.caden(solver="AdamW"), "torch_optim"),
    ],
)
def test_wrong_parts_of_a_training_are_refused(make, message):
    with pytest.raises(caden.CadenError, match=message):
        make()


def test_a_schedule_comes_from_a_file_too(tmp_path):
    (tmp_path / "mine.py").write_text("def halved(elapsed):\n    return 0.5\n")
    spec = {"name": "torch_optim", "optimizer": "SGD", "lr": 0.1}
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    problem = caden.problems.classification(nn.Linear(4, 3), (x, y), agents=2, batch_size=4)
    ends = []
    for changed in ({"schedule": f"{tmp_path / 'mine.py'}:halved"}, {"lr": 0.05}):
        method = caden.methods.local(solver=spec | changed)
        ends.append(caden.simulate(method, problem, caden.graphs.path(2), rounds=2, progress=False).x)
    assert torch.equal(*ends)


def test_group_norm_takes_a_layer_alone():
    assert isinstance(caden.problems.group_norm(nn.BatchNorm2d(6)), nn.GroupNorm)
