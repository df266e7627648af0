"""`simulate`: rounds of a method over a network, measured, checkpointed, stopped."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from caden.core import Method, Problem, complete
from caden.engine.history import Result
from caden.engine.options import Conditions, Saving, Stopping, group_options, signature_with_options
from caden.engine.process import deterministic_mode, interruptible
from caden.engine.progress import ProgressBar
from caden.engine.recorder import Recorder
from caden.engine.run import Run
from caden.engine.warmup import Warmup, list_agents, start_point
from caden.errors import CadenError, Diverged, Interrupted, require_integer
from caden.graphs import Graph
from caden.networks.messages import Messages
from caden.networks.network import Network
from caden.networks.transport import Memory, Transport
from caden.schedules import Draw, Links, Participation, Workload


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
    """Run `method` on `problem` over `graph`, all agents in this process.

    Args:
        rounds: how many; row t of the history is after t rounds, row 0 the start (its exchange of x^0 is not counted).
        seed: of all draws; each is a pure function of (seed, label, round, agent).
        x0: (d,) or (m, d) start; by default the model's own parameters, else zeros.
        warmup: local training before round 0, {"steps": 20, "step_size": 0.1}; also estimates each agent's curvature.
        progress: show a bar; by default only on a terminal.
        deterministic: one thread, deterministic kernels and every row by itself: equal to the bit, also over processes.
        transport: what carries rows between processes, if the agents are spread over several (`networks.cluster.join`).
        options: the fields of `caden.Conditions` (participation, local_steps, messages, links), `caden.Stopping`
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
    conditions, stopping, saving = group_options(options)
    transport = Memory() if transport is None else transport
    run, start = prepare(method, problem, graph, conditions, seed, transport, x0)
    recorder = Recorder(run, saving.path)
    with deterministic_mode(deterministic), interruptible() as interrupted:
        _begin(run, recorder, start, Warmup.from_spec(warmup), saving, seed)
        if stopping.stop_at_target and (stopping.target is None or "accuracy" not in recorder.rows[0]):
            raise CadenError("`stop_at_target` needs a `target` and a problem that measures accuracy.")
        reached = any(map(stopping.reached, recorder.rows))
        why = stopping.reason(recorder.rows[-1], run.state, ask=False)
        with ProgressBar(rounds, graph.agents, progress if transport.rank == 0 else False) as bar:
            bar.update(run.index, recorder.rows[-1])
            while run.index < rounds and why is None:
                run.step()
                lost = run.diverged()
                if lost or run.index == rounds or run.index % saving.record_every == 0 or not reached:
                    row = recorder.record()
                    reached = reached or stopping.reached(row)
                    why = stopping.reason(row, run.state, ask=transport.rank == 0)
                    why = stopping.REASONS[int(transport.reduce([stopping.REASONS.index(why)], "max")[0])]
                    bar.update(run.index, row)
                if lost:
                    raise _diverged(recorder, stopping, lost)
                halt = transport.reduce([float(interrupted.is_set())], "max")[0]
                if run.index % saving.checkpoint_every == 0 or halt:
                    recorder.save()
                if halt and run.index < rounds and why is None:
                    raise _interrupted(recorder, stopping, saving)
        return recorder.finish(stopping.target, why or "rounds", saving.picture)


simulate.__signature__ = signature_with_options(simulate)  # type: ignore[attr-defined]


_DEFAULT = Conditions()


def prepare(
    method: Method,
    problem: Problem,
    graph: Graph,
    conditions: Conditions = _DEFAULT,
    seed: int = 0,
    transport: Transport | None = None,
    x0: Tensor | None = None,
) -> tuple[Run, Tensor]:
    """A run that has not begun, and where it will start."""
    transport = Memory() if transport is None else transport
    problem, hosted, draw = complete(problem), transport.hosts(graph), Draw(seed, graph.agents)
    if hosted is not None and problem.agents == graph.agents:
        problem = problem.take(hosted)
    awake, work = Participation(conditions.participation, draw), Workload(conditions.local_steps, draw)
    messages, links = Messages.from_spec(conditions.messages), Links.from_spec(conditions.links, graph, seed)
    network = Network(graph, problem, draw, awake.may_sleep or transport.sees_only_itself, messages, links, transport)
    if x0 is not None and x0.ndim == 2 and len(x0) == graph.agents:
        x0 = x0[network.layout.hosted]
    return Run(method, problem, network, awake, work), start_point(problem, x0)


def _begin(run: Run, recorder: Recorder, start: Tensor, warmup: Warmup | None, saving: Saving, seed: int) -> None:
    """From the start, or from the last checkpoint; either way there is a row afterwards."""
    path, first = saving.path, run.network.transport.rank == 0
    if path is not None and first and not saving.resume and path.exists():
        raise CadenError(f"{path} exists already; choose another directory, or resume that run.")
    saved = recorder.load() if saving.resume else None
    if saved is None:
        run.begin(start, warmup)
    else:
        run.restore(start, *saved)
    if saving.resume:
        recorder.reopen()
    else:
        recorder.create(saving.config, seed)
    if not recorder.rows:
        recorder.record()


def _diverged(recorder: Recorder, stopping: Stopping, agents: list[int]) -> Diverged:
    where = f" The history until then is in {recorder.run_dir.metrics}." if recorder.run_dir else ""
    error = Diverged(
        f"Diverged in round {recorder.run.index} (agents {list_agents(agents)}): lower the dual step `mu_y` to at most "
        f"`mu_z`, raise `mu_z`, or shorten the step size.{where}"
    )
    error.result = recorder.failed(stopping.target, "diverged", str(error))
    return error


def _interrupted(recorder: Recorder, stopping: Stopping, saving: Saving) -> Interrupted:
    how, path = "", saving.path
    if path is not None:
        again = f"the same call with resume=True and directory={str(path)!r}"
        how = f"; `caden resume {path}` goes on" if saving.config else f"; {again} goes on"
    error = Interrupted(f"Interrupted after round {recorder.run.index}{how}.")
    error.result = recorder.failed(stopping.target, "interrupted", str(error))
    return error
