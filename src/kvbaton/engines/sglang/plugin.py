"""kvbaton as a plug-in of SGLang (entry point `sglang.srt.plugins`): `--disaggregation-transfer-backend kvbaton`.

SGLang loads it in each of its processes before it reads its arguments. Laws: nothing of SGLang is changed on disk, and
without `kvbaton` on the command line nothing that is put in here does anything. A SGLang that lacks one of the places
is refused by its name.

    place                                     what happens there
    utils.TransferBackend                     one more member
    utils.get_kv_class                        the classes of that member
    PrefillBootstrapQueue.create_sender       the sender is shown its request, the manager its allocator
    DecodePreallocQueue._create_receiver_and_enqueue    the receiver is shown its request
    the allocator of P's pages                each way to give a page back says so, before it can be handed out again
"""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from kvbaton.engines.side.guard import note

BACKEND = "kvbaton"
_UTILS = "sglang.srt.disaggregation.utils"
_ALLOCATORS = {
    "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator": ("free", "clear"),
    "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator": ("_release_page_ids", "clear"),
}
"""Of each allocator that is known, what all its ways to free lead through."""
TELLS = "_kvbaton_tells"
OLDEST = (0, 5, 17)


def register() -> None:
    """The entry point."""
    arguments = importlib.import_module("sglang.srt.server_args")
    check_version(getattr(importlib.import_module("sglang"), "__version__", ""))
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    utils = importlib.import_module(_UTILS)
    arguments.add_disagg_transfer_backend_choices([BACKEND])
    base = importlib.import_module("sglang.srt.disaggregation.base.conn")
    put = hooks.HookRegistry.register
    kind = hooks.HookType
    backends = with_backend(utils.TransferBackend)
    put(f"{_UTILS}.TransferBackend", backends, kind.REPLACE)
    put(f"{_UTILS}.get_kv_class", functools.partial(kv_class, base, utils.KVClassType), kind.AROUND)
    put("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender", sender_made, kind.AFTER)
    enqueued = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
    put(enqueued, receiver_made, kind.AFTER)


def check_version(text: str) -> None:
    """RuntimeError names a SGLang that is older than those that were read."""
    parts = []
    for part in text.split(".")[:3]:
        digits = "".join(ch for ch in part if ch.isdigit())
        parts.append(int(digits or 0))
    if parts and tuple(parts) < OLDEST and tuple(parts) != (0, 0, 0):
        raise RuntimeError(f"kvbaton: SGLang {text} is too old: {'.'.join(map(str, OLDEST))} or newer (docs/sglang.md)")


def with_backend(backends: type[enum.Enum]) -> Any:
    """SGLang's own, and kvbaton; members compare by identity, so the new ones replace all of them."""
    members = {member.name: member.value for member in backends}
    return enum.Enum(backends.__name__, {**members, "KVBATON": BACKEND}, module=backends.__module__)


def kv_class(base: Any, kinds: Any, genuine: Callable[..., Any], backend: Any, kind: Any) -> Any:
    """`get_kv_class`, around."""
    if getattr(backend, "value", backend) != BACKEND:
        return genuine(backend, kind)
    return base.KVArgs if kind == kinds.KVARGS else classes(base)[kind.value]


@functools.cache
def classes(base: Any) -> dict[str, type]:
    """SGLang's four, each over its own base of the SGLang that is installed, whose defaults it then has."""
    from kvbaton.engines.sglang.bootstrap_stub import BootstrapStub
    from kvbaton.engines.sglang.manager import BatonManager
    from kvbaton.engines.sglang.sender_receiver import BatonReceiver, BatonSender

    pairs = {
        "manager": (BatonManager, base.BaseKVManager),
        "sender": (BatonSender, base.BaseKVSender),
        "receiver": (BatonReceiver, base.BaseKVReceiver),
        "bootstrap_server": (BootstrapStub, base.BaseKVBootstrapServer),
    }
    found = {name: type(ours.__name__, (ours, theirs), {}) for name, (ours, theirs) in pairs.items()}
    found["manager"].no_metric = staticmethod(base.KVTransferMetric)  # type: ignore[attr-defined]
    return found


def sender_made(made: Any, queue: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `create_sender`."""
    sender = getattr(req, "disagg_kv_sender", None)
    if made and hasattr(sender, "bind"):
        _shown(sender, req)
        manager = queue.kv_manager
        allocator = queue.scheduler.token_to_kv_pool_allocator
        if not hasattr(allocator, "_kvbaton_freed"):
            manager.watch(allocator, exact=is_told(type(allocator)))


def receiver_made(made: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `_create_receiver_and_enqueue`."""
    if hasattr(made.kv_receiver, "bind"):
        _shown(made.kv_receiver, made.req)


def _shown(poller: Any, req: Any) -> None:
    try:
        poller.bind(req)
    except Exception as error:  # noqa: BLE001 - promise 4; `poll` then says that it failed
        note("bind", error)


def is_told(allocator: type) -> bool:
    """Whether each way to give a page back is told from now on: of an allocator that is known, none derived from it."""
    ways = _ALLOCATORS.get(f"{allocator.__module__}.{allocator.__name__}", ())
    if ways and TELLS not in vars(allocator):
        tell_frees(allocator, ways)
    return bool(ways)


def _nobody(pages: Iterable[int]) -> None:
    """Of an allocator that is not watched."""


def tell_frees(allocator: type, ways: Iterable[str]) -> None:
    """From now on each of these methods says which pages it gives back, to whoever watches the allocator."""
    for name in ways:
        genuine = getattr(allocator, name)

        @functools.wraps(genuine)
        def told(self: Any, *pages: Any, _genuine: Callable[..., Any] = genuine) -> Any:
            freed: Callable[[Iterable[int]], None] = getattr(self, "_kvbaton_freed", _nobody)
            for some in pages if freed is not _nobody else ():
                freed(some.tolist())
            done = _genuine(self, *pages)
            if freed is not _nobody and not pages:  # `clear`: all of them are free now
                freed(self.free_pages.tolist())
            return done

        setattr(allocator, name, told)
    setattr(allocator, TELLS, True)
