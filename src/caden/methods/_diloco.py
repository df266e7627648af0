"""Outer momentum on the progress of many local steps. DiLoCo: Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro,
Ranzato, Szlam and Shen, "DiLoCo: distributed low-communication training of language models", arXiv:2311.08105, 2023.
NoLoCo: Kolehmainen, Blagoev, Donaghy, Ersoy and Nies, "NoLoCo: no-all-reduce low communication training method for
large models", arXiv:2506.10911, 2025.

Agents take `local_steps` steps of an optimizer, whose state they keep, and come from x to x'.

    DiLoCo   (a server)   D = mean of the awake agents' theta - x'
                          m <- mu m + D;  theta <- theta - outer_lr (D + mu m),  or outer_lr m without Nesterov
    NoLoCo   (in pairs)   D_i = x'_i - x_i;  means over agent i and its partner:
                          m_i <- mu m_i + outer_lr mean D + pull (mean x - x_i);  x_i <- x_i + m_i

NoLoCo's partners are a random matching of the graph's edges, drawn anew in every round (in the paper any two may meet);
an agent without a partner continues alone. DiLoCo: one communication up and one down per awake agent and round; NoLoCo:
two per agent of a pair. If all agents are one group, NoLoCo is DiLoCo without Nesterov's correction.

Biased if agents differ and take several local steps, even with everyone awake. DiLoCo has the limit of FedAvg with the
same local steps, for every outer_lr and mu; outer_lr = 1 and mu = 0 is FedAvg. NoLoCo's models also stay apart.

Sleeping agents: DiLoCo's mean is over awake agents. A NoLoCo agent whose partner sleeps continues alone.
"""

from typing import Any, NamedTuple

from torch import Tensor

from caden import solvers
from caden.core import Info, LocalSolver, Method, Round
from caden.errors import require_choice, require_fraction, require_positive
from caden.methods._first_order import awake, train
from caden.methods._gossip import in_random_pairs
from caden.methods._registry import register

Solver = LocalSolver | str | dict[str, Any] | None
_LR = {"low": 1e-4, "high": 0.1}
_SGD = {"name": "torch_optim", "optimizer": "SGD", "lr": 0.02}


class DilocoState(NamedTuple):
    x: Tensor  # (k, d) the last theta that each agent received
    theta: Tensor  # (d,)
    momentum: Tensor  # (d,)
    memory: Any


class NolocoState(NamedTuple):
    x: Tensor  # (k, d)
    momentum: Tensor  # (k, d)
    memory: Any


def _inner(lr: float, mu: float, outer_lr: float, solver: Solver) -> LocalSolver:
    require_positive("lr", lr), require_positive("outer_lr", outer_lr)
    require_fraction("mu", mu, "[0, 1)")
    adam = {"name": "torch_optim", "optimizer": "AdamW", "lr": lr}
    return solvers.from_spec(adam if solver is None else solver)


@register(
    {"mu": 0.5, "solver": _SGD},
    space={"lr": _LR, "outer_lr": [0.4, 0.7, 1.0], "mu": [0.0, 0.5, 0.9]},
    equal_steps=True,
    server=True,
)
def diloco(
    lr: float = 0.003, outer_lr: float = 0.7, mu: float = 0.9, nesterov: bool = True, solver: Solver = None
) -> Method:
    """DiLoCo, through a server; biased if agents differ and take several local steps.

    Args:
        lr: learning rate of the agents' AdamW.
        outer_lr: learning rate of the server.
        mu: its momentum, in [0, 1).
        nesterov: look ahead along the momentum.
        solver: another local solver instead of AdamW, as an object, a name or a table.

    Reference: Douillard et al., arXiv:2311.08105, 2023.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> method = caden.methods.diloco(solver={"name": "gd", "step_size": 0.02})
    >>> result = caden.simulate(method, problem, graph, rounds=100)
    >>> bool((result.mean - problem.solution).norm() < 0.1)
    True
    """
    inner = _inner(lr, mu, outer_lr, solver)

    def init(x: Tensor, round: Round) -> DilocoState:
        theta = round.average(x)
        return DilocoState(x, theta, theta * 0, inner.init(round.problem, x, round.curvature))

    def step(state: DilocoState, round: Round) -> tuple[DilocoState, Info]:
        x = awake(round, state.theta, state.x)
        trained, memory, info = train(round, inner, x, state.memory)
        progress = round.average(x - trained)
        momentum = mu * state.momentum + progress
        theta = state.theta - outer_lr * (progress + mu * momentum if nesterov else momentum)
        return DilocoState(awake(round, theta, x), theta, momentum, memory), Info(steps=info.steps, seen=info.seen)

    return Method(init, step, "diloco")


@register(
    {"solver": _SGD},
    space={"lr": _LR, "outer_lr": [0.4, 0.7, 1.0], "mu": [0.0, 0.3, 0.5]},
    equal_steps=True,
)
def noloco(
    lr: float = 0.003,
    outer_lr: float = 0.7,
    mu: float = 0.5,
    pull: float = 0.7,
    group: str = "pair",
    solver: Solver = None,
) -> Method:
    """NoLoCo: outer momentum with one random neighbour in each round; biased, and the models stay apart.

    Args:
        lr: learning rate of the agents' AdamW.
        outer_lr: weight of the group's mean progress in the momentum.
        mu: the momentum's own weight, in [0, 1).
        pull: weight of the way to the group's mean model.
        group: "pair", or "all" for all neighbours, with the mixing matrix.
        solver: another local solver instead of AdamW, as an object, a name or a table.

    Reference: Kolehmainen, Blagoev, Donaghy, Ersoy and Nies, arXiv:2506.10911, 2025.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> method = caden.methods.noloco(solver={"name": "gd", "step_size": 0.02})
    >>> result = caden.simulate(method, problem, graph, rounds=100)
    >>> bool((result.mean - problem.solution).norm() < 0.5)
    True
    """
    inner = _inner(lr, mu, outer_lr, solver)
    require_positive("pull", pull), require_choice("group", group, ("pair", "all"))

    def init(x: Tensor, round: Round) -> NolocoState:
        return NolocoState(x, x * 0, inner.init(round.problem, x, round.curvature))

    def step(state: NolocoState, round: Round) -> tuple[NolocoState, Info]:
        trained, memory, info = train(round, inner, state.x, state.memory)
        groups = in_random_pairs(round) if group == "pair" else round
        progress, mean = groups.broadcast(trained - state.x).mix(), groups.broadcast(state.x).mix()
        momentum = mu * state.momentum + outer_lr * progress + pull * (mean - state.x)
        momentum = awake(round, momentum, state.momentum)
        x = awake(round, state.x + momentum, state.x)
        return NolocoState(x, momentum, memory), Info(steps=info.steps, seen=info.seen)

    return Method(init, step, "noloco")
