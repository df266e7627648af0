"""Write the file of a new fleet."""

import re
import secrets
from pathlib import Path
from typing import Any

import tomli_w

from caden.errors import CadenError, require_integer
from caden.experiments.config import experiment
from caden.networks.peers.fleet import FORMAT, Fleet, certify, free_ports


def write_fleet(file: Path, agents: int, graph: str, mode: str, hosts: list[str], tls: bool) -> Path | None:
    """Write a fleet on the digits; with `tls`, also write a folder of certificates next to it and return the folder."""
    folder = file.parent / f"{file.stem}-certificates" if tls else None
    for path in (file, folder):
        if path is not None and path.exists():
            raise CadenError(f"{path} already exists: choose another name.")
    if not file.parent.is_dir():
        raise CadenError(f"The folder {file.parent} does not exist.")
    names = _host_per_agent(hosts, require_integer("agents", agents, least=2))
    ports = free_ports(agents) if set(names) == {"127.0.0.1"} else [7447 + i for i in range(agents)]
    table: dict[str, Any] = {
        "rounds": 200,
        "deterministic": True,
        "method": {"name": "caden"},
        "problem": {"agents": agents},
        "graph": {"name": graph},
        "fleet": {
            "format": FORMAT,
            "name": f"fleet-{secrets.token_hex(3)}",
            "mode": mode,
            "endpoints": [f"{'tls' if tls else 'tcp'}/{host}:{port}" for host, port in zip(names, ports)],
            **({"certificates": folder.name} if folder else {}),
        },
    }
    scratch = file.with_suffix(".tmp")
    scratch.write_text(tomli_w.dumps(table))
    try:
        experiment(scratch).build(lambda built: Fleet.of(experiment(scratch)).hosted_agents(built, 0))
        if folder:
            certify(folder, names)
        scratch.rename(file)
    finally:
        scratch.unlink(missing_ok=True)
    return folder


def renew_certificates(file: Path, fleet: Fleet) -> tuple[Path, Path]:
    """Make a new authority and new certificates; return their folder and the one that holds the old ones.

    The old authority's key was never kept, so that all agents need the new files.
    """
    if not fleet.certificates:
        raise CadenError("The fleet has no certificates: its endpoints are tcp/.")
    folder = file.parent / fleet.certificates
    hosts = [endpoint.partition("/")[2].rpartition(":")[0] for endpoint in fleet.endpoints]
    fresh = folder.with_name(f"{folder.name}.new")
    certify(fresh, hosts)
    old = folder.with_name(f"{folder.name}.old-{secrets.token_hex(3)}")
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    return folder, old


def _host_per_agent(hosts: list[str], agents: int) -> list[str]:
    """Return one host for each agent."""
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9.:_-]+", host):
            raise CadenError(f"`--hosts` must be names or addresses, got {host!r}.")
    if len(hosts) not in (1, agents):
        raise CadenError(f"`--hosts` must name one host or one for each of the {agents} agents, got {len(hosts)}.")
    return hosts * agents if len(hosts) == 1 else hosts
