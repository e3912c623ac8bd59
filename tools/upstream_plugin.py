"""A pytest plugin for vLLM's own tests: it notes which connectors a test has vLLM build, and may put ours in place.

    python -m pytest -p upstream_plugin tests/v1/…       (tools/upstream_tests.py does it)

Laws: only the configuration is changed (`KVTransferConfig`: name, module and settings of the connector; role, policy
and all else stay what the test says), so that vLLM's own factory builds what it finds there. What an engine does
between building a scheduler and its first request is done here too, since these tests leave it out: workers register
their caches, and the scheduler's connector is told of them. Nothing of the tests is replaced, and no result is judged.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import NonCallableMock

import pytest

REPORT_ENV = "KVBATON_UPSTREAM_REPORT"
"""The file that gets a line of JSON for each test."""
SWAP_ENV = "KVBATON_UPSTREAM_SWAP"
"""Set where connectors are to be swapped; then also"""
KEYS_ENV = "KVBATON_UPSTREAM_KEYS"
"""where a key directory is to be,"""
HANDSHAKE_ENV = "KVBATON_UPSTREAM_HANDSHAKE"
"""whether schedulers hear of workers, as in an engine, and"""
ROLE_ENV = "KVBATON_UPSTREAM_ROLE"
"""a kv_role in place of the one that a test gives; empty: as it is."""

HANDS_OVER = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector")
"""vLLM's connectors that hand a prompt's KV from engine to engine."""
EXAMPLE, RECORDED = "ExampleConnector", "TestExampleConnector"
"""The one that scheduler tests take for any connector; the same, in the tests' own wrapper that counts calls."""
SWAPPED = (*HANDS_OVER, EXAMPLE, RECORDED)
COUNTING = "CountingBaton"
OURS, OUR_MODULE = "BatonConnector", "kvbaton.integrations.vllm"
NAMES = tuple(f"unit{number}" for number in range(16))
SAID_CHARS = 200
MOCKED = "a mock in the connector's place"
NO_LOAD = "its load had failed before"
"""The test asks for a load in another connector's words, and plays the worker that brings it."""

BESIDE = {"tblib": (), "tblib.pickling_support": ("install",), "ray": ("init", "shutdown")}
"""What the tests import before they say whether they need it, and vLLM's package does not bring: module, functions."""


def stand_in() -> None:
    """Let those be imported that are not here; whoever goes on to use one fails by itself."""
    missing = [name for name in BESIDE if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(BESIDE[name], lambda *_args, **_kwargs: None))
        parent, _, child = name.rpartition(".")
        if parent:
            vars(sys.modules[parent])[child] = sys.modules[name]


class Seen:
    """What is known of the test that runs now."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.notes: list[str] = []
        self.outcome = ""
        self.said = ""
        self.alive: list[Any] = []


_seen = Seen()
_labels: dict[str, str] = {}
"""What a test calls a connector, by the name that it has here."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.core.sched.scheduler import Scheduler

    stand_in()  # after vLLM, which looks for some of them itself
    watch(KVConnectorFactory, VllmConfig)
    bridge(Scheduler)
    if os.environ.get(SWAP_ENV):
        from vllm.config import KVTransferConfig

        from kvbaton.control import keyring

        keys = os.environ[KEYS_ENV]
        keyring.mint(keys, NAMES)
        swap(KVTransferConfig, keys)
        note_failed_loads()
        if os.environ.get(HANDSHAKE_ENV):
            bring_to_life(Scheduler)


def watch(factory: Any, config: Any) -> None:
    """Note each connector whose class vLLM looks up, by its name; but not that it does so for every configuration that
    is made, also for tests that then go on without a connector, or make one by its class."""
    plain, plain_config = factory.get_connector_class, config.__post_init__
    making = []

    def noted(transfer: Any) -> Any:
        if not making and transfer.kv_connector not in _seen.built:
            _seen.built.append(str(transfer.kv_connector))
        return plain(transfer)

    def quiet(self: Any) -> None:
        making.append(self)
        try:
            plain_config(self)
        finally:
            making.pop()

    factory.get_connector_class = staticmethod(noted)
    config.__post_init__ = quiet


NEWER = ("get_loaded_kv_cache_group_ids", "get_external_cache_hit_sources")
"""Hooks of vLLM 0.32 to which a mock of an older test has no answer that vLLM can use."""


def bridge(scheduler: Any) -> None:
    """For a checkout that is older than the vLLM beside it: the name that `kv_holding_waiting` had before 0.32; and
    where a test puts a mock in the connector's place, the hooks that it does not know stay the connector's."""
    if not hasattr(scheduler, "skipped_waiting"):
        scheduler.skipped_waiting = property(lambda self: self.kv_holding_waiting)

    def put(self: Any, connector: Any) -> None:
        built = self.__dict__.get("connector")
        if isinstance(connector, NonCallableMock) and built is not None:
            _seen.notes.append(MOCKED)
            for hook in NEWER:
                setattr(connector, hook, getattr(built, hook))
        self.__dict__["connector"] = connector

    scheduler.connector = property(lambda self: self.__dict__["connector"], put)


# --- ours in place of what a test names


def swap(config: Any, keys: str) -> None:
    """From here on a configuration that names one of `SWAPPED` names ours. Children of a MultiConnector are
    configurations of their own."""
    plain, numbers = config.__post_init__, itertools.count()

    def swapped(self: Any) -> None:
        plain(self)
        if self.kv_connector in SWAPPED:
            recorded = self.kv_connector == RECORDED
            self.kv_connector = COUNTING if recorded else OURS
            self.kv_connector_module_path = __name__ if recorded else OUR_MODULE
            name = NAMES[next(numbers) % len(NAMES)]
            _labels[name] = str(self.kv_connector_extra_config.get("name", ""))
            self.kv_connector_extra_config = {"name": name, "keys": keys, "model_id": "no weights"}
            self.kv_role = os.environ.get(ROLE_ENV) or self.kv_role

    config.__post_init__ = swapped


def note_failed_loads() -> None:
    """Note it where a request asks for KV and has no ticket of ours: such a load fails before it begins."""
    from kvbaton.engines.side.decode import DecodeSide
    from kvbaton.engines.vllm.connector_parts import BeforeRanks

    def noting(plain: Any, failed: Any) -> Any:
        @functools.wraps(plain)
        def noted(*args: Any) -> Any:
            answer = plain(*args)
            if failed(answer) and NO_LOAD not in _seen.notes:
                _seen.notes.append(NO_LOAD)
            return answer

        return noted

    DecodeSide.refused = noting(DecodeSide.refused, lambda _: True)  # type: ignore[method-assign]
    BeforeRanks.match = noting(BeforeRanks.match, lambda answer: bool(answer[0]))  # type: ignore[method-assign]


def __getattr__(name: str) -> Any:
    if name == COUNTING:
        return counting_baton()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def counting_baton() -> type[Any]:
    """Ours, with what tests read of their own wrapper: how often each hook was called, and a file with their names."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvbaton.integrations.vllm import BatonConnector

    def counting(hook: str) -> Any:
        plain = getattr(BatonConnector, hook)

        @functools.wraps(plain)
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.__dict__.setdefault("call_record", Counter())[hook] += 1
            label = _labels[self._vllm_config.kv_transfer_config.kv_connector_extra_config["name"]]
            with (Path(tempfile.gettempdir()) / f"connector_{label}-{self.role.name}_events.log").open("a") as events:
                events.write(f"{hook}\n")
            return plain(self, *args, **kwargs)

        return counted

    hooks = [name for name, value in vars(KVConnectorBase_V1).items() if isinstance(value, types.FunctionType)]
    counted = {name: counting(name) for name in hooks if not name.startswith("_")}
    return type(COUNTING, (BatonConnector,), counted)


# --- what an engine does before its first request


def bring_to_life(scheduler: Any) -> None:
    plain = scheduler.__init__

    @functools.wraps(plain)
    def alive(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        connector = getattr(self, "connector", None)
        for each in getattr(connector, "_connectors", [connector]):
            if any(kind.__name__ == OURS for kind in type(each).__mro__):
                try:
                    shake_hands(each)
                except Exception as error:  # noqa: BLE001 - a cache that ours cannot hand over: the test goes on without
                    _seen.notes.append(f"no handshake: {type(error).__name__}: {error}"[:SAID_CHARS])

    scheduler.__init__ = alive


def shake_hands(connector: Any) -> None:
    """One worker with a cache of the scheduler's groups, on this host; the scheduler's side is told of it."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    from kvbaton_proof.conformance.configs import kv_cache_planning

    config, cache = copy.deepcopy(connector._vllm_config), connector._kv_cache_config
    config.cache_config.num_gpu_blocks_override = cache.num_blocks
    pages = {group.kv_cache_spec.page_size_bytes for group in cache.kv_cache_groups}
    layout = config.cache_config.kv_cache_layout = "LBHNC" if len(pages) == 1 else "BLHNC"  # as engines on CPUs have it
    planned = kv_cache_planning().get_kv_cache_config_from_groups(config, copy.deepcopy(cache.kv_cache_groups), 1 << 40)
    worker = type(connector)(config, KVConnectorRole.WORKER, planned)
    _seen.alive += [connector, worker]
    worker.register_kv_caches(allocate_kv_cache(planned, torch.device("cpu"), KVCacheLayout[layout]))
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})


# --- the report


def pytest_runtest_logstart(nodeid: str) -> None:
    global _seen  # noqa: PLW0603 - pytest's hooks are functions of a module
    _seen = Seen()


def pytest_runtest_logreport(report: Any) -> None:
    """A test is what its worst part was; a failure is told by the line that pytest shows for it."""
    if report.failed or (_seen.outcome != "failed" and (report.when == "call" or report.skipped)):
        _seen.outcome = report.outcome
    if report.failed and not _seen.said:
        crash = getattr(report.longrepr, "reprcrash", None)
        _seen.said = " ".join(str(crash.message if crash else report.longrepr).split())[:SAID_CHARS]


def pytest_runtest_teardown() -> None:
    for each in _seen.alive:
        each.shutdown()
    _seen.alive.clear()


def pytest_runtest_logfinish(nodeid: str) -> None:
    _tell({"test": nodeid, "outcome": _seen.outcome, "said": _seen.said, "built": _seen.built, "notes": _seen.notes})


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported has no tests to tell of: it is told itself."""
    if report.failed:
        said = " ".join(str(report.longrepr).split())[-SAID_CHARS:]
        _tell({"test": report.nodeid, "outcome": "not collected", "said": said, "built": [], "notes": []})


def _tell(line: dict[str, Any]) -> None:
    with Path(os.environ[REPORT_ENV]).open("a") as report:
        report.write(json.dumps(line) + "\n")
