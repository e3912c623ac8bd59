"""Per-client quotas of a server: held bytes, and connections.

Laws: no client address holds more bytes than are left free: whoever fills the server leaves room for the next. At the
bound of connections the oldest one goes that is not being answered, however busily it sends; of an address that has
more than its share, its own. What was taken is given back once, with the request or the connection that it was for.
"""

from __future__ import annotations

import ipaddress
import resource
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvbaton.api.api_errors import ApiError, no_room

BYTES_MAX = 1 << 30
CONNECTIONS_MAX = 16_384
"""Of clients, where the process may have three times as many descriptors."""
CONNECTIONS_MIN = 16
DESCRIPTORS_KEPT = 128
"""For what is no connection of a client or to a worker: keys, records, the registry's sockets."""
ADDRESS_SHARE = 4
"""An address that has this part of all connections makes room for its next one itself."""
_IPV6_NET_BITS = 64
T = TypeVar("T")


def descriptors() -> int:
    """How many connections this process may have, of clients and to workers together."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = 3 * CONNECTIONS_MAX
    return most if soft == resource.RLIM_INFINITY else max(3 * CONNECTIONS_MIN, min(most, soft - DESCRIPTORS_KEPT))


def connections_max() -> int:
    """Of clients: a request under way has up to two more, to its workers."""
    return descriptors() // 3


def caller(peer: str) -> str:
    """Who counts as one client: an IPv4 address, or a network of IPv6, which anybody has all addresses of."""
    if ":" not in peer:
        return peer
    try:
        address = ipaddress.IPv6Address(peer.partition("%")[0])
    except ValueError:
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _IPV6_NET_BITS), strict=False))


class ClientQuotas:
    """Bytes of requests and answers that are held, of all clients."""

    def __init__(
        self, bytes_max: int = BYTES_MAX, *, holder: str = "the router", setting: str = " (--held-bytes-max)"
    ) -> None:
        self.bytes_max = bytes_max
        self._holder = holder
        self._setting = setting
        self.bytes = 0
        self.refused: Counter[str] = Counter()  # by what there was no room for
        self.turned_away: Counter[str] = Counter()  # connections at the bound: idle ones, or new ones if none is
        self._held: dict[str, int] = {}  # by caller

    @property
    def total(self) -> int:
        """Bytes that are held, of all processes of this router."""
        return self.bytes

    def tab(self, who: str = "") -> Tab:
        return Tab(self, who)

    def _change(self, who: str, more: int) -> bool:
        mine = self._held.get(who, 0) + more
        if more > 0 and mine + self.bytes + more > self.bytes_max:
            return False
        self.bytes += more
        if mine:
            self._held[who] = mine
        else:
            self._held.pop(who, None)
        return True

    def full(self, what: str) -> ApiError:
        """What a client is told for whose `what` there is no room; it is counted."""
        self.refused[what] += 1
        said = (
            f"{what}: {self._holder} holds {self.total} bytes of requests and answers, at most {self.bytes_max}"
            f"{self._setting}, and for one client address no more than are left; read answers, send less at once,"
            " or try again later"
        )
        return no_room(said)


class Tab:
    """What one thing holds. Close it with that thing."""

    __slots__ = ("_who", "bytes", "room")

    def __init__(self, room: ClientQuotas, who: str) -> None:
        self.room = room
        self._who = who
        self.bytes = 0

    def another(self) -> Tab:
        """For something else of the same client's."""
        return Tab(self.room, self._who)

    def hold(self, count: int) -> bool:
        """Hold so many from now on; False, and nothing is changed, where there is no room."""
        if count == self.bytes:
            return True
        if not self.room._change(self._who, count - self.bytes):
            return False
        self.bytes = count
        return True

    def grow(self, count: int) -> bool:
        return self.hold(self.bytes + count)

    def absorb(self, other: Tab) -> None:
        """Hold what another tab of the same client's holds, which is closed by that."""
        self.bytes += other.bytes
        other.bytes = 0

    def close(self) -> None:
        if self.bytes:
            self.hold(0)


class ClientCrowd(Generic[T]):
    """Who is connected. Whoever enters is idle until said otherwise."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._of: dict[T, str] = {}
        self._count: Counter[str] = Counter()
        self._idle: OrderedDict[T, None] = OrderedDict()  # the oldest first
        self._idle_of: dict[str, OrderedDict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._of))

    def enter(self, who: T, address: str) -> None:
        self._of[who] = address
        self._count[address] += 1
        self.idle(who)

    def next_to_go(self, address: str) -> T | None:
        """Whose place a new one from `address` takes; None if all are being answered."""
        own = self._idle_of.get(address)
        if own and self._count[address] * ADDRESS_SHARE >= self.bound:
            return next(iter(own))
        return next(iter(self._idle), None)

    def busy(self, who: T) -> None:
        """It is being answered from now on."""
        if self._idle.pop(who, self) is self:  # was not
            return
        own = self._idle_of[self._of[who]]
        del own[who]
        if not own:
            del self._idle_of[self._of[who]]

    def idle(self, who: T) -> None:
        """It is no longer being answered, if it is still here."""
        address = self._of.get(who)
        if address is not None and who not in self._idle:
            self._idle[who] = None
            self._idle_of.setdefault(address, OrderedDict())[who] = None

    def leave(self, who: T) -> None:
        if who not in self._of:
            return
        self.busy(who)
        address = self._of.pop(who)
        self._count[address] -= 1
        if not self._count[address]:
            del self._count[address]
