"""The one loop: rounds of a method over a network, measured, checkpointed, stopped."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import checkpoint, cluster
from caden.core import Info, Method, Problem
from caden.errors import CadenError, Diverged, Interrupted, positive, whole
from caden.graphs import Graph
from caden.history import Result, Row, RunDirectory
from caden.messages import Messages
from caden.metrics import measure
from caden.network import Stacked
from caden.parallel import keep_freed_memory
from caden.progress import ProgressBar
from caden.schedules import Draw, Links, Participation, Schedule, Workload

Callback = Callable[[Row, Any], bool | None]
_GROWTH = 1e8  # a model whose norm exceeds this many times 1 + the largest at the start has diverged


class Warmup(NamedTuple):
    """Local training before round 0: `steps` full gradient steps of length `step_size` on each f_i."""

    steps: int = 0
    step_size: float = 0.1


class Counted:
    """A problem that counts its gradients, one per agent and evaluation; in each round it is that round's."""

    def __init__(self, problem: Problem):
        self._whole = self._now = problem
        self.gradients, self._lock = 0, threading.Lock()  # agents may be evaluated in threads

    def enter(self, round: int) -> Counted:
        """Mini-batches: the functions of a round are a sample of the whole."""
        if hasattr(self._whole, "at"):
            self._now = self._whole.at(round)
        return self

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with self._lock:
            self.gradients += len(x)
        return self._now.value_and_grad(x, rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)


def simulate(
    method: Method,
    problem: Problem,
    graph: Graph,
    rounds: int = 100,
    *,
    participation: float | Sequence[float] | Schedule = 1.0,
    local_steps: int | Sequence[int] | Schedule = 5,
    seed: int = 0,
    x0: Tensor | None = None,
    warmup: Warmup | Mapping[str, Any] | None = None,
    messages: Messages | Mapping[str, Any] | None = None,
    links: float | Sequence[float] | Schedule | None = None,
    record_every: int = 1,
    target: float | None = None,
    stop_at_target: bool = False,
    tolerance: float | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    deterministic: bool = False,
    directory: Path | str | None = None,
    checkpoint_every: int = 25,
    config: str = "",
    picture: bool = True,
    resume: bool = False,
) -> Result:
    """Run `method` on `problem` over `graph`, all agents in this process.

    Args:
        rounds: how many; row t of the history is after t rounds, row 0 the start (its exchange of x^0 is not counted).
        participation: probability of being awake: a number, one per agent, or a schedule (round, draw) -> either.
        local_steps: local iterations per round, likewise.
        seed: of all draws; each is a pure function of (seed, label, round, agent).
        x0: (d,) or (m, d) start; by default the model's own parameters, else zeros.
        warmup: local training before round 0, which also estimates each agent's curvature.
        messages: what happens to messages, as `messages.Messages` or its fields: {"loss": 0.2}, {"delay": 3}, {"top":
            0.1}, {"bits": 8}; by default they arrive at once and whole.
        links: which edges are up: like `participation`, or a schedule (round, draw) -> graph with edges of `graph`.
        record_every: rounds between two rows of the history; the last round is always recorded, and with a `target`
            every one until it is reached, so that what it took is known to the round.
        target: accuracy to reach, for the summary; `stop_at_target` ends the run there.
        tolerance: end the run when the relative error falls below this.
        callbacks: called as callback(row, state) after every recorded round; one that returns True ends the run.
        progress: show a bar; by default only on a terminal.
        deterministic: one thread and deterministic kernels, for results that are equal to the bit.
        directory: where to keep the run; it must not exist, unless `resume` continues it.
        checkpoint_every: rounds between two checkpoints.
        config: text kept in the directory as config.toml.
        picture: draw the history into the directory at the end.

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
    whole("rounds", rounds), whole("seed", seed)
    whole("record_every", record_every, least=1), whole("checkpoint_every", checkpoint_every, least=1)
    if tolerance is not None:
        positive("tolerance", tolerance)
    if target is not None and not 0 < target <= 1:
        raise CadenError(f"`target` must lie in (0, 1], got {target}.")
    if resume and directory is None:
        raise CadenError("`resume` needs the `directory` of the run.")
    keep_freed_memory()
    draw = Draw(seed, graph.agents)
    awake, workload = Participation(participation, draw), Workload(local_steps, draw)
    network: Stacked
    if cluster.launched():
        problem, network = cluster.host(problem, graph, draw, awake.may_sleep, messages, links)
    else:
        model, up = Messages.from_spec(messages), Links.from_spec(links, graph, seed)
        network = Stacked(graph, problem, draw, awake.may_sleep, model, up)
    counted, first_rank = Counted(problem), network.rank == 0
    if x0 is not None and x0.ndim == 2 and len(x0) == graph.agents:
        x0 = x0[network.hosted]
    start = start_point(problem, x0)
    everyone = torch.ones(graph.agents, dtype=torch.bool)

    rows: list[Row] = []
    place = RunDirectory(Path(directory)) if directory is not None else None
    saved = network.load(place.path) if place and resume else None
    if place and first_rank and not resume and place.path.exists():
        raise CadenError(f"{place.path} exists already; choose another directory, or resume that run.")

    with threads(deterministic), _interruptible() as interrupted:
        curvature = saved[0].get("curvature") if saved else None
        if curvature is not None:
            curvature = curvature.to(problem.device)
        if saved is None and warmup is not None:
            start, curvature = warm_up(counted, start, warmup)
        largest = network.reduce([float(torch.linalg.vector_norm(start, dim=1).max())], "max")[0]
        bound = _GROWTH * (1 + largest)
        state = method.init(start, network.round(-1, everyone, workload(0), counted, curvature))
        first, clock = 0, 0.0
        rejected = fallbacks = stalled = 0
        if saved is not None and place is not None:
            tensors, numbers = saved
            state = checkpoint.restore(state, tensors, "state")
            buffers = {k.removeprefix("network."): t for k, t in tensors.items() if k.startswith("network.")}
            network.restore(buffers, int(numbers["numbers_sent"]), int(numbers["bytes"]))
            counted.gradients, bound = int(numbers["gradients"]), numbers["bound"]
            first, clock = int(numbers["round"]), numbers["seconds"]
            rejected, fallbacks, stalled = (int(numbers[k]) for k in ("rejected", "fallbacks", "stalled"))
            rows = place.read(first)
        if place and first_rank and resume:
            place.keep(rows)
        elif place and first_rank:
            place = RunDirectory.create(place.path, config, seed)

        def record(index: int, info: Info, active: int) -> Row:
            found = measure(problem, state, info, network)
            counts = network.reduce([counted.gradients, rejected, fallbacks, stalled, network.wire_bytes], "sum")
            row: Row = {
                "round": index,
                "seconds": clock,
                "communications": network.communications,
                "bytes": network.bytes,
                **dict(zip(("gradients", "rejected", "fallbacks", "stalled"), map(int, counts))),
                **{k: found[k] for k in ("objective", "relative_error", "consensus", "lyapunov", "dual_sum")},
                "active": active,
            }
            row |= {k: v for k, v in found.items() if k not in row}
            if cluster.launched():
                row["wire_bytes"] = int(counts[4])
            rows.append(row)
            if place and first_rank:
                place.append(row)
            return row

        def result(why: str) -> Result:
            fields = checkpoint.flatten(state, "").items()
            scalars = {name.removeprefix("."): float(value) for name, value in fields if value.ndim == 0}
            return Result(network.gather(state.x), rows, problem, target, place.path if place else None, scalars, why)

        def save(index: int) -> None:
            if place is None:
                return
            tensors = checkpoint.flatten(state, "state")
            tensors |= {f"network.{k}": t for k, t in network.buffers().items()}
            if curvature is not None:
                tensors["curvature"] = curvature
            numbers = {
                "round": index,
                "seconds": clock,
                "numbers_sent": network.numbers_sent,
                "bytes": network.bytes,
                "gradients": counted.gradients,
                "rejected": rejected,
                "fallbacks": fallbacks,
                "stalled": stalled,
                "bound": bound,
            }
            network.save(place.path, tensors, numbers)

        def stop(error: Diverged | Interrupted, why: str) -> Diverged | Interrupted:
            error.result = result(why)
            return error

        if not rows:
            record(0, Info(), graph.agents)
        if stop_at_target and (target is None or "accuracy" not in rows[0]):
            raise CadenError("`stop_at_target` needs a `target` and a problem that measures accuracy.")
        reached = target is None or "accuracy" not in rows[0] or any(_reached(row, target) for row in rows)
        why = _reason(rows[-1], state, target if stop_at_target else None, tolerance, ())
        with ProgressBar(rounds, graph.agents, progress if first_rank else False) as bar:
            bar.update(first, rows[-1])
            index = first
            while index < rounds and why is None:
                began = time.perf_counter()
                active = awake(index)
                info = Info()
                if bool(active.any()):  # a round in which everyone sleeps changes nothing
                    context = network.round(index, active, workload(index), counted.enter(index), curvature)
                    state, info = method.step(state, context)
                    rejected, fallbacks = rejected + info.rejected, fallbacks + info.fallbacks
                    stalled += len(info.stalled)
                clock += time.perf_counter() - began
                index += 1
                fine = _fine(state.x, info.value, bound)
                bad = network.reduce([float(not fine.all())], "max")[0]
                lost = (network.gather(fine.int()) == 0).nonzero().flatten().tolist() if bad else []
                if lost or index == rounds or index % record_every == 0 or not reached:
                    row = record(index, info, int(active.sum()))
                    reached = reached or _reached(row, target)
                    asked = callbacks if first_rank else ()
                    why = _reason(row, state, target if stop_at_target else None, tolerance, asked)
                    why = _REASONS[int(network.reduce([_REASONS.index(why)], "max")[0])]
                    bar.update(index, row)
                if lost:
                    error = stop(_diverged(index, lost, place), "diverged")
                    if place and first_rank and error.result:
                        place.summarise(error.result)
                    raise error
                halt = network.reduce([float(interrupted.is_set())], "max")[0]
                if index % checkpoint_every == 0 or halt:
                    save(index)
                if halt and index < rounds and why is None:
                    raise stop(_interrupted(index, place, config), "interrupted")
        done = result(why or "rounds")
        if place and first_rank:
            place.finish(done, picture)
        return done


def start_point(problem: Problem, x0: Tensor | None) -> Tensor:
    """(m, d) start: what was given, the model's own parameters, or zeros."""
    shape = (problem.agents, problem.dim)
    if x0 is None:
        x0 = getattr(problem, "start", None)
    if x0 is None:
        return torch.zeros(shape, dtype=problem.dtype, device=problem.device)
    x0 = torch.as_tensor(x0).to(problem.device, problem.dtype)
    if x0.shape not in (shape, shape[1:]):
        raise CadenError(f"`x0` must have shape ({shape[1]},) or {shape}, got {tuple(x0.shape)}.")
    return x0.expand(shape).contiguous()


def warm_up(problem: Problem | Counted, x: Tensor, spec: Warmup | Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Local gradient steps; curvature is the largest |change of gradient| / |change of x|, as the paper estimates L."""
    try:
        warmup = spec if isinstance(spec, Warmup) else Warmup(**spec)
    except TypeError as error:
        raise CadenError(f"`warmup` takes `steps` and `step_size`: {error}.") from None
    whole("warmup.steps", warmup.steps), positive("warmup.step_size", warmup.step_size)
    curvature: Tensor | None = None
    before: Tensor | None = None
    for _ in range(warmup.steps):
        gradient = problem.value_and_grad(x)[1]
        if before is not None:
            moved = warmup.step_size * torch.linalg.vector_norm(before, dim=1)
            ratio = (torch.linalg.vector_norm(gradient - before, dim=1) / moved).nan_to_num(0, 0)
            curvature = ratio if curvature is None else torch.maximum(curvature, ratio)
        x, before = x - warmup.step_size * gradient, gradient
    lost = (~x.isfinite().all(1)).nonzero().flatten().tolist()
    if lost:
        raise Diverged(f"The warm-up diverged (agents {_named(lost)}): shorten `warmup.step_size`.")
    return x, curvature


def _fine(x: Tensor, value: Tensor | None, bound: float) -> Tensor:
    """(k,) bool: the model has not grown past the bound, and model and loss are finite."""
    fine: Tensor = torch.linalg.vector_norm(x, dim=1) <= bound
    return fine if value is None else fine & value.isfinite()


_REASONS = (None, "callback", "tolerance", "target")  # to end a run before its last round


def _reason(
    row: Row, state: Any, target: float | None, tolerance: float | None, callbacks: Sequence[Callback]
) -> str | None:
    """Why the run should end here, or None."""
    asked = [callback(row, state) for callback in callbacks]
    if target is not None and _reached(row, target):
        return "target"
    if tolerance is not None and float(row["relative_error"] or 0) < tolerance:
        return "tolerance"
    return "callback" if any(answer is True for answer in asked) else None


def _reached(row: Row, target: float | None) -> bool:
    return target is not None and float(row.get("accuracy") or 0) >= target


def _named(agents: list[int]) -> str:
    return ", ".join(map(str, agents[:8])) + (" ..." if len(agents) > 8 else "")


def _diverged(index: int, agents: list[int], place: RunDirectory | None) -> Diverged:
    where = f" The history until then is in {place.metrics}." if place else ""
    return Diverged(
        f"Diverged in round {index} (agents {_named(agents)}): lower the dual step `mu_y` to at most `mu_z`, raise "
        f"`mu_z`, or shorten the step size.{where}"
    )


def _interrupted(index: int, place: RunDirectory | None, config: str) -> Interrupted:
    how = f"; `caden resume {place.path}` goes on" if place and config else ""
    if place and not config:
        how = f"; the same call with resume=True and directory={str(place.path)!r} goes on"
    return Interrupted(f"Interrupted after round {index}{how}.")


_strict = threading.Lock()
_runs = 0  # deterministic ones at this moment, which may be in several threads
_before = (1, False)


@contextmanager
def threads(deterministic: bool) -> Iterator[None]:
    """One thread and deterministic kernels for the time of a run, if asked for."""
    global _runs, _before  # noqa: PLW0603
    if not deterministic:
        yield
        return
    with _strict:
        if _runs == 0:
            _before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
            torch.set_num_threads(1)
            torch.use_deterministic_algorithms(True)
        _runs += 1
    try:
        yield
    finally:
        with _strict:
            _runs -= 1
            if _runs == 0:
                torch.set_num_threads(_before[0])
                torch.use_deterministic_algorithms(_before[1])


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C ends the run after the current round (a step may overwrite its state); a second one ends it at once."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
