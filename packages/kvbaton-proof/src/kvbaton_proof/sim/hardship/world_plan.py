"""The kind of world that a seed makes: number of workers, shapes, faults. All drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import ALL_FEATURES, SPOKEN, Feature, Versions
from kvbaton_proof.sim.hardship import engine_shapes, hardships
from kvbaton_proof.sim.hardship.engine_shapes import Variety
from kvbaton_proof.sim.hardship.hardships import Hardships, beside
from kvbaton_proof.sim.hardship.rank_faults import RankFaults, RankLot
from kvbaton_proof.sim.world.life import Character
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_network import NetworkFaults
from kvbaton_proof.sim.world.sim_transport import TransportFaults

FAULTY_S = 12.0
"""Faults and requests happen in this span; then everything heals and must come to rest."""
REST_S = 60.0
ROOMY = 96
PROBE_S = 30.0

PROFILES = (
    "healthy", "healthy", "expiry", "expiry", "writes", "writes", "network", "copies", "crashes", "pauses", "engines",
    "strangers", "all", "all",
)  # fmt: skip
"""`healthy`: frames may double and overtake each other, nothing else is wrong, so every handoff must be delivered."""

PLANES = (("shm", "tcp"), ("tcp",), ("rdma",), ("rdma", "tcp"), ("cma", "tcp"), ("cma",))


class Plan(msgspec.Struct, frozen=True):
    """One seed's world."""

    profile: str
    prefill: tuple[Character, ...]
    decode: tuple[Character, ...]
    requests: int
    network: NetworkFaults
    copies: TransportFaults
    crashes: int
    pauses: int
    partitions: int
    flaps: int  # a living worker is said to have departed
    retires: int  # drain, goodbye, another life
    abort: float  # share of requests that clients give up
    bad_ticket: float
    late_ticket: float  # share of tickets that reach D long after P wrote them
    bursts: bool  # requests come together, not evenly
    push: float  # share of requests that are pushed
    leave: float  # share of clients that leave between P's answer and D's
    stray: float  # share of tickets that are taken back out of turn
    hardships: Hardships
    ranks: RankFaults = RankFaults()
    liars: tuple[WorkerId, ...] = ()
    apart_s: float = 0.0  # if not 0, requests come one after the other
    talks: bool = False  # conversations go on, and D keeps them for that: in worlds of their own (`turn_worlds`)
    removals: int = 0  # members whose keys are removed: likewise


HEALTHY = Settings(
    transfer_timeout=5.0, defer_timeout=20.0, claim_timeout=5.0, lease_s=1.0, max_hold_s=40.0, retry_s=0.3, shun_s=20.0
)


def settings(rng: random.Random, profile: str) -> Settings:
    """Short times and tight bounds, so that every limit is met often."""
    if profile == "healthy":
        return HEALTHY
    tight = rng.random() < 0.3
    return Settings(
        transfer_timeout=rng.uniform(1.0, 3.0),
        defer_timeout=rng.uniform(2.0, 4.0),
        claim_timeout=rng.uniform(0.8, 2.0),
        lease_s=rng.uniform(0.2, 0.4) if profile == "expiry" else rng.uniform(0.3, 1.5),
        max_hold_s=rng.choice((rng.uniform(1.5, 3.0), rng.uniform(5.0, 8.0))),
        retry_s=rng.uniform(0.15, 0.4),
        probe_timeout=rng.uniform(0.3, 0.6),
        shun_s=rng.uniform(1.0, 20.0),
        revoke_timeout=rng.uniform(0.3, 1.0),
        tombstones_max=4 if tight else 64,
        parked_max=2 if tight else 32,
        revoked_max=2 if tight else 16,
        sessions_max=4 if tight else 16,
        intakes_max=6 if tight else 64,
        leases_max=8 if tight else 64,
        quarantine_blocks_max=8 if tight else 64,
        puts_max=2 if tight else 16,
    )


def upgrades(rng: random.Random, strange: bool) -> Callable[[str], Versions]:
    """What each worker speaks: in a third of all worlds a rolling upgrade is under way, in strange ones a forced one.

    Drawn beside the world's own chance, so that a seed's world is otherwise the same as before there were versions.
    """
    chance = random.Random()
    chance.setstate(rng.getstate())
    under_way, seed = chance.random() < 1 / 3, chance.getrandbits(64)
    kinds = [Versions(1, 1), SPOKEN] + [Versions(2, 3)] * strange

    def speaks(name: str) -> Versions:
        return random.Random(f"{seed} {name}").choice(kinds) if under_way else SPOKEN

    return speaks


def draw_honest(rng: random.Random) -> Plan:
    profile = rng.choice(PROFILES)
    bad = profile == "all"
    hard = hardships.draw(rng, profile)

    def when(name: str, value: float) -> float:
        return value if profile == name or (bad and rng.random() < 0.6) else 0.0

    times = settings(rng, profile)
    times = hardships.PATIENT if hard.lossy else times
    if hard.quotas:
        times = msgspec.structs.replace(times, **hardships.TIGHT)
        if hard.crowd:  # when all has healed, three may be busy with one at a time
            times = msgspec.structs.replace(times, sessions_max=3)
    if hard.hold_s:  # P gives up before D does
        times = msgspec.structs.replace(times, transfer_timeout=5.0, max_hold_s=8.0)
    healthy, expiry = profile == "healthy", profile == "expiry"
    writes = profile == "writes"
    transports: tuple[str, ...] = rng.choice(
        (("shm", "tcp"), ("tcp",), ("rdma",), ("rdma", "tcp"), ("cma", "tcp"), ("cma",))
    )
    if writes:  # one-sided hardware, clients that leave, frames that double and overtake: what push must survive
        transports = rng.choice((("tcp",), ("rdma",), ("rdma",)))
    transports = hard.planes or transports
    groups = rng.choice(((2,), (2,), (1, 1), (2, 1)))
    strange, engines = when("strangers", 1.0), when("engines", 1.0)
    mixed = strange and rng.random() < 0.3

    def room(
        blocks: int,
    ) -> int:  # who waits long for lost frames keeps much; and where all is reused, nothing is partly
        return ROOMY if hard.lossy or hard.nibbles else blocks

    def character(name: str, variety: Variety, side: int, loads: bool) -> Character:
        block_tokens = variety.block_tokens[side]
        own = (
            times
            if healthy or hard.lossy
            else msgspec.structs.replace(times, lease_s=max(0.2, times.lease_s * rng.choice((0.5, 1.0))))
        )
        if hard.hold_s and not loads:
            own = msgspec.structs.replace(own, max_hold_s=max(hard.hold_s, own.lease_s))
        gets = rng.random() < (0.8 if engines else 0.3)
        return Character(
            name=WorkerId(name),
            wall_skew_s=0.0 if healthy else rng.uniform(-0.5, 0.5),
            shape=variety.of(
                Shape(
                    ranks=variety.ranks[side],
                    blocks=room(rng.choice((12, 16, 24)) if not healthy else ROOMY) * len(groups) * 2 // block_tokens
                    + 4,
                    block_tokens=block_tokens,
                    group_layers=groups,
                    blocks_first=rng.random() < 0.3,
                    order=rng.choice(("HNP", "HNP", "NHP")),
                ),
                name,
                side,
            ),
            transports=transports,
            settings=own,
            policy=rng.choice(("recompute", "recompute", "fail")) if not hard.policy else hard.policy,
            drift=rng.uniform(-0.05, 0.05),
            layerwise=rng.random() < 0.4,
            preempt=engines and 0.1,
            put=0.2,
            get=0.5 if gets else 0.0,
            depth=rng.choice((1, 2, 2, 3)),
            defers=loads or gets,
            reuses_soon=rng.random() < (1.0 if expiry else 0.5) and not hard.nibbles,
            turns=hard.turned,
            early=hard.early,
            stores_read_on=hard.stores_read_on,
            epochs=hard.epochs,
            lists_early=hard.lists_early,
            skips=hard.skips,
            recorded=hard.recorded,
            pins=hard.pins,
            features=int(ALL_FEATURES & ~Feature.PUSH if mixed and rng.random() < 0.5 else ALL_FEATURES),
            required=1 << 40 if mixed and rng.random() < 0.2 else 0,
            store_fails=0.5 if engines or bad else 0.05,
        )

    ranks = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 2)))
    block_tokens = rng.choice(((2, 2), (2, 2), (2, 4), (4, 2)))
    variety = engine_shapes.draw(beside(rng, "shapes"), groups, block_tokens, ranks, hard.nibbles > 0)
    speaks = upgrades(rng, bool(mixed))
    prefill = tuple(character(f"p{n}", variety, 0, loads=False) for n in range(hard.crowd or rng.randint(1, 2)))
    decode = tuple(character(f"d{n}", variety, 1, loads=True) for n in range(hard.crowd or rng.randint(1, 2)))
    if rng.random() < 0.15:  # workers of both roles, who hand over to each other
        alike = msgspec.structs.replace(variety, optional=0)
        prefill = decode = tuple(character(f"b{n}", alike, 0, loads=True) for n in range(2))
    prefill = tuple(msgspec.structs.replace(each, versions=speaks(each.name)) for each in prefill)
    decode = tuple(msgspec.structs.replace(each, versions=speaks(each.name)) for each in decode)
    lot = RankLot(rng, profile)
    prefill, decode = lot.deal(prefill), lot.deal(decode)
    shut = (
        frozenset(transports[:-1]) if rng.random() < (0.5 if healthy else 0.2) else frozenset()
    )  # the last resort is never shut
    return Plan(
        profile=profile,
        prefill=prefill,
        decode=decode,
        requests=rng.randint(16, 40) * (2 if expiry and not hard.nibbles else 1),
        network=NetworkFaults(
            loss=when("network", rng.uniform(0, 0.1)) or expiry * rng.uniform(0.2, 0.5) or hard.lossy * hardships.LOSS,
            double=when("network", 0.05) or healthy * 0.2 or writes * 0.3,
            slow=when("network", 0.15) or healthy * 0.1 or writes * 0.3,
            slow_s=0.1 if healthy else rng.choice((2.0, 2.0, 8.0)),
            garble=when("network", 0.02) or strange * 0.05,
            throws=hard.throws,
        ),
        copies=TransportFaults(
            fail=when("copies", 0.08),
            stall=when("copies", 0.08),
            slow=(hard.nibbles and 0.8)
            or when("copies", 0.2)
            or when("pauses", 0.4)
            or when("crashes", 0.2)
            or expiry * 0.7
            or writes * 0.6,
            slow_s=4.0 if hard.nibbles else 1.0 if expiry or writes else 5.0,
            refuse=when("copies", 0.5),
            queue_max=rng.choice((1, 4, 64)),
            broken=when("copies", 0.01),
            throws=hard.throws,
            shut=shut,
            shut_rank=hard.shut_rank,
        ),
        crashes=int(when("crashes", rng.randint(1, 4))),
        pauses=int(when("pauses", rng.randint(1, 4))),
        partitions=int(when("network", rng.randint(0, 3))),
        flaps=int(
            when("crashes", rng.randint(0, 2)) or when("strangers", rng.randint(0, 2)) or writes * rng.randint(0, 6)
        ),
        retires=int(when("crashes", rng.randint(0, 2)) or when("engines", rng.randint(0, 1))),
        abort=(engines and 0.2) or when("network", 0.3) or when("copies", 0.1) or writes * 0.4,
        bad_ticket=strange * 0.3,
        bursts=rng.random() < (0.0 if expiry else 0.4),  # what expires is seen where others come meanwhile
        push=1.0 if writes else 0.1 if hard.nibbles else 0.4,
        late_ticket=0.0 if healthy else rng.choice((0.0, 0.2)),
        leave=0.1,
        stray=0.2 if healthy else rng.choice((0.0, 0.1, 0.3)),
        hardships=hard,
        ranks=lot.faults,
    )
