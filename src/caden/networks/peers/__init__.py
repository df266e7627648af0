"""Peers: one agent on one machine, links along the graph's edges, no server. Needs the extra `caden-opt[peers]`."""

from caden.networks.peers.fleet import Fleet, certify
from caden.networks.peers.transports import Free, Lockstep

__all__ = ["Fleet", "Free", "Lockstep", "certify"]
