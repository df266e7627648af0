"""Process-wide settings that a run changes and restores."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_runs = 0  # deterministic runs under way, perhaps in several threads
_before = (1, False)


@contextmanager
def deterministic_mode(deterministic: bool) -> Iterator[None]:
    """For the time of a run, if requested: one thread, deterministic kernels, every row computed by itself."""
    global _runs, _before  # noqa: PLW0603
    if not deterministic:
        yield
        return
    with _lock:
        if _runs == 0:
            _before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
            torch.set_num_threads(1)
            torch.use_deterministic_algorithms(True)
        _runs += 1
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            if _runs == 0:
                torch.set_num_threads(_before[0])
                torch.use_deterministic_algorithms(_before[1])


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Let Ctrl-C end the run after the current round, as a step may overwrite its state, and a second one at once."""
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
