"""What a vLLM worker needs to reach the shared store: an identity, and its rank's part of each block as a value.

Laws: a cache that cannot be stored, a key that is missing and a text that is no store are refused at start, by name. A
store that is not there is not: it costs misses. Each rank has an identity of its own towards a kvbaton store, since an
answer goes to whoever spoke last under that name. Caches of a device go through pinned memory (`device_shelf`).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence

import zmq

from kvbaton.control.addressing import ControlError
from kvbaton.control.joining.join_client import Enrolment, enrolled
from kvbaton.control.keyring import TICKET_KEY_BYTES, Keyring, data_parallel_name, engine_and_rank, load
from kvbaton.engines.vllm.config.connector_settings import FIELD, ConnectorSettings
from kvbaton.engines.vllm.memory.vllm_layout import RankFacts, engine_layout
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Role
from kvbaton.ranks.device_store import DeviceRankStore, StagingShape
from kvbaton.ranks.engine_store import RankStoreInterface
from kvbaton.ranks.rank_store import LocalRankStore, NotStorable, rank_values
from kvbaton.ranks.rank_store_link import MakeRankStore
from kvbaton.ranks.store_trust import Served, opener, store_place
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.cuda.cuda_driver import CudaGpu, Gpu

_NOBODY = "0" * 32


def enrolment_of(settings: ConnectorSettings, role: Role) -> Enrolment:
    """Who the engine is. One that is alone gets keys that nobody else knows."""
    if settings.is_alone:
        return Enrolment(_alone(settings))
    with _naming_ranks(settings):
        return enrolled(settings.credentials(role))


def keyring_of(settings: ConnectorSettings, rank: int = 0, role: Role = Role.BOTH) -> Keyring:
    """Who a rank is, towards a store. A rank of an engine that joins is a member of its own, and so a use of the
    token: its process has no part in the engine's key."""
    if settings.is_alone:
        return _alone(settings)
    if not settings.joins:
        with _naming_ranks(settings):
            return load(settings.keys, rank_identity(settings.name, rank))
    enrolment = enrolled(settings.credentials(role, f"r{rank}"))
    if enrolment.member is not None:
        enrolment.member.start()  # for as long as this process lives
    return enrolment.keyring


def _alone(settings: ConnectorSettings) -> Keyring:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    name = WorkerId(settings.name)
    return Keyring(name, public, secret, {name: public}, (secrets.token_bytes(TICKET_KEY_BYTES),))


@contextlib.contextmanager
def _naming_ranks(settings: ConnectorSettings) -> Iterator[None]:
    """A missing key of a data-parallel rank is answered with the command that mints those of all ranks."""
    try:
        yield
    except ControlError as error:
        of = engine_and_rank(settings.name)
        if of is None or "is missing" not in str(error):
            raise
        ranks = " ".join(f"{data_parallel_name(of[0], rank)}:ROLE" for rank in range(max(2, of[1] + 1)))
        raise ControlError(
            f"{error}. Each data-parallel rank of {of[0]} is a member with a key of its own; mint them with: "
            f"kvbaton keys add {settings.keys} {ranks} … (ROLE: prefill, decode or both)"
        ) from None


def rank_identity(name: str, rank: int) -> str:
    """In the key directory: the engine's own name for its first rank, and one each for the others."""
    return f"{name}.{rank}" if rank else name


def rank_shelf(
    settings: ConnectorSettings,
    facts: RankFacts,
    rank: int,
    ranks: int,
    memories: Sequence[memoryview] | Sequence[DeviceMemory],
    gpu: Callable[[int], Gpu] = CudaGpu,
    role: Role = Role.BOTH,
) -> MakeRankStore | None:
    """What makes this rank's shelf, once its engine is known; None without a store. Raises what is told at start.

    `gpu`: of the device that the memory is on. `role`: of the engine.
    """
    if not settings.store:
        return None
    place = store_place(settings.store)
    layout = engine_layout([facts])
    views = [each for each in memories if isinstance(each, memoryview)]
    on_device = [each for each in memories if isinstance(each, DeviceMemory)]
    try:
        values = rank_values(layout, 0, _NOBODY)
        if on_device:
            StagingShape(values, on_device)
    except NotStorable as error:
        raise ValueError(f"{FIELD}.store: {error}") from None
    if isinstance(place, Served):
        keyring = keyring_of(settings, rank, role)
    else:  # which asks for no key of ours
        keyring = _alone(settings) if settings.joins else keyring_of(settings)
    make, _ = opener(place, keyring, ranks=ranks, server=settings.store_name)

    def made(compat: str) -> RankStoreInterface:
        values = rank_values(layout, 0, compat)
        if on_device:
            return DeviceRankStore(make(), values, on_device, gpu(on_device[0].device))
        return LocalRankStore(make(), values, views, owned=True)

    return made
