"""Run a script as two ranks on two hosts: network namespaces joined by a link of limited rate.

    python benchmarks/namespaces.py --rate 50 SCRIPT [ARGUMENT ...]

Needs root, `ip` and `tc` (Debian: iproute2). The namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def two_hosts(rate: float) -> Iterator[list[tuple[str, str]]]:
    """Make two namespaces with a link of `rate` Mbit/s; yield the name and the interface of each."""
    hosts = [(f"caden-{side}-{os.getpid()}", f"link-{side}") for side in "ab"]
    try:
        for name, _ in hosts:
            _run("ip", "netns", "add", name)
        (a, interface_a), (b, interface_b) = hosts
        _run("ip", "link", "add", interface_a, "netns", a, "type", "veth", "peer", "name", interface_b, "netns", b)
        for (name, interface), address in zip(hosts, ADDRESSES):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
            _run("ip", "-n", name, "link", "set", interface, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            shape = ["tbf", "rate", f"{rate}mbit", "burst", "256k", "latency", "400ms"]
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", interface, "root", *shape)
        yield hosts
    finally:
        for name, _ in hosts:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def ranks_on_two_hosts(script: str, arguments: list[str], rate: float) -> int:
    """Run a script as two ranks, one on each host."""
    with two_hosts(rate) as hosts:
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29517", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, script, *arguments],
                env={**os.environ, **common, "RANK": str(rank), "GLOO_SOCKET_IFNAME": interface},
            )
            for rank, (name, interface) in enumerate(hosts)
        ]
        return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=50.0, help="Mbit/s")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    sys.exit(ranks_on_two_hosts(options.script, options.arguments, options.rate))
