"""How agents communicate: one network over several transports, and models of unreliable messages."""

from caden.networks.layout import Layout as Layout
from caden.networks.messages import Messages as Messages
from caden.networks.network import Network as Network
from caden.networks.transport import Memory as Memory
from caden.networks.transport import Transport as Transport
