"""Callbacks of `simulate` that log histories to other tools."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from caden.engine.history import Row
from caden.errors import CadenError


def tensorboard(folder: Path | str) -> Callable[[Row, Any], None]:
    """Return a callback that writes the history as TensorBoard scalars; needs the extra `tensorboard`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise CadenError("TensorBoard event files need the package: pip install 'caden-opt[tensorboard]'.") from None
    try:
        writer = SummaryWriter(str(folder))
    except OSError as error:
        raise CadenError(f"Cannot write TensorBoard files to {folder}: {error.strerror}.") from None

    def log(row: Row, state: Any) -> None:
        for name, value in row.items():
            if name != "round" and value is not None:
                writer.add_scalar(name, value, row["round"])
        writer.flush()

    return log
