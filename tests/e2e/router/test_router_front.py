"""`kvbaton router` as a process of its own before the workers of `kvbaton up`: https, API keys, every kind of path."""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton import __version__
from kvbaton.engines.embedded.embedded_worker import reference_answers
from tests.certificates import write_certificate
from tests.e2e.cluster import up, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

KEY = "sk-of-a-client-0123456789"
PROMPT = "Tell me about shared memory and sockets."


@contextlib.contextmanager
def router(folder: Path, workers: dict[str, str]) -> Iterator[tuple[str, ssl.SSLContext, subprocess.Popen[str]]]:
    """Its URL, who trusts it, and its process."""
    cert, secret = write_certificate(folder, "router")
    (folder / "api-keys").write_text(f"# clients\n{KEY}\n")
    words = [sys.executable, "-m", "kvbaton.cli.main", "router", "--port", "0", "--json", "--tls-cert", cert]
    words += ["--tls-key", secret, "--api-key-file", str(folder / "api-keys"), "--allow-origin", "https://chat.example"]
    words += [word for role, url in workers.items() for word in (f"--{role}-url", url)] + ["--body-limit", "100000"]
    log = folder / "router.log"
    with log.open("w") as out, (folder / "router.err").open("w") as err:
        process = subprocess.Popen(words, stdout=out, stderr=err, text=True)
    try:
        wait_for(lambda: log.read_text().endswith("\n"), 60.0, folder / "router.err")
        yield json.loads(log.read_text())["url"], ssl.create_default_context(cafile=cert), process
    finally:
        process.terminate()
        assert process.wait(40) == 0
    assert KEY not in log.read_text() + (folder / "router.err").read_text()


def test_https_keys_and_every_kind_of_path(tmp_path: Path) -> None:
    with up(tmp_path) as cluster:
        with urllib.request.urlopen(f"{cluster.url}/workers", timeout=20) as response:
            workers = {each["role"]: each["url"] for each in json.loads(response.read())["workers"]}
        with router(tmp_path, workers) as (url, trusting, process):
            assert url.startswith("https://127.0.0.1:")

            def ask(path: str, body: Any = None, key: str = KEY, **headers: str) -> tuple[int, Any]:
                data = None if body is None else json.dumps(body).encode()
                head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
                asked = urllib.request.Request(url + path, data, head)
                try:
                    with urllib.request.urlopen(asked, timeout=60, context=trusting) as response:
                        return response.status, json.loads(response.read() or b"null")
                except urllib.error.HTTPError as error:
                    return error.code, json.loads(error.read())

            body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
            status, told = ask("/v1/completions", body)
            assert (status, told["choices"][0]["text"]) == (200, reference_answers([PROMPT], 16)[0])
            assert ask("/invocations", body)[1]["choices"] == told["choices"]
            assert ask("/v1/completions", body, key="sk-of-nobody-0123456789")[0] == 401
            assert ask("/v1/completions", {**body, "prompt": "x" * 100_000})[0] == 413
            status, tokens = ask("/tokenize", {"prompt": "baton"})
            assert (status, tokens["count"]) == (200, len(tokens["tokens"])) and tokens["max_model_len"] > 0
            assert ask("/tokenize", {"prompt": "baton"}, key="sk-of-nobody-0123456789")[0] == 401
            assert ask("/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": "baton"})
            chat = ask("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
            assert chat[0] == 200 and chat[1]["count"] == len("hi") + 3
            assert ask("/version")[1] == {"version": __version__, "kvbaton": __version__}
            assert ask("/ping", key="")[0] == ask("/health", key="")[0] == 200
            status, refused = ask("/v1/embeddings", {"input": "x"})
            assert (status, refused["error"]["code"]) == (404, "not_found"), "the worker's word"
            assert ask("/sleep", {})[0] == 403
            status, told = ask("/tokenize", {"prompt": "x", "kv_transfer_params": {"ticket": "t"}})
            assert (status, told["error"]["param"]) == (400, "kv_transfer_params")
            assert "/tokenize" in ask("/openapi.json")[1]["paths"]
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(url.replace("https", "http") + "/health", timeout=20)
            shown = (
                Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
            )
            assert KEY.encode() not in shown
