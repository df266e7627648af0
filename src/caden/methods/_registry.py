"""The register of methods: what each one's own file says of it beside the algorithm."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from caden.core import Method
from caden.errors import require_choice

CONDITIONS = ("sleep", "links", "loss", "delay", "compression")
BROADCAST = "sleep links compression"  # what methods survive whose awake neighbours hear the same

# Pieces of search spaces. A range is searched on a logarithmic scale, in units of the curvature L that the warm-up
# finds; a list is of choices. Every method has one range of three decades and up to three choices beside it.
PENALTY = {"low": 1e-3, "high": 1.0, "unit": "L"}
STEP = {"low": 0.03, "high": 30.0, "unit": "1/L"}
RELAX = [0.5, 0.7, 0.9]


class Card(NamedTuple):
    """Facts about a method."""

    unit_parameters: dict[str, Any]  # parameters that suit a problem of curvature 1, such as that of `--check`
    survives: frozenset[str]  # of CONDITIONS: under these it still reaches the minimiser, if it does at all
    space: dict[str, Any]  # what `caden tune` searches
    theory: bool  # its mu_z, mu_y and relax are what `caden.theory` speaks of


Factory = TypeVar("Factory", bound=Callable[..., Method])
METHODS: dict[str, Callable[..., Method]] = {}
CARDS: dict[str, Card] = {}


def register(
    unit_parameters: dict[str, Any], survives: str = "", space: dict[str, Any] | None = None, theory: bool = False
) -> Callable[[Factory], Factory]:
    """Put a factory into the register under its own name."""

    def decorate(factory: Factory) -> Factory:
        named = frozenset(require_choice("condition", word, CONDITIONS) for word in survives.split())
        METHODS[factory.__name__] = factory
        CARDS[factory.__name__] = Card(unit_parameters, named, space or {}, theory)
        return factory

    return decorate
