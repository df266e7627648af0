"""Jobs of several processes: the one that a launcher started this process in, and starting one on this machine."""

import os
import socket
import subprocess
import time
from typing import NamedTuple


class Job(NamedTuple):
    """One process among those that work as one run."""

    rank: int
    world: int
    name: str  # the same in all processes of the job
    host: str  # where the first process listens
    port: int
    attempt: int  # how often the launcher has restarted the job
    store_exists: bool  # the launcher keeps a store at this address; else the first process opens it


def launched() -> Job | None:
    """Return the job of this process, or None if it stands alone."""
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


def start(command: list[str], processes: int) -> int:
    """Run a command as the ranks of a job on this machine; return the exit code of the first that fails, else 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    common["CADEN_JOB"] = f"{os.getpid()}"
    ranks = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    try:
        code = 0
        while code == 0 and any(rank.poll() is None for rank in ranks):
            time.sleep(0.05)
            code = next((rank.returncode for rank in ranks if rank.returncode), 0)
        if code:
            time.sleep(1)  # the others may have something to print
        return code or next((rank.wait() for rank in ranks if rank.wait()), 0)
    except KeyboardInterrupt:  # the ranks received it as well, and stop after their round
        return next((rank.wait() for rank in ranks if rank.wait()), 0)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
