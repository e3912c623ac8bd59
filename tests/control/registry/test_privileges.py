"""Which keys the registry listens to, for each thing that can be said to it."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_server import _check_sender
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.protocol.legality import Act, Role, may

from .town import reg

ME = WorkerId("p0")
SAID: dict[m.ToRegistry, Act] = {
    m.Register(reg("p0", 1)): Act.REGISTER,
    m.Ping(Incarnation(1), m.SeenWorkers()): Act.REGISTER,
    m.Deregister(Incarnation(1)): Act.REGISTER,
    m.WorkerReport(Incarnation(1), b"{}"): Act.REPORT,
    m.DrainWorker(WorkerId("d0")): Act.DRAIN,
    m.Watch(m.SeenWorkers()): Act.WATCH,
    m.DiscardFor(WorkerId("p0"), Incarnation(1), ("t",)): Act.WATCH,
    m.ShowFor(WorkerId("p0"), Incarnation(1), ()): Act.WATCH,
}


def test_everything_that_can_be_said_is_here() -> None:
    assert {type(message) for message in SAID} == set(get_args(m.ToRegistry))


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("message", SAID, ids=lambda message: type(message).__name__)
def test_the_registry_hears_who_may_and_refuses_everybody_else(message: m.ToRegistry, role: Role) -> None:
    if isinstance(message, m.Register) and role in (Role.PREFILL, Role.DECODE):
        own = msgspec.structs.replace(message.registration, role=role.value)
        message = m.Register(own)
    if may(role, SAID.get(message, Act.REGISTER)):
        _check_sender(ME, role, message)
    else:
        with pytest.raises(m.RegistryFault, match=f"the key of p0 is for {role}"):
            _check_sender(ME, role, message)


@pytest.mark.parametrize(
    ("key", "listed"), [(Role.PREFILL, "decode"), (Role.PREFILL, "both"), (Role.DECODE, "prefill")]
)
def test_nobody_is_listed_as_what_its_key_is_not_for(key: Role, listed: str) -> None:
    told = msgspec.structs.replace(reg("p0", 1), role=listed)  # type: ignore[arg-type]
    with pytest.raises(m.RegistryFault, match=f"registers as {listed}, and its key is for {key}"):
        _check_sender(ME, key, m.Register(told))
    for role in get_args(m.Role):
        _check_sender(ME, Role.BOTH, m.Register(msgspec.structs.replace(told, role=role)))
