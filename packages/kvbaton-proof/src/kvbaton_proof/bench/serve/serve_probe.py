"""Checks that a server is up before a load goes to it, and which model it serves.

Law: an unreachable server costs one line that names it and the next step; one without a list of models counts as up.
"""

from __future__ import annotations

import os

import aiohttp
import msgspec

from kvbaton.processes.operator_errors import CommandError

PROBE_S = 10.0


class Served(msgspec.Struct, frozen=True):
    """What a server says of its first model; None where it says nothing."""

    model: str | None = None
    tokens_max: int | None = None


class _Card(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Card, ...] = ()


async def ask_for_models(name: str, url: str) -> Served:
    """`CommandError` if nobody is there, or nobody who could serve."""
    timeout = aiohttp.ClientTimeout(total=PROBE_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/v1/models") as response:
            data = await response.read()
    except TimeoutError:
        raise CommandError(f"target {name}: {url} gave no answer within {PROBE_S:.0f} s; is it up?") from None
    except (aiohttp.ClientError, OSError) as error:
        number = getattr(error, "errno", None)
        why = os.strerror(number) if number and number > 0 else type(error).__name__
        raise CommandError(f"target {name}: {url} cannot be reached ({why}); start one, e.g.: kvbaton up") from None
    if response.status >= 500:
        raise CommandError(f"target {name}: {url} answers {response.status}; see: curl {url}/health")
    try:
        first = msgspec.json.decode(data, type=_Models).data[0]
    except (msgspec.DecodeError, IndexError):
        return Served()
    return Served(first.id, first.max_model_len)
