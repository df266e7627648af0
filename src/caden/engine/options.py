"""The options of `simulate` in groups; every field of a group is a keyword of `simulate`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from caden.engine.history import Row
from caden.errors import CadenError, require_choice, require_integer, require_positive
from caden.networks.clock import Clock
from caden.networks.messages import Messages
from caden.schedules import Schedule

Callback = Callable[[Row, Any], bool | None]


@dataclass(frozen=True)
class Conditions:
    """The conditions of a run.

    participation: probability of being awake: a number, one per agent, or a schedule (round, draw) -> either.
    local_steps: local iterations per round, likewise.
    messages: what happens to messages, as `Messages` or its fields: {"loss": 0.2}, {"delay": 3}, {"top": 0.1},
        {"bits": 8}, {"trigger": 0.01}, {"trigger": {"first": 1.0, "decay": 0.9}}; by default they are all sent, and
        arrive immediately and complete.
    links: which edges are up: like `participation`, or a schedule (round, draw) -> graph with some of the edges.
    clock: how long computing and sending take, as `Clock` or its fields; the history then has `time`.
    """

    participation: float | Sequence[float] | Schedule = 1.0
    local_steps: int | str | Sequence[int] | Schedule = 5
    messages: Messages | Mapping[str, Any] | None = None
    links: float | Sequence[float] | Schedule | None = None
    clock: Clock | Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Stopping:
    """When a run ends before its last round.

    target: accuracy to reach, for the summary; `stop_at_target` ends the run there.
    tolerance: end the run when the relative error falls below this.
    callbacks: called as callback(row, state) after every recorded round; one that returns True ends the run. Copy
        what you keep of the state: the next round may overwrite it.
    """

    target: float | None = None
    stop_at_target: bool = False
    tolerance: float | None = None
    callbacks: Sequence[Callback] = ()

    REASONS = (None, "callback", "tolerance", "target")

    def __post_init__(self) -> None:
        if self.tolerance is not None:
            require_positive("tolerance", self.tolerance)
        if self.target is not None and not 0 < self.target <= 1:
            raise CadenError(f"`target` must lie in (0, 1], got {self.target}.")

    def reached(self, row: Row) -> bool:
        """Return whether the target is reached, or there is none."""
        return self.target is None or "accuracy" not in row or float(row["accuracy"] or 0) >= self.target

    def reason(self, row: Row, state: Any, ask: bool) -> str | None:
        """Return why the run should end here, or None; callbacks are called only if `ask` is set."""
        asked = [callback(row, state) for callback in self.callbacks] if ask else []
        if self.stop_at_target and self.reached(row):
            return "target"
        if self.tolerance is not None and float(row["relative_error"] or 0) < self.tolerance:
            return "tolerance"
        return "callback" if any(answer is True for answer in asked) else None


@dataclass(frozen=True)
class Saving:
    """What a run saves, and where.

    directory: run directory; it must not exist, unless `resume` continues the run in it.
    record_every: rounds between two rows of the history. The last round is always recorded, and with a `target` every
        round until it is reached, so its cost is exact.
    metrics: "exact" measures every recorded round on all samples. "auto" does so, too, unless there are mini-batches:
        then the loss is that of the batches seen, the test set a fixed sample of it (all of it in the last row), in as
        many rounds as cost a tenth of the time.
    checkpoint_every: rounds between two checkpoints.
    config: text to save as config.toml.
    picture: draw the history into the directory at the end.
    """

    directory: Path | str | None = None
    resume: bool = False
    record_every: int = 1
    metrics: str = "auto"
    checkpoint_every: int = 25
    config: str = ""
    picture: bool = True

    def __post_init__(self) -> None:
        (
            require_integer("record_every", self.record_every, least=1),
            require_integer("checkpoint_every", self.checkpoint_every, least=1),
        )
        require_choice("metrics", self.metrics, ("auto", "exact"))
        if self.resume and self.directory is None:
            raise CadenError("`resume` needs the `directory` of the run.")

    @property
    def path(self) -> Path | None:
        return None if self.directory is None else Path(self.directory)


GROUPS = (Conditions, Stopping, Saving)


def group_options(options: Mapping[str, Any]) -> tuple[Conditions, Stopping, Saving]:
    """Sort keywords into their groups."""
    names = {field.name: group for group in GROUPS for field in fields(group)}
    for name in options:
        require_choice("option", name, names)
    conditions, stopping, saving = (
        group(**{name: value for name, value in options.items() if names[name] is group}) for group in GROUPS
    )
    return conditions, stopping, saving  # type: ignore[return-value]


def signature_with_options(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function with `**options` spelled out."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(f.name, kind, default=f.default, annotation=f.type) for g in GROUPS for f in fields(g)]
    return signature.replace(parameters=[*own, *more])
