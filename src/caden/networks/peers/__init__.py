"""Peers: one agent per machine, links along the graph's edges, no server. Needs the extra `caden-opt[peers]`."""

from caden.networks.peers.fleet import Fleet as Fleet
from caden.networks.peers.fleet import certify as certify
from caden.networks.peers.transports import Free as Free
from caden.networks.peers.transports import Lockstep as Lockstep
