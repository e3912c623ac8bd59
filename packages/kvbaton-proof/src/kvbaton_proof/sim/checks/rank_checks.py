"""Invariants of all ranks of an engine and their links: at every step of the node, at rest, and after a goodbye.

Laws: a rank that lives, was cut off for less than `lost_s` (each further cut counts as a ping) and did not stall as
long is never taken for lost; one that is gone is, and nothing waits for it. Nothing grows beyond its bound. At rest
nothing is outstanding at either end: no command, no copy, no loan, no fence, no question, no order, no part of a table;
and the engine knows what its ranks have counted. After a goodbye every data plane is closed, and the store, which pins
nothing.
"""

from __future__ import annotations

from collections import Counter

from kvbaton.ranks.rank_messages import table_bytes
from kvbaton.ranks.rank_store_messages import RankStoreLookup
from kvbaton.ranks.rank_transport import RemoteTransport
from kvbaton.transports.core.wrapped import UnnamedTransport
from kvbaton_proof.sim.promises import HANG, LEAK, NEEDLESS, STRANGER, Broken
from kvbaton_proof.sim.ranks.rank_links import LinkedRanks, Rank

NEVER = float("inf")


def check_step(ranks: LinkedRanks) -> None:
    for rank in ranks.ranks if not ranks.traits.near else ():
        _check_loss(ranks, rank)
    for number, link in ranks.links._links.items():
        jobs = [job for each in link.transports.values() for job in each._jobs._jobs]
        asked = [each for each in link.store._open.values() if isinstance(each, RankStoreLookup)] if link.store else []
        if link.lost and (jobs or asked):
            raise Broken(HANG, f"{ranks.me.worker}: rank {number} is lost, and {jobs or asked} waits for it")
    _check_bounds(ranks)


def _check_loss(ranks: LinkedRanks, rank: Rank) -> None:
    traits, name = ranks.traits, f"{ranks.me.worker}: rank {rank.number}"
    channel = ranks.carrier.channels[rank.number]
    pings_cut = max(0, channel.connection - 1)  # a cut may take a ping along, or its answer; for one there is room
    troubled_s = rank.stalled_s + channel.down_s + pings_cut * traits.ping_s
    is_excused = traits.garble > 0 or troubled_s > traits.lost_s - 2 * traits.ping_s - 0.1
    if ranks.links._links[rank.number].counters["losses"] and rank.dead_since == NEVER and not is_excused:
        raise Broken(NEEDLESS, f"{name} was taken for lost, and was there")
    gone_s = ranks.world.now - rank.dead_since - channel.down_s  # its last words may be heard when the link is back
    if gone_s > 1.1 * (traits.lost_s + 2 * traits.ping_s) and not ranks.links.is_lost(rank.number):
        raise Broken(HANG, f"{name} is gone, and its end is still waited for")


def _check_bounds(ranks: LinkedRanks) -> None:
    found = []
    for link in ranks.links._links.values():
        found.append(("leases", len(link._progress), link.leases_max))
        found.append(("frames", len(link.stream._flight), link.stream.window_max))
        if link.store is not None:
            found.append(("orders", link.store.open_orders, link.store.orders_max))
        for each in link.transports.values():
            found.append(("copies", len(each._jobs._jobs), each._jobs._copies_max))
            largest = max((table_bytes(job.copy) for job in each._jobs._jobs.values()), default=0)
            found.append(("bytes of tables", each._tables_bytes, max(each.tables_bytes_max, largest)))
    for host in (rank.host for rank in ranks.ranks if rank.host is not None):
        found.append(("leases in a rank", len(host._progress), host.leases_max))
        found.append(("frames of a rank", len(host._stream._flight), host._stream.window_max))
        for plane in host._planes.values():
            found.append(("copies that wait in a rank", len(plane._waiting), plane.waiting_max))
            found.append(("tables in a rank", len(plane._parts), plane.waiting_max))
    for what, count, limit in found:
        if count > limit:
            raise Broken(LEAK, f"{ranks.me.worker}: {count} {what}, at most {limit}")


def check_at_rest(ranks: LinkedRanks) -> None:
    name = ranks.me.worker
    for port in (port for rank in ranks.ports for port in rank.values()):
        port.check_at_rest()
    if ranks.store is not None and ranks.shelf is not None:
        ranks.store.check_at_rest(name, ranks.shelves, ranks.shelf)
    for number, link in ranks.links._links.items():
        if link.lost:
            raise Broken(NEEDLESS, f"{name}: rank {number} is still lost at rest")
        for transport in link.transports.values():
            _check_transport(f"{name} rank {number}", transport)
    for rank in ranks.ranks:
        assert rank.host is not None
        for plane in rank.host._planes.values():
            if plane._waiting or plane._parts or plane._news:
                what = f"{len(plane._waiting)} copies, {len(plane._parts)} tables, {len(plane._news)} news"
                raise Broken(LEAK, f"{name}: rank {rank.number} still keeps {what}")
    _check_told(ranks)
    _check_resent(ranks)


def _check_transport(name: str, transport: RemoteTransport) -> None:
    kept = {
        "copies": transport._jobs._jobs,
        "bytes of tables": transport._tables_bytes,
        "loans": transport._loans,
        "questions": transport._endpoints._asked,
    }
    left = [what for what, held in kept.items() if held]
    if left or any(job.live for job in transport._restless._items.values()):
        raise Broken(LEAK, f"{name}: {', '.join(left) or 'copies not at rest'} outstanding at rest")


def _check_told(ranks: LinkedRanks) -> None:
    """What the ranks have counted is known to their engine; frames of strangers were all refused."""
    name, links = ranks.me.worker, ranks.links
    turned_away: Counter[str] = Counter()
    for plane, each in ((plane, each) for rank in ranks.ranks for plane, each in rank.planes.items()):
        turned_away[f"{plane}:left"] += each.strangers
    if +turned_away != +Counter(links.data_refused()):
        raise Broken(LEAK, f"{name}: {dict(turned_away)} were turned away, told {links.data_refused()}")
    mapped_bytes = sum(each.mapped_bytes for rank in ranks.ranks for each in rank.planes.values())
    if not ranks.traits.near and mapped_bytes != links.mapped_bytes():
        raise Broken(LEAK, f"{name}: {mapped_bytes} bytes are mapped, told {links.mapped_bytes()}")
    hosts = [rank.host for rank in ranks.ranks if rank.host is not None]
    refused = links.counters["refused"] + sum(host.stream_counters["refused"] for host in hosts)
    came = sum(channel.strange_frames for channel in ranks.carrier.channels.values())
    if refused != came or any(host.strangers for host in hosts) or len(links) != len(hosts):
        raise Broken(STRANGER, f"{name}: {came} frames of strangers came, {refused} were refused")


def _check_resent(ranks: LinkedRanks) -> None:
    """Where nothing was lost or slow, nothing is sent again."""
    if ranks.carrier.engine.was_paused:  # and spoke before it read what had come meanwhile
        return
    for rank in ranks.ranks:
        channel, host = ranks.carrier.channels[rank.number], rank.host
        assert host is not None
        if ranks.traits.garble or ranks.traits.near or rank.stalled_s or channel.connection:
            continue
        if host.stream_counters["resent"] or ranks.links._links[rank.number].stream.counters["resent"]:
            raise Broken(NEEDLESS, f"{ranks.me.worker}: rank {rank.number}: frames were sent again that had arrived")


def _is_made(rank: Rank, name: str) -> bool:
    """Whether the rank was told its name: until then there is no transport, and nothing to close."""
    assert rank.host is not None
    transport = (rank.host._planes or rank.host._given)[name].transport
    return not isinstance(transport, UnnamedTransport) or transport._inner is not None


def check_gone(ranks: LinkedRanks) -> None:
    """After a goodbye; of ranks that could hear it."""
    for rank in (rank for rank in ranks.ranks if rank.process.runs):
        open_planes = [name for name, plane in rank.planes.items() if plane.inner.alive and _is_made(rank, name)]
        if open_planes:
            raise Broken(LEAK, f"{ranks.me.worker}: rank {rank.number} has gone, and {open_planes} are still open")
        kept = ranks.store.kept.get(rank.number) if ranks.store is not None else None
        if kept is not None and (kept.is_busy or not kept.is_closed):
            what = "orders of its store have not ended" if kept.is_busy else "its store is still open"
            raise Broken(LEAK, f"{ranks.me.worker}: rank {rank.number} has gone, and {what}")
