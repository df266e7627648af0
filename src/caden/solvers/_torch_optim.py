"""Any optimizer of PyTorch as a local solver: each agent's steps follow the gradient of its subproblem."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from caden._tensor.parallel import run_in_threads
from caden._tensor.rows import row_norms, row_numbers, rows_separately, take_rows
from caden.core import LocalSolver, Objective, Problem, Solved
from caden.draws import generator_states
from caden.errors import CadenError, require_choice, require_flag, require_positive
from caden.registry import load_object
from caden.solvers import _iterate
from caden.solvers._iterate import Iterate, start
from caden.solvers._team import Build, Layout, Team

Schedule = Callable[[float], float]

# Those whose steps treat every number alike, so that the rows of many agents can be one parameter.
ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
SCHEDULES: dict[str, Schedule] = {
    "constant": lambda elapsed: 1.0,
    "linear": lambda elapsed: 1 - elapsed,
    "cosine": lambda elapsed: (1 + math.cos(math.pi * elapsed)) / 2,
}


class Memory(NamedTuple):
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)
    curvature: Tensor  # (k,)
    taken: Tensor  # (k,) steps taken so far: an optimizer has no state before its first one
    slots: Tensor  # (k, n) the optimizers' states, in the order of `Layout.places`


def _muon(
    parameters: list[nn.Parameter], lr: float = 0.01, weight_decay: float = 0.0, **options: Any
) -> list[Optimizer]:
    """Muon for matrices (kernels are matrices with a row per output channel), AdamW for vectors."""
    matrices = [nn.Parameter(p.data.view(len(p), -1)) for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    options = {"adjust_lr_fn": "match_rms_adamw", **options}
    made: list[Optimizer] = []
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, **options))
    if vectors:
        made.append(torch.optim.AdamW(vectors, lr=lr, weight_decay=weight_decay))
    return made


def _title(value: Any) -> str:
    """Return a number or word as it is, and the name of anything else."""
    if value is None or isinstance(value, str | int | float | tuple | list):
        return str(value)
    return str(getattr(value, "__name__", type(value).__name__))


def _builder(optimizer: Any, options: dict[str, Any]) -> tuple[Build, bool]:
    """Return a function from parameters to optimizers, and whether it treats every number alike."""
    if isinstance(optimizer, str):
        known = [n for n in dir(torch.optim) if n[0].isupper() and n not in ("LBFGS", "Optimizer", "SparseAdam")]
        optimizer = (
            load_object(optimizer)
            if ":" in optimizer
            else getattr(torch.optim, require_choice("optimizer", optimizer, known))
        )
    name = _title(optimizer)
    if not callable(optimizer):
        kind = "an optimizer of fixed parameters" if isinstance(optimizer, Optimizer) else repr(optimizer)
        raise CadenError(f"`optimizer` must be a class of torch.optim, its name, or a function, got {kind}.")
    if optimizer is torch.optim.LBFGS:
        raise CadenError("`torch.optim.LBFGS` needs a closure: use the solver `lbfgs`.")
    make = _muon if optimizer is getattr(torch.optim, "Muon", None) else optimizer  # torch has it since 2.9

    def build(parameters: list[nn.Parameter]) -> list[Optimizer]:
        try:
            made = make(parameters, **options)
        except (TypeError, ValueError, RuntimeError, AssertionError, LookupError) as error:
            raise CadenError(f"{name} does not accept these options ({str(error).splitlines()[0]}).") from None
        optimizers = list(made) if isinstance(made, list | tuple) else [made]
        if not all(isinstance(one, Optimizer) for one in optimizers):
            raise CadenError(f"{name} does not make an optimizer of PyTorch.")
        owned = {p.data_ptr() for one in optimizers for group in one.param_groups for p in group["params"]}
        if not {p.data_ptr() for p in parameters} <= owned:
            raise CadenError(f"{name} leaves out some of the parameters: freeze them with requires_grad=False instead.")
        return optimizers

    elementwise = any(optimizer is getattr(torch.optim, n) for n in ELEMENTWISE)
    build([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))])  # wrong options are found at once
    return build, elementwise


def _schedule(spec: str | Schedule) -> Schedule:
    """Return a schedule, tried once."""
    rate: Any = spec
    if isinstance(spec, str):
        rate = load_object(spec) if ":" in spec else SCHEDULES[require_choice("schedule", spec, SCHEDULES)]
    try:
        sound = math.isfinite(rate(0.0))
    except TypeError:  # such as a number
        sound = False
    if not sound:
        raise CadenError(
            "`schedule` must be a name, or a function from the part of the run that is over (0 to 1) to a factor, got "
            f"{getattr(spec, '__name__', spec)!r}."
        )
    return cast(Schedule, rate)


def _factor(rate: Schedule, elapsed: float) -> float:
    """Return the factor of the learning rate."""
    try:
        factor = rate(elapsed)
        if math.isfinite(factor):
            return factor
        reason = f"it gives {factor}"
    except (ArithmeticError, TypeError, ValueError, LookupError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise CadenError(f"`schedule` fails after {elapsed:.3g} of the run ({reason}).")


def torch_optim(
    optimizer: type[Optimizer] | Callable[..., Any] | str = "AdamW",
    carry: bool = True,
    schedule: str | Schedule = "constant",
    clip: float | None = None,
    **options: Any,
) -> LocalSolver:
    """`work[i]` steps of an optimizer of PyTorch on each subproblem, each on a fresh mini-batch if there are any.

    Args:
        optimizer: a class of torch.optim, its name, a class of your own, or a function parameters -> optimizer(s).
            Muon takes kernels as matrices, and leaves vectors to AdamW; unlike torch's, it has by default lr 0.01,
            no weight decay, and steps as long as AdamW's (adjust_lr_fn="match_rms_adamw").
        carry: keep its state (moments) from round to round; it rests while the agent sleeps.
        schedule: factor of the learning rate over the run: "constant", "linear" or "cosine" (both fall to 0), or a
            function of the part of the run that is over, in a file as "module:function".
        clip: largest norm of the subproblem's gradient.
        options: the optimizer's own, such as `lr` and `weight_decay`.

    >>> torch_optim(torch.optim.AdamW, lr=1e-3, weight_decay=0.01, schedule="cosine").name
    'torch_optim(AdamW, lr=0.001, weight_decay=0.01, schedule=cosine)'
    """
    build, elementwise = _builder(optimizer, options)
    rate = _schedule(schedule)
    require_flag("carry", carry)
    if clip is not None:
        require_positive("clip", clip)
    local = _Optimizers(build, elementwise, carry, rate, clip)
    shown = {**options, "carry": carry, "schedule": schedule, "clip": clip}
    usual = {"carry": True, "schedule": "constant", "clip": None}
    words = [_title(optimizer), *(f"{k}={_title(v)}" for k, v in shown.items() if k not in usual or v != usual[k])]
    return LocalSolver(local.init, local.solve, f"torch_optim({', '.join(words)})", fresh=True)


class _Optimizers:
    """The local solver: teams of agents take their steps, and their optimizers' states are rows of the memory."""

    def __init__(self, build: Build, elementwise: bool, carry: bool, rate: Schedule, clip: float | None):
        self._build, self._elementwise, self._carry, self._rate, self._clip = build, elementwise, carry, rate, clip
        self._layouts: dict[tuple[Any, ...], Layout] = {}  # a cache: a function of the problem and the options

    def _team(self, problem: Problem, rows: Tensor, values: Tensor) -> Team:
        shapes = [torch.Size([problem.dim])] if problem.shapes is None else problem.shapes
        return Team(rows, values, shapes, self._together(), self._build)

    def _together(self) -> bool:
        return self._elementwise and not rows_separately()

    def _layout(self, problem: Problem, x: Tensor) -> Layout:
        """Return what the optimizer keeps, as a step with zero gradients shows."""
        key = (tuple(problem.shapes or ()), problem.dim, x.dtype, x.device, self._together())
        if key not in self._layouts:
            trial = self._team(problem, torch.zeros(1, dtype=torch.int64), torch.zeros_like(x[:1]))
            before = generator_states()
            try:
                trial.step(torch.zeros_like(x[:1]), 1.0)
            except (TypeError, RuntimeError, AssertionError) as error:
                raise CadenError(f"This optimizer cannot be a local solver ({str(error).splitlines()[0]}).") from None
            if generator_states() != before:
                raise CadenError(
                    "This optimizer cannot be a local solver: its steps draw random numbers, which no resumed or "
                    "distributed run could repeat."
                )
            self._layouts[key] = trial.layout()
        return self._layouts[key]

    def init(self, problem: Problem, x: Tensor, curvature: Tensor | None) -> Memory:
        width = sum(place.shape.numel() for place in self._layout(problem, x).places) if self._carry else 0
        taken = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return Memory(*start(problem, x, curvature), taken, x.new_zeros(len(x), width))

    def solve(self, objective: Objective, x: Tensor, work: Tensor, memory: Memory) -> Solved:
        known, layout = _iterate.Memory(*memory[:3]), self._layout(objective.problem, x)
        now = Iterate(objective, x, known, work, fresh=True)
        teams = []
        alone = not self._together() or objective.accuracy is not None  # agents that may stop at different steps
        for group in _alike(memory.taken, work, not alone):
            teams.append(self._team(objective.problem, group, now.x[group]))
            if self._carry and int(memory.taken[group[0]]) > 0:
                teams[-1].load(layout, memory.slots[group])
        factor = _factor(self._rate, objective.elapsed)
        for _, rows in now.local_steps():
            gradient = now.full_gradient(rows)
            if self._clip is not None:
                gradient = gradient * (self._clip / (row_norms(gradient) + 1e-6)).clamp(max=1).unsqueeze(1)
            stepping = set(row_numbers(rows, len(x)))
            live = [team for team in teams if int(team.rows[0]) in stepping]
            now.advance(rows, _step(live, take_rows(now.x, rows), gradient, rows, factor))
        taken, slots = memory.taken, memory.slots
        if self._carry and teams:
            taken, slots = taken + now.steps, slots.clone()
            for team in teams:
                slots[team.rows] = team.slots(layout, slots)
        return Solved(now.x, Memory(now.value, now.gradient, now.curvature, taken, slots), now.info())


def _step(teams: list[Team], x: Tensor, gradient: Tensor, rows: Tensor | None, factor: float) -> Tensor:
    """Return where the teams get from x (k', d), which belongs to `rows`."""
    point = x.clone()
    position = None if rows is None else {row: n for n, row in enumerate(rows.tolist())}

    def one(i: int) -> None:
        own = teams[i].rows
        at = own if position is None else torch.tensor([position[row] for row in own.tolist()], device=x.device)
        teams[i].step(gradient[at], factor)
        point[at] = teams[i].values

    run_in_threads(one, range(len(teams)))
    return point


def _alike(taken: Tensor, work: Tensor, together: bool) -> list[Tensor]:
    """Return the working rows in groups with the same count of steps, before and in this round; or one by one."""
    working = (work > 0).nonzero().flatten()
    if not together:
        return list(working.unsqueeze(1))
    keys = list(zip(taken[working].tolist(), work[working].tolist()))
    groups = [[i for i, k in enumerate(keys) if k == key] for key in dict.fromkeys(keys)]
    return [working[torch.tensor(group, device=working.device)] for group in groups]
