"""What the methods that hold d x d matrices share: knowing when they cannot."""

from torch import Tensor

from caden.core import Round
from caden.errors import CadenError

LIMIT = 1e9  # bytes


def must_fit(name: str, matrices: int, x: Tensor) -> None:
    """Refuse dimensions whose matrices do not fit."""
    d = x.shape[1]
    size = matrices * d * d * x.element_size()
    if size > LIMIT:
        raise CadenError(
            f"`{name}` holds {matrices} matrices of {d} x {d} numbers, which takes {size / 1e9:,.1f} GB; it is meant "
            f"for small dimensions, up to {LIMIT / 1e9:.0f} GB."
        )


def must_be_awake(name: str, round: Round) -> None:
    """Refuse runs in which agents may sleep or links may be down."""
    if round.may_sleep:
        raise CadenError(f"`{name}` needs everyone awake: set `participation` and `links` to 1.")
