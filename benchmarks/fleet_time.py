"""Predict how long a fleet takes, then run it: 6 peers on 6 hosts, one of them slow, on links with rate and latency.

    python benchmarks/fleet_time.py [--modes lockstep free] [--rate 20] [--latency 0.05] [--target 0.96]

The hosts are network namespaces. Each has a network device of its own (`tc tbf` limits its rate); one process carries
packets between these devices and delays them, as `tc netem` would where the kernel has it. Control groups limit the
processors. `caden clock measure` runs on a fast host, on the slow one and over a link; the simulator predicts the time
to the target; then the fleet runs. Needs root, `ip`, `tc` (Debian: iproute2), /dev/net/tun and the cpu controller of
control groups, version 1 or 2.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

from caden.experiments.config import experiment

AGENTS, SLOW = 6, 5  # agent 5 is the slow one
NETWORK = "10.77.1"
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
ONE, TWO = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
SLICE = 2000  # microseconds that a host may compute at a time
MEMORY = Path("/dev/shm")  # six peers that write to one disk would wait for each other


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def missing() -> str:
    """Return what this needs and the machine lacks, or ""."""
    if os.geteuid() != 0:
        return "root is needed"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun is missing"
    if not (ONE / "cpu.cfs_quota_us").parent.is_dir() and not (TWO / "cgroup.controllers").exists():
        return "there are no control groups for processors"
    return next((f"{tool} is missing" for tool in ("ip", "tc") if shutil.which(tool) is None), "")


def open_device(namespace: str) -> int:
    """Make a device in a namespace and return the file through which its packets pass."""
    libc, here = ctypes.CDLL(None, use_errno=True), os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", b"wan", IFF_TUN | IFF_NO_PI))
    finally:
        libc.setns(here, CLONE_NEWNET)
        os.close(here), os.close(there)
    return file


def carry(files: list[int], latency: float, stop: threading.Event) -> None:
    """Carry packets between the devices, each `latency` seconds late."""
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while not stop.is_set():
        timeout = min(0.1, max(0.0, waiting[0][0] - time.monotonic())) if waiting else 0.1
        for file in select.select(files, [], [], timeout)[0]:
            try:
                packet = os.read(file, 65536)
            except BlockingIOError:
                continue
            host = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of the destination
            if 0 <= host < len(files):
                count += 1
                heapq.heappush(waiting, (time.monotonic() + latency, count, host, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, host, packet = heapq.heappop(waiting)
            try:
                os.write(files[host], packet)
            except OSError:  # a full queue drops packets, as real ones do
                continue


@contextmanager
def hosts(rate: float, latency: float) -> Iterator[list[str]]:
    """Make the namespaces and carry their packets; yield their names."""
    names, files, stop = [f"caden-{os.getpid()}-{i}" for i in range(AGENTS)], list[int](), threading.Event()
    carrier = threading.Thread(target=carry, args=(files, latency, stop), daemon=True)
    try:
        for i, name in enumerate(names):
            run("ip", "netns", "add", name)
            files.append(open_device(name))
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, "ip", "addr", "add", f"{NETWORK}.{i + 1}/24", "dev", "wan")
            run(*inside, "ip", "link", "set", "wan", "up", "mtu", "9000")
            # Without this, TCP begins every round with a small window again, and long links never get up to speed.
            run(*inside, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")
            shape = ["tbf", "rate", f"{rate}mbit", "burst", "64k", "latency", "2s"]
            run(*inside, "tc", "qdisc", "add", "dev", "wan", "root", *shape)
        carrier.start()
        yield names
    finally:
        stop.set()
        if carrier.is_alive():
            carrier.join(2)
        for file in files:
            os.close(file)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


@contextmanager
def processors(shares: list[float]) -> Iterator[list[Path]]:
    """Make control groups with so much of a processor each, in slices of a few ms; yield their process files."""
    unified = (TWO / "cgroup.controllers").exists()
    groups = [(TWO if unified else ONE) / f"caden-{os.getpid()}-{i}" for i in range(len(shares))]
    try:
        for group, share in zip(groups, shares):
            group.mkdir()
            period = int(SLICE / share)
            if unified:
                (group / "cpu.max").write_text(f"{SLICE} {period}")
                (group / "cpu.weight").write_text("10000")  # whatever else runs on this machine
            else:
                (group / "cpu.cfs_period_us").write_text(str(period))
                (group / "cpu.cfs_quota_us").write_text(str(SLICE))
                (group / "cpu.shares").write_text("100000")
        yield [group / "cgroup.procs" for group in groups]
    finally:
        for group in groups:
            if group.exists():
                group.rmdir()


@contextmanager
def awake() -> Iterator[None]:
    """Keep all processors and their caches busy with processes of the lowest priority.

    In the fleet, other peers compute between two slices of a host, so it finds a fast processor and cold caches. While
    one host is measured alone, the processor would fall asleep, and the caches stay warm.
    """
    busy = (
        "import os, numpy; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "numbers = numpy.ones(1 << 20)\n"
        "while True: numbers += 1"
    )
    processes = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# Starting takes seconds on a fast processor, and minutes on a slow one. So the limit comes after it, and a peer notes
# when it has begun.
LIMITED = """
import os, sys, time
import sklearn.datasets, torch._inductor, zenoh
import caden.cli.show
from caden.experiments import calibrate
from caden.experiments.peer import _Peer

group, begin, alone = int(sys.argv[1]), _Peer._begin, calibrate._alone

def limited(peer):
    os.write(group, b"0")
    begin(peer)
    (peer.log.parent / "began").write_text(str(time.time()))

def limited_alone(*arguments):
    os.write(group, b"0")
    return alone(*arguments)

_Peer._begin, calibrate._alone = limited, limited_alone
if sys.argv[3] == "answer":
    os.write(group, b"0")
sys.argv = ["caden", *sys.argv[2:]]
caden.cli.main()
"""


def start(host: str, group: Path, log: Path, *words: str) -> subprocess.Popen[str]:
    """Start a caden command on a host, with the host's share of a processor; what it says goes into a file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)}
    with log.open("w") as errors, group.open("w") as joined:  # opened here: the host has another view of /sys
        number = joined.fileno()
        command = ["ip", "netns", "exec", host, sys.executable, "-c", LIMITED, str(number), *words]
        return subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=errors, pass_fds=[number]
        )


def fleet_file(folder: Path, mode: str, options: argparse.Namespace) -> Path:
    endpoints = ", ".join(f'"tcp/{NETWORK}.{i + 1}:7447"' for i in range(AGENTS))
    file = folder / f"{mode}.toml"
    file.write_text(
        f"rounds = {options.rounds}\nlocal_steps = 5\ntarget = {options.target}\ndeterministic = true\n"
        f"[method]\nname = 'caden'\nmu_z = {options.mu}\n"
        f"[problem]\nagents = {AGENTS}\nhidden = 512\npartition = {{name = 'dirichlet', alpha = 0.1}}\n"
        "[graph]\nname = 'ring'\n[warmup]\nsteps = 0\n"
        f"[fleet]\nformat = 1\nname = 'measured-{mode}'\nmode = '{mode}'\npace = 0.001\nendpoints = [{endpoints}]\n"
    )
    return file


def calibrate(names: list[str], groups: list[Path], file: Path) -> dict[str, object]:
    """Return the clock that `caden clock measure` finds on a fast host, on the slow one, and over a link."""
    log = file.parent / "calibration.log"
    answering = start(names[0], groups[0], log, "clock", "answer", "--seconds", "300")
    found = {}
    try:
        for agent in (1, SLOW):
            link = ["--link", f"{NETWORK}.1:7446"] if agent == 1 else []
            words = ["clock", "measure", str(file), "--agent", str(agent), "--json", *link]
            process = start(names[agent], groups[agent], log, *words)
            out, _ = process.communicate(timeout=300)
            if process.returncode:
                raise RuntimeError(log.read_text())
            found[agent] = json.loads(out)
    finally:
        answering.kill()
        answering.wait()
    print("measured on a fast host and over a link, and on the slow host:", found, flush=True)
    clock: dict[str, object] = {
        name: [found[SLOW if i == SLOW else 1][name] for i in range(AGENTS)]
        for name in ("compute", "overhead", "serve")
    }
    # The rate is that of a host's connection, which its neighbours share.
    return clock | {"latency": found[1]["latency"], "up": found[1]["bandwidth"], "pull": True}


def predict(file: Path, mode: str, clock: dict[str, object], target: float) -> float:
    table = {**clock, "mode": "wait" if mode == "lockstep" else "free"}
    result = experiment(file).model_copy(update={"clock": table, "stop_at_target": True}).run(progress=False)
    row = result.rows[-1]
    print(f"{mode}: predicted {row['time']:.2f} s ({row['round']} rounds, accuracy {row['accuracy']:.4f})", flush=True)
    return float(row["time"]) if row["accuracy"] >= target else float("nan")


def measured(folder: Path, mode: str, target: float) -> float:
    """Return when the mean accuracy reached the target, as seen whenever the slow agent had made a step."""
    folders = [folder / f"agent-{i}" for i in range(AGENTS)]
    began = [float((f / "began").read_text()) for f in folders]
    tables = [pd.read_csv(f / "metrics.csv") for f in folders]
    for table, start in zip(tables, began):
        table["seconds"] += start - max(began)
    for number, moment in zip(tables[SLOW]["round"], tables[SLOW]["seconds"]):
        if mode == "lockstep":
            rows = [t[t["round"] == number].iloc[0] for t in tables if (t["round"] == number).any()]
        else:
            rows = [t[t["seconds"] <= moment].iloc[-1] for t in tables]
        if len(rows) == AGENTS and np.mean([row["accuracy"] for row in rows]) >= target:
            return float(moment)
    return float("nan")


def run_fleet(names: list[str], groups: list[Path], file: Path, mode: str, target: float) -> float:
    """Run the fleet until its target is reached, and return the seconds that took."""
    folder = file.parent / f"runs-{mode}"
    peers = [
        start(name, group, file.parent / f"{mode}-{i}.log", "peer", str(file), "--agent", str(i), "--out", str(folder))
        for i, (name, group) in enumerate(zip(names, groups))
    ]
    took, end = float("nan"), time.monotonic() + 300
    try:
        while np.isnan(took) and time.monotonic() < end and any(p.poll() is None for p in peers):
            time.sleep(1)
            if all((folder / f"agent-{i}" / "began").exists() for i in range(AGENTS)):
                took = measured(folder, mode, target)
    finally:
        for peer in peers:
            peer.terminate()
        for peer in peers:
            try:
                peer.wait(30)
            except subprocess.TimeoutExpired:
                peer.kill()
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="*", default=["lockstep", "free"])
    parser.add_argument("--rate", type=float, default=20.0, help="Mbit/s of each host")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds one way")
    parser.add_argument("--shares", type=float, nargs=2, default=[0.25, 0.06], help="of a processor: fast, slow")
    parser.add_argument("--target", type=float, default=0.96)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--mu", type=float, default=0.2)
    options = parser.parse_args()
    if lacks := missing():
        print(f"skipped: {lacks}")
        return 0
    shares = [options.shares[i == SLOW] for i in range(AGENTS)]
    worst = 0.0
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder,
        hosts(options.rate, options.latency) as names,
        processors(shares) as groups,
        awake(),
    ):
        for mode in options.modes:
            file = fleet_file(Path(folder), mode, options)
            clock = calibrate(names, groups, file)
            expected = predict(file, mode, clock, options.target)
            took = run_fleet(names, groups, file, mode, options.target)
            print(f"{mode}: measured {took:.2f} s, predicted {expected:.2f} s, ratio {expected / took:.3f}", flush=True)
            worst = max(worst, abs(expected / took - 1)) if np.isfinite(expected / took) else np.inf
    print(f"largest deviation: {worst:.1%}")
    return int(worst > 0.15)


if __name__ == "__main__":
    sys.exit(main())
