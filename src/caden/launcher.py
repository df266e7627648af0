"""Jobs of several processes: the job that this process belongs to, and starting one on this machine."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Job(NamedTuple):
    """One of the processes that work together on a run."""

    rank: int
    world: int
    name: str  # the same in all processes of the job
    host: str  # where the first process listens
    port: int
    attempt: int  # how often the launcher has restarted the job
    store_exists: bool  # the launcher keeps a store at this address; else the first process opens it


def launched() -> Job | None:
    """Return the job of this process, or None if it runs alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        return None
    port = os.environ.get("MASTER_PORT", "29500")
    return Job(
        int(os.environ.get("RANK", "0")),
        world,
        os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("CADEN_JOB") or port,
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(port),
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


GRACE = 4.0  # seconds that ranks have to end after being told to


def start(command: list[str], processes: int) -> int:
    """Run a command as the ranks of a job on this machine; return the exit code of the first that fails, else 0.

    The ranks run in sessions of their own, so Ctrl-C and SIGTERM reach them only through this process, once. They also
    end if this process does (`watch`).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    common |= {"CADEN_JOB": f"{os.getpid()}", "CADEN_LAUNCHER": f"{os.getpid()}"}
    told = threading.Event()
    with _told_to_stop(told):
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True,
            )
            for rank in range(processes)
        ]
        try:
            return _wait(ranks, told)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], told: threading.Event) -> int:
    """Wait until all ranks have ended, or until a short delay after one has failed or all were told to stop."""
    deadline = None
    while any(rank.poll() is None for rank in ranks):
        code = next((rank.returncode for rank in ranks if rank.returncode), 0)
        now = time.monotonic()
        if told.is_set() and deadline is None:
            for rank in ranks:
                rank.send_signal(signal.SIGINT)  # each ends after its round
            deadline = now + GRACE
        elif code and deadline is None:
            deadline = now + 1  # the others may have something to print
        if deadline is not None and now > deadline:
            return code or 1
        time.sleep(0.05)
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


@contextmanager
def _told_to_stop(told: threading.Event) -> Iterator[None]:
    """Set `told` on SIGINT and SIGTERM, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: told.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch() -> None:
    """In a rank that `start` started, end when the launcher is gone, however it ended."""
    launcher = os.environ.get("CADEN_LAUNCHER")
    if launcher is None or os.getppid() != int(launcher):
        return

    end_with(int(launcher))


def end_with(parent: int) -> None:
    """End this process when its parent is gone, however that ended."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
