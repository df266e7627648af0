"""The samples of each agent: in memory, or read by index when they are used.

Inputs and targets are tensors, or tuples or dictionaries of tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from caden.draws import randomness
from caden.errors import CadenError

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which torch stores, but hardly computes with


def parts_of(tree: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a tuple, list, dictionary or dataclass by position or name; None for anything else."""
    if isinstance(tree, Mapping):
        return tree
    if isinstance(tree, tuple | list):
        return dict(enumerate(tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in fields(tree)}
    return None


def rebuilt(tree: Any, parts: Mapping[Any, Any]) -> Any:
    """Return what `tree` is, with other parts: named tuples and dataclasses, such as outputs of models, stay such."""
    if is_dataclass(tree) and not isinstance(tree, type):
        return type(tree)(**parts)
    if isinstance(tree, Mapping):
        return dict(parts)
    return type(tree)(*parts.values()) if hasattr(tree, "_fields") else tuple(parts.values())


def over(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every tensor of nested tuples, dictionaries and dataclasses."""
    parts = parts_of(tree)
    if parts is None:
        return function(tree)
    return rebuilt(tree, {key: over(part, function) for key, part in parts.items()})


def leaves(tree: Any) -> list[Any]:
    """Return the tensors of nested tuples and dictionaries."""
    parts: list[Any] = []
    over(tree, parts.append)
    return parts


class Shard(Protocol):
    """The samples of one agent."""

    @property
    def count(self) -> int:
        """How many."""

    def read(self, chosen: np.ndarray | slice) -> tuple[Any, Any]:
        """Return inputs and targets of some of them."""


class Held(NamedTuple):
    """Samples in memory."""

    inputs: Any
    targets: Tensor

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(leaves(self.inputs)[0])

    def read(self, chosen: np.ndarray | slice) -> tuple[Any, Any]:
        if not isinstance(chosen, slice):
            index = torch.from_numpy(chosen).to(self.targets.device)
            return over(self.inputs, lambda t: t[index]), over(self.targets, lambda t: t[index])
        return over(self.inputs, lambda t: t[chosen]), over(self.targets, lambda t: t[chosen])


class OnDemand(NamedTuple):
    """Samples that are read from their source whenever they are used."""

    source: Reader
    indices: np.ndarray

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self.indices)

    def read(self, chosen: np.ndarray | slice) -> tuple[Any, Any]:
        return self.source.read(self.indices[chosen])


class Reader:
    """Training samples by index, converted to a dtype and a device as they are read."""

    def __init__(self, data: Any, dtype: torch.dtype, device: str, label: str = "label", name: str = "train"):
        self._arrays = isinstance(data, tuple | list)
        data = (data[0], np.asanyarray(data[1])) if self._arrays else data
        self._data, self._dtype, self._device, self._label = data, dtype, device, label
        self.runs_code = not self._arrays  # of the user, which may be random
        self._repeats = getattr(data, "repeats", True)  # False: known to give other samples with every read
        if isinstance(data, IterableDataset):
            raise CadenError(
                "An IterableDataset has no samples by index: pass one per agent in `caden.data.Streams`, or train with "
                "it in a loop of your own, with `caden.Agent`."
            )
        if not self._arrays and not hasattr(data, "__len__"):
            raise CadenError(f"The data set {type(data).__name__} has no length: give it a `__len__`.")
        if isinstance(data, Mapping):
            raise CadenError(f"`{name}` is a dictionary of data sets: choose one of {', '.join(map(repr, data))}.")
        self.count = len(leaves(data[0])[0]) if self._arrays else len(data)
        if self._arrays and any(len(part) != self.count for part in leaves(data)):
            raise CadenError(f"`{name}` has {self.count} inputs but {len(data[1])} targets.")

    def read(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Return inputs and targets of these samples."""
        if self._arrays:
            inputs, targets = (over(part, lambda a: torch.from_numpy(np.array(a[indices]))) for part in self._data)
        else:
            samples = [self._sample(int(i)) for i in indices]
            try:
                inputs, targets = self._split(default_collate(samples))
            except (TypeError, RuntimeError) as error:
                raise CadenError(f"Samples do not make a batch ({str(error).splitlines()[0]}).") from None
        if not all(isinstance(part, Tensor) for part in (*leaves(inputs), *leaves(targets))):
            raise CadenError("Samples must consist of numbers, arrays or tensors: convert texts before.")
        return over(inputs, self._converted), over(targets, lambda t: self._converted(t, target=True))

    def _sample(self, index: int) -> Any:
        try:
            sample = self._data[index]
        except CadenError:
            raise
        except Exception as error:  # of the user's code
            raise CadenError(f"Sample {index} cannot be read ({type(error).__name__}: {error}).") from error
        if isinstance(sample, Mapping):  # Hugging Face datasets have lists, unless they have another format
            return {key: np.asarray(part) if isinstance(part, list) else part for key, part in sample.items()}
        return sample

    def _split(self, samples: Any) -> tuple[Any, Any]:
        if isinstance(samples, Mapping):  # as of a Hugging Face dataset
            if self._label not in samples:
                raise CadenError(f"The samples have no `{self._label}`: name the column of the targets by `label`.")
            inputs = {key: part for key, part in samples.items() if key != self._label}
            return next(iter(inputs.values())) if len(inputs) == 1 else inputs, samples[self._label]
        if isinstance(samples, tuple | list) and len(samples) == 2:
            return samples[0], samples[1]
        raise CadenError("Every sample must be a pair (inputs, target) or a dictionary.")

    def _converted(self, tensor: Tensor, target: bool = False) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(self._device, self._dtype)
        return tensor.to(self._device, torch.int64 if target or tensor.dtype in _UNSIGNED else None)

    def targets(self) -> np.ndarray:
        """Return all targets, to split the samples by them: those that the data set offers, else by reading all."""
        if self._arrays:
            return np.asarray(self._data[1])
        for name in ("targets", "labels"):
            value = getattr(self._data, name, None)
            if value is not None and not callable(value) and np.shape(value)[:1] == (self.count,):
                return np.asarray(value)
        if hasattr(self._data, "column_names") and self._label in self._data.column_names:
            return np.asarray(self._data[self._label])
        chunks = [self.read(np.arange(a, min(a + 256, self.count)))[1] for a in range(0, self.count, 256)]
        if not all(isinstance(chunk, Tensor) for chunk in chunks):
            raise CadenError("A sample must have one tensor or number as its target.")
        return torch.cat(chunks).cpu().numpy()

    def is_random(self) -> bool:
        """Return whether reading a sample twice gives two results, in eight attempts; warn if seeds do not help."""
        if self._arrays:
            return False
        some = np.unique(np.linspace(0, self.count - 1, 8).astype(int))

        def attempt(number: int) -> list[Any]:
            with randomness(0, number, 0, 0, of="data"):
                return leaves(self.read(some))

        first = attempt(0)

        def differs(number: int) -> bool:
            return any(not torch.equal(a, b) for a, b in zip(first, attempt(number)))

        if not any(differs(number) for number in range(1, 8)):
            return False
        if self._repeats and differs(0):
            warnings.warn(
                "The data draw from generators of their own, so a resumed, distributed or replayed run sees other "
                "samples: draw from the global generators of torch, numpy or Python, which are seeded for every read.",
                stacklevel=2,
            )
        return True


def is_lazy(data: Any) -> bool:
    """Return whether samples should be read when they are used: data sets, and arrays on disk."""
    if isinstance(data, Dataset) or (hasattr(data, "column_names") and hasattr(data, "__getitem__")):
        return not isinstance(data, TensorDataset)
    return isinstance(data, tuple | list) and any(isinstance(part, np.memmap) for part in leaves(data))


def _tensor(values: Any) -> Tensor:
    """Return values as a tensor; arrays that may not be written are copied."""
    fixed = isinstance(values, np.ndarray) and not values.flags.writeable
    return torch.as_tensor(np.array(values) if fixed else values)


def held(data: Any, name: str, dtype: torch.dtype, device: str) -> Held:
    """Return a pair (inputs, targets) of arrays or tensors in memory; inputs may be a tuple or a dictionary of them."""
    if isinstance(data, DataLoader):
        streams = ", or one loader per agent in `caden.data.Streams`" if name == "train" else ""
        raise CadenError(f"`{name}` is a DataLoader: pass its `dataset` and `batch_size`{streams}.")
    if isinstance(data, TensorDataset):
        if len(data.tensors) < 2:
            raise CadenError(f"`{name}` must have inputs and targets.")
        data = (data.tensors[0] if len(data.tensors) == 2 else data.tensors[:-1], data.tensors[-1])
    if not isinstance(data, Sequence) or len(data) != 2:
        raise CadenError(f"`{name}` must be a pair (inputs, targets) or a torch Dataset.")
    try:
        inputs, targets = over(data[0], _tensor), over(data[1], _tensor)
    except (TypeError, ValueError):
        raise CadenError(f"`{name}` must be a pair (inputs, targets) or a torch Dataset.") from None
    if not isinstance(targets, Tensor):
        raise CadenError(f"`{name}` must have one tensor of targets.")
    for part in leaves(inputs):
        if len(part) != len(targets):
            raise CadenError(f"`{name}` has {len(part)} inputs but {len(targets)} targets.")
    inputs = over(inputs, lambda t: t.to(device, dtype) if t.is_floating_point() else t.to(device))
    inputs = over(inputs, lambda t: t.long() if t.dtype in _UNSIGNED else t)
    return Held(inputs, targets.to(device, dtype if targets.is_floating_point() else torch.int64))
