"""Debian's Prometheus, as a test runs it: promtool, and the server with the rules that this project ships."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbaton.processes.child_process import free_ports
from tests.e2e.cluster import wait_for

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "kvbaton.json"
START_S, STOP_S, ASK_S = 30.0, 10.0, 10.0


def program(name: str) -> str:
    """Where `make .tools/.ready` put it, or on PATH."""
    found = shutil.which(name, path=str(ROOT / ".tools" / "bin")) or shutil.which(name)
    assert found, f"{name} is not there; run: make .tools/.ready"
    return found


def promtool(*words: str, text: str | None = None) -> str:
    """What it says; AssertionError if it does not approve."""
    done = subprocess.run(
        [program("promtool"), *words], check=False, input=text, capture_output=True, text=True, timeout=60
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def alerts() -> list[str]:
    """The names of the alerts that are shipped."""
    return re.findall(r"^ +- alert: (\w+)$", RULES.read_text(), re.MULTILINE)


class Server:
    """A Prometheus that runs, asked over its API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The vector that it answers; AssertionError if it cannot read the question."""
        return list(self._get("query", query=expr)["result"])

    def value(self, expr: str) -> float:
        """The one number of an answer, 0 for none."""
        found = self.query(expr)
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else 0.0

    def alerts(self) -> dict[str, str]:
        """Those that are pending or fire, by name."""
        return {each["labels"]["alertname"]: each["state"] for each in self._get("alerts")["alerts"]}

    def names(self) -> set[str]:
        """Of all series that were ever scraped."""
        return set(self._get("label/__name__/values"))

    def targets(self) -> dict[str, str]:
        return {each["scrapeUrl"]: each["health"] for each in self._get("targets")["activeTargets"]}

    def exemplars(self, expr: str, begin: float, end: float) -> list[dict[str, Any]]:
        return list(self._get("query_exemplars", query=expr, start=str(begin), end=str(end)))

    def _get(self, path: str, **params: str) -> Any:
        query = f"?{urllib.parse.urlencode(params)}" if params else ""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}{query}", timeout=ASK_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {params}: {error.read().decode()}") from None


def shortened(rules: str) -> str:
    """Rules whose windows and patience are seconds; not a word else is changed."""
    rules = re.sub(r"\[\d+[mh]\]", "[6s]", rules)
    rules = re.sub(r"\boffset \d+m\b", "offset 6s", rules)
    return re.sub(r"^( +for: )\d+m$", r"\g<1>1s", rules, flags=re.MULTILINE)


@contextlib.contextmanager
def prometheus(directory: Path, jobs: Mapping[str, Sequence[str]]) -> Iterator[Server]:
    """A server that scrapes these targets once a second, and evaluates the shipped rules as often."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rules.yml").write_text(shortened(RULES.read_text()))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": list(targets)}]} for name, targets in jobs.items()
        ],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # which is YAML
    address, log = f"127.0.0.1:{free_ports(1)[0]}", directory / "prometheus.log"
    command = [
        program("prometheus"), f"--config.file={directory / 'prometheus.yml'}", f"--web.listen-address={address}",
        f"--storage.tsdb.path={directory / 'data'}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: _is_ready(f"http://{address}"), START_S, log)
        yield Server(f"http://{address}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=ASK_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
