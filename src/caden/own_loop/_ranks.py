"""The run of an agent under torchrun: rounds until the loops end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

from torch import Tensor

from caden.core import Method
from caden.engine.history import Result
from caden.engine.options import Conditions, Saving
from caden.engine.recorder import Recorder
from caden.engine.simulate import begin, prepare, warn_outside
from caden.errors import CadenError, Diverged, LoopEnded
from caden.experiments.peer import Owner
from caden.graphs import Graph
from caden.methods import CARDS, advice_for
from caden.networks.messages import Messages
from caden.networks.transport import Transport
from caden.own_loop._loop import OwnLoop, Restored

WITH_SGD = ("kgt", "led")  # their duals are scaled by the step of their own gradient descent


class Job(NamedTuple):
    """What the agents of a job under torchrun run; see `Agent`."""

    method: str | Callable[..., Method]
    parameters: dict[str, Any]
    graph: Any
    conditions: Conditions
    saving: Saving
    seed: int
    rounds: int | None
    overlap: bool

    def require_consistent(self) -> None:
        """Refuse what cannot go together."""
        method = self.method
        if method in WITH_SGD and self.conditions.participation != 1.0:
            raise CadenError(f"{method} needs all agents in every round here: remove `participation`.")
        if self.overlap and Messages.from_spec(self.conditions.messages).shared_copies:
            raise CadenError("`overlap` sends whole rows: remove compression and triggers from `messages`.")
        if self.overlap and isinstance(method, str) and "delay" not in CARDS.get(method, CARDS["gt"]).survives:
            raise CadenError(f"`overlap` needs a method that survives delay, such as `caden`, got {method!r}.")


def run_rank(job: Job, method: Method, problem: OwnLoop, graph: Graph, transport: Transport, owner: Owner) -> Result:
    """Make rounds until a loop ends, or as many as planned."""
    saving, rounds = job.saving, job.rounds
    run, start = prepare(method, problem, graph, job.conditions, job.seed, transport)
    run.rounds, run.record_every = rounds or 0, saving.record_every
    recorder = Recorder(run, saving.path)
    owner.attach(recorder)
    if transport.rank == 0:
        warn_outside(run)
    with closing(recorder):
        try:
            begin(run, recorder, start, None, saving, job.seed, owner.introduce)
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
            if run.index % saving.checkpoint_every == 0:
                recorder.save()
        if recorder.rows[-1]["round"] != run.index:
            recorder.record()
        recorder.save()
        return recorder.finish(None, "loop" if run.problem.whole.ended else "rounds", picture=False)


def state_of(recorder: Recorder) -> dict[str, Any]:
    """Return what determines the rest of a run, without what the user saves: the model and the optimizer."""
    tensors, numbers = recorder.run.flatten()
    kept: dict[str, Tensor] = {name: t.clone() for name, t in tensors.items() if not name.startswith("problem.")}
    return {"tensors": kept, "numbers": numbers}
