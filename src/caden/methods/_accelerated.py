"""Quasi-Newton acceleration: Zhou, Alexander and Lange, "A quasi-Newton acceleration for high-dimensional optimization
algorithms", Statistics and Computing 21, 2011.

One round of a method is a map F of its state z (x, the duals and everything else it carries). Every second round jumps:

    u = F(z) - z,  v = F(F(z)) - F(z),   the last q of them as columns of U and V
    z <- F(z) - V (U'U - U'V)^-1 U'(z - F(z))

All agents use the same coefficients, so the sums that the method preserves (of duals, of trackers) stay preserved. If
|F(z) - z| is more than twice what it was before a jump, the jump is undone. Stored values and gradients are
re-evaluated after a jump: one gradient per two rounds.

In addition to the method's own communications, q (q + 1) scalars per agent are averaged in every second round and one
in the others. Memory: 2 q + 2 states.

Sleeping agents: refused; with them each round is a different map.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden._tensor.rows import row_dots
from caden._tensor.states import flatten, restore
from caden.core import Info, Method, Round
from caden.errors import CadenError, require_integer
from caden.methods._dense import must_be_awake
from caden.methods._registry import METHODS, PENALTY, advice_for, register
from caden.registry import make


class State(NamedTuple):
    x: Tensor  # (k, d)
    inner: Any  # the method's own state
    move: Tensor  # (N, d) F(z) - z, once it is known
    safe: Tensor  # (N, d) F(F(z)) before the last jump
    u: Tensor  # (q, N, d)
    v: Tensor  # (q, N, d)
    stored: int
    residual: float  # |F(z) - z|^2 before the last jump; infinite if there was none
    halfway: bool  # the method's state is F(z), not z


_NOT_MOVED = (".value", ".gradient", ".tally", ".vectors", ".columns", ".hessian")  # evaluated from x, or a memory


def _moving(inner: Any) -> dict[str, Tensor]:
    """Return the tensors of a state that F moves: all but the solver's memory and what is evaluated from x."""
    width = inner.x.shape[1]
    return {
        name: tensor
        for name, tensor in flatten(inner, "").items()
        if tensor.shape[-1:] == (width,)
        and tensor.is_floating_point()
        and not name.startswith(".memory")
        and name not in _NOT_MOVED
    }


def _rows(inner: Any) -> Tensor:
    """Return the moving tensors as one: (N, d)."""
    return torch.cat([tensor.reshape(-1, inner.x.shape[1]) for tensor in _moving(inner).values()])


def _with_rows(inner: Any, rows: Tensor, round: Round) -> Any:
    """Return the state with new moving rows, and with f and its gradient at the new x."""
    tensors, moving = flatten(inner, ""), _moving(inner)
    parts = torch.split(rows, [tensor.numel() // rows.shape[1] for tensor in moving.values()])
    tensors |= {name: part.reshape(tensor.shape) for (name, tensor), part in zip(moving.items(), parts)}
    evaluated = dict(zip(("value", "gradient"), round.problem.value_and_grad(tensors[".x"])))
    for name in tensors:
        if name.rpartition(".")[2] in evaluated:
            tensors[name] = evaluated[name.rpartition(".")[2]]
    return restore(inner, tensors, "")


@register(
    {"method": {"name": "caden", "mu_z": 0.4, "solver": "exact"}},
    space={"mu_z": PENALTY, "secants": [1, 3, 8]},
    equal_steps=True,
    server=True,
)
def accelerated(method: Method | str | dict[str, Any] = "caden", secants: int = 3, **parameters: Any) -> Method:
    """Any method with its fixed-point map accelerated by secant pairs; needs everyone awake, and sums over all agents.

    Args:
        method: the method to accelerate, as an object, a name or a table.
        secants: number of secant pairs.
        parameters: those of the method, such as `mu_z`, if it is given by its name or a table.

    Reference: Zhou, Alexander and Lange, Statistics and Computing 21, 2011.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.accelerated(caden.methods.caden(mu_z=0.4)), problem, graph, rounds=60)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    if isinstance(method, Method) and parameters:
        raise CadenError(f"`method` is made already, so it cannot take {', '.join(map(repr, parameters))}.")
    table = {"name": method} if isinstance(method, str) else method
    base: Method = table if isinstance(table, Method) else make("method", METHODS, {**table, **parameters})
    q = require_integer("secants", secants, least=1)

    def total(round: Round, products: Tensor) -> Tensor:
        """Sum the contributions of all agents' rows: (N, n) -> (n,)."""
        own = products.new_zeros(len(round.active), products.shape[1])
        own.index_add_(0, torch.arange(len(products), device=own.device) % len(own), products)
        return round.average(own) * round.graph.agents

    def init(x: Tensor, round: Round) -> State:
        must_be_awake("accelerated", round)
        inner = base.init(x, round)
        rows = _rows(inner)
        empty = rows.new_zeros(q, *rows.shape)
        return State(inner.x, inner, rows * 0, rows, empty, empty.clone(), 0, float("inf"), False)

    def step(state: State, round: Round) -> tuple[State, Info]:
        before = _rows(state.inner)
        inner, info = base.advance(state.inner, round)
        now = _rows(inner)
        if state.halfway:
            return jump(state, before, now, inner, round)
        residual = float(total(round, ((now - before) ** 2).sum(1, keepdim=True)))
        if residual > 4 * state.residual:
            inner = _with_rows(inner, state.safe, round)
            return state._replace(x=inner.x, inner=inner, residual=float("inf")), Info()
        return state._replace(x=inner.x, inner=inner, move=now - before, residual=residual, halfway=True), info

    def jump(state: State, middle: Tensor, now: Tensor, inner: Any, round: Round) -> tuple[State, Info]:
        slot, held = state.stored % q, min(state.stored + 1, q)
        state.u[slot], state.v[slot] = state.move, now - middle
        u, v = state.u[:held], state.v[:held]
        pairs = [*((a, b) for a in u for b in u - v), *((a, -state.move) for a in u)]
        sums = total(round, torch.stack([row_dots(a, b) for a, b in pairs], dim=1)).double()
        weights = torch.linalg.pinv(sums[: held**2].reshape(held, held), rtol=1e-12) @ sums[held**2 :]
        inner = _with_rows(inner, middle - sum(w * b for w, b in zip(weights.to(v), v)), round)
        new = State(inner.x, inner, state.move, now, state.u, state.v, state.stored + 1, state.residual, False)
        return new, Info()

    return Method(init, step, "accelerated", base.examine, advice=base.advice or advice_for(base.name))
