"""Layers that normalise by statistics of a batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from caden.errors import CadenError, require_integer


def keeps_statistics(model: nn.Module) -> list[str]:
    """Return the names of the layers that collect running statistics in training."""
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, _NormBase)]
    return [name for name, layer in layers if layer.training and layer.track_running_stats]


@contextmanager
def forget_statistics(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Replace the layers' statistics by those of the batch that passes within the block."""
    momenta: list[Any] = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()  # type: ignore[operator]
        layer.momentum = None  # type: ignore[assignment]
        layer.train()
    yield
    for layer, momentum in zip(layers, momenta):
        layer.momentum = momentum
        layer.eval()


def group_norm(model: nn.Module, groups: int = 8) -> nn.Module:
    """Return a copy of a model with GroupNorm in place of batch normalisation: no statistics, no coupling of samples.

    The number of groups is the largest divisor of the channels that is at most `groups`. Scale and shift are kept.

    >>> group_norm(nn.Sequential(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12)))[1].num_groups
    6
    """
    require_integer("groups", groups, least=1)
    if not isinstance(model, nn.Module):
        raise CadenError(f"`model` must be an nn.Module, got {type(model).__name__}.")
    require_initialised(model)
    model = copy.deepcopy(model)
    if isinstance(model, _BatchNorm):
        return _grouped(model, groups)
    new: dict[nn.Module, nn.GroupNorm] = {}  # a layer may be used in several places
    for parent in list(model.modules()):
        for name, layer in parent._modules.items():
            if isinstance(layer, _BatchNorm):
                new[layer] = new.get(layer) or _grouped(layer, groups)
                parent._modules[name] = new[layer]
    return model


def _grouped(layer: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    best = max(n for n in range(1, groups + 1) if math.gcd(n, channels) == n)
    new = nn.GroupNorm(best, channels, layer.eps, layer.affine)
    if layer.affine:
        new.weight, new.bias = layer.weight, layer.bias
    return new


def require_initialised(model: nn.Module) -> None:
    """Refuse a model whose parameters have no shapes yet."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise CadenError(f"`{lazy[0]}` has no shape yet: call the model once before, with some inputs.")
