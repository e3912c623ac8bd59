"""Worlds in which keys of members are removed, while their KV lies in the caches, turns and store of the others.

Three members of both roles hand the same few prompts to each other, so that KV goes over several of them. Little else
is wrong: what a removal costs is then told from what other faults do.
"""

from __future__ import annotations

import random

import msgspec

from kvbaton.protocol.wire.messages import ALL_FEATURES
from kvbaton_proof.sim.hardship.hardships import Hardships
from kvbaton_proof.sim.hardship.rank_faults import GET, PUT, RankFaults
from kvbaton_proof.sim.hardship.world_plan import Plan
from kvbaton_proof.sim.liars.liar_plan import alike
from kvbaton_proof.sim.world.rank_links import RankTraits
from kvbaton_proof.sim.world.sim_network import NetworkFaults
from kvbaton_proof.sim.world.sim_transport import TransportFaults

NAMES = "m0", "m1", "m2"
PROMPTS = 4
REMOVALS = 3
REQUESTS = 24
RETIRES = 2


def with_removals(rng: random.Random, plan: Plan, apart: bool) -> Plan:
    """The plan's engines as three members; `apart`: with a store, which their ranks reach, and without turns."""
    first = plan.decode[0]
    members = alike(first, NAMES, first.transports, first.shape.group_layers[:1] if apart else first.shape.group_layers)
    able = {"features": int(ALL_FEATURES), "defers": True, "reuses_soon": False, "pins": 1.0}
    if apart:
        traits = RankTraits(store=True)
        members = tuple(msgspec.structs.replace(each, ranks=traits, put=PUT, get=GET, **able) for each in members)
    else:  # a store without ranks knows nobody
        members = tuple(msgspec.structs.replace(each, put=0.0, get=0.0, **able) for each in members)
    return msgspec.structs.replace(
        plan,
        profile="removals",
        prefill=members,
        decode=members,
        requests=REQUESTS,
        removals=REMOVALS,
        talks=not apart,
        network=NetworkFaults(double=0.1, slow=0.1, slow_s=0.1),
        copies=TransportFaults(slow=rng.choice((0.0, 0.3)), slow_s=0.5),
        crashes=0,
        pauses=0,
        partitions=0,
        flaps=0,
        retires=0 if apart else RETIRES,
        abort=0.0,
        bad_ticket=0.0,
        late_ticket=0.0,
        stray=0.0,
        hardships=Hardships(),
        ranks=RankFaults(prompts=PROMPTS),
    )
