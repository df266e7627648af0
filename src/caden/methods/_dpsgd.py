"""D-PSGD: Lian, Zhang, Zhang, Hsieh, Zhang and Liu, "Can decentralized algorithms outperform centralized algorithms? A
case study for decentralized parallel stochastic gradient descent", NeurIPS 2017. With several local steps: Koloskova,
Loizou, Boreiri, Jaggi and Stich, "A unified theory of decentralized SGD with changing topology and local updates", ICML
2020.

    v = x;  `local_steps` steps of an optimizer on f_i
    send v;  x <- W v

One communication per directed edge and round. Biased where data differ, even with everyone awake. `local` is the same
without the second line: what each agent reaches alone.

Sleeping agents: W is doubly stochastic on the awake subgraph.
"""

from typing import Any, NamedTuple

from torch import Tensor

from caden import solvers
from caden.core import Info, LocalSolver, Method, Round
from caden.methods._first_order import train
from caden.methods._registry import EVERYTHING, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    memory: Any


_SPACE = {"lr": {"low": 0.001, "high": 1.0}}


@register({"lr": 0.02, "momentum": 0.0}, space=_SPACE, equal_steps=True)
def dpsgd(lr: float = 0.03, momentum: float = 0.9, solver: LocalSolver | str | dict[str, Any] | None = None) -> Method:
    """D-PSGD: local steps of any optimizer, then averaging with the neighbours; biased where data differ.

    Args:
        lr: learning rate of SGD.
        momentum: its momentum, carried over the rounds.
        solver: another local solver instead, as an object, a name or a table.

    Reference: Lian et al., NeurIPS 2017.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.dpsgd(0.005, momentum=0.0), problem, graph, rounds=600)
    >>> bool((result.mean - problem.solution).norm() < 0.3)
    True
    """
    return _method("dpsgd", lr, momentum, solver, mixes=True)


@register({"lr": 0.02, "momentum": 0.0}, EVERYTHING, _SPACE, equal_steps=True, free=True)
def local(lr: float = 0.03, momentum: float = 0.9, solver: LocalSolver | str | dict[str, Any] | None = None) -> Method:
    """Local training without any communication, to compare with; it finds the agents' own minimisers.

    Args:
        lr: learning rate of SGD.
        momentum: its momentum, carried over the rounds.
        solver: another local solver instead, as an object, a name or a table.

    Reference: none; what the agents reach alone.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> caden.simulate(caden.methods.local(), problem, graph, rounds=10).rows[-1]["communications"]
    0
    """
    return _method("local", lr, momentum, solver, mixes=False)


def _method(name: str, lr: float, momentum: float, solver: Any, mixes: bool) -> Method:
    sgd = {"name": "torch_optim", "optimizer": "SGD", "lr": lr, "momentum": momentum}
    optimizer = solvers.from_spec(sgd if solver is None else solver)

    def init(x: Tensor, round: Round) -> State:
        return State(x, optimizer.init(round.problem, x, round.curvature))

    def step(state: State, round: Round) -> tuple[State, Info]:
        x, memory, info = train(round, optimizer, state.x, state.memory, elsewhere=mixes)  # mixing moved it
        if mixes:  # the gradient in `info` is that before
            return State(round.broadcast(x).mix(), memory), Info(steps=info.steps, seen=info.seen)
        return State(x, memory), info

    return Method(init, step, name)
