from __future__ import annotations

import gc

import zmq

from kvbaton.control.addressing import ControlLimits
from kvbaton.control.sockets import SocketPlane

from .rig import cluster

RINGS = cluster("p0", "d0")


def test_one_that_is_dropped_in_a_cycle_hangs_nobody() -> None:
    for _ in range(3):
        plane = SocketPlane(RINGS["p0"])
        cycle: list[object] = [plane, plane.server(ipv6=False), plane.client(RINGS["d0"].public, ipv6=False)]
        cycle.append(cycle)
        del plane, cycle
        gc.collect()


def test_every_bound_is_on_both_kinds_of_socket() -> None:
    limits = ControlLimits(frame_bytes_max=1000, frames_queued_max=7, silence_s=7.5, handshake_s=2.0, linger_s=0.1)
    plane = SocketPlane(RINGS["p0"], limits)
    for socket in (plane.server(ipv6=True), plane.client(RINGS["d0"].public, ipv6=True)):
        with socket:
            found = {
                option: socket.getsockopt(option)
                for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER, zmq.IPV6, zmq.HANDSHAKE_IVL)
            }
            assert list(found.values()) == [7, 7, 100, 1, 2000]
            dead = (zmq.TCP_MAXRT, zmq.TCP_KEEPALIVE, zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL)
            assert [socket.getsockopt(option) for option in dead] == [7500, 1, 2, 2]
            assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0, "libzmq's own would end this process one day"
            assert 1000 < int(socket.getsockopt(zmq.MAXMSGSIZE)) < 1100
            assert socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
    plane.context.term()
