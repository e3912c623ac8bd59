"""Additional hardships of a world: each is drawn from its own random stream.

Law: adding a hardship changes only the worlds that draw it. So nothing here draws from the world's own generator, and
no two hardships share one.
"""

from __future__ import annotations

import random

import msgspec

from kvbaton.protocol.settings import Settings

PATIENT = Settings(
    transfer_timeout=8.0, defer_timeout=12.0, claim_timeout=10.0, lease_s=6.0, max_hold_s=40.0, retry_s=0.3
)
"""With these a tenth of all frames may be lost and every handoff is delivered all the same: every exchange is tried at
least a dozen times before anybody gives up, and a lease outlives every greeting."""
LOSS = 0.1
TIGHT = {
    "parked_per_peer_max": 1, "seats_per_peer_max": 2, "bytes_per_peer_max": 300, "unconfirmed_per_peer_max": 1,
    "greetings_per_s_max": 2.0, "greetings_burst_max": 4.0, "sessions_max": 2, "puts_max": 1, "intakes_max": 4,
    "leases_max": 5, "quarantine_blocks_max": 4, "tombstones_max": 3, "revoked_max": 1,
}  # fmt: skip
"""Every bound as low as a worker of a small cluster can live with: each is met."""

RESTARTING = ("crashes", "engines", "all")
NIBBLED = {"expiry": 1.5, "all": 2.0, "copies": 3.0, "network": 3.0, "pauses": 3.0}
"""In one of so many worlds of these profiles leases are partly reused under their readers."""


class Hardships(msgspec.Struct, frozen=True, kw_only=True):
    """Of one seed's world."""

    lossy: bool = False  # frames are lost where every handoff must be delivered: always, or when all else has healed
    nibbles: float = 0.0  # share of leases that expire under their readers, of which a block or two is reused at once
    policy: str = ""  # if any, every engine's: what is proven good matters to who recomputes
    turned: bool = False  # of a prompt in several groups, the first group's blocks are reused first
    early: float = 0.0  # share of pulls for which D takes blocks before P's answer
    hold_s: float = 0.0  # if not 0, P holds nothing for longer: leases end under their readers, renewed or not
    planes: tuple[str, ...] = ()  # if any, these data planes and no others
    quotas: bool = False  # every bound of every node is met
    crowd: int = 0  # if not 0, so many P's and as many D's
    shut_rank: int = -1  # if not -1, a data plane that cannot be opened cannot be opened by and to this rank alone
    opens_s: float = 0.0  # if not 0, what could not be opened can be from then on
    ghosts: bool = False  # frames of and to a life that has ended come again while its worker lives the next one
    nobody: float = 0.0  # share of tickets that name a worker that is not there
    epochs: str = "exact"  # see Character
    replaces: int = 0  # caches that are replaced under their nodes
    lists_early: bool = False  # P says that all blocks are listed before they are ready
    skips: float = 0.0  # share of prompts that D finds in its own cache after all
    recorded: bool = True  # nodes keep flight records
    throws: float = 0.0  # share of stops, fences, closings and looks for news that raise
    stores_read_on: bool = False  # a store that was told to stop reads on for a while
    pins: float = 1.0  # the share of P's cache that handoffs may pin; beyond it prompts wait, and are refused
    judged: float = 0.0  # share of pushes that are judged by D's ranks while D's cache is replaced


def beside(rng: random.Random, name: str) -> random.Random:
    """A generator of its own for `name`, from the state of the world's; the world's is not touched."""
    chance = random.Random()
    chance.setstate(rng.getstate())
    return random.Random(f"{chance.getrandbits(64)} {name}")


def draw(rng: random.Random, profile: str) -> Hardships:
    def one_in(count: float, name: str) -> bool:
        return beside(rng, name).random() * count < 1

    expiry = profile == "expiry"
    nibbles = profile in NIBBLED and one_in(NIBBLED[profile], "nibbles")
    lossy = not (expiry or nibbles) and one_in(2 if profile == "healthy" else 6, "lossy")
    quotas = profile != "healthy" and not lossy and one_in(6, "quotas")
    squeezed = profile != "healthy" and not (lossy or nibbles) and one_in(3, "pins")
    planes: tuple[str, ...] = ()
    if nibbles:  # who enforces loans lets nobody read on
        planes = beside(rng, "planes").choice((("rdma",), ("cma",), ("shm",)))
    elif profile == "writes" and one_in(4, "planes"):  # that cannot shut a writer out
        planes = ("cma",)
    elif one_in(8, "planes"):
        planes = beside(rng, "which planes").choice((("cuda", "tcp"), ("cuda",), ("cma", "rdma", "tcp")))
    return Hardships(
        lossy=lossy,
        nibbles=0.9 if nibbles else 0.0,
        policy="recompute" if nibbles else "",
        turned=one_in(2, "turned"),
        early=0.6 if one_in(2, "early") else 0.0,
        hold_s=beside(rng, "hold_s").uniform(1.5, 2.2) if nibbles else 0.0,
        planes=planes,
        quotas=quotas,
        crowd=4 if not quotas and one_in(25, "crowd") else 4 if quotas and one_in(4, "crowd") else 0,
        shut_rank=beside(rng, "which rank").randint(0, 1) if one_in(3, "shut_rank") else -1,
        opens_s=beside(rng, "when opened").uniform(2, 9) if one_in(2, "opens") else 0.0,
        ghosts=profile in RESTARTING and one_in(1.5, "ghosts"),
        nobody=0.1 if profile in ("strangers", "all") and one_in(2, "nobody") else 0.0,
        epochs=beside(rng, "epochs").choice(("exact", "exact", "exact", "exact", "none", "stolen")),
        replaces=beside(rng, "replaces").randint(1, 3) if profile != "healthy" and one_in(6, "replaced") else 0,
        lists_early=one_in(3, "lists_early"),
        skips=0.1 if profile != "healthy" and one_in(4, "skips") else 0.0,
        recorded=not one_in(3, "recorded"),
        throws=0.2 if profile != "healthy" and one_in(6, "throws") else 0.0,
        stores_read_on=one_in(2, "stores_read_on"),
        pins=beside(rng, "how many pins").choice((0.1, 0.3, 0.5)) if squeezed else 1.0,
    )
