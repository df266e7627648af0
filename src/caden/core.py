"""The contract: what a method sees in a round, and what methods, problems and local solvers are.

One idea carries the library: *rows are agents*. Every per-agent quantity is a tensor of shape ``(k, d)`` with one row
per agent that this process hosts (``k = m`` in the simulator). A method is written once, on rows, and meets the other
agents only through the operators of its `Round`; whether those are sums in memory or messages on a wire is the
network's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from caden.errors import CadenError
from caden.graphs import Graph


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges of hosted agents; edge e joins rows `first[e]` and `second[e]`.

    Rows from `agents` on stand for agents of other processes that are known here by their messages. An edge to such an
    agent is held by both processes; what is summed for them here is dropped.
    """

    first: Tensor  # (e,) row of one end
    second: Tensor  # (e,) row of the other end
    awake_first: Tensor  # (e, 1) bool: that end is awake this round, and the link is up
    awake_second: Tensor  # (e, 1) bool
    agents: int  # rows hosted
    awake_degree: Tensor  # (rows, 1) awake neighbours of each awake row
    elsewhere: int = 0  # rows of other processes

    def _add(self, values: Tensor, *ends: tuple[Tensor, Tensor, int]) -> Tensor:
        out = values.new_zeros(self.agents + self.elsewhere, values.shape[1])
        for index, part, sign in ends:
            out.index_add_(0, index, part, alpha=sign)
        return out[: self.agents] if self.elsewhere else out

    def sum(self, values: Tensor) -> Tensor:
        """Sum of an agent's edge values: (e, d) -> (k, d)."""
        return self._add(values, (self.first, values, 1), (self.second, values, 1))

    def signed_sum(self, values: Tensor) -> Tensor:
        """The same with + at the first end and - at the second: rows of all processes sum to zero."""
        return self._add(values, (self.first, values, 1), (self.second, values, -1))

    def mixing(self, like: Tensor, weights: Tensor | None = None) -> Tensor:
        """(e, 1) weights on edges whose ends are both awake, 0 on others.

        The given ones (e,), else Metropolis weights of the awake subgraph, 1 / (1 + larger number of awake neighbours).
        """
        if weights is None:
            return self._metropolis.to(like.dtype)
        return (self.awake_first & self.awake_second) * weights.reshape(-1, 1).to(like)

    @cached_property
    def _metropolis(self) -> Tensor:
        both = (self.awake_first & self.awake_second).double()
        return both / (1 + torch.maximum(self.awake_degree[self.first], self.awake_degree[self.second]))

    def owner(self) -> Tensor:
        """(2e,) the row that owns each arc: arc e belongs to `first[e]`, arc e + |E| to `second[e]`.

        An arc that another process owns has some row of this one, and no say in any sum.
        """
        owner = torch.cat([self.first, self.second])
        return owner.clamp(max=self.agents - 1) if self.elsewhere else owner

    def arc_sum(self, values: Tensor) -> Tensor:
        """Sum of the arc values that an agent owns: (2e, d) -> (k, d)."""
        return self._add(values, (torch.cat([self.first, self.second]), values, 1))


class Heard(Protocol):
    """What one broadcast gives, in any number of uses; sleepers count with the last row they sent."""

    def laplacian(self) -> Tensor:
        """sum_j (v_i - v_j): (k, d), summed over edge differences."""

    def mix(self, weights: Tensor | None = None) -> Tensor:
        """W v on the awake subgraph, W doubly stochastic there; rows of sleepers come back unchanged."""

    def disagreement(self) -> Tensor:
        """sum_j |v_i - v_j|^2: (k,)."""

    def ends(self) -> tuple[Tensor, Tensor]:
        """The rows at both ends of each edge: two tensors (e, d)."""


class Round(NamedTuple):
    """All that a method may see in one round."""

    index: int  # type: ignore[assignment]  # -1 in init, where everyone is awake
    active: Tensor  # (k, 1) bool; nobody awake is legal and changes nothing
    awake: int  # how many of all agents are awake
    work: Tensor  # (k,) local iterations this round, 0 for sleepers
    degree: Tensor  # (k, 1) in the problem's dtype
    problem: Problem  # the hosted agents' functions
    edges: Edges
    graph: Graph  # facts that every agent may know: size, degrees, spectrum
    may_sleep: bool  # False: everyone is awake and every link is up in every round of this run
    curvature: Tensor | None  # (k,) what warm-up learnt of each agent's Lipschitz constant
    broadcast: Callable[[Tensor], Heard]  # awake agents send their row once to all neighbours
    exchange: Callable[[Tensor], tuple[Tensor, Tensor]]  # arc messages -> what reached each arc's owner, and whether
    average: Callable[[Tensor], Tensor]  # (k, d) -> (d,) mean over awake agents, through a server
    maximum: Callable[[Tensor], Tensor]  # (k,) -> () largest value of all agents, by max-consensus
    uniform: Callable[[str], float]  # a random number that all agents share, by label


class Info(NamedTuple):
    """What a step reports beside its state; every field is optional."""

    value: Tensor | None = None  # (k,) f_i at the new x_i, if the method has it: saves the metrics an evaluation
    gradient: Tensor | None = None  # (k, d) gradient of f_i at the new x_i, likewise
    rejected: int = 0  # trial points thrown away by line searches
    fallbacks: int = 0  # local iterations that gave up their direction for a safe gradient step
    stalled: tuple[int, ...] = ()  # rows that found no acceptable point at all
    heard: Heard | None = None  # the broadcast of x, if the method adapts to it


class Verdict(NamedTuple):
    """What theory says of a method's parameters before a run."""

    refusal: str | None = None  # one line: why the run must diverge, and what would work
    warning: str | None = None  # one line: what is risky


class Method(NamedTuple):
    """An algorithm: a pair of functions on a state, which is a NamedTuple whose first field is `x` (k, d).

    A state field is rows (k, d), edges (e, d), arcs (2e, d), a server's (d,), a scalar, or a solver's memory
    (NamedTuple of tensors with a leading k). `step` has no hidden state and no randomness of its own; it may overwrite
    the state that it is given.
    """

    init: Callable[[Tensor, Round], Any]
    step: Callable[[Any, Round], tuple[Any, Info]]
    name: str = "method"
    examine: Callable[[Round], Verdict] | None = None  # asked once, before `init`
    adapt: Callable[[Any, Any, Round, Info], Any] | None = None  # old state, new state -> new one with other parameters

    def advance(self, state: Any, round: Round) -> tuple[Any, Info]:
        """One round: `step`, then `adapt`."""
        new, info = self.step(state, round)
        if self.adapt is not None:
            new = self.adapt(state, new, round, info)
        return new, info._replace(heard=None)  # it holds rows


class Problem:
    """f_1 ... f_m, one function per agent; x has one row per agent asked for.

    Subclass it and define what has no default. An object of any other class with these members will do, too.
    """

    agents: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    start: Tensor | None = None  # (d,) or (m, d) where a run begins unless it is told otherwise; None: at zero
    hessian: Tensor | None = None  # (m, d, d) if the f_i are quadratic
    execution: str = ""  # "loop" or "turns": agents are evaluated one by one, so that one may run ahead of the others
    stochastic: bool = False  # these are the functions of one round: values of another round are of other functions

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(k', d) -> (k',), (k', d): values and gradients of the agents `rows` (all of them if None)."""
        raise NotImplementedError

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        """Hessian of f_i at x_i times v_i, row by row; only second-order methods and solvers ask for it."""
        raise CadenError(f"{type(self).__name__} has no Hessian-vector products (`hvp`), which this method needs.")

    def take(self, agents: list[int]) -> Problem:
        """The part of the problem that a process hosts; only distributed runs ask for it."""
        raise CadenError(f"{type(self).__name__} cannot be spread over processes: it has no `take`.")

    def evaluate(self, x: Tensor) -> dict[str, Tensor]:
        """(k,) per extra metric, for example the test accuracy of each local model."""
        return {}

    def at(self, round: int) -> Problem:
        """The functions of a round, if they change: mini-batches are a sample of the whole."""
        return self

    def module(self, vector: Tensor) -> nn.Module:
        """The user's model with the parameters `vector` (d,)."""
        raise CadenError("Only a problem made from an nn.Module has a module; take `result.mean`.")


class _Completed(Problem):
    """An object of the user's with the defaults of `Problem` for what it lacks."""

    def __init__(self, problem: Any):
        members = [name for name in {*dir(Problem), *Problem.__annotations__} if not name.startswith("_")]
        vars(self).update({name: getattr(problem, name) for name in members if hasattr(problem, name)})


def complete(problem: Any) -> Problem:
    """Any object with a problem's members as a `Problem`."""
    if isinstance(problem, Problem):
        return problem
    for name in ("agents", "dim", "dtype", "device", "value_and_grad"):
        if not hasattr(problem, name):
            raise CadenError(f"{type(problem).__name__!r} is not a problem: it has no `{name}`; see `caden.Problem`.")
    return _Completed(problem)


class Objective(NamedTuple):
    """A local subproblem around its starting point x_i: f_i(v) + slope_i.(v - x_i) + rho_i/2 |v - x_i|^2.

    Every proximal or augmented-Lagrangian subproblem of this library is of this form; written around the start it has
    no cancellation between a large linear and a large quadratic term, which matters in float32.
    """

    problem: Problem
    slope: Tensor  # (k, d)
    rho: Tensor  # (k, 1)


class Solved(NamedTuple):
    """What a local solve gives back."""

    x: Tensor  # (k, d)
    memory: Any  # carries f_i and its gradient at x to the next round, and what else the solver keeps
    info: Info


class LocalSolver(NamedTuple):
    """`init` evaluates f at the start; `solve` does `work[i]` iterations for agent i (0: the row is untouched).

    The memory's first two fields are `value` (k,) and `gradient` (k, d) of f_i at the current x_i.
    """

    init: Callable[[Problem, Tensor, Tensor | None], Any]  # problem, x, known curvature (k,)
    solve: Callable[[Objective, Tensor, Tensor, Any], Solved]  # objective, x, work (k,), memory
    name: str = "solver"
    exact: bool = False  # any amount of work solves a quadratic subproblem
