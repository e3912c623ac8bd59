"""How a command of the documentation is held to the product without being run: by the product's own parsers.

Law: every program that a page may show has a rule here; a command without one is a failure, never a pass.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from docs_commands import ROOT, Command

from kvbaton.cli.main import COMMANDS, build_parser, module_of
from kvbaton.engines.shared.connector_settings import ConnectorSettings

OPERATORS = {"|", ">", ">>", "2>", "&", "&&", ";", "<"}
VLLM_FIELDS = {
    "kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config",
}  # fmt: skip
VLLM_ROLES = {"kv_producer", "kv_consumer", "kv_both"}
VLLM_POLICIES = {"recompute", "fail"}
PLACEHOLDER = re.compile(r"…|\.\.\.|<[a-z]+>")


class DocsError(AssertionError):
    """What a page shows and nobody can run."""


def check(command: Command) -> None:
    """DocsError says what is wrong with a command."""
    if PLACEHOLDER.search(command.text):
        raise DocsError("commands are shown whole: write out what the dots stand for")
    for part in split(command.words):
        while re.match(r"^[A-Z_]+=", part[0]):
            part.pop(0)
        name = Path(part[0]).name
        rule = RULES.get(name)
        if rule is None:
            raise DocsError(f"no rule for {name}: add one to tests/docs/docs_rules.py")
        rule(part)


def split(words: list[str]) -> list[list[str]]:
    """The programs of a pipeline, without what they are redirected to."""
    parts: list[list[str]] = [[]]
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in {"|", "&&", ";", "&"}:
            parts.append([])
        elif word in OPERATORS:
            skip = True
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


# --- kvbaton


def parsed(words: list[str]) -> argparse.Namespace:
    """A `kvbaton` command line, by the parser that the product uses."""
    name = next((word for word in words[1:] if not word.startswith("-")), None)
    if name not in COMMANDS:
        raise DocsError(f"kvbaton has no command {name}")
    try:
        module = module_of(name)
    except ModuleNotFoundError:
        raise DocsError(f"kvbaton {name} is not there yet") from None
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            args = build_parser(name, module).parse_args(words[1:])
            if name == "worker":
                module.options_of(args)
    except SystemExit as end:
        if end.code not in (0, None):
            raise DocsError(said.getvalue().strip()) from None
        return argparse.Namespace()
    except Exception as error:  # noqa: BLE001 - whatever the product says is what is wrong with the page
        raise DocsError(str(error)) from None
    return args


def _kvbaton(words: list[str]) -> None:
    parsed(words)


# --- vLLM and what belongs to it


def _vllm_server(words: list[str]) -> None:
    if Path(words[0]).name == "vllm" and words[1:2] not in (["serve"], ["bench"]):
        raise DocsError(f"vllm has no {words[1:2]}")
    if "--kv-transfer-config" in words:
        check_transfer_config(words[words.index("--kv-transfer-config") + 1])
    elif words[1:2] == ["serve"]:
        raise DocsError("an engine of ours needs --kv-transfer-config")


def check_transfer_config(text: str) -> None:
    """`--kv-transfer-config`: vLLM's own fields by name, ours by the connector's own parser."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise DocsError(f"--kv-transfer-config: {error}") from None
    unknown = sorted(set(config) - VLLM_FIELDS)
    if unknown:
        raise DocsError(f"--kv-transfer-config: no field {unknown[0]}")
    if config["kv_connector"] != "BatonConnector" or config["kv_connector_module_path"] != "kvbaton.integrations.vllm":
        raise DocsError("--kv-transfer-config: not our connector")
    if config["kv_role"] not in VLLM_ROLES or config.get("kv_load_failure_policy", "fail") not in VLLM_POLICIES:
        raise DocsError("--kv-transfer-config: no such role or policy")
    try:
        ConnectorSettings.parse(config["kv_connector_extra_config"])
    except ValueError as error:
        raise DocsError(str(error)) from None


@functools.cache
def _help_of(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.stdout + ended.stderr


def _vllm_router(words: list[str]) -> None:
    program = ROOT / ".venv-router" / "bin" / "vllm-router"
    if not program.exists():
        raise DocsError("make docs-test gets vllm-router, which knows its own flags; it is not here")
    known = set(re.findall(r"--[a-z][a-z0-9-]+", _help_of(str(program), "--help")))
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    if unknown:
        raise DocsError(f"vllm-router has no {unknown[0]}")


# --- the repository's own


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"(?m)^([a-z][\w-]*):", text))


def _make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in words[1:]:
        name, is_variable, _ = word.partition("=")
        if is_variable:
            if not re.search(rf"(?m)^{re.escape(name)} \??:?=", text):
                raise DocsError(f"the Makefile has no variable {name}")
        elif not word.startswith("-") and word not in targets():
            raise DocsError(f"the Makefile has no target {word}")


def _pytest(words: list[str]) -> None:
    named = [word for word in words[1:] if word.startswith(("tests", "packages"))]
    for word in named:
        path, _, test = word.partition("::")
        if not (ROOT / path).exists():
            raise DocsError(f"{path} is not there")
        if test and f"def {test.rpartition('::')[2]}(" not in (ROOT / path).read_text():
            raise DocsError(f"{path} has no {test}")
    if not named:
        raise DocsError("name the tests")


def _python(words: list[str]) -> None:
    if "-m" in words:
        module = words[words.index("-m") + 1]
        if module == "vllm.entrypoints.openai.api_server":
            return _vllm_server(words)
        if module == "dynamo.vllm":
            check_transfer_config(words[words.index("--kv-transfer-config") + 1])
            return None
        if module in {"venv", "http.server", "pip"}:
            return None
        if module.startswith("tests."):
            if not (ROOT / (module.replace(".", "/") + ".py")).exists():
                raise DocsError(f"{module} is not there")
            return None
        if importlib.util.find_spec(module) is None:
            raise DocsError(f"{module} is not there")
        return None
    script = next(word for word in words[1:] if not word.startswith("-"))
    if not (ROOT / script).exists():
        raise DocsError(f"{script} is not there")
    return None


def _pip(words: list[str]) -> None:
    """Extras that are named must be ours."""
    text = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"kvbaton\[([\w,-]+)\]|^\.\[([\w,-]+)\]", " ".join(words)):
        for name in ",".join(filter(None, extra)).split(","):
            if not re.search(rf"(?m)^{name} = \[", text):
                raise DocsError(f"there is no extra {name}")


# --- Kubernetes


def _kubectl(words: list[str]) -> None:
    for flag in ("-k", "--kustomize", "-f"):
        if flag in words:
            path = ROOT / words[words.index(flag) + 1]
            if not path.exists():
                raise DocsError(f"{path.relative_to(ROOT)} is not there")
    if "kustomize" in words[1:2] and not (ROOT / words[2] / "kustomization.yaml").exists():
        raise DocsError(f"{words[2]} is no kustomization")


def _container(words: list[str]) -> None:
    """`docker build -f FILE CONTEXT`: both are there."""
    if "-f" in words and not (ROOT / words[words.index("-f") + 1]).exists():
        raise DocsError(f"{words[words.index('-f') + 1]} is not there")


def _shell(words: list[str]) -> None:
    """Everyday tools; what they do is the reader's own affair."""


RULES: Mapping[str, Callable[[list[str]], None]] = {
    "kvbaton": _kvbaton,
    "vllm": _vllm_server,
    "vllm-router": _vllm_router,
    "make": _make,
    "pytest": _pytest,
    "python": _python,
    "python3": _python,
    "pip": _pip,
    "mkdocs": _shell,
    "kubectl": _kubectl,
    "kustomize": _kubectl,
    "docker": _container,
    "podman": _container,
    "mooncake_master": _shell,
    **dict.fromkeys(
        ("curl", "kill", "git", "tar", "cp", "scp", "rsync", "echo", "head", "grep", "mkdir", "export", "printf"),
        _shell,
    ),
}
