"""Secrets are where they belong and nowhere else: a cluster at --debug, and everything that it says, searched.

Promise 5: not in logs, answers, figures, command lines, environments or what `doctor` and `drain` print.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from zmq.utils import z85

from kvbaton.cli.main import main
from kvbaton.control import keyring
from kvbaton.control.joining import admission_files
from kvbaton.protocol.legality import Role
from kvbaton.transports.net import connection_handshake
from tests.e2e.cluster import wait_for
from tests.e2e.pair import pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NAMES = ("router", "operator", "store", "p0")
"""Who is minted; d0 joins with a token."""
MAIN = [sys.executable, "-m", "kvbaton.cli.main", "--debug"]


def spellings(secret: bytes) -> Iterator[bytes]:
    """A secret in every form in which it could be written down."""
    yield secret
    yield secret.hex().encode()
    yield base64.b64encode(secret).rstrip(b"=")
    yield base64.urlsafe_b64encode(secret).rstrip(b"=")
    yield repr(secret)[2:-1].encode()
    if len(secret) % 4 == 0:
        yield z85.encode(secret)


def secrets_in(directory: Path) -> dict[str, bytes]:
    found = {}
    for path in (directory / "secret").glob("*.json"):
        found[path.stem] = z85.decode(json.loads(path.read_text())["secret"])
    for number, key in enumerate(json.loads((directory / "tickets.json").read_text())["keys"]):
        found[f"ticket key {number}"] = bytes.fromhex(key)
    for path in directory.glob("admission.json"):
        told = json.loads(path.read_text())
        found |= {"admission key": bytes.fromhex(told["seed"]), "door": z85.decode(told["door"])}
    for path in directory.glob("tokens/*.json"):
        found["token's check key"] = bytes.fromhex(json.loads(path.read_text())["key"])
    return found


def leaks(said: dict[str, bytes], hidden: dict[str, bytes]) -> list[str]:
    return [
        f"{name} in {where}"
        for where, text in said.items()
        for name, secret in hidden.items()
        if any(form in text for form in spellings(secret))
    ]


class Talkative:
    """A router, a store and two workers, each at --debug, that write down all they have to say."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.keys = directory / "keys"
        keyring.mint(self.keys, NAMES)
        self.token = admission_files.new_token(self.keys, Role.DECODE, 600.0, 1)
        self.token_file = directory / "join.token"
        self.token_file.write_text(self.token.text)
        self.token_file.chmod(0o600)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        where = ("--keys", str(self.keys))
        self._start("router", "router", *where, "--port", "0", "--registry-port", "0", "--show-pair")
        self.url = self._said("router", r"clients (http://[^/]+)/v1")
        self.registry = self._said("router", r"registry (tcp://\S+)").rstrip(",")
        self._start("store", "store", *where, "--port", "0", "--json")
        store = self._said("store", r'"endpoint":\s*"(tcp://[^"]+)"')
        more = ("--registry", self.registry, "--transport", "tcp", "--store", store)
        door = self._said("router", r"join (tcp://[0-9.:]+)")
        joins = ("--join-token-file", str(self.token_file), "--join-at", door)
        self.joins = (*joins, "--registry", self.registry)
        self._start("p0", "worker", "--name", "p0", "--role", "prefill", *where, *more)
        self._start("d0", "worker", "--name", "d0", "--role", "decode", *joins, *more)
        self.urls = {name: self._said(name, r" serves (http://\S+)") for name in ("p0", "d0")}

    def _start(self, name: str, *words: str) -> None:
        with (self.directory / f"{name}.log").open("wb") as out:
            self.children[name] = subprocess.Popen(
                [*MAIN, *words], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def _said(self, name: str, pattern: str) -> str:
        log = self.directory / f"{name}.log"
        found: str = wait_for(lambda: re.search(pattern, log.read_text()), 60.0, log)[1]
        return found

    def command(self, *words: str) -> bytes:
        """What a command prints."""
        said, root = io.StringIO(), logging.getLogger()
        level, handler = root.level, logging.StreamHandler(said)
        root.addHandler(handler)  # so that the command, which shares this process, adds none
        root.setLevel(logging.DEBUG)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                main([*words, "--debug"])
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
        return said.getvalue().encode()

    def close(self) -> None:
        for child in self.children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGHUP)
        for child in self.children.values():
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


async def use(town: Talkative) -> tuple[dict[str, bytes], str]:
    """Ask well and badly, and read all that can be read; also a ticket that P gave."""
    said = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:

        async def served() -> bool:
            async with session.get(f"{town.url}/health") as response:
                return response.status == 200

        while not await served():
            await asyncio.sleep(0.1)
        for mode in ("pull", "push", "stream"):
            body = {"prompt": f"a prompt that is handed over in {mode}", "max_tokens": 4}
            async with session.post(
                f"{town.url}/v1/completions", json=body, headers={"x-kvbaton-mode": mode}
            ) as response:
                assert response.status == 200
                said[f"answer {mode}"] = await response.read() + str(response.headers).encode()
        asked = {"prompt": "another", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        async with session.post(f"{town.urls['p0']}/v1/completions", json=asked) as response:
            ticket = str((await response.json())["kv_transfer_params"]["ticket"])
        for forged in (ticket[:-4] + "AAAA", ticket, "AAAA" * 30):
            params = {"do_remote_prefill": True, "ticket": forged}
            asked = {"prompt": "no such prompt", "max_tokens": 4, "kv_transfer_params": params}
            async with session.post(f"{town.urls['d0']}/v1/completions", json=asked) as response:
                said[f"refusal of {forged[-6:]}"] = await response.read()
        for url in (town.url, *town.urls.values()):
            for path in ("/stats", "/metrics", "/workers", "/health", "/v1/models", "/nowhere"):
                async with session.get(url + path) as response:
                    said[url + path] = await response.read() + str(response.headers).encode()
    return said, ticket


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, bytes], dict[str, bytes], str]]:
    """All that a cluster said, the secrets of its key directory, and a ticket."""
    town = Talkative(tmp_path_factory.mktemp("talkative"))
    with contextlib.ExitStack() as stack:
        stack.callback(town.close)
        said, ticket = asyncio.run(use(town))
        for name, child in town.children.items():
            for what in ("cmdline", "environ", "comm"):
                said[f"{what} of {name}"] = Path(f"/proc/{child.pid}/{what}").read_bytes()
        said["doctor --json"] = town.command("doctor", "--router", town.url, "--json")
        said["drain"] = town.command(
            "drain", "d0", "--keys", str(town.keys), "--registry", town.registry, "--json", "--force"
        )
        said["drain nobody"] = town.command("drain", "no-one", "--keys", str(town.keys), "--registry", town.registry)
        said["keys list"] = town.command("keys", "list", str(town.keys), "--json")
        said["token list"] = town.command("keys", "token", "list", str(town.keys))
        said["join again"] = town.command("worker", "--name", "d1", "--role", "decode", *town.joins)
        said["keys"] = town.command("keys", "new", str(town.directory / "more"), "p1")
    for log in town.directory.glob("*.log"):
        said[log.name] = log.read_bytes()
    hidden = {
        **secrets_in(town.keys),
        "token": town.token.secret,
        **{f"new {n}": s for n, s in secrets_in(town.directory / "more").items()},
    }
    yield said, hidden, ticket


def test_no_secret_is_in_anything_that_a_cluster_says(
    everything: tuple[dict[str, bytes], dict[str, bytes], str],
) -> None:
    said, hidden, _ = everything
    assert len(hidden) == 5 + 4 + 4 and len(said) > 30
    assert b'"role":"decode"' in said["keys list"] and b"1 of 1 uses" in said["token list"]
    assert b"as often as it may be" in said["join again"]
    assert all(said[f"{name}.log"] and said[f"cmdline of {name}"] for name in ("router", "store", "p0", "d0"))
    assert b'"planes"' in said["doctor --json"] and b"no-one" in said["drain nobody"]
    assert leaks(said, hidden) == []


def test_no_ticket_is_in_a_log_or_a_figure(everything: tuple[dict[str, bytes], dict[str, bytes], str]) -> None:
    """A ticket lets its holder have a prompt's KV: it goes to whom it is for, in the parameters and nowhere else."""
    said, _, ticket = everything
    assert len(ticket) > 100
    assert [where for where, text in said.items() if ticket[20:60].encode() in text] == []


def test_the_search_finds_what_it_looks_for() -> None:
    hidden = {"it": os.urandom(32)}
    for form in spellings(hidden["it"]):
        assert leaks({"here": b"before" + form + b"after"}, hidden) == ["it in here"]
    assert leaks({"here": os.urandom(4096)}, hidden) == []


def test_the_secrets_of_pairings_are_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that data planes mint for each other, which no file holds."""
    caplog.set_level(logging.DEBUG)

    async def story() -> list[bytes]:
        found: list[bytes] = []
        for transport in ("tcp", "shm"):
            async with pair(tmp_path / transport, transport=transport) as made:
                for mode in ("pull", "push"):
                    await made.answer(f"a prompt {mode}", mode)
                rings = [
                    each for each in gc.get_objects() if type(each) is connection_handshake.SecretRing
                ]  # asks nothing of others
                found += [secret for ring in rings for secret in list(ring._secrets.values())]
        return found

    minted = asyncio.run(story())
    assert len(minted) >= 2
    assert leaks({"log": caplog.text.encode()}, {str(number): secret for number, secret in enumerate(minted)}) == []
