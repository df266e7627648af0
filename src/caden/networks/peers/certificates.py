"""Certificates of a fleet: what a peer checks before it trusts its own, and why a link fails."""

from __future__ import annotations

import socket
import ssl
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from caden.errors import CadenError
from caden.graphs import Graph
from caden.networks.peers.fleet import Fleet

WARN_BEFORE = timedelta(days=30)


def files_of(folder: Path, agent: int) -> tuple[Path, Path, Path]:
    """Return the files of an agent's authority, certificate and key, all of which must exist."""
    files = folder / "ca.pem", folder / f"agent-{agent}.pem", folder / f"agent-{agent}.key"
    for file in files:
        if not file.exists():
            raise CadenError(f"{file} is missing; `caden fleet init --tls` creates certificates.")
    return files


def require_valid(folder: Path, agent: int, now: datetime | None = None) -> None:
    """Refuse a certificate that the neighbours would refuse, and warn 30 days before it expires."""
    try:
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
    except ImportError:
        raise CadenError('Certificates need the extra "peers": pip install "caden-opt[peers]".') from None
    authority_file, file, _ = files_of(folder, agent)
    try:
        authority, own = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (authority_file, file))
        own.verify_directly_issued_by(authority)
    except InvalidSignature:
        raise CadenError(f"{file} was not signed by the authority in {authority_file}.") from None
    except (ValueError, TypeError, OSError) as error:
        raise CadenError(f"{file} or {authority_file} is not a certificate: {error}.") from None
    now = datetime.now(UTC) if now is None else now
    for path, certificate in ((file, own), (authority_file, authority)):
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now < begin:
            raise CadenError(f"{path} is not valid before {begin:%Y-%m-%d %H:%M} UTC: is the clock here right?")
        if now > end:
            raise CadenError(f"{path} expired on {end:%Y-%m-%d}: run `caden fleet renew`.")
        if now > end - WARN_BEFORE:
            warnings.warn(f"{path} expires on {end:%Y-%m-%d}: run `caden fleet renew` before that.", stacklevel=2)


def link_errors(
    fleet: Fleet, graph: Graph, agent: int, home: Path, timeout: float = 3.0, only: list[int] | None = None
) -> dict[int, str]:
    """Try to reach the neighbours of an agent (`only` some); return what is wrong with each link, or "" if it is up."""
    folder = home / fleet.certificates if fleet.certificates else None
    context = None
    if folder is not None:
        require_valid(folder, agent)
        authority, certificate, key = files_of(folder, agent)
        context = ssl.create_default_context(cafile=str(authority))
        context.load_cert_chain(certificate, key)
    neighbours = graph.neighbours(agent) if only is None else only
    with ThreadPoolExecutor(max(1, len(neighbours))) as pool:  # one that does not answer delays no other
        errors = pool.map(lambda j: _link_error(fleet.endpoints[j], context, timeout), neighbours)
        return dict(zip(neighbours, errors))


def _link_error(endpoint: str, context: ssl.SSLContext | None, timeout: float) -> str:
    host, _, port = endpoint.partition("/")[2].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as plain:
            if context is not None:
                with context.wrap_socket(plain, server_hostname=host.strip("[]")) as secure:
                    secure.settimeout(0.3)
                    with suppress(TimeoutError):  # TLS 1.3: our certificate is refused only after the handshake
                        secure.recv(1)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is refused here: {error.verify_message}"
    except ssl.SSLError as error:
        return f"TLS failed: {error.reason or error}".lower().replace("_", " ").replace("tls", "TLS")
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error) or type(error).__name__
    return ""
