"""How a supervisor is reached by those of the other processes, and reaches them."""

from __future__ import annotations

from jshard.launch.addresses import bind_host, listen, open_port, roll_call_port, token_of
from jshard.launch.cluster import Cluster, Deadlines
from jshard.launch.listener import Listener
from jshard.launch.rendezvous_messages import PeerAddress
from jshard.launch.restarts import Restarts


class Endpoint:
    """The port of a supervisor, and the addresses of the others.

    Attributes:
        cluster: the place of its process among all that were launched.
        deadlines: how long the processes wait for each other.
        restarts: whether and how the run is restarted; None if it is not.
        token: that of the run.
        addresses: how to reach the others; empty before the first meeting.
        bind: the address on which it listens; "" for all interfaces.
        listener: its port; None if it has none yet, or no longer.
    """

    def __init__(self, cluster: Cluster, deadlines: Deadlines, restarts: Restarts | None = None) -> None:
        self.cluster = cluster
        self.deadlines = deadlines
        self.restarts = restarts
        self.token = token_of(cluster)
        self.addresses: dict[int, PeerAddress] = {}
        # Process 0 listens from the start, as the others know only its address.
        self.bind = ""
        self.listener: Listener | None = None
        if cluster.process_id == 0:
            self.bind = bind_host(cluster)
            self.listener = Listener(listen(cluster, self.bind), self.token)

    def open_listener(self, host: str) -> None:
        """Opens the port of a process other than 0, at the address with which it reaches the others."""
        # Without restarts only process 0 ever leads, and no other port is needed.
        if self.listener is not None or self.restarts is None:
            return
        # An address of the loopback is not reached from other machines.
        self.bind = "" if host.startswith("127.") and not self.cluster.is_local else host
        self.listener = Listener(open_port(self.bind), self.token)

    def address_of(self, process: int) -> tuple[str, int] | None:
        """Returns the address of the supervisor of a process; None if it is not known."""
        if process == 0:
            return self.cluster.host, roll_call_port(self.cluster)
        if process not in self.addresses:
            return None
        peer = self.addresses[process]
        return peer.ip, peer.port

    def close(self) -> None:
        """Closes the port."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
