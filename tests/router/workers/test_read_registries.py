"""A router that reads registries elsewhere, with one of its own beside them: one list, whoever lists a worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvbaton.control import key_room, keyring
from kvbaton.control.registry import Registration, RegistryGroup, RegistryServer
from kvbaton.local_cluster.router_front import Sources, dialled, run_router
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.app import Router
from kvbaton.router.router_settings import OperatorPages, RouterSettings
from tests.e2e.cluster import eventually


def test_the_list_is_of_the_registry_here_and_of_those_elsewhere(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keyring.mint(keys, ["registry-a", "router-1", "p0:prefill", "d0:decode"])
    name = WorkerId("registry-a")
    elsewhere = RegistryServer(keyring.load(keys, name))
    elsewhere.start()

    def member(worker: str, role: str, place: tuple[WorkerId, str], http: str) -> RegistryGroup:
        told = Registration(WorkerId(worker), Incarnation(7), role, http, "tcp://127.0.0.1:5000")  # type: ignore[arg-type]
        ignore = lambda *_: None  # noqa: E731
        group = RegistryGroup(keyring.load(keys, worker), [place], told, on_directory=ignore, on_departed=ignore)
        group.start()
        return group

    async def story() -> None:
        sources = Sources(
            keyring=keyring.load(keys, "router-1"),
            registry_bind="tcp://127.0.0.1:0",
            registries=[(name, elsewhere.endpoint)],
        )
        settings = RouterSettings(operator_pages=OperatorPages.OFF)
        async with run_router(sources, settings, host="127.0.0.1", port=0) as front:
            groups = [
                member("p0", "prefill", (name, elsewhere.endpoint), "127.0.0.1:80"),
                member("d0", "decode", (WorkerId("router-1"), front.registry_endpoint), ""),
            ]

            async def both() -> bool:
                found = {worker.name: (worker.url, worker.state.value) for worker in front.directory.snapshot()}
                return found == {"p0": ("http://127.0.0.1:80", "serving"), "d0": ("", "no_http")}

            await eventually(both, 30.0)
            for group in groups:
                await asyncio.to_thread(group.close)

    try:
        asyncio.run(story())
    finally:
        elsewhere.close()


def test_a_ticket_key_that_changed_before_the_router_listened_is_the_one_that_signs(tmp_path: Path) -> None:
    keys, name = tmp_path / "keys", WorkerId("registry-a")
    keyring.mint(keys, [name, "router-1"])
    loaded = keyring.load(keys, "router-1")
    key_room.prepare_tickets(keys)
    key_room.promote_tickets(keys)
    elsewhere = RegistryServer(keyring.load(keys, name))
    elsewhere.start()

    async def story() -> None:
        sources = Sources(keyring=loaded, registries=[(name, elsewhere.endpoint)])
        settings = RouterSettings(operator_pages=OperatorPages.OFF)
        async with run_router(sources, settings, host="127.0.0.1", port=0) as front:

            async def fresh() -> bool:
                assert isinstance(front.app, Router) and front.app._minter is not None
                return front.app._minter.key == keyring.load(keys, "router-1").ticket_keys[0]

            await eventually(fresh, 10.0)

    try:
        asyncio.run(story())
    finally:
        elsewhere.close()


def test_a_listener_on_every_address_is_dialled_on_loopback() -> None:
    assert dialled("tcp://0.0.0.0:7700") == "tcp://127.0.0.1:7700"
    assert dialled("tcp://[::]:7700") == "tcp://[::1]:7700" and dialled("tcp://10.0.0.1:1") == "tcp://10.0.0.1:1"
