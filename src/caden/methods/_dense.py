"""Checks that methods share: whether d x d matrices fit, and whether everyone is awake."""

from torch import Tensor

from caden.core import Round
from caden.errors import CadenError

LIMIT = 1e8  # bytes; a round with more takes minutes


def must_fit(name: str, matrices: int, x: Tensor) -> None:
    """Refuse dimensions whose matrices exceed LIMIT."""
    d = x.shape[1]
    size = matrices * d * d * x.element_size()
    if size > LIMIT:
        raise CadenError(
            f"`{name}` holds {matrices} matrices of {d} x {d} numbers, which must fit in {LIMIT / 1e6:.0f} MB, "
            f"got {size / 1e6:,.0f} MB; use it for small dimensions."
        )


def must_be_awake(name: str, round: Round) -> None:
    """Refuse runs in which agents may sleep or links may be down."""
    if round.may_sleep:
        raise CadenError(
            f"`{name}` needs everyone awake: set `participation` and `links` to 1, and no `clock.deadline`."
        )
