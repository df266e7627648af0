"""Problems: f_1 ... f_m and their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from caden import data as datasets
from caden.errors import CadenError, require_integer
from caden.problems._classification import classification as classification
from caden.problems._functions import functions as functions
from caden.problems._language import language as language
from caden.problems._language import transformer as transformer
from caden.problems._logistic import logistic as logistic
from caden.problems._matrix import factorisation as factorisation
from caden.problems._matrix import pca as pca
from caden.problems._model import accuracy as accuracy
from caden.problems._module import Module as Module
from caden.problems._networks import cnn as cnn
from caden.problems._networks import mlp as mlp
from caden.problems._normalisation import group_norm as group_norm
from caden.problems._quadratic import quadratic as quadratic
from caden.problems._quadratic import quadratics as quadratics
from caden.problems._robust import robust as robust


def _classification_by_name(
    data: str = "digits",
    model: str | Callable[..., nn.Module] = "mlp",
    hidden: int = 128,
    agents: int = 20,
    partition: str | dict[str, Any] = "iid",
    weight: str = "agents",
    execution: str = "auto",
    samples: int | None = None,
    test_samples: int | None = None,
    validation: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    hosted: list[int] | None = None,
    batch_size: int | None = None,
    norm: str = "group",
    dropout: float = 0.0,
    microbatch: int | None = None,
    autocast: str | None = None,
    compile: bool = False,
) -> Module:
    """`classification` on a named data set, with the paper's network, a linear model or a CNN; used by TOML files.

    `norm` ("group", "batch" or "none") and `dropout` are for the CNN.

    `samples` and `test_samples` limit the data to that many first samples. `validation` holds out that many last
    training samples and measures on them instead of on the test set.
    """
    train, test = datasets.load(data)
    if require_integer("validation", validation) >= len(train[0]):
        raise CadenError(f"`validation` must be below {len(train[0])} (training samples of {data}), got {validation}.")
    if validation:
        test = (train[0][-validation:], train[1][-validation:])
        train = (train[0][:-validation], train[1][:-validation])
    train, test = _first("samples", train, samples), _first("test_samples", test, test_samples)
    common = {"weight": weight, "execution": execution, "seed": seed, "dtype": dtype, "device": device}
    batches = {"batch_size": batch_size, "microbatch": microbatch, "autocast": autocast, "compile": compile}
    network = _network(model, train, hidden, seed, norm, dropout)
    return classification(network, train, test, agents, partition, hosted=hosted, **batches, **common)  # type: ignore


def _network(
    model: str | Callable[..., nn.Module],
    train: tuple[Tensor, Tensor],
    hidden: int = 128,
    seed: int = 0,
    norm: str = "group",
    dropout: float = 0.0,
) -> nn.Module:
    """Build the model that a file names, sized for the data."""
    features, classes = train[0][0].numel(), int(train[1].max()) + 1
    if callable(model):
        return model()
    if model == "mlp":
        return mlp(features, classes, hidden, seed)
    if model == "linear":
        layer = nn.Linear(features, classes)
        nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
        return nn.Sequential(nn.Flatten(), layer)
    if model == "cnn":
        return cnn(train[0].shape[1], train[0].shape[-1], classes, hidden, norm, dropout, seed)
    raise CadenError(f'`model` must be "mlp", "linear", "cnn" or "module:function", got {model!r}.')


def network_size(data: Any, model: Any, hidden: Any) -> int | None:
    """Return the number of parameters of a named network without building it; None for other models or wrong values."""
    if model not in ("mlp", "linear", "cnn") or data not in list(datasets.DATASETS):
        return None
    if not isinstance(hidden, int) or hidden < 1:
        return None
    train = datasets.load(data)[0]
    with torch.device("meta"):  # shapes without numbers
        return sum(p.numel() for p in _network(model, train, hidden).parameters())


def _first(name: str, data: tuple[Tensor, Tensor], count: int | None) -> tuple[Tensor, Tensor]:
    """Return the first `count` samples; all of them for None."""
    if count is None:
        return data
    if require_integer(name, count, least=1) > len(data[0]):
        raise CadenError(f"`{name}` must be at most {len(data[0])}, the number of samples, got {count}.")
    return data[0][:count], data[1][:count]


PROBLEMS: dict[str, Callable[..., Any]] = {
    "classification": _classification_by_name,
    "factorisation": factorisation,
    "language": language,
    "logistic": logistic,
    "pca": pca,
    "quadratic": quadratic,
    "robust": robust,
}
