"""Training of any `nn.Module` over agents: parameters as rows, data in shards."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy, mse_loss

from caden._tensor.devices import require_device
from caden._tensor.parallel import run_in_threads
from caden._tensor.rows import aligned, row_numbers, rows_separately, take_rows
from caden.core import Problem
from caden.data import Partition, partition_from_spec
from caden.errors import CadenError, require_choice, require_integer
from caden.schedules import Draw

Loss = Callable[[Tensor, Tensor], Tensor]
_CHUNK = 16 << 20  # bytes of input per call, so the activations of a large shard do not all exist at the same time
_LARGE = 1 << 26  # samples times parameters of an agent from which a separate call per agent costs nothing


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return the share of samples whose largest output is the target."""
    return (output.argmax(-1) == target).float().mean()


class Module(Problem):
    """f_i = scale_i times the mean loss of a model on agent i's shard."""

    start: Tensor

    def __init__(
        self,
        model: nn.Module,
        shards: list[tuple[Tensor, Tensor]],
        test: tuple[Tensor, Tensor] | None,
        loss: Loss,
        metrics: dict[str, Loss],
        scale: Tensor,
        execution: str,
        batch_size: int | None = None,
        seed: int = 0,
        ids: list[int] | None = None,
    ):
        self.batch_size, self.seed, self.stochastic = batch_size, seed, False
        self.ids = list(range(len(shards))) if ids is None else ids  # the numbers of these agents in the whole problem
        self.model, self.test, self.loss, self.metrics, self.scale = model, test, loss, metrics, scale
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}  # frozen ones do not change
        self.names, self.shapes = list(named), [p.shape for p in named.values()]
        self.sizes = [p.numel() for p in named.values()]
        self.start = torch.cat([p.detach().reshape(-1) for p in named.values()])
        self.agents, self.dim = len(shards), int(self.start.numel())
        self.dtype, self.device = self.start.dtype, self.start.device

        self._stack(shards)
        self._unscaled = bool((scale == 1).all())
        self._local = threading.local()  # functional_call swaps parameters in place: one copy of the model per thread
        self._require_deterministic_model()
        self.chunk = self._samples_per_call()
        require_choice("execution", execution, ("auto", "loop", "vmap"))
        self.execution = self._choose_execution() if execution == "auto" else execution

    def _stack(self, shards: list[tuple[Tensor, Tensor]]) -> None:
        """Stack shards of equal size, so one batched call can evaluate them."""
        self.shards = list(shards)
        self._groups: list[tuple[list[int], Tensor, Tensor]] = []
        for size in sorted({len(x) for x, _ in shards}):
            members = [i for i, (x, _) in enumerate(shards) if len(x) == size]
            inputs, targets = (torch.stack([shards[i][part] for i in members]) for part in (0, 1))
            self._groups.append((members, inputs, targets))
            for position, i in enumerate(members):
                self.shards[i] = (inputs[position], targets[position])

    def at(self, round: int) -> Module:
        """Return the functions of a round: `batch_size` samples of each shard, drawn by (seed, round, agent) alone."""
        if self.batch_size is None:
            return self
        shards = []
        for agent, (x, y) in zip(self.ids, self.shards):
            draws = Draw(self.seed, 1).uniform(f"batch/{agent}", round, len(x))
            chosen = torch.from_numpy(np.sort(np.argsort(draws)[: self.batch_size])).to(x.device)
            shards.append((x[chosen], y[chosen]))
        view = copy.copy(self)
        view._stack(shards)
        view.stochastic = True
        return view

    def _require_deterministic_model(self) -> None:
        """Check that f_i is a function of the parameters: no randomness, no state that changes in the forward pass."""
        x, y = (part[:8] for part in self.shards[0])
        trial = copy.deepcopy(self.model)
        before = [b.clone() for b in trial.buffers()]
        try:
            with torch.no_grad():
                first, second = trial(x), trial(x)
                loss = self.loss(first, y)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            message = str(error).splitlines()[0]
            raise CadenError(f"The model or the loss does not accept these data ({message}).") from None
        if any(not torch.equal(a, b) for a, b in zip(before, trial.buffers())):
            raise CadenError(
                "The model changes buffers in its forward pass (batch normalisation?), so it is not a function of "
                "its parameters: use GroupNorm or LayerNorm, or track_running_stats=False."
            )
        if not torch.equal(first, second):
            raise CadenError("The model is random (dropout?): set the layer's p to 0 or call model.eval() first.")
        if loss.ndim != 0:
            raise CadenError("`loss` must return a scalar, the mean over the samples.")
        labels = [target for _, target in self.shards]
        if self.loss is cross_entropy and not y.is_floating_point():
            low, high = min(int(t.min()) for t in labels), max(int(t.max()) for t in labels)
            if low < 0 or high >= first.shape[1]:
                raise CadenError(f"The labels lie in {low}..{high}, but the model has {first.shape[1]} outputs.")

    def _choose_execution(self) -> str:
        """Choose how to evaluate agents by their shapes: small shards of few sizes in one batched call, others singly.

        Convolutions are batched by groups, which is slow on a CPU, and not every model can be batched.
        """
        longest = max(len(x) for x, _ in self.shards)
        large = longest * self.dim >= _LARGE or self.chunk < longest or any(len(shape) > 2 for shape in self.shapes)
        if len(self._groups) > self.agents / 2 or (large and self.device.type == "cpu"):
            return "loop"
        try:
            self._evaluate_with("vmap", self.start[None], torch.tensor([0]))
        except RuntimeError:
            return "loop"
        return "vmap"

    def _samples_per_call(self) -> int:
        """Return the number of samples per call: less than a shard only if f_i is a mean of one term per sample."""
        x, whole_shard = self.shards[0][0], max(len(x) for x, _ in self.shards)
        if self.loss not in (cross_entropy, mse_loss) or len(x) < 4:
            return whole_shard
        with torch.no_grad():
            together, in_halves = self.model(x[:4]), torch.cat([self.model(x[:2]), self.model(x[2:4])])
        if not torch.allclose(together, in_halves, rtol=1e-3, atol=1e-5):
            return whole_shard  # a layer couples the samples of a batch
        return min(whole_shard, max(64, _CHUNK // (x[0].numel() * x.element_size())))

    def _views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return (..., d) rows as a dictionary of parameters, without copying."""
        parts = torch.split(rows, self.sizes, dim=-1)
        return {n: p.view(*rows.shape[:-1], *s) for n, p, s in zip(self.names, parts, self.shapes)}

    def _model(self) -> nn.Module:
        if not hasattr(self._local, "model"):
            self._local.model = copy.deepcopy(self.model)
        model: nn.Module = self._local.model
        return model

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._evaluate_with(self.execution, x, rows)

    def _evaluate_with(self, execution: str, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        agents = row_numbers(rows, self.agents)
        value, gradient = x.new_empty(len(agents)), torch.empty_like(x)
        if execution == "vmap" and not rows_separately():
            self._evaluate_batched(x, agents, value, gradient)
        else:
            run_in_threads(lambda a: self._evaluate_agent(x[a], agents[a], value[a], gradient[a]), range(len(agents)))
        scale = take_rows(self.scale, rows)
        return value.mul_(scale), gradient if self._unscaled else gradient.mul_(scale[:, None])

    def _evaluate_agent(self, row: Tensor, agent: int, value: Tensor, gradient: Tensor) -> None:
        """Write the value and the gradient of one agent into `value` and `gradient`."""
        inputs, targets = map(aligned, self.shards[agent])
        parameters = {n: p.detach().requires_grad_() for n, p in self._views(aligned(row)).items()}
        out = list(self._views(gradient).values())
        model, count = self._model(), len(inputs)
        value.zero_()
        for a in range(0, count, self.chunk):
            x, y = inputs[a : a + self.chunk], targets[a : a + self.chunk]
            with torch.enable_grad():
                loss = self.loss(functional_call(model, parameters, (x,)), y)
                if self.chunk < count:
                    loss = loss * (len(x) / count)
                parts = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
            value += loss.detach()
            for total, part in zip(out, parts):
                total.copy_(part) if a == 0 else total.add_(part)

    def _evaluate_batched(self, x: Tensor, agents: list[int], value: Tensor, gradient: Tensor) -> None:
        """Evaluate all agents with shards of one size in one call of vmap."""

        def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return self.loss(functional_call(self.model, parameters, (inputs,)), targets)

        for members, inputs, targets in self._groups:
            position = {agent: n for n, agent in enumerate(members)}
            group = [a for a, agent in enumerate(agents) if agent in position]
            if not group:
                continue
            chosen = [position[agents[a]] for a in group]
            everyone = chosen == list(range(len(members)))
            data = (inputs, targets) if everyone else (inputs[chosen], targets[chosen])
            rows = x if len(group) == len(agents) else x[group]
            gradients, values = vmap(grad_and_value(loss))(self._views(rows), *data)
            flat = torch.cat([gradients[n].flatten(1) for n in self.names], dim=1)
            if len(group) == len(agents):
                value.copy_(values), gradient.copy_(flat)
            else:
                value[group], gradient[group] = values, flat

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x)
        for a, agent in enumerate(row_numbers(rows, self.agents)):
            inputs, targets = map(aligned, self.shards[agent])
            row = aligned(x[a]).detach().requires_grad_()
            with torch.enable_grad():
                loss = self.loss(functional_call(self.model, self._views(row), (inputs,)), targets)
                slope = torch.autograd.grad(loss, row, create_graph=True)[0]
            out[a] = torch.autograd.grad(slope, row, v[a])[0] * self.scale[agent]
        return out

    def take(self, agents: list[int]) -> Module:
        shards, ids = [self.shards[i] for i in agents], [self.ids[i] for i in agents]
        common = (self.test, self.loss, self.metrics, self.scale[agents], self.execution)
        return Module(self.model, shards, *common, self.batch_size, self.seed, ids)

    def evaluate(self, x: Tensor) -> dict[str, Tensor]:
        """Return the metrics of each row's model on the test data."""
        if self.test is None:
            return {}
        inputs, targets = self.test
        values = {name: x.new_empty(len(x)) for name in self.metrics}

        def evaluate_row(i: int) -> None:
            with torch.no_grad():
                output = functional_call(self._model(), self._views(x[i]), (inputs,))
                for name, metric in self.metrics.items():
                    values[name][i] = metric(output, targets)

        run_in_threads(evaluate_row, range(len(x)))
        return values

    def module(self, vector: Tensor) -> nn.Module:
        """Return a copy of the model with the parameters `vector` (d,)."""
        model = copy.deepcopy(self.model)
        model.load_state_dict({**model.state_dict(), **{n: p.detach().clone() for n, p in self._views(vector).items()}})
        return model

    def state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        return self.module(vector).state_dict()

    def notes(self) -> list[str]:
        single = [i for i, (x, _) in zip(self.ids, self.shards) if len(x) == 1]
        classes = [
            i for i, (_, y) in zip(self.ids, self.shards) if not y.is_floating_point() and bool((y == y[0]).all())
        ]
        lines = [("a single sample", single), ("samples of one class only", [i for i in classes if i not in single])]
        return [f"Agents {', '.join(map(str, agents[:8]))} have {what}." for what, agents in lines if agents]

    def facts(self) -> dict[str, Any]:
        sizes = [len(x) for x, _ in self.shards]
        samples = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
        return super().facts() | {"samples per agent": samples, "model": type(self.model).__name__}


def _tensors(data: Any, name: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets from a pair of arrays or tensors, or from a torch Dataset."""
    if isinstance(data, torch.utils.data.Dataset):
        samples = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
        inputs = torch.stack([torch.as_tensor(np.asarray(x)) for x, _ in samples])
        targets = torch.stack([torch.as_tensor(np.asarray(y)) for _, y in samples])
    else:
        if isinstance(data, tuple | list) and any(isinstance(part, dict) for part in data):
            raise CadenError(f"`{name}` has a dictionary as inputs or targets: pass one array or tensor for each.")
        try:
            inputs, targets = (torch.as_tensor(part) for part in data)
        except (TypeError, ValueError):
            raise CadenError(f"`{name}` must be a pair (inputs, targets) or a torch Dataset.") from None
    if len(inputs) != len(targets):
        raise CadenError(f"`{name}` has {len(inputs)} inputs but {len(targets)} targets.")
    inputs = inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)
    targets = targets.to(device, dtype if targets.is_floating_point() else torch.int64)
    return inputs, targets


def _require_finite(inputs: Tensor, targets: Tensor, parts: Sequence[np.ndarray]) -> None:
    """Refuse samples with NaN or infinite entries, and name the agent that holds the first one."""
    for name, data in (("inputs", inputs), ("targets", targets)):
        broken = (~data.isfinite()).reshape(len(data), -1).any(1) if data.is_floating_point() else data.new_zeros(0)
        if bool(broken.any()):
            sample = int(broken.nonzero()[0])
            agent = next((i for i, part in enumerate(parts) if sample in part), None)
            owner = "" if agent is None else f", which belongs to agent {agent}"
            raise CadenError(
                f"The {name} of training sample {sample}{owner}, are not finite ({int(broken.sum())} in all)."
            )


def classification(
    model: nn.Module,
    train: Any,
    test: Any = None,
    agents: int = 20,
    partition: Partition | str | dict[str, Any] | Sequence[Any] = "iid",
    loss: Loss = cross_entropy,
    metrics: dict[str, Loss] | None = None,
    weight: str = "agents",
    execution: str = "auto",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    hosted: list[int] | None = None,
    batch_size: int | None = None,
) -> Module:
    """The training of `model` over agents that each hold a shard of `train`, from the model's own parameters.

    Args:
        model: any module whose forward pass is a function of its parameters (running batch norm and dropout are
            refused); parameters with requires_grad=False do not change.
        train, test: a pair (inputs, targets) of arrays or tensors, or a torch Dataset; `test` may be None.
        partition: "iid", "dirichlet", "shards", "sizes", a table with `name` and parameters, a function
            (labels, agents, seed) -> index arrays, or the index arrays themselves.
        loss: (output, target) -> mean over the samples. metrics: name -> (output, target) -> number on the test data.
        weight: "agents" weights every agent equally, "samples" every sample.
        execution: gradients by a "loop" over agents, by "vmap", or "auto" (chosen by the shapes).
        hosted: hold only the shards of these agents.
        batch_size: number of samples that every agent draws anew in each round; all of them for None.

    >>> model = nn.Linear(2, 2)
    >>> problem = classification(model, (torch.randn(9, 2), torch.randint(2, (9,))), agents=4)
    >>> problem.agents, problem.dim, [len(x) for x, _ in problem.shards]
    (4, 6, [3, 2, 2, 2])
    """
    require_integer("agents", agents, least=1)
    require_choice("weight", weight, ("agents", "samples"))
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise CadenError("`model` must be an nn.Module with parameters to train.")
    require_device(device)
    inputs, targets = _tensors(train, "train", dtype, device)
    held_out = None if test is None else _tensors(test, "test", dtype, device)
    if held_out is not None and held_out[0].shape[1:] != inputs.shape[1:]:
        raise CadenError(
            f"`test` inputs have shape {tuple(held_out[0].shape[1:])}, `train` inputs {tuple(inputs.shape[1:])}."
        )
    model = copy.deepcopy(model).to(device, dtype)
    parts = partition_from_spec(partition, targets.cpu().numpy(), agents, seed)
    _require_finite(inputs, targets, parts)
    local_agents = list(range(agents)) if hosted is None else hosted
    shards = [(inputs[torch.as_tensor(parts[i])], targets[torch.as_tensor(parts[i])]) for i in local_agents]
    if metrics is None:
        metrics = {"accuracy": accuracy} if not targets.is_floating_point() else {}
    counts = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    scale = counts * agents / counts.sum() if weight == "samples" else torch.ones_like(counts)
    if batch_size is not None:
        require_integer("batch_size", batch_size, least=1)
    common = (held_out, loss, metrics, scale[local_agents].to(device, dtype), execution)
    return Module(model, shards, *common, batch_size, seed, local_agents)


def mlp(inputs: int, outputs: int, hidden: int = 128, seed: int = 0) -> nn.Sequential:
    """The paper's network: two fully connected layers without biases and a ReLU between them."""
    require_integer("hidden", hidden, least=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs, hidden, bias=False),
            nn.ReLU(),
            nn.Linear(hidden, outputs, bias=False),
        )
