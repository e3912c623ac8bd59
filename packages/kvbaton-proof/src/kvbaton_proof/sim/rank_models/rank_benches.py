"""Which parts of the rank links a seed puts on the bench (`rank_bench`), beside its world.

Laws: what is set up, and what happens there, comes from streams of their own, so nothing else of that seed's world
moves. Each bench is set up by nearly half of all seeds, and costs a millisecond or two.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kvbaton_proof.sim.rank_models.rank_bench_host import bench_host
from kvbaton_proof.sim.rank_models.rank_bench_links import bench_link, bench_links
from kvbaton_proof.sim.rank_models.rank_bench_messages import bench_messages
from kvbaton_proof.sim.rank_models.rank_bench_plane import bench_plane
from kvbaton_proof.sim.rank_models.rank_bench_port import bench_port
from kvbaton_proof.sim.rank_models.rank_bench_store import bench_store_host
from kvbaton_proof.sim.rank_models.rank_bench_store_link import bench_store_link
from kvbaton_proof.sim.rank_models.rank_bench_stream import bench_stream
from kvbaton_proof.sim.rank_models.rank_bench_values import bench_shelf, bench_values

BENCHES_PER_SEED = 5

BENCHES: dict[str, Callable[[random.Random], None]] = {
    "host": bench_host,
    "link": bench_link,
    "links": bench_links,
    "messages": bench_messages,
    "plane": bench_plane,
    "port": bench_port,
    "shelf": bench_shelf,
    "store_host": bench_store_host,
    "store_link": bench_store_link,
    "stream": bench_stream,
    "values": bench_values,
}


def run_benches(seed: int) -> None:
    """Set up some of them, and object to the first that breaks a rule."""
    for name in random.Random(f"kvbaton-sim-{seed}-benches").sample(sorted(BENCHES), BENCHES_PER_SEED):
        BENCHES[name](random.Random(f"kvbaton-sim-{seed}-bench-{name}"))
