"""The gradients of small fully connected networks with cross entropy, written out for all agents together.

Most operations on a few numbers take as long as their call, and autograd makes more of them than needed. Here the
samples are the last dimension, so that a softmax over a few classes runs along them.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from caden.problems._model import Model


class Perceptron:
    """Linear layers, with ReLU after some of them: called with rows, it gives what autograd gives, to rounding."""

    def __init__(self, model: Model, layers: list[tuple[bool, bool]]):
        self.model, self.layers = model, layers  # of each layer whether it has a bias, and whether ReLU follows

    @classmethod
    def of(cls, model: Model) -> Perceptron | None:
        """Return a model as a perceptron if it is one: nothing but these layers, none of them frozen or changed."""
        if type(model.module) is not nn.Sequential or model.training.loss is not cross_entropy or not model.outputs:
            return None
        layers = list(model.module)
        if any(map(_is_changed, model.module.modules())):
            return None
        if layers and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
            layers = layers[1:]
        elif not isinstance(model.inputs, Tensor) or model.inputs.ndim != 2:
            return None
        kinds, linear = [type(layer) for layer in layers], [layer for layer in layers if isinstance(layer, nn.Linear)]
        own = [p.shape for layer in linear for p in (layer.weight, layer.bias) if p is not None]
        if not set(kinds) <= {nn.Linear, nn.ReLU} or not kinds[:1] == kinds[-1:] == [nn.Linear] or own != model.shapes:
            return None
        bends = [after is nn.ReLU for kind, after in pairwise([*kinds, None]) if kind is nn.Linear]
        return cls(model, [(layer.bias is not None, bent) for layer, bent in zip(linear, bends)])

    def __call__(self, rows: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values (k,) and gradients (k, d) of agents with stacked samples (k, n, ...)."""
        parameters, at, weights = list(self.model.views(rows).values()), 0, list[Tensor]()
        layer_inputs = [inputs.flatten(2).mT]  # (k, width, n)
        for has_bias, bends in self.layers:
            weights.append(parameters[at])
            if has_bias:
                out = torch.baddbmm(parameters[at + 1].unsqueeze(2), weights[-1], layer_inputs[-1])
            else:
                out = torch.bmm(weights[-1], layer_inputs[-1])
            layer_inputs.append(out.relu_() if bends else out)
            at += 1 + has_bias
        labels, logarithms = targets.unsqueeze(1), log_softmax(layer_inputs.pop(), 1)  # (k, 1, n), (k, classes, n)
        chosen = logarithms.gather(1, labels)
        slope = logarithms.exp_().scatter_add_(1, labels, torch.full_like(chosen, -1)).div_(targets.shape[1])
        gradients = list[Tensor]()
        for number in reversed(range(len(self.layers))):
            if self.layers[number][0]:
                gradients.append(slope.sum(2))
            gradients.append(torch.bmm(slope, layer_inputs[number].mT).flatten(1))
            if number:
                slope = torch.bmm(weights[number].mT, slope)
                slope = slope.mul_(layer_inputs[number].sign()) if self.layers[number - 1][1] else slope
        return -chosen.mean((1, 2)), torch.cat(gradients[::-1], 1)


def _is_changed(module: nn.Module) -> bool:
    """Return whether a module computes something else than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
