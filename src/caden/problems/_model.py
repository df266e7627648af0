"""An `nn.Module` as a function of a row of parameters."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.modules.dropout import _DropoutNd

from caden.data import Held, leaves, over, parts_of, rebuilt
from caden.draws import generator_states, randomness
from caden.errors import CadenError
from caden.problems._normalisation import forget_statistics, keeps_statistics, require_initialised

_MEANS = (
    functional.mse_loss,
    functional.nll_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)
Loss = Callable[[Any, Any], Tensor]


def class_dimension(output: Any, target: Any) -> int | None:
    """Return the dimension of the classes: the last one, or the second as in torch; None if there is none.

    Outputs of a sequence are (N, T, C) as of language models, or (N, C, T) as in torch.
    """
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)) or target.is_floating_point():
        return None
    last, second = output.shape[:-1] == target.shape, output.shape[:1] + output.shape[2:] == target.shape
    if last and second and output.ndim > 2:
        raise ValueError(f"outputs {tuple(output.shape)}: which dimension are the classes? Pass `loss` and `metrics`")
    dimension = output.ndim - 1 if last else 1 if second and output.ndim > 1 else None
    return dimension if dimension is not None and output.shape[dimension] > 1 else None


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return the share of targets that have the largest output."""
    return (output.argmax(class_dimension(output, target)) == target).float().mean()


def is_mean(loss: Loss) -> bool:
    """Return whether a loss of torch is known to be a mean of one term per sample."""
    if isinstance(loss, nn.modules.loss._Loss) and type(loss).__module__ == nn.modules.loss.__name__:
        return loss.reduction == "mean" and getattr(loss, "weight", None) is None
    return loss in (cross_entropy, *_MEANS)


def ignored_target(loss: Loss) -> int | None:
    """Return the target whose samples a loss leaves out of its mean, if there is one."""
    default = -100 if loss in (cross_entropy, functional.nll_loss) else None
    return getattr(loss, "ignore_index", default)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of an output, which may hold other objects."""
    return [tensor for tensor in leaves(tree) if isinstance(tensor, Tensor)]


def part_of(tree: Any, chosen: Any) -> Any:
    """Index every tensor of nested tuples and dictionaries."""
    return over(tree, lambda tensor: tensor[chosen])


class Training(NamedTuple):
    """How the functions follow from model and data."""

    loss: Loss = cross_entropy
    metrics: Mapping[str, Loss] | None = MappingProxyType({})  # None: the accuracy of a classifier
    batch_size: int | None = None
    seed: int = 0
    is_mean: bool = True  # the loss is a mean of one term per sample
    microbatch: int | None = None  # samples per call; None: as many as fit
    autocast: torch.dtype | None = None
    compiled: bool = False  # by torch.compile
    random_data: bool = False  # reading a sample again gives another one
    runs_code: bool = False  # reading runs the user's code, which gets its own seed
    typical: int = 1  # mean number of samples of all agents, also of those elsewhere
    probe: Held | None = None  # a few samples, on which every process tries the model


class Model:
    """A module as a function of a row of parameters; frozen parameters are not part of the row."""

    def __init__(self, module: nn.Module, training: Training, probe: tuple[Any, Any]):
        self.module, self.training = module, training
        require_initialised(module)
        named = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.names, self.shapes = list(named), [p.shape for p in named.values()]
        self.sizes = [p.numel() for p in named.values()]
        self.start = torch.cat([p.detach().reshape(-1) for p in named.values()])
        self._local = threading.local()  # functional_call swaps parameters in place: one copy of the model per thread
        self.normalised: list[str] = []  # layers that keep statistics of batches
        self.random = False  # two forward passes differ, as with dropout
        self.outputs: int | None = None  # classes, if it is a classifier
        self.inputs, self._targets = probe
        self._try()
        if training.compiled:
            self._try_compiled()

    def _try_compiled(self) -> None:
        from torch._dynamo.exc import TorchDynamoException  # takes as long to import as torch itself

        try:
            self.function()(self.views(self.start), self.inputs, self._targets)
        except TorchDynamoException as error:  # such as without a C++ compiler
            raise CadenError(f"`compile` failed ({str(error).splitlines()[0]}).") from None

    def _try(self) -> None:
        """Try the model: whether it is random and whether it keeps statistics; refuse other hidden state."""
        inputs, targets, trial = self.inputs, self._targets, copy.deepcopy(self.module)
        before = {n: b.clone() for n, b in trial.named_buffers()}
        outputs, losses, drew = [], [], False
        try:
            with torch.no_grad():
                for attempt in range(2):
                    with randomness(0, attempt, 0, 0):
                        states = generator_states()
                        outputs.append(self.forward(trial, {}, inputs))
                        losses.append(self.loss(outputs[-1], targets))
                        drew |= generator_states() != states
                output = over(outputs[0], self.whole_precision)
                classes = class_dimension(output, targets)
                if self.training.metrics is None:
                    metrics = {} if classes is None else {"accuracy": accuracy}
                    self.training = self.training._replace(metrics=metrics)
                for metric in (self.training.metrics or {}).values():
                    float(metric(joined([output]), targets))
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            message = (str(error) or type(error).__name__).splitlines()[0]
            raise CadenError(f"The model or the loss does not accept these data ({message}).") from None
        self.normalised = keeps_statistics(trial)
        changed = {n.rpartition(".")[0] for n, b in trial.named_buffers() if not torch.equal(before[n], b)}
        if changed - set(self.normalised):
            raise CadenError(
                f"The model changes buffers of `{min(changed - set(self.normalised))}` in its forward pass, so it is "
                "not a function of its parameters; only the statistics of batch normalisation may change."
            )
        if not all(isinstance(loss, Tensor) and loss.ndim == 0 for loss in losses):
            raise CadenError("`loss` must return a scalar tensor, the mean over the samples.")
        drawn = [[*tensors(output), loss] for output, loss in zip(outputs, losses)]
        dropout = any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in trial.modules())
        self.random = dropout or drew or any(not torch.equal(a, b) for a, b in zip(*drawn))
        if self._is_cross_entropy and classes is not None:
            self.outputs = output.shape[classes]

    def stateless(self) -> bool:
        """Return whether all layers and the loss are torch's own: other code may compute something else each time."""
        layers = list(self.module.modules())
        own = all(type(m).__module__.startswith("torch.nn.") and "forward" not in vars(m) for m in layers)
        return own and getattr(self.training.loss, "__module__", "") == "torch.nn.functional"

    def takes_single_samples(self) -> bool:
        """Return whether a batch of one sample is accepted: not by batch normalisation without other dimensions."""
        try:
            self.forward(copy.deepcopy(self.module), {}, part_of(self.inputs, slice(0, 1)))
        except ValueError:
            return False
        return True

    def couples_samples(self) -> bool:
        """Return whether the output of a sample depends on the others of its batch."""
        inputs = part_of(self.inputs, slice(0, 4))
        model = self.copy(exact=True)
        with torch.no_grad():
            together = tensors(self.forward(model, {}, inputs))
            halves = [tensors(self.forward(model, {}, part_of(inputs, half))) for half in (slice(0, 2), slice(2, 4))]
        in_halves = [torch.cat(pair) for pair in zip(*halves)]
        return any(not torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(together, in_halves))

    def bytes_per_sample(self) -> int:
        """Return how many bytes a gradient keeps until its backward pass for each sample more."""
        some = len(leaves(self.inputs)[0])
        return max(1, (self._bytes_kept(some) - self._bytes_kept(some // 2)) // (some - some // 2))

    def _bytes_kept(self, samples: int) -> int:
        kept = dict[int, tuple[torch.UntypedStorage, int]]()  # alive, so that no address is used twice

        def note(tensor: Tensor) -> Tensor:
            storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
            before = kept.get(storage.data_ptr(), (storage, 0))[1]
            kept[storage.data_ptr()] = storage, min(storage.nbytes(), before + size)  # several views may be kept
            return tensor.detach()  # an output that is kept would otherwise hold itself

        parameters = {n: p.detach().clone().requires_grad_() for n, p in self.views(self.start).items()}
        inputs, targets = part_of((self.inputs, self._targets), slice(0, samples))
        module = copy.deepcopy(self.module)
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with torch.enable_grad(), randomness(0, 0, 0, 0), hooks:
            self.loss(self.forward(module, parameters, inputs), targets)
        return sum(size for _, size in kept.values())

    def copy(self, exact: bool = False, test: bool = False) -> nn.Module:
        """Return this thread's copy of the module, as it was given, for exact metrics, or for the test data."""
        if not hasattr(self._local, "copies"):
            self._local.copies = {}
        copies: dict[tuple[bool, bool], nn.Module] = self._local.copies
        key = (exact and self.random, test)
        if key not in copies:
            copies[key] = copy.deepcopy(self.module)
            if any(key):
                copies[key].eval()
            if exact and not test:  # only randomness is off
                for name in self.normalised:
                    copies[key].get_submodule(name).train()
        return copies[key]

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return (..., d) rows as a dictionary of parameters, without copying."""
        parts = torch.split(rows, self.sizes, dim=-1)
        return {n: p.view(rows.shape[:-1] + s) for n, p, s in zip(self.names, parts, self.shapes)}

    def forward(self, module: nn.Module, parameters: dict[str, Tensor], inputs: Any) -> Any:
        """Call a copy of the module with other parameters."""
        arguments = () if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
        names = inputs if isinstance(inputs, dict) else {}
        with self._precision():
            return functional_call(module, parameters, arguments, names)

    def _precision(self) -> AbstractContextManager[Any]:
        dtype = self.training.autocast
        return nullcontext() if dtype is None else torch.autocast(self.start.device.type, dtype)

    def loss(self, output: Any, targets: Any) -> Tensor:
        """Return the loss of a batch."""
        with self._precision():
            several = self._is_cross_entropy and isinstance(output, Tensor) and output.ndim > 2
            if several and class_dimension(output, targets) == output.ndim - 1:  # torch has the classes second
                output, targets = output.flatten(0, -2), targets.flatten()
            return self.training.loss(output, targets)

    @property
    def _is_cross_entropy(self) -> bool:
        return self.training.loss is cross_entropy or isinstance(self.training.loss, nn.CrossEntropyLoss)

    def function(self, exact: bool = False) -> Callable[[dict[str, Tensor], Any, Any], Tensor]:
        """Return (parameters, inputs, targets) -> loss, compiled if asked for."""
        module = self.copy(exact)

        def function(parameters: dict[str, Tensor], inputs: Any, targets: Any) -> Tensor:
            return self.loss(self.forward(module, parameters, inputs), targets)

        if not self.training.compiled:
            return function
        if not hasattr(self._local, "compiled"):
            self._local.compiled = {}
        compiled: dict[nn.Module, Any] = self._local.compiled
        if module not in compiled:
            compiled[module] = torch.compile(function)
        return compiled[module]  # type: ignore[no-any-return]

    def calibrate(self, module: nn.Module, parameters: dict[str, Tensor], inputs: Any) -> None:
        """Set the statistics of batch normalisation to those of some inputs."""
        with forget_statistics([module.get_submodule(name) for name in self.normalised]):
            self.forward(module, parameters, inputs)

    def loaded(self, vector: Tensor, inputs: Any = None) -> nn.Module:
        """Return a copy of the module with the parameters `vector` (d,), its statistics those of `inputs`."""
        module, parameters = copy.deepcopy(self.module), self.views(vector.detach())
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in parameters:
                    parameter.copy_(parameters[name])
            if self.normalised:
                modes = {m: m.training for m in module.modules()}
                self.calibrate(module.eval(), parameters, inputs)
                for part, mode in modes.items():
                    part.training = mode
        return module

    def whole_precision(self, output: Any) -> Any:
        """Return outputs in the precision of the parameters."""
        return output.to(self.start.dtype) if isinstance(output, Tensor) and output.is_floating_point() else output


def joined(parts: list[Any]) -> Any:
    """Return the inputs or outputs of several calls as those of one."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts) if len(parts) > 1 and parts[0].ndim else parts[0]
    inside = [parts_of(part) for part in parts]
    if inside[0] is None:
        return parts[0]
    return rebuilt(parts[0], {key: joined([part[key] for part in inside if part]) for key in inside[0]})
