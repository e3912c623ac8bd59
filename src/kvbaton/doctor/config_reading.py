"""An engine's configuration as an operator has it: JSON, YAML, or the command that starts it; a file or a string.

Law: any input becomes one `Launch`, or a finding that says what could not be read. Nothing is run.

A finding of `kvbaton doctor`: its code in the catalogue, place, problem, and the next step for this case.

Law: a finding's severity comes from the catalogue (`kvbaton.observe.codes.findings`), so `kvbaton explain CODE` knows
every finding.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvbaton.engines.vllm.launch import launching
from kvbaton.observe.codes.entry import Severity
from kvbaton.observe.codes.findings import SEVERITY

ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding."""

    code: str
    severity: Severity
    where: str  # file, flag or part of the machine
    found: str
    fix: str  # the next command, or the setting to change


def finding(code: str, where: str, found: str, fix: str) -> Finding:
    return Finding(code=code, severity=SEVERITY[code], where=where, found=found, fix=fix)


def ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    """Each finding once, the most severe first."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda each: ORDER.index(each.severity)))


Side = Literal["prefill", "decode"]
TEXT_BYTES_MAX = 1 << 20
TRANSFER = "kv_transfer_config"
ALIASES = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size", "q": "quantization",
}  # fmt: skip
_SERVERS = {"serve", launching.MODULE}
_FLAG = re.compile(r"--?[A-Za-z]")
_ENDS = {"&&", "||", ";", "|", "&"}
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_TRANSFER_KEYS = {"kv_connector", "kv_role", "kv_connector_extra_config", "kv_connector_module_path"}


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one engine's start, as far as they were given."""

    side: Side
    where: str  # for messages: the flag, and the file if there is one
    transfer: dict[str, Any] | None = None  # vLLM: the value of --kv-transfer-config
    options: dict[str, Any] | None = None  # vLLM: its other options; None where they are not known
    variables: dict[str, str] = {}
    worker: tuple[str, ...] | None = None  # the embedded engine: the arguments after `kvbaton worker`

    def option(self, name: str) -> str:
        """An option of vLLM's as a string; "" where it is not given."""
        value = (self.options or {}).get(name)
        return "" if value is None else str(value)


class UnreadableError(Exception):
    """A configuration's text cannot be read; the message says why."""


def read(side: Side, given: str) -> tuple[Launch | None, list[Finding]]:
    """The launch, or the reason why it could not be read."""
    where = f"--{side}"
    try:
        if _is_text(given):
            return parse(side, where, given), []
        where = f"--{side} {given}"
        return parse(side, where, _content(Path(given))), []
    except UnreadableError as error:
        fix = "give the JSON of --kv-transfer-config, of a launch, or the command that starts the engine"
        return None, [finding("config-unreadable", where, str(error), fix)]


def parse(side: Side, where: str, text: str) -> Launch:
    """UnreadableError where the text cannot be parsed."""
    launch = _parse(side, where, text)
    if any("\0" in each for each in _texts([launch.transfer, launch.options, launch.worker])):
        raise UnreadableError("contains a null character")
    return launch


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for each in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _parse(side: Side, where: str, text: str) -> Launch:
    if text.lstrip().startswith("{"):
        return _of_mapping(side, where, _json(text))
    if re.search(r"--kv[-_]transfer[-_]config|\bkvbaton(\.cli\.main)?\s+worker\s", text):
        return _of_command(side, where, text)
    return _of_mapping(side, where, _yaml(text))


def _is_text(given: str) -> bool:
    return given.lstrip().startswith("{") or (any(map(str.isspace, given)) and not Path(given).exists())


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(TEXT_BYTES_MAX + 1)
        if len(data) > TEXT_BYTES_MAX:
            raise UnreadableError(f"more than {TEXT_BYTES_MAX} bytes")
        return data.decode()
    except OSError as error:
        raise UnreadableError(f"{error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UnreadableError("not UTF-8 text") from None


def _json(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnreadableError(f"not JSON: {error}") from None


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    try:  # the loader in Python: the one in C overruns its stack on lists in lists in lists
        return msgspec.convert(yaml.safe_load(text), dict[str, Any])
    except (msgspec.ValidationError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise UnreadableError(f"neither JSON nor a command nor YAML: {' '.join(str(error).split())[:200]}") from None


def _of_mapping(side: Side, where: str, fields: dict[str, Any]) -> Launch:
    if _TRANSFER_KEYS & set(fields):
        return Launch(side=side, where=where, transfer=fields)
    options = {_name(key): value for key, value in fields.items()}
    transfer = options.pop(TRANSFER, None)
    if isinstance(transfer, str):
        transfer = _json(transfer)
    if not isinstance(transfer, dict):
        raise UnreadableError("contains no kv-transfer-config")
    return Launch(side=side, where=where, transfer=transfer, options=options)


def _of_command(side: Side, where: str, text: str) -> Launch:
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UnreadableError(f"not a command: {error}") from None
    words = [part for word in words for part in ((word[:-1], ";") if word[1:].endswith(";") else (word,))]
    for index in range(1, len(words)):
        if words[index] == "worker" and words[index - 1].rpartition("/")[2] in {"kvbaton", "kvbaton.cli.main"}:
            return Launch(side=side, where=where, worker=tuple(_command(words[index + 1 :])))
    variables = {found[1]: found[2] for word in words if (found := _VARIABLE.fullmatch(word))}
    options = _flags(words)
    transfer = options.pop(TRANSFER, None)
    if not isinstance(transfer, str):
        raise UnreadableError("--kv-transfer-config has no value")
    return Launch(side=side, where=where, transfer=_json(transfer), options=options, variables=variables)


def _command(words: Sequence[str]) -> list[str]:
    end = next((index for index, word in enumerate(words) if word in _ENDS), len(words))
    return list(words[:end])


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """The options of the command that has --kv-transfer-config; a model may stand after `serve`."""
    at = next((index for index, word in enumerate(words) if _name(word.partition("=")[0]) == TRANSFER), 0)
    start = max((index for index in range(at) if words[index] in _ENDS), default=-1) + 1
    start = max((index + 1 for index in range(start, at) if words[index] in _SERVERS), default=start)
    words = _command(words[start:])
    found: dict[str, Any] = {}
    if not words[0].startswith("-"):
        found["model"] = words[0]
    for index, word in enumerate(words):
        if _FLAG.match(word):
            name, has_value, value = word.partition("=")
            after = words[index + 1] if index + 1 < len(words) else "--end"
            found[_name(name)] = value if has_value else True if _FLAG.match(after) else after
    return found


def _name(key: str) -> str:
    name = key.lstrip("-").replace("-", "_")
    return ALIASES.get(name, name)
