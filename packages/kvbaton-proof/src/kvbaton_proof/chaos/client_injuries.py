"""Faults caused by clients: oversized requests, disconnects, slow reading, lies, and late or repeated requests.

Law: each ends in bounded time, and every answer that it gets is judged; what it may be told is an error or the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from kvbaton.api import sse
from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import FIELD, LEASE_FOR_PULL, Mode
from kvbaton_proof.chaos.chaos_plan import Step
from kvbaton_proof.chaos.chaos_scene import LATE_S, Scene
from kvbaton_proof.chaos.judged_request import Ended, Found, Prompt, Verdict, Way, ask, body_of, take_chunk
from kvbaton_proof.chaos.members import LEASE_S, ROUTER

FLOOD = 160
EXHAUSTING = 20
ABORTS = 24
SLOW = 4
LATE_ONES = 4
RECEIVE_BYTES = 2048
POISON_S = 15.0
TICKET_S = 20.0
"""How long a P that gives a ticket is looked for: it may be starting again."""

DEEP = 20_000
HUGE_CHARS = 5 << 20
"""More than any door takes."""
LONG_CHARS = 20_000
"""More than the model's context."""

_MODES = tuple(Mode)


async def flood(scene: Scene, _: Step) -> str:
    ways = [scene.way(ROUTER, _MODES[n % 3], stream=n % 2 == 0) for n in range(FLOOD)]
    return await scene.ask_all([(scene.load.prompt(scene.rng)[0], way) for way in ways])


async def exhausted(scene: Scene, _: Step) -> str:
    """Each of these needs a sixth of an engine's blocks, or more."""
    long = scene.load.longest(EXHAUSTING // 2)
    ways = [scene.way(ROUTER, _MODES[n % 3], stream=n % 2 == 0) for n in range(EXHAUSTING)]
    return await scene.ask_all([(long[n % len(long)], way) for n, way in enumerate(ways)])


async def abort(scene: Scene, _: Step) -> str:
    """Nobody is left to judge these; what they leave behind is found at rest."""

    async def leave(wait_s: float) -> None:
        prompt = scene.load.prompt(scene.rng)[0]
        way = scene.way(ROUTER, scene.rng.choice(_MODES), stream=scene.rng.random() < 0.5)
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(wait_s), aiohttp.ClientSession() as session:
                headers = {"x-kvbaton-mode": str(way.mode)}
                url = way.url + BodyKind.COMPLETION.value
                async with session.post(url, json=body_of(prompt, way), headers=headers) as response:
                    await response.read()

    waits = [scene.rng.uniform(0.0, 0.4) for _ in range(ABORTS)]
    await asyncio.gather(*map(leave, waits))
    return f"{ABORTS} clients hung up within 0.4 s"


# --- late and twice


async def _leased(scene: Scene, prompt: Prompt, source: str, salt: str) -> Any:
    """Have a P compute a prompt and keep it; the parameters for D."""
    short = Prompt(prompt.text, prompt.right[:1], 1)
    way = scene.way(source, None, salt=salt, more={FIELD: LEASE_FOR_PULL})
    return (await ask(scene.session, scene.board, short, way)).params


async def _ticket(scene: Scene, prompt: Prompt, sources: Sequence[str], salt: str) -> Any:
    """The ticket of the first P that gives one; others may be dead for the moment. None: nobody did, in `TICKET_S`."""
    until = scene.now() + TICKET_S
    while scene.now() < until:
        for source in sources:
            params = await _leased(scene, prompt, source, salt)
            if params:
                return params
        await asyncio.sleep(1.0)
    return None


def _some(scene: Scene, role: str) -> list[str]:
    """Those that can be asked at their own door: one that was given other weights answers otherwise, as it should."""
    named = [name for name, spec in scene.fleet.specs.items() if spec.role == role]
    return [name for name in named if "seed" not in scene.fleet.lives[name].changes]


async def late_decode(scene: Scene, _: Step) -> str:
    async def one(number: int) -> Found | None:
        prompt, salt = scene.load.prompt(scene.rng)[0], f"late{next(scene.numbers)}"
        prefills, decodes = _some(scene, "prefill"), _some(scene, "decode")
        params = await _ticket(scene, prompt, prefills[number % len(prefills) :] + prefills, salt)
        if not params:
            return None
        await asyncio.sleep(LEASE_S + 1.0)  # it has run out, and the load has used its blocks for others
        way = scene.way(decodes[number % len(decodes)], None, salt=salt, more={FIELD: params})
        return await ask(scene.session, scene.board, prompt, way)

    found = await asyncio.gather(*map(one, range(LATE_ONES)))
    if not any(found):
        raise RuntimeError("no P gave a ticket, so nobody came late")
    return f"{sum(each is not None and each.verdict is Verdict.RIGHT for each in found)} of {LATE_ONES} right"


async def replay(scene: Scene, _: Step) -> str:
    prompt, salt = scene.load.prompt(scene.rng)[0], f"replay{next(scene.numbers)}"
    other = scene.load.prompt(scene.rng)[0]
    prefills, decodes = _some(scene, "prefill"), _some(scene, "decode")
    params = await _ticket(scene, prompt, prefills, salt)
    if not params:
        raise RuntimeError("no P gave a ticket, so none was presented again")
    uses = (
        (decodes[0], prompt, salt),
        (decodes[0], prompt, salt),
        (decodes[-1], prompt, salt),
        (decodes[0], other, ""),
    )
    found = []
    for name, asked, its_salt in uses:
        way = scene.way(name, None, salt=its_salt, more={FIELD: params})
        found.append((await ask(scene.session, scene.board, asked, way)).verdict.value)
    return f"first, again, another D, another prompt: {', '.join(found)}"


# --- slowly


async def slow_reader(scene: Scene, step: Step) -> str:
    found = await asyncio.gather(*(_read_slowly(scene, step.seconds, n) for n in range(SLOW)))
    return f"{SLOW} clients read a byte at a time: {', '.join(found)}"


async def _read_slowly(scene: Scene, seconds: float, number: int) -> str:
    """A byte at a time for so long, then the rest."""
    prompt = scene.answers[number % len(scene.answers)]
    way = scene.way(ROUTER, _MODES[number % 3], stream=True)
    began_at, read = scene.now(), bytearray()
    verdict, kind = Verdict.LATE, ""
    try:
        async with asyncio.timeout(LATE_S):
            await _trickle(scene, prompt, way, seconds, read)
        verdict, kind = _judge_stream(prompt, bytes(read))
    except TimeoutError:  # before OSError, whose kind it is: what is not over in its time is late
        pass
    except OSError as error:
        verdict, kind = _judge_stream(prompt, bytes(read))
        kind = kind or f"closed:{type(error).__name__}"
    scene.board.note(Ended(began_at, scene.now(), verdict, kind), f"a slow reader: {bytes(read)[-200:]!r}")
    return verdict.value


async def _trickle(scene: Scene, prompt: Prompt, way: Way, seconds: float, read: bytearray) -> None:
    spec = scene.fleet.specs[ROUTER]
    loop = asyncio.get_running_loop()
    body = msgspec.json.encode(body_of(prompt, way))
    head = f"POST {BodyKind.COMPLETION.value} HTTP/1.1\r\nhost: {spec.host}\r\ncontent-type: application/json\r\n"
    head += f"x-kvbaton-mode: {way.mode}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        sock.setblocking(False)
        await loop.sock_connect(sock, (spec.host, spec.ports.front))
        await loop.sock_sendall(sock, head.encode() + body)
        until = scene.now() + seconds
        while data := await loop.sock_recv(sock, 1 if scene.now() < until else 1 << 16):
            read += data
            if scene.now() < until:
                await asyncio.sleep(0.005)


def _judge_stream(prompt: Prompt, data: bytes) -> tuple[Verdict, str]:
    status = data[9:12].decode(errors="replace")
    if status != "200":
        return Verdict.ERROR, f"{status or 'closed'}:slow"
    parts: list[str] = []
    for payload in sse.payloads(data):
        if payload == b"[DONE]":
            return (Verdict.RIGHT if "".join(parts) == prompt.right else Verdict.WRONG), ""
        kind = take_chunk(payload, parts) if payload.endswith(b"}") else "event:cut off"
        if kind:
            break
    else:
        kind = "closed:no [DONE]"
    return (Verdict.ERROR if prompt.right.startswith("".join(parts)) else Verdict.WRONG), kind


# --- lies


def _body(prompt: Prompt, **more: Any) -> bytes:
    fields = {"prompt": prompt.text, "max_tokens": prompt.max_tokens, "temperature": 0, **more}
    return msgspec.json.encode(fields)


def _target(prompt: Prompt, **params: Any) -> bytes:
    return _body(prompt, **{FIELD: {"do_remote_prefill": True, **params}})


POISONS: Mapping[str, Callable[[Prompt], bytes]] = {
    "no JSON": lambda _: b"\x00\xff{",
    "nothing": lambda _: b"",
    "a list": lambda _: b"[]",
    "deep": lambda _: b"[" * DEEP,
    "huge": lambda _: b'{"prompt":"' + b"a" * HUGE_CHARS + b'"}',
    "too long": lambda _: msgspec.json.encode({"prompt": "a" * LONG_CHARS, "max_tokens": 1}),
    "a number as prompt": lambda _: b'{"prompt":7}',
    "tokens out of range": lambda _: b'{"prompt":[1,2,99999999999,-5],"max_tokens":1}',
    "minus one token": lambda prompt: _body(prompt, max_tokens=-1),
    "2**62 tokens": lambda prompt: _body(prompt, max_tokens=2**62),
    "2**62 choices": lambda prompt: _body(prompt, n=2**62),
    "warm": lambda prompt: _body(prompt, temperature="warm"),
    "params as text": lambda prompt: _body(prompt, **{FIELD: "x"}),
    "only the flag": _target,
    "both flags": lambda prompt: _target(prompt, do_remote_decode=True, ticket="x"),
    "a forged ticket": lambda prompt: _target(prompt, ticket="kvb1." + "A" * 400),
    "a huge ticket": lambda prompt: _target(prompt, ticket="A" * 1_000_000),
    "a ticket of lists": lambda prompt: _target(prompt, ticket=[["x"]]),
    "an odd mode": lambda prompt: _target(prompt, ticket="x", mode="steal"),
    "another's host": lambda prompt: _target(
        prompt, ticket="x", remote_host="203.0.113.9", remote_port=1, remote_block_ids=[2**62]
    ),
}
"""Bodies that no client should send: malformed, huge and forged. What is answered to one is an error, or the truth
about the prompt in it."""


async def poison(scene: Scene, _: Step) -> str:
    """Every kind at every HTTP door, in the router's name; 200 is right for what is a good request after all, and only
    with the truth."""
    prompt = scene.load.prompt(scene.rng)[0]
    doors = [ROUTER, *_some(scene, "prefill"), *_some(scene, "decode")]
    calls = [_poisoned(scene, door, name, prompt) for door in doors for name in POISONS]
    random.Random(scene.rng.random()).shuffle(calls)
    found = await asyncio.gather(*calls)
    return f"{len(found)} poisoned requests, {found.count('late')} late, {found.count('wrong')} wrong"


async def _poisoned(scene: Scene, door: str, name: str, prompt: Prompt) -> str:
    began_at = scene.now()
    verdict, kind = Verdict.LATE, ""
    data = b""
    try:
        async with asyncio.timeout(POISON_S + LATE_S):
            status, data = await _send(scene, door, POISONS[name](prompt))
        verdict, kind = Verdict.ERROR, f"poison:{status}"
        if status == 200:
            text = msgspec.json.decode(data)["choices"][0]["text"]
            verdict = Verdict.RIGHT if text == prompt.right else Verdict.WRONG
    except TimeoutError:  # before OSError, whose kind it is
        pass
    except (aiohttp.ClientError, OSError) as error:
        verdict, kind = Verdict.ERROR, f"poison:{type(error).__name__}"
    what = f"poison {name} at {door}: {data[:200]!r}"
    scene.board.note(Ended(began_at, scene.now(), verdict, kind), what)
    return verdict.value


async def _send(scene: Scene, door: str, body: bytes) -> tuple[int, bytes]:
    headers = {"content-type": "application/json", **scene.fleet.pass_for(door)}
    url = scene.fleet.specs[door].url + BodyKind.COMPLETION.value
    async with scene.session.post(url, data=body, headers=headers) as response:
        return response.status, await response.read()


INJURIES: Mapping[str, Callable[[Scene, Step], Awaitable[str]]] = {
    "flood": flood,
    "exhausted": exhausted,
    "abort": abort,
    "late-decode": late_decode,
    "replay": replay,
    "slow-reader": slow_reader,
    "poison": poison,
}
