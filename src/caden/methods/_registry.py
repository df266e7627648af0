"""The registry of methods, and the facts about each method that its file states next to the algorithm."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from caden.core import Method
from caden.errors import require_choice

CONDITIONS = {
    "sleep": "sleeping agents",
    "links": "changing links",
    "loss": "lost messages",
    "delay": "delayed messages",
    "compression": "compressed messages",
}
BROADCAST = "sleep links compression"  # survived by methods whose awake neighbours all receive the same row
EVERYTHING = "sleep links loss delay compression"  # survived by methods with arc variables

# Parts of search spaces. A range is searched on a logarithmic scale, in units of the curvature L found by the warm-up;
# a list holds choices. Every method has one range of three decades and up to three choices in addition.
PENALTY = {"low": 1e-3, "high": 1.0, "unit": "L"}
STEP = {"low": 0.03, "high": 30.0, "unit": "1/L"}
RELAX = [0.5, 0.7, 0.9]


class Card(NamedTuple):
    """Facts about a method."""

    unit_parameters: dict[str, Any]  # parameters for a problem of curvature 1, such as that of `--check`
    survives: frozenset[str]  # CONDITIONS under which it still reaches the minimiser, if it does at all
    space: dict[str, Any]  # what `caden tune` searches
    theory: bool  # whether `caden.theory` covers its mu_z, mu_y and relax
    has_solver: bool  # its agents solve subproblems with a local solver, which can stop by itself
    server: bool  # it needs a server: its agents meet there instead of on the graph, or sums over all agents are taken
    free: bool  # a round is at most one exchange over arcs, so agents need not wait for each other


Factory = TypeVar("Factory", bound=Callable[..., Method])
METHODS: dict[str, Callable[..., Method]] = {}
CARDS: dict[str, Card] = {}


def register(
    unit_parameters: dict[str, Any],
    survives: str = "",
    space: dict[str, Any] | None = None,
    theory: bool = False,
    equal_steps: bool = False,
    server: bool = False,
    free: bool = False,
) -> Callable[[Factory], Factory]:
    """Register a factory under its own name; see `Card`. `equal_steps`: its solver must not stop by itself."""

    def decorate(factory: Factory) -> Factory:
        conditions = frozenset(require_choice("condition", word, CONDITIONS) for word in survives.split())
        METHODS[factory.__name__] = factory
        takes = inspect.signature(factory).parameters.values()
        has_solver = not equal_steps and any(p.name == "solver" or p.kind is p.VAR_KEYWORD for p in takes)
        CARDS[factory.__name__] = Card(unit_parameters, conditions, space or {}, theory, has_solver, server, free)
        return factory

    return decorate


def not_survived(name: str, present: Mapping[str, bool]) -> tuple[str, ...]:
    """Return the conditions that are present and that a method is known not to survive."""
    survives = CARDS[name].survives if name in CARDS else CONDITIONS
    return tuple(condition for condition, here in present.items() if here and condition not in survives)


def advice_for(name: str) -> str:
    """Return what to change if a method diverges: the direction in which its search space is safe."""
    ranges = {k: v for k, v in CARDS[name].space.items() if isinstance(v, dict)} if name in CARDS else {}
    steps = [f"{'raise' if entry.get('unit') == 'L' else 'lower'} `{key}`" for key, entry in ranges.items()]
    return " or ".join(steps) or "shorten its step size, or raise its penalty"
