"""Problems from a model and data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from caden._tensor.devices import require_device
from caden.data import (
    Held,
    OnDemand,
    Partition,
    Reader,
    Shard,
    Streams,
    held,
    is_lazy,
    leaves,
    needs_labels,
    over,
    partition_from_spec,
)
from caden.draws import randomness
from caden.errors import CadenError, require_choice, require_flag, require_integer
from caden.problems._model import Loss, Training, is_mean
from caden.problems._module import Module

_AUTOCAST = {"bfloat16": torch.bfloat16}  # float16 would need scaled losses


def _require_finite(inputs: Any, targets: Tensor, parts: Sequence[np.ndarray], kind: str = "training") -> None:
    """Refuse samples with NaN or infinite entries, and name the agent that holds the first one."""
    named = [("inputs", part) for part in leaves(inputs)] + [("targets", targets)]
    for name, data in named:
        broken = (~data.isfinite()).reshape(len(data), -1).any(1) if data.is_floating_point() else data.new_zeros(0)
        if bool(broken.any()):
            sample = int(broken.nonzero()[0])
            agent = next((i for i, part in enumerate(parts) if sample in part), None)
            owner = "" if agent is None else f", which belongs to agent {agent},"
            raise CadenError(
                f"The {name} of {kind} sample {sample}{owner} are not finite ({int(broken.sum())} in all)."
            )


def _shards(
    train: Any,
    split: Callable[[np.ndarray], list[np.ndarray]],
    by_label: bool,
    wanted: list[int],
    lazy: Reader | None,
    common: Any,
) -> tuple[list[Shard], list[np.ndarray]]:
    """Return the shards of the wanted agents, and the indices of all agents."""
    if lazy is not None:
        targets = lazy.targets() if by_label else np.zeros(lazy.count)
        parts = split(targets)
        return [OnDemand(lazy, np.asarray(parts[i])) for i in wanted], parts
    whole = held(train, "train", *common)
    parts = split(whole.targets.cpu().numpy())
    _require_finite(whole.inputs, whole.targets, parts)
    return [Held(*whole.read(np.asarray(parts[i]))) for i in wanted], parts


def _probe(train: Any, lazy: Reader | None, common: Any) -> Held:
    """Return a few samples, on which every process tries the model: the first, and those with extreme integers.

    With a token beyond its vocabulary, a model that is batched over agents would read the next agent's parameters.
    """
    if lazy is not None:
        return Held(*lazy.read(np.arange(min(8, lazy.count))))
    whole = held(train, "train", *common)
    chosen = list(range(min(8, whole.count)))
    for part in leaves(whole.inputs):
        if not (part.is_floating_point() or part.is_complex()) and part.numel():
            flat = part.reshape(len(part), -1)
            chosen += [int(flat.amin(1).argmin()), int(flat.amax(1).argmax())]
    inputs, targets = whole.read(np.array(chosen))
    return Held(over(inputs, torch.clone), targets.clone())  # a view would keep all samples alive


def _source(
    train: Any, dtype: torch.dtype, device: str, label: str, batch_size: int | None
) -> tuple[Any, Reader | None]:
    """Return the data, or a source of them if they are to be read when they are used."""
    if not is_lazy(train):
        return train, None
    source = Reader(train, dtype, device, label)
    if source.count == 0:
        raise CadenError("`train` is empty.")
    on_disk = isinstance(train, tuple | list)
    if batch_size is None and not on_disk and not source.is_random():  # every round needs them all, and the same
        return source.read(np.arange(source.count)), None
    return train, source


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
    loss_is_mean: bool | None = None,
    microbatch: int | None = None,
    autocast: str | None = None,
    compile: bool = False,
    label: str = "label",
) -> Module:
    """The training of `model` over agents that each hold a shard of `train`, from the model's own parameters.

    Args:
        model: any module, in the mode that it was given in: dropout draws a mask, batch normalisation uses the
            statistics of the batch. Parameters with requires_grad=False do not change.
        train, test: a pair (inputs, targets) of arrays or tensors, or a torch or Hugging Face Dataset; inputs may be a
            tuple or a dictionary, which the model takes as arguments. A Dataset and a numpy memmap are read when they
            are used, so random transforms are drawn anew. `train` may be `caden.data.Streams`; `test` may be None.
        partition: "iid", "dirichlet", "shards", "sizes", a table with `name` and parameters, a function
            (labels, agents, seed) -> index arrays, or the index arrays themselves.
        loss: (output, target) -> mean over the samples. torch's cross entropy takes sequences as (N, T, classes) too.
        metrics: name -> (output, target) -> number on the test data; by default the accuracy, if there are classes.
        weight: "agents" weights every agent equally, "samples" every sample.
        execution: gradients by a "loop" over agents, by "vmap", or "auto" (chosen by the shapes).
        hosted: hold only the shards of these agents.
        batch_size: samples per mini-batch, drawn anew in each round, or in each local step by solvers that want it;
            all of them for None.
        loss_is_mean: promise that `loss` is a mean of one term per sample, so that it may be computed in parts.
        microbatch: samples per call of the model; gradients of larger batches are added up.
        autocast: "bfloat16" for the model's computations; parameters keep `dtype`.
        compile: compile the model with torch.compile; rounding may differ from the model as it is.
        label: the column of the targets, if the samples of a Dataset are dictionaries.

    >>> model = nn.Linear(2, 2)
    >>> problem = classification(model, (torch.randn(9, 2), torch.randint(2, (9,))), agents=4)
    >>> problem.agents, problem.dim, [shard.count for shard in problem.shards]
    (4, 6, [3, 2, 2, 2])
    """
    require_integer("agents", agents, least=1), require_integer("seed", seed, least=0)
    require_flag("compile", compile), require_flag("loss_is_mean", False if loss_is_mean is None else loss_is_mean)
    require_choice("weight", weight, ("agents", "samples"))
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise CadenError("`model` must be an nn.Module with parameters to train.")
    require_device(device)
    if dtype not in (torch.float32, torch.float64):
        raise CadenError(f"`dtype` must be torch.float32 or torch.float64, got {dtype}: see `autocast`.")
    for name, value in (("batch_size", batch_size), ("microbatch", microbatch)):
        if value is not None:
            require_integer(name, value, least=1)
    if autocast is not None:
        require_choice("autocast", autocast, _AUTOCAST)
    if isinstance(train, Streams):
        if agents != train.agents:
            raise CadenError(f"`agents` must be {train.agents}, the number of streams, got {agents}.")
        partition, least = train.parts(), batch_size or 1
        if train.window < least:
            raise CadenError(f"`window` of the streams must be at least `batch_size`, got {train.window} and {least}.")
    train, lazy = _source(train, dtype, device, label, batch_size)
    wanted = list(range(agents)) if hosted is None else hosted
    shards, parts = _shards(
        train,
        lambda labels: partition_from_spec(partition, labels, agents, seed),
        needs_labels(partition),
        wanted,
        lazy,
        (dtype, device),
    )
    held_out = _test_set(test, dtype, device, label, seed)
    _check_test_set(held_out, shards[0])
    counts = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    scale = counts * agents / counts.sum() if weight == "samples" else torch.ones_like(counts)
    mean = is_mean(loss) if loss_is_mean is None else loss_is_mean
    runs_code = lazy is not None and lazy.runs_code
    random_data = lazy is not None and runs_code and lazy.is_random()
    precision = None if autocast is None else _AUTOCAST[autocast]
    training = Training(loss, metrics, batch_size, seed, mean, microbatch, precision, compile, random_data, runs_code)
    probe = _probe(train, lazy, (dtype, device))
    training = training._replace(typical=max(1, round(float(counts.mean()))), probe=probe)
    try:
        model = copy.deepcopy(model).to(device, dtype)
    except RuntimeError as error:  # tensors that are computed from others, as by the old weight_norm
        raise CadenError(f"`model` cannot be copied ({str(error).splitlines()[0]}).") from None
    return Module(model, shards, held_out, scale[wanted].to(device, dtype), execution, training, wanted)


def _test_set(test: Any, dtype: torch.dtype, device: str, label: str, seed: int) -> Shard | None:
    if test is None or not is_lazy(test):
        return None if test is None else held(test, "test", dtype, device)
    source = Reader(test, dtype, device, label, "test")
    everything = np.arange(source.count)
    if isinstance(test, tuple | list) or not source.count:  # on disk
        return OnDemand(source, everything)
    with randomness(seed, -1, 0, -1, of="data"):
        return Held(*source.read(everything))


def _check_test_set(test: Shard | None, train: Shard) -> None:
    if test is not None and not test.count:
        raise CadenError("`test` is empty.")
    if test is not None:
        _require_same_shape(*(part.read(slice(0, 1))[0] for part in (train, test)))
    if isinstance(test, Held):
        _require_finite(test.inputs, test.targets, [], "test")


def _require_same_shape(train: Any, test: Any) -> None:
    shapes = [[tuple(t.shape[1:]) for t in leaves(inputs)] for inputs in (train, test)]
    for ours, theirs in zip(*shapes):
        if ours != theirs:
            raise CadenError(f"`test` inputs have shape {theirs}, `train` inputs {ours}.")
