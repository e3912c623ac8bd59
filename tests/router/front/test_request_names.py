"""Every answer bears the id of its request, errors in their body too, by which `kvbaton inspect` finds it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from kvbaton.router.front_secrets import FrontSecrets
from tests.router.fake_workers import QUICK, Cluster, Script, cluster, die, lease, refuse

KEY = "sk-one-0123456789"
GIVEN = "order-66/a"
BODY = {"prompt": "abc", "max_tokens": 4}
TALK = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
FAR = {"X-Forwarded-For": "192.0.2.1"}
NO_RETRY = msgspec.structs.replace(
    QUICK, prefill_retries=0, decode_retries=0, body_bytes_max=2000, breaker_failures=100
)


@contextlib.asynccontextmanager
async def guarded(prefill: Script = lease, processes: int = 1) -> AsyncIterator[Cluster]:
    access = {"secrets": FrontSecrets(keys=(KEY,))}
    async with cluster([prefill], settings=NO_RETRY, access=access, processes=processes) as c:
        yield c


async def named(c: Cluster, status: int, path: str, body: Any, method: str = "POST", key: str = KEY) -> list[str]:
    """The ids of two answers, of which the first was chosen by the client; each is where clients look for it."""
    found = []
    for given in (GIVEN, "bad id"):  # a blank is not printable, so it is replaced
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": given, **FAR}
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with c.session.request(method, c.url + path, data=data, headers=headers) as got:
            said = await got.read()
            assert got.status == status, (method, path, said)
            assert len(got.headers.getall("x-request-id")) == 1
            found.append(got.headers["x-request-id"])
            if status >= 400 and method != "HEAD":
                told = msgspec.json.decode(said)
                is_anthropic = path.startswith("/v1/messages")
                assert (told.get("type") == "error") == is_anthropic, told
                assert (told if is_anthropic else told["error"])["request_id"] == found[-1]
                assert told["error"]["message"] and "code" in told["error"]
    assert found[0] == GIVEN and found[1] not in ("", GIVEN, "bad id")
    return found


async def test_every_answer_of_the_router_is_named() -> None:
    async with guarded() as c:
        for path, body in (("/v1/completions", BODY), ("/v1/messages", TALK)):
            await named(c, 401, path, body, key="sk-wrong-0123456789")
            await named(c, 405, path, body, method="DELETE")
            await named(c, 405, path, body, method="HEAD")
            await named(c, 413, path, b"x" * 2001)
            await named(c, 400, path, b"{")
        for path in ("/v1/nothing", "/v1/messages/nothing", "/none"):
            await named(c, 404, path, BODY)
        for path in ("/v1/models", "/health", "/metrics", "/openapi.json", "/load"):
            await named(c, 200, path, b"", method="GET")
        await named(c, 200, "/v1/completions", {**BODY, "stream": True})
        await named(c, 200, "/v1/completions", {**BODY, "n": 2})
        c.directory.lose("p0")
        for path, body in (("/v1/completions", BODY), ("/v1/messages", TALK)):
            await named(c, 503, path, body)
    for script, status in ((die, 502), (refuse(429), 429), (refuse(404), 404), (refuse(422), 422)):
        async with guarded(script) as c:
            for path, body in (("/v1/completions", BODY), ("/v1/messages", TALK)):
                for wanted in (body, {**body, "stream": True}):
                    await named(c, status, path, wanted)


async def test_the_id_of_an_answer_is_that_of_the_records_and_of_the_workers() -> None:
    async with guarded(die) as c:
        for name in await named(c, 502, "/v1/completions", BODY):
            assert [each.request for each in c.app.gathering.journeys(find=name)] == [name]
    async with guarded() as c:
        ids = await named(c, 200, "/v1/completions", BODY)
        assert [headers["x-request-id"] for headers in c.p[0].headers] == ids
        assert [headers["x-request-id"] for headers in c.d[0].headers] == ids


async def test_a_router_of_several_processes_names_what_its_first_process_answers() -> None:
    async with guarded(processes=2) as c:
        await named(c, 200, "/metrics", b"", method="GET")
        await named(c, 403, "/dashboard", b"", method="GET")
