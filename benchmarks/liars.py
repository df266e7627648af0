"""What one lying peer of six does to the others: peers over real links on this machine, a complete graph, quadratics.

    python benchmarks/liars.py

Prints the largest distance of an honest agent from the minimiser of the honest agents' sum, relative to the largest
distance of an honest agent's own minimiser from it: below 1, working together still pays.
"""

import argparse
import tempfile
import threading
from pathlib import Path

import tomli_w
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from caden.experiments.config import experiment
from caden.experiments.peer import run_peer
from caden.networks.peers.fleet import free_ports
from caden.networks.peers.link import ZenohLink
from caden.networks.peers.wire import AGREED

ROUNDS, LATE = 300, 20
METHODS = {
    "radmm": {"name": "radmm", "rho": 0.4, "alpha": 0.7},
    "radmm, clip = 1": {"name": "radmm", "rho": 0.4, "alpha": 0.7},
    "gossip": {"name": "clipped_gossip", "alpha": 0.05},
    "clipped gossip, faulty = 1": {"name": "clipped_gossip", "alpha": 0.05, "faulty": 1},
}


class Honest(ZenohLink):
    """Tells the truth."""

    def publish(self, version, rows):
        super().publish(version, {j: self.lie(version, row) for j, row in rows.items()})

    def lie(self, version, row):
        return row


class FromTheStart(Honest):
    def lie(self, version, row):
        return row + 1e3


class Late(Honest):
    def lie(self, version, row):
        return row + 1e3 * (version > LATE)


class Noise(Honest):
    def lie(self, version, row):
        return 10 * torch.randn(row.shape, generator=torch.Generator().manual_seed(version), dtype=row.dtype)


class ClaimsCalm(Honest):
    """Works as it should, but tells everyone that all agents are calm and have agreed to end."""

    def agreed(self, calm):
        return False

    def report_progress(self, rounds, life=0, calm=0, flags=0):
        super().report_progress(rounds, life, 10**6, AGREED)
        with self._changed:
            self.table = [entry._replace(calm=10**6, flags=AGREED) for entry in self.table]


LIES = {
    "none": Honest,
    "from the start": FromTheStart,
    "late": Late,
    "noise": Noise,
    "claims calm": ClaimsCalm,
}


def measure(name: str, liar: type[ZenohLink]) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "FLEET.toml"
        endpoints = [f"tcp/127.0.0.1:{port}" for port in free_ports(6)]
        fleet = {"name": "liars", "endpoints": endpoints} | ({"clip": 1.0} if "clip =" in name else {})
        problem = {"name": "quadratic", "agents": 6, "dim": 4, "seed": 3, "condition": 4.0}
        table = {"rounds": ROUNDS, "tolerance": 1e-9, "local_steps": 2, "warmup": {"steps": 0}, "fleet": fleet}
        file.write_text(
            tomli_w.dumps(table | {"method": METHODS[name], "problem": problem, "graph": {"name": "complete"}})
        )
        ends = {}

        def run(agent: int) -> None:
            kind = liar if agent == 5 else Honest
            ends[agent] = run_peer(experiment(file), agent, Path(scratch) / f"agent-{agent}", link_type=kind)

        crew = [threading.Thread(target=run, args=(agent,)) for agent in range(6)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        honest = experiment(file).build()[1].take([0, 1, 2, 3, 4])
        if liar in (Honest, ClaimsCalm):  # what it sends is true
            honest = experiment(file).build()[1]
        own = torch.linalg.solve(honest.hessian, honest.linear)
        spread = (own - honest.solution).norm(dim=1).max()
        return float(max((ends[agent].x[0] - honest.solution).norm() for agent in range(5)) / spread)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    table = Table("method", *LIES)
    with Progress(transient=True) as progress:
        task = progress.add_task("fleets", total=len(METHODS) * len(LIES))
        for name in METHODS:
            row = []
            for liar in LIES.values():
                row.append(f"{measure(name, liar):.2g}")
                progress.advance(task)
            table.add_row(name, *row)
    Console().print(table)


if __name__ == "__main__":
    main()
