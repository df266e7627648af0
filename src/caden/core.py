"""The interfaces: what a method sees in one round, and what methods, problems and local solvers are.

One idea carries the library: *rows are agents*. Every per-agent quantity is a tensor of shape ``(k, d)`` with one row
per agent that this process hosts (``k = m`` in the simulator). A method is written once, on rows, and reaches the
other agents only through the operators of its `Round`. The network decides whether these are sums in memory or
messages on a wire.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from caden.errors import CadenError
from caden.graphs import Graph


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges of the hosted agents; edge e joins rows `first[e]` and `second[e]`.

    Rows from `agents` on stand for agents of other processes, known here only by their messages. Both processes hold an
    edge to such an agent. Sums for these rows are dropped here.
    """

    first: Tensor  # (e,) row of the first end
    second: Tensor  # (e,) row of the second end
    awake_first: Tensor  # (e, 1) bool: the first end is awake in this round, and the link is up
    awake_second: Tensor  # (e, 1) bool
    agents: int  # hosted rows
    awake_degree: Tensor  # (rows, 1) number of awake neighbours of each awake row
    elsewhere: int = 0  # rows of other processes

    def _add(self, values: Tensor, *ends: tuple[Tensor, Tensor, int]) -> Tensor:
        out = values.new_zeros(self.agents + self.elsewhere, values.shape[1])
        for index, part, sign in ends:
            out.index_add_(0, index, part, alpha=sign)
        return out[: self.agents] if self.elsewhere else out

    @cached_property
    def count(self) -> int:
        """The number of edges."""
        return len(self.first)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(e,) both ends as arrays, for compiled loops."""
        return self.first.numpy(), self.second.numpy()

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values of each agent's edges: (e, d) -> (k, d)."""
        return self._add(values, (self.first, values, 1), (self.second, values, 1))

    def signed_sum(self, values: Tensor) -> Tensor:
        """Sum edge values with + at the first end and - at the second: the rows of all processes sum to zero."""
        return self._add(values, (self.first, values, 1), (self.second, values, -1))

    def mixing(self, like: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return (e, 1) mixing weights: `weights` (e,) on edges whose ends are both awake, 0 on the others.

        The default is the Metropolis weights of the awake subgraph, 1 / (1 + larger number of awake neighbours).
        """
        if weights is None:
            return self._metropolis.to(like.dtype)
        return (self.awake_first & self.awake_second) * weights.reshape(-1, 1).to(like)

    @cached_property
    def _metropolis(self) -> Tensor:
        both = (self.awake_first & self.awake_second).double()
        return both / (1 + torch.maximum(self.awake_degree[self.first], self.awake_degree[self.second]))

    def owner(self) -> Tensor:
        """Return the (2e,) rows that own the arcs: arc e belongs to `first[e]`, arc e + |E| to `second[e]`.

        An arc that another process owns gets some row of this process and enters no sum.
        """
        return self._hosted_owners

    @cached_property
    def owner_awake(self) -> Tensor:
        """(2e, 1) bool: the arc's owner is awake in this round, and the link is up."""
        return torch.cat([self.awake_first, self.awake_second])

    @cached_property
    def peer_awake(self) -> Tensor:
        """(2e, 1) bool: the same of its peer."""
        return torch.cat([self.awake_second, self.awake_first])

    @cached_property
    def _owners(self) -> Tensor:
        return torch.cat([self.first, self.second])

    @cached_property
    def _hosted_owners(self) -> Tensor:
        return self._owners.clamp(max=self.agents - 1) if self.elsewhere else self._owners

    def arc_max(self, values: Tensor) -> Tensor:
        """Return the largest value of the arcs that each agent owns, -inf without any: (2e, n) -> (k, n)."""
        out = values.new_full((self.agents + self.elsewhere, values.shape[1]), -torch.inf)
        owner = self._owners.unsqueeze(1).expand_as(values)
        return out.scatter_reduce_(0, owner, values, "amax")[: self.agents]

    def arc_sum(self, values: Tensor) -> Tensor:
        """Sum the values of the arcs that each agent owns: (2e, d) -> (k, d)."""
        return self._add(values, (self._owners, values, 1))


_ALL = slice(None)


class Heard(Protocol):
    """The rows heard in one broadcast, for any number of uses; sleeping agents count with the last row they sent."""

    def laplacian(self) -> Tensor:
        """Return sum_j (v_i - v_j), (k, d), summed over edge differences."""

    def mix(self, weights: Tensor | None = None) -> Tensor:
        """Return W v on the awake subgraph, with W doubly stochastic there; rows of sleeping agents do not change."""

    def disagreement(self) -> Tensor:
        """Return sum_j |v_i - v_j|^2, (k,)."""

    def ends(self, columns: slice = _ALL) -> tuple[Tensor, Tensor]:
        """Return the rows at both ends of each edge, or some of their columns, as two tensors (e, d)."""


class Round(NamedTuple):
    """Everything a method may see in one round."""

    index: int  # type: ignore[assignment]  # -1 in `init`, where all agents are awake
    active: Tensor  # (k, 1) bool; a round with no agent awake is legal and changes nothing
    awake: int  # number of awake agents, over all processes
    work: Tensor  # (k,) local steps in this round, at most if `accuracy` is set; 0 for sleeping agents
    degree: Tensor  # (k, 1) in the problem's dtype
    problem: Problem  # the hosted agents' functions
    edges: Edges
    graph: Graph  # what every agent may know: size, degrees, spectrum
    may_sleep: bool  # False: all agents are awake and all links are up in every round of this run
    lossy: bool  # True: messages may be lost or late, or agents run free; then only arc variables are safe
    abridged: str  # "compressed", "triggered" (sent only if they say something new), or ""
    curvature: Tensor | None  # (k,) each agent's Lipschitz constant, as estimated by the warm-up
    accuracy: float | None  # local solves may stop at this relative error (`Objective`)
    broadcast: Callable[..., Heard]  # awake agents send their row once to all neighbours; keep=False: for once
    # Messages of arcs -> what each arc's owner received, and whether. Columns beyond d are sent as they are, and count
    # as bytes only. In `init` nothing is received: it is what later messages are compared with.
    exchange: Callable[[Tensor], tuple[Tensor, Tensor]]
    average: Callable[[Tensor], Tensor]  # (k, d) -> (d,) mean over awake agents, through a server
    maximum: Callable[[Tensor], Tensor]  # (k,) -> () largest value over all agents, by max-consensus
    uniform: Callable[[str], float]  # a random number shared by all agents, by label
    restrict: Callable[[np.ndarray], dict[str, Any]]  # of these fields those that differ on some edges only; see `over`
    elapsed: float = 0.0  # the part of the run that is over, for schedules; in [0, 1)

    @property
    def everyone(self) -> bool:
        """Whether all agents of the network are awake."""
        return self.awake == self.graph.agents

    def over(self, chosen: np.ndarray) -> Round:
        """Return this round on the `chosen` (|E|,) bool edges of the graph; all agents must choose the same."""
        return self._replace(**self.restrict(chosen))

    def objective(self, slope: Tensor, rho: Tensor, overshoot: float = 0.25, elsewhere: bool = False) -> Objective:
        """Return the awake agents' subproblems f_i(v) + slope_i.(v - x_i) + rho_i/2 |v - x_i|^2.

        `elsewhere`: the solve starts at another point than the last one ended, so its gradient is unknown.
        """
        return Objective(self.problem, slope, rho, self.accuracy, overshoot, elsewhere, self.elapsed)


class Info(NamedTuple):
    """What a step reports in addition to its state; every field is optional."""

    value: Tensor | None = None  # (k,) f_i at the new x_i, if the method knows it: saves the metrics an evaluation
    gradient: Tensor | None = None  # (k, d) gradient of f_i at the new x_i, likewise
    rejected: int = 0  # trial points rejected by line searches
    fallbacks: int = 0  # local steps that replaced their direction by a safe gradient step
    stalled: tuple[int, ...] = ()  # rows that found no acceptable point
    steps: Tensor | None = None  # (k,) local steps that each agent took
    seen: Tensor | None = None  # (k,) mean loss of the batches that each agent saw in this round
    heard: Heard | None = None  # the broadcast of x, if the method adapts to it


class Verdict(NamedTuple):
    """What theory predicts for a method's parameters before a run."""

    refusal: str | None = None  # one line: why the run must diverge, and what would work
    warning: str | None = None  # one line: the risk


def _captured(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function has from the one around it, but for those that have no value yet."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):
            yield name, cell.cell_contents


class Method(NamedTuple):
    """An algorithm: two functions on a state, which is a NamedTuple whose first field is `x` (k, d).

    A state field is rows (k, d), edges (e, d), arcs (2e, d), a server's vector (d,), a scalar, or a solver's memory
    (a NamedTuple of tensors with a leading k). `step` has no hidden state and no randomness of its own. It may
    overwrite the state it receives.
    """

    init: Callable[[Tensor, Round], Any]
    step: Callable[[Any, Round], tuple[Any, Info]]
    name: str = "method"
    examine: Callable[[Round], Verdict] | None = None  # called once, before `init`
    adapt: Callable[[Any, Any, Round, Info], Any] | None = None  # old state, new state -> state with other parameters
    advice: str = ""  # what to change if it diverges, for example "lower `alpha`"

    def advance(self, state: Any, round: Round) -> tuple[Any, Info]:
        """Run one round: `step`, then `adapt`."""
        new, info = self.step(state, round)
        if self.adapt is not None:
            new = self.adapt(state, new, round, info)
        return new, info if info.heard is None else info._replace(heard=None)  # frees the rows it holds

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that the factory was called with, as far as `init` and `step` use them."""
        functions = [f for f in (self.init, self.step) if inspect.isfunction(f)]
        values = {k: v for f in functions for k, v in _captured(f)}
        named = {k: v.name if isinstance(v, LocalSolver) else v for k, v in values.items()}
        return {k: v for k, v in sorted(named.items()) if isinstance(v, bool | int | float | str)}

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.parameters().items())})"

    def _repr_html_(self) -> str:
        return html_table(f"method {self.name}", self.parameters())


class Problem:
    """The functions f_1 ... f_m, one per agent; x has one row per agent evaluated.

    Subclass it and define the members that have no default. An object of any other class with these members also works.
    """

    agents: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    start: Tensor | None = None  # (d,) or (m, d) default starting point of a run; None: zero
    hessian: Tensor | None = None  # (m, d, d) if the f_i are quadratic
    shapes: Sequence[torch.Size] | None = None  # of the parameters that x consists of, if it is a model's
    execution: str = ""  # "loop" or "turns": agents are evaluated one by one, so one may run ahead of the others
    waited: list[float] | None = None  # seconds spent waiting for samples so far, if they are read when they are used
    metric_names: Sequence[str] = ()  # of `evaluate`, if `glance` has a cost
    tests: tuple[int, int] = (0, 0)  # test samples of `evaluate` and of `glance`, if `glance` has a cost
    metrics_cost: float = 0.0  # of `glance` per agent, in gradients of the functions of a round
    ended: bool = False  # True: no more gradients come, since a training loop has ended, and so the run ends
    stochastic: bool = False  # True: the functions of one draw, such as a mini-batch, and not those to be minimised

    @property
    def exact(self) -> Problem:
        """The functions to be minimised; in a run, those of a round know them, if they are a draw of them."""
        return self

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return values (k',) and gradients (k', d) at x (k', d) of the agents `rows` (all agents if None)."""
        raise NotImplementedError

    def descend(self, x: Tensor, step: float, correction: Tensor, work: Tensor) -> Tensor | None:
        """Return where `work[i]` steps v <- v - step (grad f_i(v) + correction_i) lead from x (k, d).

        None: this problem has nothing faster than a gradient after the other, which the caller then asks for.
        """
        return None

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the Hessian of f_i at x_i times v_i, row by row; only second-order methods and solvers use it."""
        raise CadenError(f"{type(self).__name__} has no Hessian-vector products (`hvp`), which this method needs.")

    def take(self, agents: list[int]) -> Problem:
        """Return the part of the problem that a process hosts; only distributed runs use it."""
        raise CadenError(f"{type(self).__name__} cannot be spread over processes: it has no `take`.")

    def evaluate(self, x: Tensor) -> dict[str, Tensor]:
        """Return extra metrics, (k,) each, for example the test accuracy of each local model."""
        return {}

    def at(self, round: int) -> Problem:
        """Return the functions of a round, if they are drawn anew in each, as mini-batches are; round -1 is the start.

        A solver that does not want one function for the whole solve asks these for others: see `redraw`.
        """
        return self

    def redraw(self, step: int) -> Problem:
        """Return the functions of a local step of the same round, drawn anew; those of step 0 are `at(round)`."""
        return self

    def prepare(self, rows: Tensor | None) -> None:
        """Begin to read the samples of these rows; `value_and_grad` will be called for them."""

    def glance(self, x: Tensor) -> dict[str, Tensor]:
        """Return the metrics of `evaluate`, perhaps on fewer samples, for rounds in between."""
        return self.evaluate(x)

    def known_curvature(self, x: Tensor) -> Tensor | None:
        """Return (k,) how curved the functions are, if the problem knows; None: ask `curvature.smoothness`."""
        return None

    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must hold, such as the state of an optimizer outside the method."""
        return {}

    def restore(self, buffers: dict[str, Tensor]) -> None:
        """Restore the tensors that `buffers` returned."""

    def module(self, vector: Tensor, agent: int | None = None) -> nn.Module:
        """Return the user's model with the parameters `vector` (d,): those of an agent, or the mean of all."""
        raise CadenError("Only a problem made from an nn.Module has a module; use `result.mean`.")

    def state_dict(self, vector: Tensor) -> dict[str, Tensor] | None:
        """Return that model's tensors by name; None if the problem has no model."""
        return None

    def notes(self) -> list[str]:
        """Return one line about each agent whose data look odd."""
        return []

    def facts(self) -> dict[str, Any]:
        """Return what to show of the problem."""
        return {"agents": self.agents, "dimension": self.dim, "dtype": str(self.dtype).removeprefix("torch.")}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k} {v}' for k, v in self.facts().items())})"

    def _repr_html_(self) -> str:
        return html_table(f"problem {type(self).__name__}", self.facts())


def html_table(caption: str, cells: Mapping[str, Any]) -> str:
    """Return a small two-column table for notebooks: names on the left, values on the right."""
    rows = "".join(
        f"<tr><td style='text-align:left'>{escape(str(name))}</td>"
        f"<td style='text-align:right'>{escape(str(value))}</td></tr>"
        for name, value in cells.items()
    )
    return f"<table><caption>{escape(caption)}</caption><tbody>{rows}</tbody></table>"


class _Completed(Problem):
    """A user's object with the defaults of `Problem` for the members it lacks."""

    def __init__(self, problem: Any):
        members = [name for name in {*dir(Problem), *Problem.__annotations__} if not name.startswith("_")]
        vars(self).update({name: getattr(problem, name) for name in members if hasattr(problem, name)})


def complete(problem: Any) -> Problem:
    """Return any object with a problem's members as a `Problem`."""
    if isinstance(problem, Problem):
        return problem
    for name in ("agents", "dim", "dtype", "device", "value_and_grad"):
        if not hasattr(problem, name):
            raise CadenError(f"{type(problem).__name__!r} is not a problem: it has no `{name}`; see `caden.Problem`.")
    return _Completed(problem)


class Objective(NamedTuple):
    """A local subproblem around its starting point x_i: f_i(v) + slope_i.(v - x_i) + rho_i/2 |v - x_i|^2.

    Every proximal or augmented-Lagrangian subproblem of this library has this form. Written around the starting point,
    it has no cancellation between a large linear and a large quadratic term, which matters in float32.

    With `accuracy` set, an agent stops at the first v, after at least one step, whose gradient g of the subproblem has

        |g| <= accuracy rho |v - x|   and   g.(v - x) <= overshoot rho |v - x|^2,

    or is zero to rounding. If f is convex, the first makes v - x right up to the fraction `accuracy`; the second lets v
    lie beyond the minimiser by a small fraction only. Where rho is 0, |g| <= accuracy |g at x| is asked for instead.
    """

    problem: Problem
    slope: Tensor  # (k, d)
    rho: Tensor  # (k, 1)
    accuracy: float | None = None
    overshoot: float = 0.25
    elsewhere: bool = False  # f and its gradient at x are unknown: this is not where the last solve ended
    elapsed: float = 0.0  # the part of the run that is over


class Solved(NamedTuple):
    """The result of a local solve."""

    x: Tensor  # (k, d)
    memory: Any  # f_i and its gradient at x for the next round, and anything else the solver stores
    info: Info


class LocalSolver(NamedTuple):
    """A local solver: `init` evaluates f at the start, `solve` does `work[i]` local steps (0: the row is unchanged).

    The memory's first two fields are `value` (k,) and `gradient` (k, d) of f_i at the current x_i.
    """

    init: Callable[[Problem, Tensor, Tensor | None], Any]  # problem, x, known curvature (k,)
    solve: Callable[[Objective, Tensor, Tensor, Any], Solved]  # objective, x, work (k,), memory
    name: str = "solver"
    exact: bool = False  # any amount of work solves a quadratic subproblem
    fresh: bool = False  # it draws mini-batches anew for every local step; False: one function for the whole solve
