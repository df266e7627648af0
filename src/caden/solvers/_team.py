"""Optimizers of PyTorch on the parameters of agents, and what they keep between rounds as rows of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from caden.errors import CadenError

Build = Callable[[list[nn.Parameter]], list[Optimizer]]


class _Place(NamedTuple):
    """What a number or tensor of an optimizer's state looks like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_tensor: bool


class Layout(NamedTuple):
    """What optimizers keep: the state of each parameter, then the numbers of each group."""

    trees: list[Any]  # with a `_Place` for each number or tensor
    places: list[_Place]  # those, in order


def _described(tree: Any, together: bool) -> Any:
    """Return a tree with a `_Place` for each number or tensor; keys in alphabetical order."""
    if isinstance(tree, dict):
        return {key: _described(tree[key], together) for key in sorted(tree) if tree[key] is not None}
    if isinstance(tree, list | tuple):
        return [_described(part, together) for part in tree]
    if not isinstance(tree, Tensor | int | float):
        raise CadenError(
            f"This optimizer cannot be a local solver: its state has a value of type {type(tree).__name__}."
        )
    value = torch.as_tensor(tree, dtype=torch.float64 if isinstance(tree, float) else None)
    shape = value.shape[1:] if together and value.ndim else value.shape
    return _Place(shape, value.dtype, value.device, isinstance(tree, Tensor))


def _matched(described: Any, tree: Any) -> Iterator[tuple[_Place, Any]]:
    """Yield each place with its value in a tree."""
    if isinstance(described, _Place):
        yield described, tree
    else:
        keys = described if isinstance(described, dict) else range(len(described))
        for key in keys:
            yield from _matched(described[key], tree[key])


def _filled(described: Any, values: Iterator[Any]) -> Any:
    """Return a tree with the values, which are in the order of its places."""
    if isinstance(described, _Place):
        return next(values)
    if isinstance(described, dict):
        return {key: _filled(part, values) for key, part in described.items()}
    return [_filled(part, values) for part in described]


class Team:
    """Optimizers of the parameters of one agent, or elementwise ones of the rows of several agents."""

    def __init__(self, rows: Tensor, values: Tensor, shapes: Sequence[torch.Size], together: bool, build: Build):
        self.rows, self.values = rows, values.clone()  # (g,), (g, d)
        parts = [self.values] if together else _views(self.values[0], shapes)
        self.parameters, self._together = [nn.Parameter(part) for part in parts], together
        self.optimizers = build(self.parameters)
        if not all("lr" in group for optimizer in self.optimizers for group in optimizer.param_groups):
            raise CadenError("This optimizer cannot be a local solver: its groups have no learning rate `lr`.")
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]

    def _states(self) -> list[dict[str, Any]]:
        owner = {p: o for o in self.optimizers for group in o.param_groups for p in group["params"]}
        by_storage = {p.data_ptr(): o.state[p] for p, o in owner.items()}
        return [by_storage[p.data_ptr()] for p in self.parameters]

    def step(self, gradient: Tensor, factor: float) -> None:
        """Take one step along (g, d) gradients."""
        parts = [gradient] if self._together else _views(gradient[0], [p.shape for p in self.parameters])
        for parameter, part in zip(self.parameters, parts):
            parameter.grad = part
        for optimizer, rates in zip(self.optimizers, self._rates):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * factor
                for parameter in group["params"]:
                    if parameter.grad is None:  # a reshaped view
                        whole = next(p for p in self.parameters if p.data_ptr() == parameter.data_ptr())
                        assert whole.grad is not None
                        parameter.grad = whole.grad.view_as(parameter)
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups of optimizers from elsewhere, which may count their steps there."""
        others = [one for one in self.optimizers if not type(one).__module__.startswith("torch.optim")]
        return [group for optimizer in others for group in optimizer.param_groups]

    def _trees(self) -> list[dict[str, Any]]:
        """Return the state of each parameter, then the numbers of each group."""
        numbers = [{k: v for k, v in g.items() if isinstance(v, int | float) and k != "lr"} for g in self._groups()]
        return [*self._states(), *numbers]

    def layout(self) -> Layout:
        """Return what the optimizers keep, after a step."""
        trees = [_described(tree, self._together) for tree in self._trees()]
        return Layout(trees, [place for tree in trees for place, _ in _matched(tree, tree)])

    def load(self, layout: Layout, slots: Tensor) -> None:
        """Restore the state from (g, n) numbers."""
        parts = torch.split(slots, [place.shape.numel() for place in layout.places], dim=1)
        values = map(self._value, layout.places, parts)
        states, groups = self._states(), self._groups()
        for tree, described in zip(states, layout.trees):
            tree.update(_filled(described, values))
        for group, described in zip(groups, layout.trees[len(states) :]):
            new = _filled(described, values)  # what has only been rounded is an option, and stays as it is
            group |= {k: v for k, v in new.items() if k not in group or v != slots.new_tensor(group[k]).item()}

    def _value(self, place: _Place, part: Tensor) -> Any:
        value = part.to(place.device, place.dtype, copy=True)
        if self._together and place.shape:
            value = value.view(len(self.rows), *place.shape)
        else:  # one agent, or a number that all of them share, such as the count of steps
            value = value[0].reshape(place.shape)
        return value if place.is_tensor else value.item()

    def slots(self, layout: Layout, like: Tensor) -> Tensor:
        """Return the state as (g, n) numbers."""
        count, parts = len(self.rows), []
        if [p.shape for p in self.layout().places] != [p.shape for p in layout.places]:
            raise CadenError(
                "This optimizer keeps other state after later steps than after its first: set carry=False."
            )
        for described, tree in zip(layout.trees, self._trees()):
            for place, number in _matched(described, tree):
                value = torch.as_tensor(number, dtype=like.dtype, device=like.device)
                together = self._together and bool(place.shape)
                parts.append(value.reshape(count, -1) if together else value.reshape(1, -1).expand(count, -1))
        return torch.cat(parts, dim=1) if parts else like.new_empty(count, 0)


def _views(row: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = torch.split(row, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]
