"""The settings of a peer's Zenoh session: links along the graph's edges only, certificates, and who may say what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from caden.networks.peers.certificates import files_of, require_valid
from caden.networks.peers.fleet import Fleet
from caden.networks.peers.wire import CHUNK


def key(fleet: Fleet, *parts: object) -> str:
    """Return a key on the wire."""
    return "/".join(map(str, (fleet.name, *parts)))


def zenoh_config(zenoh: Any, fleet: Fleet, agent: int, neighbours: list[int], home: Path) -> Any:
    """Return the configuration of an agent's session; `fleet.certificates` is relative to `home`."""
    settings: dict[str, Any] = {
        "mode": "peer",
        "listen/endpoints": [fleet.endpoints[agent]],
        "connect/endpoints": [fleet.endpoints[j] for j in neighbours if j < agent],  # one link per edge
        "connect/exit_on_failure": False,
        "connect/timeout_ms": -1,  # retry for ever in the background
        "connect/retry": {"period_init_ms": 200, "period_max_ms": 1000, "period_increase_factor": 1.5},
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "transport/link/tx/lease": 2000,
        "transport/link/tx/queue/congestion_control/block/wait_before_close": 500000,
        "transport/link/rx/max_message_size": 4 * CHUNK,
    }
    if fleet.certificates:
        folder = home / fleet.certificates
        require_valid(folder, agent)
        authority, certificate, key_file = files_of(folder, agent)
        own = {"private_key": str(key_file), "certificate": str(certificate)}
        settings["transport/link/tls"] = {
            "root_ca_certificate": str(authority),
            "enable_mtls": True,
            **{f"{side}_{k}": v for side in ("listen", "connect") for k, v in own.items()},
        }
        settings["access_control"] = _access_rules(fleet, agent, neighbours)
    config = zenoh.Config()
    for name, value in settings.items():
        config.insert_json5(name, json.dumps(value))
    return config


def _access_rules(fleet: Fleet, agent: int, neighbours: list[int]) -> dict[str, Any]:
    """Return rules that let a neighbour send only as the agent in its certificate and ask only for its own rows."""
    rules, policies = list[Any](), list[Any]()
    for j in neighbours:
        allowed: dict[str, tuple[str, list[str], str]] = {}
        for flow, here, there in (("ingress", j, agent), ("egress", agent, j)):
            allowed |= {
                f"{flow}/put/{j}": (flow, ["put"], key(fleet, "note", here)),
                f"{flow}/listen/{j}": (flow, ["declare_subscriber"], key(fleet, "note", there)),
                f"{flow}/ask/{j}": (flow, ["query"], key(fleet, "row", there, here)),
                f"{flow}/reply/{j}": (flow, ["reply", "declare_queryable"], key(fleet, "row", here, there)),
            }
        rules += [
            {"id": name, "permission": "allow", "flows": [flow], "messages": messages, "key_exprs": [expression]}
            for name, (flow, messages, expression) in allowed.items()
        ]
        policies.append({"rules": list(allowed), "subjects": [f"agent-{j}"]})
    subjects = [{"id": f"agent-{j}", "cert_common_names": [f"agent-{j}"]} for j in neighbours]
    common = {"enabled": True, "default_permission": "deny"}
    return {**common, "rules": rules, "subjects": subjects, "policies": policies}
