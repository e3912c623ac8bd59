"""What the entry point does to SGLang, on a fake of the few modules that it touches (names and shapes of 0.5.23).

The hooks were also put into the modules themselves of SGLang 0.5.17 and 0.5.23 (docs/sglang.md says how far).
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvbaton.engines.sglang import plugin
from kvbaton.engines.sglang.sender_receiver import FAILED, BatonReceiver, BatonSender
from kvbaton.integrations.sglang import register
from tests.engines.sglang.fake_sglang import PAGE_TOKENS, prompt_pair
from tests.engines.sglang.sglang_rig import SglangRig


class Pages(list[int]):
    """What the plug-in needs of a tensor."""

    def tolist(self) -> list[int]:
        return list(self)


class TokenToKVPoolAllocator:
    """As SGLang's: freed pages may be handed out at once; `clear` frees all."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.free_pages = Pages(range(1, 9))

    def free(self, free_index: Pages) -> None:
        self.free_pages = Pages([*self.free_pages, *free_index])


class PagedTokenToKVPoolAllocator(TokenToKVPoolAllocator):
    def free(self, free_index: Pages) -> None:
        self._release_page_ids(Pages(sorted({each // PAGE_TOKENS for each in free_index})))

    def _release_page_ids(self, *page_ids: Pages) -> None:
        self.free_pages = Pages([*self.free_pages, *(page for ids in page_ids for page in ids)])


class FakeSglang:
    """Its modules, as far as the plug-in looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str = "0.5.23") -> None:
        self.choices: list[str] = []
        self.hooks: dict[str, tuple[Callable[..., Any], str]] = {}

        class TransferBackend(enum.Enum):
            NIXL = "nixl"
            FAKE = "fake"

        class KVClassType(enum.Enum):
            KVARGS = "kvargs"
            MANAGER = "manager"
            SENDER = "sender"
            RECEIVER = "receiver"
            BOOTSTRAP_SERVER = "bootstrap_server"

        bases = {name: type(name, (), {}) for name in ("BaseKVManager", "BaseKVReceiver", "BaseKVBootstrapServer")}
        sender = type("BaseKVSender", (), {"of_a_newer_sglang": lambda self: "its default"})
        put = lambda target, hook, kind: self.hooks.update({target: (hook, kind)})  # noqa: E731
        kinds = SimpleNamespace(REPLACE="replace", AROUND="around", AFTER="after")
        metric = type("KVTransferMetric", (), {})
        told: dict[str, dict[str, Any]] = {
            "sglang": {"__version__": version},
            "sglang.srt": {},
            "sglang.srt.server_args": {"add_disagg_transfer_backend_choices": self.choices.extend},
            "sglang.srt.plugins": {},
            "sglang.srt.plugins.hook_registry": {"HookRegistry": SimpleNamespace(register=put), "HookType": kinds},
            "sglang.srt.disaggregation": {},
            "sglang.srt.disaggregation.utils": {"TransferBackend": TransferBackend, "KVClassType": KVClassType},
            "sglang.srt.disaggregation.base": {},
            "sglang.srt.disaggregation.base.conn": {
                **bases, "BaseKVSender": sender, "KVArgs": type("KVArgs", (), {}), "KVTransferMetric": metric,
            },
        }  # fmt: skip
        for name, content in told.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        self.utils = sys.modules["sglang.srt.disaggregation.utils"]
        self.base = sys.modules["sglang.srt.disaggregation.base.conn"]

    def hook(self, ending: str) -> Callable[..., Any]:
        return next(hook for target, (hook, _) in self.hooks.items() if target.endswith(ending))


def _of_sglang(allocator: type, module: str) -> type:
    """With methods of its own, which the plug-in may change, where SGLang has it."""
    content = {name: value for base in reversed(allocator.__mro__[:-1]) for name, value in vars(base).items()}
    for name in ("__dict__", "__weakref__"):
        content.pop(name, None)
    return type(allocator.__name__, (), {**content, "__module__": f"sglang.srt.mem_cache.allocator.{module}"})


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> FakeSglang:
    fake = FakeSglang(monkeypatch)
    register()
    return fake


def test_the_backend_is_one_more_choice(sglang: FakeSglang) -> None:
    backends, kind = sglang.hooks["sglang.srt.disaggregation.utils.TransferBackend"]
    assert (sglang.choices, kind) == (["kvbaton"], "replace")
    assert [member.value for member in backends] == ["nixl", "fake", "kvbaton"]  # type: ignore[attr-defined]
    assert backends("kvbaton").name == "KVBATON"


def test_its_classes_are_those_of_the_base_that_is_installed(sglang: FakeSglang) -> None:
    backends = sglang.hook("TransferBackend")
    get, kinds = sglang.hook("get_kv_class"), sglang.utils.KVClassType
    genuine = lambda backend, kind: (backend.value, kind.value)  # noqa: E731
    assert get(genuine, backends("nixl"), kinds.SENDER) == ("nixl", "sender")
    made = get(genuine, backends("kvbaton"), kinds.SENDER)
    assert issubclass(made, BatonSender) and issubclass(made, sglang.base.BaseKVSender)
    assert made.of_a_newer_sglang(None) == "its default"
    assert issubclass(get(genuine, backends("kvbaton"), kinds.RECEIVER), BatonReceiver)
    assert get(genuine, backends("kvbaton"), kinds.KVARGS) is sglang.base.KVArgs
    manager = get(genuine, backends("kvbaton"), kinds.MANAGER)
    assert isinstance(manager.no_metric(), sglang.base.KVTransferMetric)


@pytest.mark.parametrize("version", ["0.5.14", "0.4.9.post1"])
def test_an_older_sglang_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSglang(monkeypatch, version)
    with pytest.raises(RuntimeError, match=f"SGLang {version} is too old"):
        register()
    assert not fake.choices and not fake.hooks


def test_requests_are_shown_to_both_ends(sglang: FakeSglang) -> None:
    rig = SglangRig()
    p, d = prompt_pair(9)
    sender = BatonSender(rig.p.manager, "", p.bootstrap_room)
    receiver = BatonReceiver(rig.d.manager, "p", d.bootstrap_room)
    watched: list[object] = []
    rig.p.manager.watch = lambda allocator, exact: watched.append((allocator, exact))
    allocator = SimpleNamespace()
    queue = SimpleNamespace(kv_manager=rig.p.manager, scheduler=SimpleNamespace(token_to_kv_pool_allocator=allocator))
    p.disagg_kv_sender = sender  # type: ignore[attr-defined]
    sglang.hook("create_sender")(True, queue, p, 8)
    sglang.hook("_create_receiver_and_enqueue")(SimpleNamespace(kv_receiver=receiver, req=d), None, d)
    assert sender.poll() != FAILED and receiver.poll() != FAILED and watched == [(allocator, False)]


def test_senders_of_others_are_left_alone(sglang: FakeSglang) -> None:
    """Warm-up requests have SGLang's own fake ones; one that was not made has none."""
    sglang.hook("create_sender")(True, None, SimpleNamespace(disagg_kv_sender=object()), 8)
    sglang.hook("create_sender")(False, None, SimpleNamespace(), 8)
    sglang.hook("_create_receiver_and_enqueue")(SimpleNamespace(kv_receiver=object()))


@pytest.mark.parametrize(
    ("plain", "module"), [(TokenToKVPoolAllocator, "token"), (PagedTokenToKVPoolAllocator, "paged")]
)
def test_each_way_to_free_a_page_is_told(plain: type, module: str) -> None:
    told: list[list[int]] = []
    found = _of_sglang(plain, module)
    assert plugin.is_told(found) and plugin.is_told(found)
    allocator = found()
    allocator.free(Pages([1]))  # nobody watches
    allocator._kvbaton_freed = told.append
    allocator.free(Pages(range(4, 12)))
    allocator.clear()
    assert told == [[1, 2] if module == "paged" else list(range(4, 12)), list(range(1, 9))]
    assert not plugin.is_told(type("Derived", (found,), {})), "it may free in ways of its own"
