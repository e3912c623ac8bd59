"""Rank links over ZeroMQ, one thread per end: no decisions here.

Law: keys are minted for each line and never leave memory except in the invitation.
"""

from __future__ import annotations

import ipaddress
import secrets
import threading
from collections.abc import Callable, Sequence

import zmq

from kvbaton.control.addressing import check_endpoint
from kvbaton.control.keyring import Keyring
from kvbaton.control.poll_loop import LoopThread, Sleeper
from kvbaton.control.zmq import ZmqControl
from kvbaton.ranks.rank_carrying import Arrival, Clock
from kvbaton.ranks.rank_dialling import RankDialler
from kvbaton.ranks.rank_messages import ENGINE, RankInvitation, rank_name
from kvbaton.ranks.rank_stream import LIMITS


class RankListener:
    """One rank's end: a `ZmqControl` that accepts only the holder of its invitation."""

    def __init__(self, rank: int, host: str, clock: Clock) -> None:
        (engine_public, engine_secret), (public, secret) = (_mint(), _mint())
        keyring = Keyring(rank_name(rank), public, secret, {ENGINE: engine_public, rank_name(rank): public}, ())
        self._control = ZmqControl(keyring, _bind(host), LIMITS, clock)
        self.keys = public, engine_public, engine_secret
        self.endpoint = self._control.endpoint
        self.wait, self.wake, self.close = self._control.wait, self._control.wake, self._control.close

    @property
    def strangers(self) -> int:
        return self._control.strangers

    def send(self, frame: bytes) -> None:
        self._control.send(ENGINE, frame)

    def receive(self) -> list[bytes]:
        return [frame for _, frame in self._control.receive()]


class Sockets:
    """Implements `rank_carrying.Carrier`."""

    def session(self) -> int:
        return secrets.randbits(62) + 1

    def dial(self, invitations: Sequence[RankInvitation], clock: Clock) -> RankDialler:
        return RankDialler(invitations, clock)

    def listen(self, rank: int, host: str, clock: Clock) -> RankListener:
        return RankListener(rank, host, clock)

    def loop(
        self,
        name: str,
        sleeper: Sleeper,
        turn: Callable[[float], float | None],
        finish: Callable[[], None],
        clock: Clock,
    ) -> LoopThread:
        return LoopThread(name, sleeper, turn, finish, clock)

    def arrival(self) -> Arrival:
        return threading.Condition()


SOCKETS = Sockets()


def _mint() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _bind(host: str) -> str:
    """The listening address: numeric, so that the engine can connect to it as it is."""
    address = ipaddress.ip_address(host)
    where = f"[{host}]" if address.version == 6 else host
    check_endpoint(f"tcp://{where}:1")
    return f"tcp://{where}:0"
