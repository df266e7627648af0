"""How rows meet: one network over several transports, and what may happen to messages on the way."""

from caden.networks.layout import Layout
from caden.networks.messages import Messages
from caden.networks.network import Network
from caden.networks.transport import Memory, Transport

__all__ = ["Layout", "Memory", "Messages", "Network", "Transport"]
