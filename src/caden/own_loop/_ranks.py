"""The run of an agent under torchrun: rounds until the loops end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from torch import Tensor

from caden.core import Method
from caden.engine.history import Result
from caden.engine.options import Conditions, Saving
from caden.engine.recorder import Recorder
from caden.engine.simulate import begin, prepare, warn_outside
from caden.errors import CadenError, Diverged, LoopEnded
from caden.graphs import Graph
from caden.methods import advice_for
from caden.networks.transport import Transport
from caden.own_loop._loop import OwnLoop, Restored


def run_rank(
    method: Method,
    problem: OwnLoop,
    graph: Graph,
    transport: Transport,
    conditions: Conditions,
    saving: Saving,
    seed: int,
    rounds: int | None,
    attach: Callable[[Recorder], None],
    introduce: Callable[[], None],
) -> Result:
    """Make rounds until a loop ends, or as many as planned."""
    run, start = prepare(method, problem, graph, conditions, seed, transport)
    run.rounds, run.record_every = rounds or 0, saving.record_every
    recorder = Recorder(run, saving.path)
    attach(recorder)
    if transport.rank == 0:
        warn_outside(run)
    with closing(recorder):
        try:
            begin(run, recorder, start, None, saving, seed, introduce)
        except LoopEnded:
            raise CadenError("The loop ended before its first round: make more steps, or `every` smaller.") from None
        except Restored as wanted:  # while `mu_z = "auto"` was being measured
            run.restore(start, [wanted.part])
            recorder.record()
        while not run.problem.whole.ended and (rounds is None or run.index < rounds):
            try:
                run.step()
            except LoopEnded:
                break
            except Diverged:
                raise Diverged(f"Diverged in round {run.index}: {method.advice or advice_for(method.name)}.") from None
            except Restored as wanted:
                run.restore(start, [wanted.part])
                continue
            problem.diverged = not bool(run.sound().all())  # the others learn it at the end of their next steps
            if run.index % saving.record_every == 0:
                recorder.record()
            if saving.path is not None and run.index % saving.checkpoint_every == 0:
                recorder.save()
        if recorder.rows[-1]["round"] != run.index:
            recorder.record()
        return recorder.finish(None, "loop" if run.problem.whole.ended else "rounds", picture=False)


def state_of(recorder: Recorder) -> dict[str, Any]:
    """Return what determines the rest of a run, without what the user saves: the model and the optimizer."""
    tensors, numbers = recorder.run.flatten()
    kept: dict[str, Tensor] = {name: t.clone() for name, t in tensors.items() if not name.startswith("problem.")}
    return {"tensors": kept, "numbers": numbers}
