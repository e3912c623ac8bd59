"""A router that listens on an address of the network alone: who opens its operators' pages, from which host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton_proof.chaos.network import networks
from kvbaton_proof.chaos.network.networks import Network
from tests.certificates import write_certificate
from tests.e2e.cluster import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BEST, _ = networks.available()
CLIENT, OPERATOR = "sk-of-a-client-0123456789", "op-of-an-operator-0123456789"
PROGRAM = [sys.executable, "-m", "kvbaton.cli.main"]
NOTHING = 1
"""The exit status of `inspect` where the router answered and has seen no request."""
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("KVBATON_")}


@contextlib.contextmanager
def router(network: Network, folder: Path) -> Iterator[str]:
    address = network.address("front")
    cert, secret = write_certificate(folder, "router", address)
    (folder / "clients").write_text(CLIENT)
    (folder / "operators").write_text(OPERATOR)
    words = ["router", "--host", address, "--port", "8443", "--tls-cert", cert, "--tls-key", secret, "--json"]
    words += ["--api-key-file", str(folder / "clients"), "--operator-key-file", str(folder / "operators")]
    words += ["--prefill-url", f"http://{address}:9", "--decode-url", f"http://{address}:10"]
    log = folder / "router.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            network.command("front", [*PROGRAM, *words]), stdout=out, stderr=subprocess.STDOUT, env=CLEAN
        )
    try:
        wait_for(lambda: '"url"' in log.read_text(), 60.0, log)
        yield f"https://{address}:8443"
    finally:
        process.terminate()
        process.wait(60)
    assert OPERATOR not in log.read_text() and CLIENT not in log.read_text()


def test_the_hosts_own_address_is_local_and_elsewhere_an_operators_key_opens_what_a_clients_does_not(
    tmp_path: Path,
) -> None:
    with networks.start(BEST, ["front", "desk"]) as network, router(network, tmp_path) as url:

        def kvbaton(host: str, *words: str, **more: str) -> tuple[int, str]:
            done = subprocess.run(
                network.command(host, [*PROGRAM, *words, "--router", url]),
                capture_output=True, text=True, timeout=120, check=False, env={**CLEAN, **more},
            )  # fmt: skip
            return done.returncode, done.stderr + done.stdout

        trust = ("--cacert", str(tmp_path / "cert.pem"))
        inspect = ("inspect", *trust)
        assert kvbaton("front", *inspect)[0] == NOTHING, "the router's own machine, by its address"
        if BEST == "namespaces":  # hosts of a relay are all on loopback
            for key in (), ("--operator-key-file", str(tmp_path / "clients")):
                status, told = kvbaton("desk", *inspect, *key)
                assert status == 2 and "returned 403: /flights: " in told
                assert "with an operator's key: send Authorization: Bearer KEY" in told
                assert told.endswith("; here: --operator-key-file FILE\n") == (not key)
            status, told = kvbaton("desk", "doctor", *trust)
            assert status == 1 and "HTTP 401; it wants a key: --operator-key-file FILE" in told
        assert kvbaton("desk", *inspect, "--operator-key-file", str(tmp_path / "operators"))[0] == NOTHING
        assert kvbaton("desk", *inspect, KVBATON_OPERATOR_KEY=OPERATOR)[0] == NOTHING
        assert "worker prefill0 (http://" in kvbaton("desk", "doctor", *trust, KVBATON_OPERATOR_KEY=OPERATOR)[1]
        status, told = kvbaton("desk", "inspect", KVBATON_OPERATOR_KEY=OPERATOR)
        assert status == 2 and "name its authority with --cacert FILE" in told
