"""Fleets: experiment files with a table `[fleet]` that sets where the agents listen and how they work together."""

from __future__ import annotations

import ipaddress
import random
import re
import socket
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from caden.errors import CadenError, require_choice, require_integer, require_positive
from caden.graphs import Graph

FORMAT = 1  # of the table `[fleet]`
MODES = ("free", "lockstep")


class FleetFile(Protocol):
    """The parts of an experiment that a fleet depends on."""

    fleet: dict[str, Any]
    rounds: int
    record_every: int
    tolerance: float | None
    participation: Any
    messages: dict[str, Any]
    links: Any


class Fleet(BaseModel):
    """The table `[fleet]`. Times are in seconds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int = 1  # of this table
    name: str  # the first part of every key on the wire, and of the run directory
    endpoints: list[str]  # where agent i listens, "tcp/HOST:PORT" or "tls/HOST:PORT"
    mode: str = "free"  # or "lockstep": exact rounds, as in the simulator
    certificates: str = ""  # folder with ca.pem, agent-I.pem and agent-I.key; needed for tls
    pace: float = 0.05  # free: if no new row arrives, the next step begins after this time
    forget: float = 30.0  # free: a neighbour that is silent for this long does not count until it is heard again
    patience: float = 60.0  # lockstep: a neighbour silent for this long ends the run; both: longest stay at the end
    seconds: float | None = None  # time limit of a run; in lockstep all agents end in the same round
    calm: int = 20  # free: sweeps over all neighbours with changes below `tolerance` before an agent is done
    clip: float | None = None  # free: largest change, in Euclidean norm, that a neighbour's message may make

    @classmethod
    def of(cls, config: FleetFile) -> Fleet:
        """Return the checked table of an experiment, which must suit the rest of it."""
        fleet = cls.from_table(config.fleet)
        require_integer("rounds", config.rounds), require_integer("record_every", config.record_every, least=1)
        if config.tolerance is not None:
            require_positive("tolerance", config.tolerance)
        if fleet.mode == "free" and config.participation != 1.0:
            raise CadenError("`participation` works only in lockstep: free-running peers sleep when they like.")
        if set(config.messages) - {"top", "bits", "trigger"} or config.links != 1.0:
            raise CadenError(
                "`messages.loss`, `messages.delay` and `links` simulate a network and cannot be set for a real one: "
                "remove them."
            )
        if fleet.mode == "free" and "trigger" in config.messages:
            raise CadenError(
                "`messages.trigger` works only in lockstep: free-running peers cannot tell that a silent neighbour has "
                "nothing new, and may end at a wrong point. Use `messages.top` or `messages.bits`."
            )
        return fleet

    @classmethod
    def from_table(cls, table: Any) -> Fleet:
        """Return the checked table `[fleet]` by itself."""
        if not table or not isinstance(table, dict):
            raise CadenError("The file has no table `[fleet]`; `caden fleet init` writes one.")
        try:
            fleet = cls.model_validate(table)
        except ValidationError as error:
            first = error.errors()[0]
            raise CadenError(f"`fleet.{first['loc'][0]}`: {first['msg']}, got {first['input']!r}.") from None
        if fleet.format != FORMAT:
            raise CadenError(f"`fleet.format` is {fleet.format}, and this version reads format {FORMAT}.")
        require_choice("mode", fleet.mode, MODES)
        for key in ("pace", "forget", "patience", "seconds", "clip"):
            if getattr(fleet, key) is not None:
                require_positive(f"fleet.{key}", getattr(fleet, key))
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", fleet.name):
            raise CadenError(f"`fleet.name` must be a plain word, got {fleet.name!r}.")
        require_integer("fleet.calm", fleet.calm, least=1)
        return fleet

    def hosted_agents(self, graph: Graph, agent: int) -> list[int]:
        """Check that the table fits the graph, and return the agents that this process hosts."""
        if len(self.endpoints) != graph.agents:
            raise CadenError(f"`fleet.endpoints` has {len(self.endpoints)} entries for {graph.agents} agents.")
        if not 0 <= agent < graph.agents:
            raise CadenError(f"`--agent` must lie in 0..{graph.agents - 1}, got {agent}.")
        for endpoint in self.endpoints:
            if not re.fullmatch(r"(tcp|tls)/[^\s/]+:\d{1,5}", endpoint):
                raise CadenError(f"`fleet.endpoints` must be tcp/HOST:PORT or tls/HOST:PORT, got {endpoint!r}.")
            if endpoint.startswith("tls/") != bool(self.certificates):
                raise CadenError(f"`fleet.certificates` must be set exactly for tls/ endpoints, got {endpoint!r}.")
        return [agent]


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that are currently unused, below those that outgoing connections take."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 32_000), 2000 + count):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise CadenError("This machine has no unused ports between 10000 and 32000.")


def certify(folder: Path, hosts: list[str], days: int = 365) -> None:
    """Create a private certificate authority and one certificate per agent, named agent-I, for the host it listens on.

    The authority's key is discarded: no agent can be added later, and only the agents' own keys must be kept secret.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError:
        raise CadenError('Certificates need the extra "peers": pip install "caden-opt[peers]".') from None

    def sign(name: str, key: Any, extensions: list[Any]) -> Any:
        begin = datetime.now(UTC) - timedelta(minutes=5)
        builder = x509.CertificateBuilder().serial_number(x509.random_serial_number())
        builder = builder.subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        builder = builder.issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleet")]))
        builder = builder.public_key(key.public_key()).not_valid_before(begin)
        builder = builder.not_valid_after(begin + timedelta(days=days))
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    folder.mkdir(parents=True)
    authority = ec.generate_private_key(ec.SECP256R1())
    (folder / "ca.pem").write_bytes(sign("fleet", authority, [x509.BasicConstraints(ca=True, path_length=0)]))
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    for agent, host in enumerate(hosts):
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            name: Any = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            name = x509.DNSName(host)
        certificate = sign(f"agent-{agent}", key, [x509.SubjectAlternativeName([name]), usage])
        (folder / f"agent-{agent}.pem").write_bytes(certificate)
        private_key = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = folder / f"agent-{agent}.key"
        path.touch(mode=0o600)
        path.write_bytes(private_key)
