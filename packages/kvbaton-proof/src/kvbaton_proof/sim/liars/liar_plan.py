"""Which worlds have a liar among the workers, and the rest of such a world.

Laws: drawn beside the world's own chance: a world without a liar is what it was before there were any. There is one
liar, and an honest worker of each part beside it. All data planes enforce what is lent, or can only be read: where
nothing is enforced, a member that lies may do what it likes with registered memory, and nobody promises otherwise
(docs/security.md, "What is enforced where").
"""

from __future__ import annotations

import random

import msgspec

from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import SPOKEN
from kvbaton_proof.sim.hardship.hardships import Hardships
from kvbaton_proof.sim.hardship.rank_faults import RankFaults
from kvbaton_proof.sim.hardship.world_plan import Plan, draw_honest
from kvbaton_proof.sim.world.life import Character
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_network import NetworkFaults
from kvbaton_proof.sim.world.sim_transport import TransportFaults

LIARS = "liars"
SHARE = 1 / 8

SETTINGS = Settings(
    transfer_timeout=5.0, defer_timeout=15.0, claim_timeout=5.0, lease_s=2.0, max_hold_s=25.0, retry_s=0.3,
    revoke_timeout=1.0, tombstones_max=64, parked_max=48, parked_per_peer_max=24, seats_per_peer_max=24,
    greetings_per_s_max=5.0, greetings_burst_max=20.0, unconfirmed_per_peer_max=3, revoked_max=16, sessions_max=8,
    intakes_max=64, leases_max=64, quarantine_blocks_max=64, puts_max=16,
)  # fmt: skip
"""Time enough for the honest, and quotas that a liar meets."""


def draw(rng: random.Random) -> Plan:
    """Any seed's plan: what its chance says of honest worlds, then whether somebody lies in it."""
    liars = random.Random()  # another source of chance from the same seed: `rng` goes on as if it had not been asked
    liars.setstate(rng.getstate())
    chance = random.Random(f"liars {liars.getrandbits(64)}")
    return among_liars(chance, draw_honest(rng))


def among_liars(chance: random.Random, plan: Plan) -> Plan:
    """The plan as it is; or, for one seed in eight, with a liar."""
    if chance.random() >= SHARE:
        return plan
    transports = chance.choice((("tcp",), ("tcp",), ("tcp",), ("shm", "tcp")))
    layers = plan.decode[0].shape.group_layers
    if plan.prefill == plan.decode:
        prefill = decode = alike(plan.prefill[0], ("b0", "b1", "b2"), transports, layers)
    else:
        prefill = alike(plan.prefill[0], ("p0", "p1"), transports, layers)
        decode = alike(plan.decode[0], ("d0", "d1"), transports, layers)
    liar = chance.choice(sorted({each.name for each in (*prefill, *decode)}))
    return msgspec.structs.replace(
        plan,
        profile=LIARS,
        prefill=prefill,
        decode=decode,
        liars=(liar,),
        requests=chance.randint(24, 48),
        network=NetworkFaults(double=0.1, slow=0.1, slow_s=0.1),
        copies=TransportFaults(slow=chance.choice((0.0, 0.3)), slow_s=0.5),
        crashes=0,
        pauses=0,
        partitions=0,
        flaps=0,
        retires=0,
        abort=0.0,
        bad_ticket=0.0,
        late_ticket=0.0,
        bursts=chance.random() < 0.3,
        push=chance.choice((0.2, 0.4, 0.7)),
        leave=0.05,
        stray=0.0,
        hardships=Hardships(),
        ranks=RankFaults(),
    )


def alike(
    first: Character, names: tuple[str, ...], transports: tuple[str, ...], layers: tuple[int, ...]
) -> tuple[Character, ...]:
    """So many workers like the first, with nothing of their own that fails a handoff, and plain shapes: what
    must be asked for before a commit is counted in whole pages."""
    drawn = first.shape
    shape = Shape(
        ranks=drawn.shards,
        blocks=120 * len(layers) * 2 // drawn.block_tokens,
        block_tokens=drawn.block_tokens,
        group_layers=layers,
        blocks_first=drawn.blocks_first,
        order=drawn.order if drawn.order in ("HNP", "NHP") else "HNP",
    )
    return tuple(
        msgspec.structs.replace(
            first,
            name=WorkerId(name),
            shape=shape,
            transports=transports,
            settings=SETTINGS,
            wall_skew_s=0.0,
            preempt=0.0,
            turns=False,
            early=0.0,
            stores_read_on=False,
            epochs="exact",
            lists_early=False,
            skips=0.0,
            recorded=True,
            features=first.features | 7,
            required=0,
            versions=SPOKEN,
            store_fails=0.0,
            ranks=None,
        )
        for name in names
    )
