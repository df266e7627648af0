"""The training of any `nn.Module` over agents: data in shards, mini-batches by round and step, gradients, tests."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from caden._tensor.parallel import AGENT_LOOPS, run_in_threads
from caden._tensor.rows import aligned, row_numbers, rows_separately, take_rows
from caden.core import Problem
from caden.data import Held, Shard, leaves, over
from caden.draws import batch, randomness
from caden.errors import CadenError, require_choice
from caden.problems._model import Loss, Model, Training, ignored_target, joined, part_of
from caden.problems._perceptron import Perceptron
from caden.problems._traced import Traced

_Gradients = Callable[[Tensor, Any, Tensor], tuple[Tensor, Tensor]]  # of some agents' rows, with stacked samples

_CHUNK = 16 << 20  # bytes of input per call, so the activations of a large shard do not all exist at the same time
_KEPT = 128 << 20  # bytes per call and thread kept for the backward pass; token numbers are small, activations not
_LARGE = 1 << 26  # samples times parameters of an agent from which a separate call per agent costs nothing
_SMALL = 1 << 20  # samples times parameters of all agents up to which computing takes less time than calling
_GLANCE = 400  # test samples of the metrics of a round, if there are mini-batches
_CALIBRATION = 512  # samples for the statistics of batch normalisation


@cache
def _reader(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="caden-reader")


def _numbers(rows: list[int]) -> slice | list[int]:
    """Return row numbers for indexing: consecutive ones as a slice, which does not copy."""
    consecutive = slice(rows[0], rows[-1] + 1)
    return consecutive if rows == list(range(rows[0], rows[-1] + 1)) else rows


class Module(Problem):
    """f_i = scale_i times the mean loss of a model on agent i's shard; `at(round)` has one mini-batch of it.

    The functions of a round also fix the masks of dropout and the draws of random transforms. `value_and_grad` of the
    problem itself is for exact metrics: of all samples, with dropout off.
    """

    start: Tensor
    shapes: list[torch.Size]

    def __init__(
        self,
        model: nn.Module,
        shards: Sequence[Shard],
        test: Shard | None,
        scale: Tensor,
        execution: str = "auto",
        training: Training = Training(),  # noqa: B008
        ids: list[int] | None = None,
    ):
        self.shards, self.test, self.scale, self.training = list(shards), test, scale, training
        self.ids = list(range(len(shards))) if ids is None else ids  # the numbers of these agents in the whole problem
        self._drawn: tuple[int, int] | None = None  # (round, step) of a view
        probe = training.probe
        self.model = Model(model, training, self._read(0, slice(0, 8)) if probe is None else tuple(probe))
        self.training = training = self.model.training
        self.shapes, self.start = self.model.shapes, self.model.start
        self.agents, self.dim = len(shards), int(self.start.numel())
        self.dtype, self.device = self.start.dtype, self.start.device
        self.random = self.model.random
        self.lazy = not all(isinstance(shard, Held) for shard in shards)
        self.waited = [0.0] if self.lazy else None  # shared by all views
        self._batches: dict[int, tuple[Any, Any]] = {}
        self._coming: dict[int, Future[tuple[Any, Any]]] = {}
        self._unscaled = bool((scale == 1).all())
        self._groups: list[tuple[list[int], Any, Any]] = []
        written_out = None if self._leaves_out_targets() else Perceptron.of(self.model)
        self._some: _Gradients = self._gradients if written_out is None else written_out
        self._batch = Traced(self._gradients) if written_out is None and self.model.stateless() else self._some
        require_choice("execution", execution, ("auto", "loop", "vmap", "turns"))
        self.chunk = self._samples_per_call()
        self.execution = self._choose_execution() if execution == "auto" else execution
        if self.execution == "vmap" and self._needs_separate_calls():
            raise CadenError(
                '`execution = "vmap"` cannot run dropout, batch normalisation, microbatches or compiled models.'
            )
        single = [i for i, shard in zip(self.ids, self.shards) if min(shard.count, training.batch_size or 2) == 1]
        if self.model.normalised and single and not self.model.takes_single_samples():
            raise CadenError(
                f"Agents {', '.join(map(str, single[:8]))} have a single sample, but batch normalisation needs two: "
                "use `caden.problems.group_norm`, or another partition."
            )
        if (self.random or training.compiled) and self.execution == "loop":
            self.execution = "turns"  # torch has one generator, and one compiler, for all threads
        self._require_labels()
        self.metric_names = () if test is None else tuple(self._metrics)
        # The test samples of `glance` are forward passes only, a third of a gradient.
        self.tests = (0, 0) if test is None else (test.count, min(test.count, _GLANCE))
        tested = self.tests[1] + (_CALIBRATION if self.tests[1] and self.model.normalised else 0)
        self.metrics_cost = tested / 3 / (training.batch_size or training.typical)

    @property
    def _metrics(self) -> Mapping[str, Loss]:
        return self.training.metrics or {}

    def _leaves_out_targets(self) -> bool:
        """Return whether the loss leaves out some of the targets in memory."""
        ignored = ignored_target(self.training.loss)
        held = [shard.targets for shard in self.shards if isinstance(shard, Held)]
        return ignored is not None and any(bool((targets == ignored).any()) for targets in held)

    def _require_labels(self) -> None:
        outputs, ignored = self.model.outputs, ignored_target(self.training.loss)
        labels = [part.targets for part in (*self.shards, self.test) if isinstance(part, Held)]
        labels = [there for t in labels if len(there := t if ignored is None else t[t != ignored])]
        if not labels or outputs is None:
            return
        low, high = min(int(t.min()) for t in labels), max(int(t.max()) for t in labels)
        if low < 0 or high >= outputs:
            raise CadenError(f"The labels lie in {low}..{high}, but the model has {outputs} outputs.")

    def _choose_execution(self) -> str:
        """Choose how to evaluate agents by their shapes: small shards of few sizes in one batched call, others singly.

        Convolutions are batched by groups, which is slow on a CPU, and not every model can be batched.
        """
        counts = [min(shard.count, self.training.batch_size or shard.count) for shard in self.shards]
        large = max(counts) * self.dim >= _LARGE or self.chunk < max(counts)
        large |= any(len(shape) > 2 for shape in self.shapes)
        if self._needs_separate_calls() or self.lazy or self.training.autocast:
            return "loop"
        if len(set(counts)) > self.agents / 2 or (large and self.device.type == "cpu"):
            return "loop"
        inputs, targets = (part_of(part, None) for part in self._read(0, slice(0, 2)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # an operation that vmap takes one by one
                vmap(grad_and_value(self._batched_loss))(self.model.views(self.start[None]), inputs, targets)
        except (RuntimeError, UserWarning):
            return "loop"
        return "vmap"

    def _needs_separate_calls(self) -> bool:
        training = self.training
        return bool(self.random or self.model.normalised or training.microbatch or training.compiled)

    def _samples_per_call(self) -> int:
        """Return the number of samples per call: less than all only if f_i is a mean of one term per sample."""
        microbatch, whole = self.training.microbatch, max(shard.count for shard in self.shards)
        if microbatch is not None and not self.training.is_mean:
            raise CadenError("`microbatch` needs a loss that is a mean over samples: promise `loss_is_mean=True`.")
        inputs = leaves(self.model.inputs)
        if not self.training.is_mean or len(inputs[0]) < 4:
            return microbatch or whole
        if self.model.couples_samples():
            if microbatch is not None:
                raise CadenError("`microbatch` would change the model, whose layers couple the samples of a batch.")
            return whole
        if microbatch is not None:
            return microbatch
        # A mini-batch is computed as it is: who wants parts of it says `microbatch`.
        least = max(64, self.training.batch_size or 0)
        if whole <= least:
            return whole
        size: int = sum(t[0].numel() * t.element_size() for t in inputs)
        return min(whole, max(least, min(_CHUNK // size, _KEPT // self.model.bytes_per_sample())))

    # Data.

    def at(self, round: int) -> Module:
        """Return the functions of a round."""
        return self._view(round, 0) if self.training.batch_size or self.random or self.training.random_data else self

    def redraw(self, step: int) -> Module:
        """Return the functions of another local step of the same round."""
        return self if self._drawn is None else self._view(self._drawn[0], step)

    def _view(self, round: int, step: int) -> Module:
        view = copy.copy(self)
        view._drawn, view.stochastic = (round, step), True
        view._batches, view._coming, view._groups = {}, {}, []
        return view

    def indices(self, agent: int) -> np.ndarray:
        """Return which of its samples hosted agent `agent` sees in these functions."""
        count = self.shards[agent].count
        if self._drawn is None or self.training.batch_size is None:
            return np.arange(count)
        return batch(self.training.seed, *self._drawn, self.ids[agent], count, self.training.batch_size)

    def batch(self, agent: int) -> tuple[Any, Any]:
        """Return the inputs and targets that hosted agent `agent` sees in these functions."""
        if self._drawn is None or (self.training.batch_size is None and not self.lazy):
            return self._read(agent, slice(None))
        if agent not in self._batches:
            coming = self._coming.pop(agent, None)
            began = time.perf_counter()
            self._batches[agent] = self._read(agent, self.indices(agent)) if coming is None else coming.result()
            if self.waited is not None:
                self.waited[0] += time.perf_counter() - began
        return self._batches[agent]

    def _read(self, agent: int, chosen: np.ndarray | slice) -> tuple[Any, Any]:
        if not self.training.runs_code:
            return self.shards[agent].read(chosen)
        with randomness(self.training.seed, *(self._drawn or (-1, 0)), self.ids[agent], of="data"):
            return self.shards[agent].read(chosen)

    def prepare(self, rows: Tensor | None) -> None:
        """Begin to read the samples of these rows, while others are computed."""
        if self.lazy and self._drawn is not None:
            pool = _reader(os.getpid())
            for agent in row_numbers(rows, self.agents):
                if agent not in self._batches and agent not in self._coming:
                    self._coming[agent] = pool.submit(self._read, agent, self.indices(agent))

    def _pieces(self, agent: int) -> Iterator[tuple[Any, Any, float]]:
        """Yield the samples of an agent, as many as one call takes, and their share of all."""
        if self.lazy and self._drawn is None:  # not all at once
            count = self.shards[agent].count
            for a in range(0, count, self.chunk):
                inputs, targets = self._read(agent, slice(a, a + self.chunk))
                if self.chunk < count:
                    self._require_all_targets(targets)
                yield inputs, targets, min(self.chunk, count - a) / count
            return
        samples = Held(*(over(part, aligned) for part in self.batch(agent)))
        if samples.count <= self.chunk:
            yield samples.inputs, samples.targets, 1.0
            return
        self._require_all_targets(samples.targets)
        for a in range(0, samples.count, self.chunk):
            yield *samples.read(slice(a, a + self.chunk)), min(self.chunk, samples.count - a) / samples.count

    def _require_all_targets(self, targets: Any) -> None:
        """Refuse to compute a loss in parts if its mean leaves out some targets."""
        ignored = ignored_target(self.training.loss)
        if ignored is not None and any(bool((t == ignored).any()) for t in leaves(targets)):
            raise CadenError(
                f"Targets of {ignored} are left out of the loss, whose parts then have other weights than the whole: "
                "set `loss_is_mean=False`, and no `microbatch`."
            )

    # Values and gradients.

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        agents = row_numbers(rows, self.agents)
        value, gradient = x.new_empty(len(agents)), torch.empty_like(x)
        if self.execution == "vmap" and not rows_separately():
            self._evaluate_batched(x, agents, value, gradient)
        else:
            self.prepare(rows)
            agent_loop = AGENT_LOOPS.get(self.execution, run_in_threads)
            agent_loop(lambda a: self._evaluate_agent(x[a], agents[a], value[a], gradient[a]), range(len(agents)))
        scale = take_rows(self.scale, rows)
        return value.mul_(scale), gradient if self._unscaled else gradient.mul_(scale[:, None])

    def _masks(self, agent: int) -> AbstractContextManager[None]:
        """Return the context of a model's own draws."""
        if not self.random or self._drawn is None:
            return nullcontext()
        return randomness(self.training.seed, *self._drawn, self.ids[agent])

    @contextmanager
    def _waiting(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Enter a context; the wait for a reader that holds the generators is time spent on reading."""
        began = time.perf_counter()
        with context:
            if self.waited is not None:
                self.waited[0] += time.perf_counter() - began
            yield

    @contextmanager
    def _blaming(self, agent: int) -> Iterator[None]:
        """Name the agent whose samples the model or the loss does not accept."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AssertionError, RuntimeError) as error:
            message = (str(error) or type(error).__name__).splitlines()[0]
            raise CadenError(f"Samples of agent {self.ids[agent]}: the model or the loss fails ({message}).") from error

    def _evaluate_agent(self, row: Tensor, agent: int, value: Tensor, gradient: Tensor) -> None:
        """Write the value and the gradient of one agent into `value` and `gradient`."""
        parameters = {n: aligned(p).detach().requires_grad_() for n, p in self.model.views(aligned(row)).items()}
        out = list(self.model.views(gradient).values())
        function = self.model.function(exact=self._drawn is None)
        value.zero_()
        if self._drawn is not None:
            self.batch(agent)  # the reader may need the generators that the masks hold
        with self._waiting(self._masks(agent)):
            for number, (x, y, share) in enumerate(self._pieces(agent)):
                with torch.enable_grad(), self._blaming(agent):
                    loss = function(parameters, x, y)
                    loss = loss if share == 1 else loss * share
                    parts = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
                value += loss.detach()
                for total, part in zip(out, parts):
                    total.copy_(part) if number == 0 else total.add_(part)

    def _grouped(self, agents: list[int]) -> list[tuple[list[int], Any, Any]]:
        """Return groups of agents with equally many samples, and their samples stacked."""
        if self._groups:
            return self._groups
        stacked = agents if self._drawn is not None else range(self.agents)
        samples = {agent: self.batch(agent) for agent in stacked}
        groups = []
        for size in sorted({len(y) for _, y in samples.values()}):
            members = [agent for agent, (_, y) in samples.items() if len(y) == size]
            inputs = [samples[agent][0] for agent in members]
            if isinstance(inputs[0], Tensor):
                stack: Any = torch.stack(inputs)
            elif isinstance(inputs[0], dict):
                stack = {key: torch.stack([part[key] for part in inputs]) for key in inputs[0]}
            else:
                stack = tuple(map(torch.stack, zip(*inputs)))
            groups.append((members, stack, torch.stack([samples[agent][1] for agent in members])))
        if self._drawn is None:
            self._groups = groups
            for members, stack, targets in groups:  # the shards become parts of the stacks, which costs no memory
                for n, agent in enumerate(members):
                    self.shards[agent] = Held(part_of(stack, n), targets[n])
        return groups

    def _batched_loss(self, parameters: dict[str, Tensor], inputs: Any, targets: Tensor) -> Tensor:
        return self.model.loss(self.model.forward(self.model.module, parameters, inputs), targets)

    def _gradients(self, rows: Tensor, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values (k',) and gradients (k', d) of some agents with stacked samples."""
        gradients, values = vmap(grad_and_value(self._batched_loss))(self.model.views(rows), inputs, targets)
        return values, torch.cat([gradients[n].reshape(len(rows), -1) for n in self.model.names], dim=1)

    def _evaluate_batched(self, x: Tensor, agents: list[int], value: Tensor, gradient: Tensor) -> None:
        """Evaluate all agents with shards of one size in one call."""
        for members, inputs, targets in self._grouped(agents):
            position = {agent: n for n, agent in enumerate(members)}
            group = [a for a, agent in enumerate(agents) if agent in position]
            if not group:
                continue
            chosen = [position[agents[a]] for a in group]
            there = _numbers(group)
            rows = x[there]
            if chosen == list(range(len(members))):
                values, flat = self._batch(rows, inputs, targets)
            elif targets.shape[1] * len(members) * self.dim < _SMALL:  # others cost nothing, other shapes do
                everyone = x.new_zeros(len(members), self.dim).index_copy_(
                    0, torch.tensor(chosen, device=x.device), rows
                )
                values, flat = (part[chosen] for part in self._batch(everyone, inputs, targets))
            else:
                values, flat = self._some(rows, *part_of((inputs, targets), chosen))
            value[there], gradient[there] = values, flat

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x)
        for a, agent in enumerate(row_numbers(rows, self.agents)):
            inputs, targets = (over(part, aligned) for part in self.batch(agent))
            row = aligned(x[a]).detach().requires_grad_()
            # Fused attention has no second derivatives.
            with torch.enable_grad(), self._masks(agent), sdpa_kernel(SDPBackend.MATH):
                loss = self.model.function(exact=self._drawn is None)(self.model.views(row), inputs, targets)
                slope = torch.autograd.grad(loss, row, create_graph=True)[0]
            out[a] = torch.autograd.grad(slope, row, v[a])[0] * self.scale[agent]
        return out

    def take(self, agents: list[int]) -> Module:
        shards, ids = [self.shards[i] for i in agents], [self.ids[i] for i in agents]
        return Module(self.model.module, shards, self.test, self.scale[agents], self.execution, self.training, ids)

    # Test data, and models to hand out.

    def evaluate(self, x: Tensor) -> dict[str, Tensor]:
        """Return the metrics of each row's model on the test data."""
        return self._tested(x, self.tests[0])

    def glance(self, x: Tensor) -> dict[str, Tensor]:
        """Return the metrics on a fixed sample of the test data."""
        return self._tested(x, self.tests[1])

    def _tested(self, x: Tensor, count: int) -> dict[str, Tensor]:
        if self.test is None:
            return {}
        values, samples = {name: x.new_empty(len(x)) for name in self._metrics}, self.test
        if count < samples.count:
            samples = Held(*samples.read(batch(self.training.seed, -1, 0, -1, samples.count, count)))

        def evaluate_row(i: int) -> None:
            module, parameters = self.model.copy(test=True), self.model.views(x[i])
            with torch.no_grad():
                if self.model.normalised:
                    self.model.calibrate(module, parameters, self._calibration([i]))
                size, outputs, targets = max(self.chunk, 256), [], []
                for a in range(0, samples.count, size):
                    inputs, some = samples.read(slice(a, a + size))
                    outputs.append(self.model.forward(module, parameters, inputs))
                    targets.append(some)
                whole, answers = over(joined(outputs), self.model.whole_precision), joined(targets)
                for name, metric in self._metrics.items():
                    values[name][i] = metric(whole, answers)

        run_in_threads(evaluate_row, range(len(x)))
        return values

    def _calibration(self, agents: Sequence[int]) -> Any:
        """Return a fixed sample of the agents' training inputs, for the statistics of batch normalisation.

        One batch for all agents: the variance of agents that differ is more than the mean of their variances.
        """
        each = max(2, -(-_CALIBRATION // len(agents)))
        chosen = [batch(self.training.seed, -1, 0, self.ids[a], self.shards[a].count, each) for a in agents]
        return joined([self._read(agent, some)[0] for agent, some in zip(agents, chosen)])

    def module(self, vector: Tensor, agent: int | None = None) -> nn.Module:
        """Return a copy of the model with the parameters `vector` (d,), those of an agent or the mean of all.

        Batch normalisation gets the statistics of that agent's samples, or of all agents'.
        """
        whose = range(self.agents) if agent is None else [agent]
        return self.model.loaded(vector, self._calibration(whose) if self.model.normalised else None)

    def state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        return self.module(vector).state_dict()

    def notes(self) -> list[str]:
        single = [i for i, shard in zip(self.ids, self.shards) if shard.count == 1]
        labels = [(i, shard.targets) for i, shard in zip(self.ids, self.shards) if isinstance(shard, Held)]
        classes = [i for i, y in labels if not y.is_floating_point() and bool((y == y[0]).all())]
        lines = [("a single sample", single), ("samples of one class only", [i for i in classes if i not in single])]
        return [f"Agents {', '.join(map(str, agents[:8]))} have {what}." for what, agents in lines if agents]

    def facts(self) -> dict[str, Any]:
        sizes = [shard.count for shard in self.shards]
        samples = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
        return super().facts() | {"samples per agent": samples, "model": type(self.model.module).__name__}
