"""LoDAdaC: Liu, Panda, Pandey, Cook, Slota, Wang, Chen and Xu, "LoDAdaC: a unified local training-based decentralized
framework with adaptive gradients and compressed communication", TMLR, 2026.

    `local_steps` times   m <- beta1 m + (1 - beta1) grad f(x);  x <- x - alpha m / sqrt(u + eps)
                          u from grad f(x)^2:  adam     u <- beta2 u + (1 - beta2) grad f(x)^2
                                               amsgrad  the largest of these so far
    xh <- xh + C(x - xh);  x <- x + gamma (W xh - xh)

m and u start at 0, and a step uses the u before it. C compresses: the compressor is that of the run, and the network
keeps xh and counts the bytes of C as they are packed, `messages = {"top": 0.4}` in the paper. The first message is sent
whole. One communication per directed edge and round.

Biased where data differ, whatever alpha is: nothing tracks the other agents' gradients, and Adam's steps do not shrink
with them. While u = 0, a step is 1 / sqrt(eps) times a gradient.

Sleeping agents: W is doubly stochastic on the awake subgraph; a sleeper's moments rest.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_choice, require_fraction, require_positive
from caden.methods._first_order import require_fixed_steps
from caden.methods._gossip import damped_mix
from caden.methods._registry import register


class State(NamedTuple):
    x: Tensor  # (k, d)
    m: Tensor  # (k, d)
    v: Tensor  # (k, d) the decaying mean of squared gradients
    u: Tensor  # (k, d) as above: v, or the largest v so far


@register(
    {"alpha": 0.003, "eps": 1e-4},
    space={"alpha": {"low": 1e-4, "high": 0.1}, "gamma": [0.2, 0.5, 1.0], "variant": ["adam", "amsgrad"]},
)
def lodadac(
    alpha: float = 0.003,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-4,
    gamma: float = 0.5,
    variant: str = "amsgrad",
) -> Method:
    """LoDAdaC: local steps of Adam or AMSGrad, then gossip of compressed differences; biased where data differ.

    Args:
        alpha: step size, in units of x.
        beta1, beta2: decay rates of the two moments, in [0, 1).
        eps: added to the second moment, under the root; 1e-8 in the paper, whose first steps are then very long.
        gamma: consensus step size, in (0, 1].
        variant: "adam" or "amsgrad".

    Reference: Liu, Panda, Pandey, Cook, Slota, Wang, Chen and Xu, TMLR, 2026.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.lodadac(), problem, graph, rounds=200, messages={"top": 0.4})
    >>> bool((result.mean - problem.solution).norm() < 1.5)
    True
    """
    require_positive("alpha", alpha), require_positive("eps", eps)
    require_choice("variant", variant, ("adam", "amsgrad"))
    require_fraction("beta1", beta1, "[0, 1)"), require_fraction("beta2", beta2, "[0, 1)")
    require_fraction("gamma", gamma, "(0, 1]")

    def init(x: Tensor, round: Round) -> State:
        return State(x, x * 0, x * 0, x * 0)

    def step(state: State, round: Round) -> tuple[State, Info]:
        require_fixed_steps(round)
        x, m, v, u = (field.clone() for field in state)
        for done in range(int(round.work.max())):
            rows = (round.work > done).nonzero().flatten()
            functions = round.problem.redraw(done) if done else round.problem
            g = functions.value_and_grad(x[rows], rows)[1]
            m[rows] = beta1 * m[rows] + (1 - beta1) * g
            x[rows] -= alpha * m[rows] / (u[rows] + eps).sqrt()
            v[rows] = beta2 * v[rows] + (1 - beta2) * g * g
            u[rows] = torch.maximum(u[rows], v[rows]) if variant == "amsgrad" else v[rows]
        return State(damped_mix(round, x, gamma), m, v, u), Info()

    return Method(init, step, "lodadac")
