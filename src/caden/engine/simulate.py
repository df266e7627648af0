"""`simulate`: run rounds of a method over a network, measure, checkpoint and stop."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from caden.core import Method, Problem, complete
from caden.draws import Draw
from caden.engine.history import Result
from caden.engine.options import Conditions, Saving, Stopping, group_options, signature_with_options
from caden.engine.process import deterministic_mode, interruptible
from caden.engine.progress import ProgressBar
from caden.engine.recorder import Recorder
from caden.engine.run import Run
from caden.engine.warmup import Warmup, list_agents
from caden.errors import CadenError, Diverged, Interrupted, require_integer
from caden.graphs import Graph, as_graph
from caden.methods import CARDS, CONDITIONS, advice_for, not_survived
from caden.networks.clock import Clock
from caden.networks.mail import FreeTimer, Mail, refusal
from caden.networks.messages import Messages
from caden.networks.network import Network
from caden.networks.timers import DeadlineTimer, Timer
from caden.networks.transport import Memory, Transport
from caden.schedules import Links, Participation, Workload


def simulate(
    method: Method,
    problem: Problem,
    graph: Graph,
    rounds: int = 100,
    *,
    seed: int = 0,
    x0: Tensor | None = None,
    warmup: Warmup | Mapping[str, Any] | None = None,
    progress: bool | None = None,
    deterministic: bool = False,
    transport: Transport | None = None,
    **options: Any,
) -> Result:
    """Run `method` on `problem` over `graph`, with all agents in this process.

    Args:
        method: what the agents do, for example `caden.methods.caden()`.
        problem: what they minimise, for example `caden.problems.classification(...)`.
        graph: who talks to whom: a `Graph`, a networkx graph or an adjacency matrix.
        rounds: number of rounds. Row t of the history describes the state after t rounds; row 0 is the start, whose
            exchange of x^0 is not counted.
        seed: seed of all draws of the run; each is a pure function of (seed, label, round, agent). Data, mini-batches
            and dropout are the problem's and have its seed: for independent repetitions, change both.
        x0: (d,) or (m, d) start; by default the model's own parameters, else zeros.
        warmup: local training before round 0, {"steps": 20, "step_size": 0.1}; it also estimates each agent's
            curvature.
        progress: show a progress bar; by default on a terminal and in a notebook.
        deterministic: one thread, deterministic kernels, and every row computed by itself: bit-identical results, also
            across processes.
        transport: what carries rows between processes, if the agents are spread over several
            (`networks.cluster.join`).
        options: the fields of `caden.Conditions` (participation, local_steps, messages, links, clock), `caden.Stopping`
            (target, stop_at_target, tolerance, callbacks) and `caden.Saving` (directory, resume, record_every,
            checkpoint_every, config, picture), each as a keyword.

    Returns:
        Result with `x` (m, d), `history`, `mean`, `module()`, `summary()`.

    Raises:
        Diverged, Interrupted: with what was recorded in `.result`.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = simulate(caden.methods.caden(mu_z=1.0), problem, graph, rounds=5, participation=0.5)
    >>> result.x.shape, len(result.history)
    (torch.Size([6, 3]), 6)
    """
    require_integer("rounds", rounds), require_integer("seed", seed)
    method, problem, graph = checked(method, problem, graph)
    conditions, stopping, saving = group_options(options)
    transport = Memory() if transport is None else transport
    run, start = prepare(method, problem, graph, conditions, seed, transport, x0)
    run.rounds, run.record_every = rounds, saving.record_every
    if transport.rank == 0:
        warn_outside(run)
    recorder = Recorder(run, saving.path, exact=saving.metrics == "exact" or stopping.tolerance is not None)
    with deterministic_mode(deterministic), interruptible() as interrupted, closing(recorder):
        begin(run, recorder, start, Warmup.from_spec(warmup), saving, seed)
        if stopping.stop_at_target and stopping.target is None:
            raise CadenError("`stop_at_target` needs a `target`.")
        if stopping.stop_at_target and "accuracy" not in recorder.rows[0]:
            raise CadenError("The target is an accuracy, which this problem does not measure: set `tolerance` instead.")
        reached = any(map(stopping.reached, recorder.rows))
        why = stopping.reason(recorder.rows[-1], run.state, ask=False)
        with ProgressBar(rounds, graph.agents, progress if transport.rank == 0 else False) as bar:
            bar.update(run.index, recorder.rows[-1])
            while run.index < rounds and why is None:
                run.step()
                lost = run.diverged()
                if lost or run.index == rounds or run.index % saving.record_every == 0 or not reached:
                    row = recorder.record()
                    if stopping.stop_at_target and stopping.reached(row):
                        recorder.complete()  # a sample of the test data may have flattered the models
                    reached = reached or stopping.reached(row)
                    why = stopping.reason(row, run.state, ask=transport.rank == 0)
                    why = stopping.REASONS[int(transport.reduce([stopping.REASONS.index(why)], "max")[0])]
                    bar.update(run.index, row)
                if lost:
                    raise _diverged(recorder, stopping, x0, lost)
                if why is not None:
                    recorder.complete()
                halt = transport.reduce([float(interrupted.is_set())], "max")[0]
                if run.index % saving.checkpoint_every == 0 or halt:
                    recorder.save()
                if halt and run.index < rounds and why is None:
                    raise _interrupted(recorder, stopping, saving)
        return recorder.finish(stopping.target, why or "rounds", saving.picture)


simulate.__signature__ = signature_with_options(simulate)  # type: ignore[attr-defined]


_DEFAULT = Conditions()
_TIMERS: dict[str, type[Timer]] = {"wait": Timer, "deadline": DeadlineTimer, "free": FreeTimer}


def prepare(
    method: Method,
    problem: Problem,
    graph: Graph,
    conditions: Conditions = _DEFAULT,
    seed: int = 0,
    transport: Transport | None = None,
    x0: Tensor | None = None,
) -> tuple[Run, Tensor]:
    """Return a run that has not begun, and its starting point."""
    transport = Memory() if transport is None else transport
    problem, hosted, draw = complete(problem), transport.hosts(graph), Draw(seed, graph.agents)
    if hosted is not None and problem.agents == graph.agents:
        problem = problem.take(hosted)
    awake, work = Participation(conditions.participation, draw), Workload(conditions.local_steps, draw)
    messages, links = Messages.from_spec(conditions.messages), Links.from_spec(conditions.links, graph, seed)
    clock = Clock.from_spec(conditions.clock)
    timer = None if clock is None else _TIMERS[clock.mode](clock, graph, draw)
    if timer is not None and not isinstance(transport, Memory):
        raise CadenError("`clock` is for simulations: processes and peers have clocks of their own.")
    if isinstance(timer, FreeTimer):
        if messages._replace(top=None, bits=None) != Messages() or links is not None or awake.may_sleep:
            raise CadenError(
                'The mode "free" has delays of its own: remove `messages.loss`, `messages.delay`, `messages.trigger`, '
                '`links` and `participation`, or use "wait".'
            )
        if method.name in CARDS and not CARDS[method.name].free:
            raise refusal()
        transport = Mail(timer, messages.codec)
    may_sleep = awake.may_sleep or transport.sees_only_itself
    network = Network(graph, problem, draw, may_sleep, messages, links, transport, timer)
    run = Run(method, problem, network, awake, work)
    asleep = awake.may_sleep or isinstance(timer, DeadlineTimer)
    present = {"sleep": asleep, "links": links is not None, **messages.conditions}
    present["delay"] |= transport.late
    run.outside = not_survived(method.name, present)
    return run, run.start(x0)


def warn_outside(run: Run) -> None:
    """Warn if the method of a run is known not to survive its conditions."""
    if run.outside:
        words = " and ".join(CONDITIONS[name] for name in run.outside)
        hint = "`caden list methods --check` measures which methods do"
        text = f"{run.method.name} does not tolerate {words}: it may end at a wrong point ({hint})."
        warnings.warn(text, stacklevel=3)


def checked(method: Any, problem: Any, graph: Any) -> tuple[Method, Problem, Graph]:
    """Return the arguments with the types that a run needs, or raise an error that says what was passed instead."""
    if not isinstance(method, Method):
        if isinstance(method, str):
            raise CadenError(f"`method` must be a Method, got {method!r}: use `caden.methods.{method}()`.")
        if callable(method):
            name = getattr(method, "__name__", "method")
            raise CadenError(f"`method` is the function {name!r}: call it, as in `caden.methods.{name}()`.")
        raise CadenError(f"`method` must be a Method, got {type(method).__name__}: use `caden.methods.caden()`.")
    if isinstance(problem, Graph):
        raise CadenError("`problem` is a Graph: the order is simulate(method, problem, graph).")
    if isinstance(problem, torch.nn.Module):
        raise CadenError("`problem` is an nn.Module: use `caden.problems.classification(model, train, test)`.")
    return method, complete(problem), as_graph(graph)


def begin(
    run: Run,
    recorder: Recorder,
    start: Tensor,
    warmup: Warmup | None,
    saving: Saving,
    seed: int,
    first: Callable[[], None] | None = None,
) -> None:
    """Begin at the start, or at the last checkpoint; afterwards there is at least one row.

    `first` is called before a new run begins.
    """
    path = saving.path
    if path is not None and run.network.transport.rank == 0 and not saving.resume and path.exists():
        raise CadenError(f"{path} already exists: choose another directory, or resume that run.")
    parts, part = recorder.load() if saving.resume else None, None
    if parts is None:
        if first is not None:
            first()
        run.begin(start, warmup)
    else:
        part = run.restore(start, parts)
    if saving.resume:
        recorder.reopen(part)
    else:
        recorder.create(saving.config, seed)
    if not recorder.rows:
        recorder.record()


def _diverged(recorder: Recorder, stopping: Stopping, x0: Tensor | None, agents: list[int]) -> Diverged:
    """Return an error that says when, which agents, and what to change: the method's parameters or an agent's data."""
    run = recorder.run
    advice = run.method.advice or advice_for(run.method.name)
    values, gradients = run.problem.whole.value_and_grad(run.start(x0))
    broken = (~(values.isfinite() & gradients.isfinite().all(1))).nonzero().flatten()
    if len(broken):
        culprits = list_agents(run.network.layout.hosted[broken.cpu()].tolist())
        advice = (
            f"the loss of agents {culprits} is not finite even at the start; look for NaN or huge values in their data"
        )
    history = f" The history up to then is in {recorder.run_dir.metrics}." if recorder.run_dir else ""
    error = Diverged(f"Diverged in round {run.index} (agents {list_agents(agents)}): {advice}.{history}")
    error.result = recorder.failed(stopping.target, "diverged", str(error))
    return error


def _interrupted(recorder: Recorder, stopping: Stopping, saving: Saving) -> Interrupted:
    how, path = "", saving.path
    if path is not None:
        call = f"call it again with resume=True and directory={str(path)!r}"
        how = f": run `caden resume {path}` to continue" if saving.config else f": {call} to continue"
    error = Interrupted(f"Interrupted after round {recorder.run.index}{how}.")
    error.result = recorder.failed(stopping.target, "interrupted", str(error))
    return error
