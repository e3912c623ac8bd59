"""The control plane over CurveZMQ: frames between workers that have proven who they are. Implements `ControlPort`.

Laws: never blocks, except in `wait`. May lose a frame (counted), but never alters or misattributes one: the sender is
who the key of the connection says, never who the frame says. Answers go back on the connection that the peer opened,
so a P needs no way to dial a D. Sockets are touched by one thread only; from others there are `wake`, `set_directory`
and `set_peers`, which leave a note for it. A keyring that was loaded from a directory is followed: what changes there
is in force a few seconds later, and `on_keys` is called with it on that one thread; so it is with members that joined,
of whom others tell (`set_directory`), and with the keyring of a member that has no directory (`set_keyring`).
`on_refused` is called there with a worker that we had dialled when nothing listens at its address any more.

A connection holds at most `frames_queued_max` whole frames; libzmq does not bound the parts of one unfinished
multi-part message, so an *authenticated* peer that has gone bad can make this process grow. Take its key off the list.
One that floods costs the others a share of a turn: what it sends beyond `frames_per_s_max` is dropped unread.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import zmq

from kvbaton.control.addressing import ControlError, ControlLimits, check_endpoint
from kvbaton.control.dialler import Address, Dialler, Listener, Sent
from kvbaton.control.joining.join_token import Membership
from kvbaton.control.keyring import Following, Keyring, is_public_key, with_joined, with_removed
from kvbaton.control.sockets import Heard, SocketPlane, Waker
from kvbaton.protocol.ids import WorkerId

log = logging.getLogger(__name__)

LOOPBACK = "tcp://127.0.0.1:0"
REMOVED_KEPT_MAX = 16384
"""Removals beside those of the key directory; beyond it only the latest list counts."""


class ZmqControl:
    """One process's control plane. `bind=None` makes one that only dials."""

    def __init__(
        self,
        keyring: Keyring,
        bind: str | None = LOOPBACK,
        limits: ControlLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plane = SocketPlane(keyring, limits or ControlLimits(), clock)
        self.on_keys: Callable[[Keyring], None] = lambda _: None
        self.on_refused: Callable[[WorkerId], object] = lambda _: None
        self._following = Following(keyring, clock()) if keyring.directory else None
        self._keyring, self._told = keyring, keyring  # as loaded or joined; as it is in force, with who joined
        self._joined: Mapping[WorkerId, Membership] = {}
        self._removed: tuple[frozenset[WorkerId], frozenset[str]] = frozenset(), frozenset()  # of whom others tell
        self._waker = Waker()
        self._notes: dict[str, Callable[[], None]] = {}  # at most one of a kind: the last
        self._ready: dict[object, int] | None = None  # as the last wait found it; None: not looked since
        self._dialler = Dialler(self._plane)
        self._listener: Listener | None = None
        try:
            if bind is not None:
                self._listener = Listener(self._plane, bind)
        except ControlError:
            self.close()
            raise
        self._plane.poller.register(self._waker.fd, zmq.POLLIN)
        for socket in self._listener.polled if self._listener else ():
            self._plane.poller.register(socket, zmq.POLLIN)

    @property
    def endpoint(self) -> str:
        """Where this side listens, with the port it got; empty when it only dials."""
        return self._listener.endpoint if self._listener else ""

    @property
    def counters(self) -> Counter[str]:
        """frames_in, frames_out, lost, malformed, over_quota, connections, admitted, refused, mismatched, redialled,
        hung_up, keys_changed, refused_lines."""
        return self._plane.counters

    @property
    def strangers(self) -> int:
        """Connections that came and have not proven an identity of this cluster."""
        return max(0, self.counters["connections"] - self.counters["admitted"])

    # --- from any thread

    def wake(self) -> None:
        """End the wait that is under way, or else the next."""
        self._waker.wake()

    def set_directory(
        self, directory: Mapping[WorkerId, Address], joined: Mapping[WorkerId, Membership] | None = None
    ) -> None:
        """Where each worker listens, and its public key; replaces the directory before. ValueError names the field.

        An empty key: whichever our key directory gives for that worker. `joined`: who is let in besides, by
        certificates that were verified; replaces those before.
        """
        checked: dict[WorkerId, Address] = {}
        for worker, (endpoint, key) in directory.items():
            if key and not is_public_key(key):
                raise ValueError(f"directory.{worker}: the public key is not 40 characters of Z85")
            try:
                checked[worker] = (check_endpoint(endpoint, names=True), key)
            except ValueError as error:
                raise ValueError(f"directory.{worker}: {error}") from None
        self._note("directory", lambda: self._take_directory(checked, joined))

    def set_keyring(self, keyring: Keyring) -> None:
        """The renewed keyring of a member that joined."""
        self._note("keyring", lambda: self._take_keyring(keyring))

    def add_removed(self, names: Iterable[WorkerId], keys: Iterable[str]) -> None:
        """It was proven that these were removed; what was said before stays said."""
        told = frozenset(names), frozenset(keys)
        if not (told[0] <= self._removed[0] and told[1] <= self._removed[1]):
            self._note("removed", lambda: self._take_removed(*told))

    def look_soon(self) -> None:
        """Somebody was added to the key directory: look now."""
        if self._following is not None:
            self._following.look_soon(self._plane.clock())
            self._waker.wake()

    def set_peers(self, peers: Mapping[WorkerId, str], also: Mapping[WorkerId, tuple[str, ...]] | None = None) -> None:
        """Who may connect and be dialled, by public key, from now on."""
        fixed, further = dict(peers), dict(also or {})
        self._note("peers", lambda: self._take_peers(fixed, further))

    # --- the loop's thread

    def send(self, worker: WorkerId, frame: bytes) -> bool:
        """Queue a frame; False when there is no way to `worker`. A full queue loses the frame, counts it, says True."""
        self._take_notes()
        bytes_max = self._plane.limits.frame_bytes_max
        if not 0 < len(frame) <= bytes_max:
            self.counters["lost"] += 1
            log.error("[frame-unsendable] frame of %d bytes for %s was not sent: 1..%d", len(frame), worker, bytes_max)
            return True
        sent = self._listener.reply(worker, frame) if self._listener else Sent.NO_WAY
        if sent is Sent.NO_WAY:
            return self._dialler.send(worker, frame)
        self.counters["frames_out" if sent is Sent.QUEUED else "lost"] += 1
        return True

    def receive(self) -> Sequence[tuple[WorkerId, bytes]]:
        """What has come, up to `frames_per_receive_max` frames, shared fairly among the connections that have some."""
        return [(worker, frame) for worker, frame, _ in self.hear()]

    def hear(self) -> list[Heard]:
        """The same, with the public key under which each came."""
        self._take_notes()
        self._follow()
        events = self._poll(0) if self._ready is None else self._ready
        self._ready = None
        lines = list(self._dialler.readable(events))
        listener = self._listener if self._listener and self._listener.socket in events else None
        share = max(1, self._plane.limits.frames_per_receive_max // max(1, len(lines) + (listener is not None)))
        found: list[Heard] = []
        if listener is not None:
            listener.drain(found, share)
        for worker in lines:
            self._dialler.drain(worker, found, share)
        self.counters["frames_in"] += len(found)
        return found

    def address_of(self, worker: WorkerId) -> str:
        """From which address a worker last spoke to this listener; "" if it has not."""
        return self._listener.address_of(worker) if self._listener else ""

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until a frame can be read, `wake` is called, or `timeout_s` has passed. Strangers do not end it."""
        clock = self._plane.clock
        until = None if timeout_s is None else clock() + timeout_s
        while True:
            self._follow()
            left_ms = None if until is None else max(0, math.ceil((until - clock()) * 1000))
            look_ms = self._until_look_ms()
            self._ready = self._poll(min((ms for ms in (left_ms, look_ms) if ms is not None), default=None))
            woken = self._ready.pop(self._waker.fd, 0) != 0
            if woken:
                self._waker.clear()
                self._follow()  # it may be what woke us
            if self._ready or woken or left_ms == 0:
                return

    def close(self) -> None:
        """Close the sockets and the context; waits at most `linger_s` for what is on its way. Idempotent."""
        if self._plane.context.closed:
            return
        self._dialler.close()
        if self._listener is not None:
            self._listener.close()
        self._plane.context.term()
        self._waker.close()

    def __del__(self) -> None:
        if hasattr(self, "_listener") and not sys.is_finalizing():  # at exit its thread may be frozen in the poll
            self.close()

    def _poll(self, timeout_ms: int | None) -> dict[object, int]:
        """What is readable; the gate's business is done here, by who is known by now. A wake is left for `wait`: it may
        be for work that the turn under way has already looked for."""
        events: dict[object, int] = dict(self._plane.poller.poll(timeout_ms))
        if self._listener is not None:
            asked = [events.pop(socket, 0) for socket in self._listener.polled[1:]]
            if any(asked):
                self._take_notes()
                self._listener.gate.tend()
        for worker in self._dialler.take_refused(events):
            self.counters["refused_lines"] += 1
            self.on_refused(worker)
        return events

    def _note(self, kind: str, note: Callable[[], None]) -> None:
        self._notes[kind] = note
        self._waker.wake()

    def _take_notes(self) -> None:
        while self._notes:
            self._notes.popitem()[1]()

    def _take_directory(
        self, directory: Mapping[WorkerId, Address], joined: Mapping[WorkerId, Membership] | None
    ) -> None:
        if joined is not None and joined != self._joined:
            self._joined = joined  # before they are dialled
            self._take_keyring(self._keyring)
        moved = self._dialler.set_directory(directory)
        if self._listener is not None:
            self._listener.forget(moved)

    def _take_removed(self, names: frozenset[WorkerId], keys: frozenset[str]) -> None:
        before = self._removed if max(map(len, self._removed)) < REMOVED_KEPT_MAX else (frozenset(), frozenset())
        self._removed = names | before[0], keys | before[1]
        self._take_keyring(self._keyring)

    def _take_peers(self, peers: Mapping[WorkerId, str], also: Mapping[WorkerId, tuple[str, ...]]) -> None:
        self._plane.take(peers, also)
        self._dialler.take_peers()
        if self._listener is not None:
            self._listener.take_peers()

    def _until_look_ms(self) -> int | None:
        if self._following is None:
            return None
        return max(0, math.ceil((self._following.next_look - self._plane.clock()) * 1000))

    def _follow(self) -> None:
        """Have the key directory looked at, if that is due, and take what was found to have changed there."""
        following = self._following
        if following is None:
            return
        if (now := self._plane.clock()) >= following.next_look:
            following.have_a_look(now, self._waker.wake)
        fresh = following.take()
        if fresh is None:
            return
        log.info("%s: keys loaded again: %d identities, %d for tickets", fresh.name, *_counts(fresh))
        self._take_keyring(fresh)

    def _take_keyring(self, keyring: Keyring) -> None:
        self._keyring = keyring
        fresh = with_joined(with_removed(keyring, *self._removed), self._joined)
        if fresh == self._told:
            return
        self._told = self._plane.keyring = fresh
        self.counters["keys_changed"] += 1
        self._take_peers(fresh.peers, fresh.also)
        self.on_keys(fresh)


def _counts(keyring: Keyring) -> tuple[int, int]:
    return len(keyring.peers), len(keyring.ticket_keys)
