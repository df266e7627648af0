"""Devices by name."""

import torch

from caden.errors import CadenError


def require_device(name: str | torch.device) -> torch.device:
    """Return a torch device if it is available here and computes in float64."""
    try:
        torch.zeros(1, dtype=torch.float64, device=name).item()  # the small algebra of L-BFGS needs float64
        return torch.device(name)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        reason = reason if len(reason) < 200 else reason[:200].rsplit(" ", 1)[0] + " ..."
        raise CadenError(f"`device` {str(name)!r} is not available here: {reason}") from None
