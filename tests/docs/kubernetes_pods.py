"""Plays kubelet for the rendered manifests, on loopback addresses instead of pods' own.

Law: what runs is what the manifests say, word for word, in the container's environment; replaced are only what
Kubernetes would replace ($(POD_IP), $(POD_NAME), names of Services), the places of mounts, and the wildcard address,
since pods share the network of this machine.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs_running import BIN

Object = dict[str, Any]


def pod_spec(one: Object) -> Object:
    found: Object = one["spec"]["template"]["spec"]
    return found


def container(one: Object, name: str) -> Object:
    pod = pod_spec(one)
    return next(each for each in containers(pod) if each["name"] == name)


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def has_keys(one: Object) -> bool:
    """Whether its pods have identities that were minted; the others join by a token."""
    return any(each["name"] == "keys" for each in containers(pod_spec(one)))


def main_container(one: Object) -> Object:
    found: Object = pod_spec(one)["containers"][0]
    return found


def expanded(text: str, environment: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], text)


def environment_of(each: Object, pod_name: str, pod_ip: str) -> dict[str, str]:
    fields = {"metadata.name": pod_name, "status.podIP": pod_ip}
    found: dict[str, str] = {}
    for variable in each.get("env", ()):
        if "valueFrom" in variable:
            found[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[variable["name"]] = expanded(variable["value"], found)
    return found


def loopback() -> str:
    """An address of this machine that nobody else is likely to use, so that a pod can have its own ports."""
    while True:
        address = f"127.{random.randint(16, 250)}.{random.randint(1, 250)}.{random.randint(1, 250)}"
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((address, 8000))
            return address


class Pod:
    """One pod of a workload: its key directory as the sidecar makes it, and its main process."""

    def __init__(self, one: Object, name: str, folder: Path) -> None:
        self.one, self.name, self.ip = one, name, loopback()
        self.folder = folder / name
        self.keys = self.folder / "keys"
        self.token = self.folder / "join" / "token"
        self._process: subprocess.Popen[bytes] | None = None

    def mount(self, keys: Path, script: Path) -> None:
        """What the volumes hold, read by the group as Kubernetes has it; then the sidecar's script, once."""
        sidecar = container(self.one, "keys")
        environment = environment_of(sidecar, self.name, self.ip)
        given = self.folder / "in"
        (given / "tickets").mkdir(parents=True)
        (given / "public").symlink_to(keys / "public")
        (given / "tickets" / "tickets.json").write_bytes((keys / "tickets.json").read_bytes())
        (given / "tickets" / "tickets.json").chmod(0o440)
        for mount in sidecar["volumeMounts"]:
            path = mount.get("subPath") or expanded(mount.get("subPathExpr", ""), environment)
            if path:
                place = given / Path(mount["mountPath"]).relative_to("/in")
                place.write_bytes((keys / "secret" / path).read_bytes())
                place.chmod(0o440)
            if mount["name"] == "admission":
                (given / "admission").mkdir()
                for path in (keys / "admission.json", keys / "public-admission.json", *(keys / "tokens").iterdir()):
                    (given / "admission" / path.name).write_bytes(path.read_bytes())
                    (given / "admission" / path.name).chmod(0o440)
        places = {"KEYS_IN": str(given), "KEYS_OUT": str(self.keys)}
        subprocess.run(["sh", script, "once"], check=True, timeout=30, env={**os.environ, **environment, **places})

    def give_token(self, text: str) -> None:
        """The only secret of a pod that joins; as its own user would have it, since this one is root perhaps."""
        self.token.parent.mkdir(parents=True)
        self.token.write_text(text)
        self.token.chmod(0o400)

    def command(self, names: dict[str, str]) -> list[str]:
        """The main process's words, as kubelet and DNS would have them."""
        main = main_container(self.one)
        environment = environment_of(main, self.name, self.ip)
        words = [expanded(word, environment) for word in [*main["command"], *main["args"]]]
        for name, address in names.items():
            words = [word.replace(f"tcp://{name}:", f"tcp://{address}:") for word in words]
        places = {"/keys": str(self.keys), "/join/token": str(self.token), "--host=0.0.0.0": f"--host={self.ip}"}
        for place, here in places.items():
            words = [word.replace(place, here) for word in words]
        return words

    def url(self, path: str) -> str:
        return f"http://{self.ip}:8000{path}"

    @contextlib.contextmanager
    def running(self, names: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        words = self.command(names)
        with open(self.folder / "log", "wb") as log:
            process = subprocess.Popen(
                [BIN / words[0], *words[1:]],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder,
                env={**os.environ, **environment_of(main_container(self.one), self.name, self.ip)},
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)
