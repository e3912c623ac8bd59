"""The process that is the network: it holds the hosts' namespaces and carries their packets from one to the other.

Laws: it lives as long as the conductor's end of its standard input, a socket; when that ends, so do the processes in
its hosts, the hosts, and it. It forwards by address, touches no other network, and never waits for a host.

    python -m kvbaton_proof.chaos.network.hub      (started by kvbaton_proof.chaos.network.networks)
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvbaton_proof.chaos.network import enter, namespaces
from kvbaton_proof.chaos.network.hub_policy import Switch, Wires
from kvbaton_proof.chaos.network.namespaces import MTU_BYTES, NETWORK, Host
from kvbaton_proof.chaos.network.net_control import Lines, Ready, Request, Setup, carry_out, serve

PACKETS_PER_TURN_MAX = 32  # of one host, before the others and the conductor have their turn
_NETWORK = bytes(NETWORK)


class Hub:
    def __init__(self, hosts: Sequence[Host], switch: Switch, control: Lines) -> None:
        self._switch = switch
        self._control = control
        self._by_tun = {host.tun_fd: host for host in hosts}
        self._by_byte = {socket.inet_aton(host.address)[3]: host for host in hosts}
        self._tuns = {host.name: host.tun_fd for host in hosts}
        self._poll = select.epoll()
        for fd in (*self._by_tun, control.sock.fileno()):
            self._poll.register(fd, select.EPOLLIN)

    def run(self) -> None:
        """Until the conductor goes away."""
        control = self._control.sock.fileno()
        while True:
            due = self._switch.next_due()
            ready = self._poll.poll(None if due is None else max(0.0, due - time.monotonic()))
            for (_, target), packet in self._switch.due(time.monotonic()):
                _put(self._tuns[target], packet)
            for fd, _ in ready:
                if fd == control:
                    try:
                        self._serve()
                    except EOFError:
                        return
                else:
                    self._carry(fd)

    def _serve(self) -> None:
        for line in self._control.ready():
            request = msgspec.json.decode(line, type=Request)
            self._control.send(carry_out(request, self._switch.wires, self._switch.counts))

    def _carry(self, fd: int) -> None:
        source = self._by_tun[fd].name
        now = time.monotonic()
        for _ in range(PACKETS_PER_TURN_MAX):
            try:
                packet = os.read(fd, MTU_BYTES + 64)
            except BlockingIOError:
                return
            # IPv4 to a host of ours; the rest (IPv6's discovery, mostly) has nowhere to go.
            if packet[0] >> 4 != 4 or packet[16:19] != _NETWORK:
                continue
            target = self._by_byte.get(packet[19])
            if target is not None and self._switch.arrived((source, target.name), packet, now):
                _put(target.tun_fd, packet)


def _put(fd: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # its queue is full: lost, as on any network; TCP sends it again
        os.write(fd, packet)


def run(control: Lines, setup: Setup, conductor: int) -> int:
    namespaces.leave_the_machine(setup.tmpfs, setup.own_user)
    hosts = namespaces.make_hosts(setup.names)
    before = [sys.executable, "-I", "-S", str(Path(enter.__file__)), "host", str(os.getpid())]
    control.send(
        Ready(
            addresses={host.name: host.address for host in hosts},
            prefixes={host.name: [*before, str(host.net_fd)] for host in hosts},
            private=tuple(setup.tmpfs),
        )
    )
    try:
        Hub(hosts, Switch(Wires(setup.names, setup.seed)), control).run()
    finally:
        left = namespaces.end_processes(hosts, spare=(os.getpid(), conductor))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(serve(run))
