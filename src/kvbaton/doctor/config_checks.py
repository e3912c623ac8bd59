"""One engine's configuration, checked by the code that would refuse it at startup; vLLM need not be installed.

Law: whatever the engine would refuse is an error here, in the same words; each field once, and one bad field does not
hide the next.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from kvbaton.control.addressing import ControlError
from kvbaton.control.joining.join_token import TOKEN_ENV
from kvbaton.control.keyring import data_parallel_name
from kvbaton.control.registry.registry_messages import DP_SIZE_MAX
from kvbaton.doctor.config_reading import Finding, Launch, finding
from kvbaton.engines.shared.connector_settings import FIELD, ConnectorSettings
from kvbaton.engines.vllm.config import supported
from kvbaton.engines.vllm.launch.launching import CONNECTOR
from kvbaton.processes.operator_errors import CommandError
from kvbaton.protocol.settings import Settings
from kvbaton.security.sealing import MISSING, Encrypt, check, is_loopback

if TYPE_CHECKING:  # only configurations of the embedded engine need it
    from kvbaton.engines.embedded.worker_options import WorkerOptions

POLICIES = ("recompute", "fail")
KV_ROLES = {"prefill": ("kv_producer", "kv_both"), "decode": ("kv_consumer", "kv_both")}
ROLES = {"prefill": ("prefill", "both"), "decode": ("decode", "both")}
ANYWHERE = ("", "0.0.0.0", "::")
NOT_SUPPORTED = ("decode_context_parallel_size", "prefill_context_parallel_size")
TRANSFER_FIELDS = (
    "kv_connector", "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_role", "kv_rank", "kv_parallel_size",
    "kv_ip", "kv_port", "kv_connector_extra_config", "kv_connector_module_path", "enable_permute_local_kv",
    "kv_load_failure_policy",
)  # fmt: skip
_BY_FIELD = {"control_port": "port-range", "http_port": "port-range", "keys": "keys-missing"}
_NAMED = re.compile(rf"{FIELD}\.([A-Za-z_]+)[:.]|at `\$\.([a-z_]+)")


class ConfiguredEngine(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that could be read: vLLM's with `settings`, the embedded engine's with `options`."""

    launch: Launch
    settings: ConnectorSettings | None = None
    options: WorkerOptions | None = None

    @property
    def where(self) -> str:
        return self.launch.where

    @property
    def told(self) -> ConnectorSettings | WorkerOptions | None:
        """Both have name, keys, registry, control address, transport, modes and timeouts under the same names."""
        return self.settings or self.options

    @property
    def max_hold_s(self) -> float:
        return self.settings.max_hold_s if self.settings is not None else Settings().max_hold_s

    @property
    def is_here(self) -> bool:
        """Whether it is meant for this machine, judging by its control address."""
        return self.told is None or is_local(self.told.control_host)

    @property
    def tp(self) -> int:
        if self.options is not None:
            return self.options.tp
        return _number(self.launch, "tensor_parallel_size")

    @property
    def members(self) -> list[str]:
        """The names under which it registers: one for each data-parallel rank of vLLM."""
        assert self.told is not None
        size = 1 if self.options is not None else _number(self.launch, "data_parallel_size")
        ranks = range(min(size, DP_SIZE_MAX))
        return [self.told.name] if size == 1 else [data_parallel_name(self.told.name, rank) for rank in ranks]


def examine(launch: Launch, device: str = "cpu") -> tuple[ConfiguredEngine, list[Finding]]:
    """The engine, and the problems of this configuration alone. `device`: where vLLM's cache will be."""
    if launch.worker is not None:
        options, found = _worker_options(launch)
        engine = ConfiguredEngine(launch=launch, options=options)
    else:
        transfer = launch.transfer or {}
        found = [*_transfer(launch, transfer), *_launch(launch)]
        extra = transfer.get(FIELD)
        settings, refused = _settings(launch, extra if isinstance(extra, dict) else {})
        found += refused
        engine = ConfiguredEngine(launch=launch, settings=settings)
        if settings is not None:
            found += [*_policy(launch, transfer, settings), *_http(launch, settings)]
            found += _refused(launch, settings.transport, device)
    if engine.told is not None:
        found += [*_times(engine), *_addresses(engine.where, engine.told)]
    if engine.is_here:
        found += _model(launch)
    return engine, found


def is_local(host: str) -> bool:
    """Whether this machine has the address; a name is looked up."""
    if host in ANYWHERE:
        return True
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except (OSError, TypeError, ValueError):  # the latter two: not a valid name
            return False
    return True


# --- vLLM


def _transfer(launch: Launch, transfer: Mapping[str, Any]) -> Iterator[Finding]:
    where = launch.where
    for field in transfer:
        close = difflib.get_close_matches(field, TRANSFER_FIELDS, 1, 0.75)
        if field not in TRANSFER_FIELDS and close:
            yield finding(
                "setting-unknown", where, f"{field}: vLLM does not know this key", f"did you mean {close[0]}?"
            )
    connector, path = (transfer.get(field) for field in CONNECTOR)
    wanted, home = CONNECTOR.values()
    if connector != wanted:
        yield finding("connector-other", where, f"kv_connector: got {connector!r}", f'set "kv_connector": "{wanted}"')
    elif path != home:
        found = f"kv_connector_module_path: got {path!r}, so vLLM cannot load {wanted}"
        yield finding("module-path", where, found, f'set "kv_connector_module_path": "{home}"')
    role, roles = transfer.get("kv_role"), KV_ROLES[launch.side]
    if role not in roles:
        found = f"kv_role: got {role!r}, expected {' or '.join(roles)} for the {launch.side} side"
        yield finding("role-wrong", where, found, f'set "kv_role": "{roles[0]}"')
    extra = transfer.get("kv_connector_extra_config")
    if role == "kv_producer" and isinstance(extra, Mapping) and extra.get("store"):
        found = "kv_role: kv_producer with a store: vLLM does not protect its loads against a step in flight"
        yield finding("role-wrong", where, found, 'set "kv_role": "kv_both", and "role": "prefill" beside the store')


def _policy(launch: Launch, transfer: Mapping[str, Any], settings: ConnectorSettings) -> Iterator[Finding]:
    policy, where = transfer.get("kv_load_failure_policy"), launch.where
    fix = 'set "kv_load_failure_policy": "recompute"'
    if policy is not None and policy not in POLICIES:
        found = f"kv_load_failure_policy: got {policy!r}, expected {' or '.join(POLICIES)}"
        yield finding("policy-unknown", where, found, fix)
    elif settings.store and policy != "recompute":
        found = f"kv_load_failure_policy: got {policy!r}, expected recompute with a store"
        yield finding("policy-unknown", where, found, fix)
    elif policy is None:
        found = "kv_load_failure_policy is not set, and vLLM's default is fail: a failed handoff is an HTTP 500"
        yield finding("policy-default", where, found, fix)


def _launch(launch: Launch) -> Iterator[Finding]:
    where = launch.where
    for name in NOT_SUPPORTED:
        value = launch.option(name)
        if value.isdigit() and int(value) > 1:
            found = f"{name}: {value} is not supported by this version"
            yield finding("parallel-unsupported", where, found, f"leave out {_flag(name)} and run {value} engines")
    if _is_set(launch, "enable_elastic_ep"):
        found = "enable_elastic_ep: ranks that come and go while they serve are not supported by this version"
        yield finding("parallel-unsupported", where, found, "leave it out, and start another engine to scale")
    if _is_set(launch, "calculate_kv_scales"):
        found = "calculate_kv_scales makes the KV of two engines differ"
        yield finding("parallel-unsupported", where, found, "remove it, and use static scales")


def _refused(launch: Launch, transport: str, device: str) -> Iterator[Finding]:
    asked = supported.AskedConfig(
        device=device,
        transport=transport,
        sleeps=_is_set(launch, "enable_sleep_mode"),
        cumem=_is_set(launch, "enable_cumem_allocator"),
        allocator=supported.allocator_of(launch.variables),
        nodes=_number(launch, "nnodes"),
        executor=launch.option("distributed_executor_backend"),
        ranks=_number(launch, "tensor_parallel_size") * _number(launch, "pipeline_parallel_size"),
    )
    for found, fix in supported.refusals(asked):
        yield finding("parallel-unsupported", launch.where, found, fix)


def _is_set(launch: Launch, name: str) -> bool:
    return launch.option(name) in {"True", "true"}


def _number(launch: Launch, name: str) -> int:
    text = launch.option(name)
    return int(text) if text.isdigit() and int(text) > 0 else 1


def _model(launch: Launch) -> Iterator[Finding]:
    model = Path(launch.option("model"))
    if model.parts and (model.is_absolute() or model.parts[0] in {".", ".."}) and not (model / "config.json").is_file():
        found = f"model: {model} has no config.json"
        yield finding(
            "model-missing", launch.where, found, "name the directory of a model, or run doctor on the host that has it"
        )


def _settings(launch: Launch, extra: Mapping[str, Any]) -> tuple[ConnectorSettings | None, list[Finding]]:
    """The settings without the invalid ones; None where that leaves nothing."""
    known = [field.name for field in msgspec.structs.fields(ConnectorSettings)]
    found = [_unknown(launch.where, f"{FIELD}.{key}", key, known) for key in extra if key not in known]
    left = {key: value for key, value in extra.items() if key in known}
    for _ in range(len(left) + 1):
        try:
            told = ConnectorSettings.parse(left)
            with contextlib.suppress(ControlError):  # a registry that cannot be found from here
                told = told.settled()
            return told, found
        except ValueError as error:
            field = _field(str(error))
            found.append(_invalid(launch.where, field, str(error)))
            if left.pop(field, None) is None:
                break
    return None, found


def _http(launch: Launch, settings: ConnectorSettings) -> Iterator[Finding]:
    """Where the server listens, and the address that it registers."""
    if launch.options is None:
        return
    port, told = launch.option("port") or "8000", (settings.http_address or "").rpartition(":")[2]
    if told and told != port:
        found = f"http_address: {settings.http_address}, but the server listens on port {port}: unreachable"
        yield finding("http-mismatch", launch.where, found, f"set http_address to {_host(settings)}:{port}")
    host = launch.option("host")
    if host in ANYWHERE and not launch.option("api_key"):
        found = f"the server listens on {host or 'every address (no --host)'} without --api-key"
        yield finding("http-open", launch.where, found, "add --host with an address that only the router can reach")


def _host(settings: ConnectorSettings) -> str:
    return (settings.http_address or "").rpartition(":")[0]


# --- the embedded engine


class _Words(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(message)


def _worker_options(launch: Launch) -> tuple[WorkerOptions | None, list[Finding]]:
    worker_command = importlib.import_module("kvbaton.cli.worker")
    parser = _Words(add_help=False, allow_abbrev=False)
    worker_command.add_arguments(parser)
    known = [option for action in parser._actions for option in action.option_strings]
    found: list[Finding] = []
    try:
        args, unknown = parser.parse_known_args(list(launch.worker or ()))
        flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        found = [_unknown(launch.where, flag, flag, known) for flag in flags if flag != "--debug"]
        options: WorkerOptions = worker_command.options_of(args)
        with contextlib.suppress(ControlError):
            options = options.settled(options.name)
    except CommandError as error:
        text = str(error).partition("; see: ")[0]
        named = re.search(r"--([a-z-]+)", text)
        return None, [*found, _invalid(launch.where, named[1].replace("-", "_") if named else "", text)]
    if not options.keys and not options.join_token_file:
        text = f"--keys: there is none, and no --join-token-file; {TOKEN_ENV} must hold a token where it starts"
        found.append(finding("keys-missing", launch.where, text, "give --keys DIR, or --join-token-file FILE"))
    if options.role not in (roles := ROLES[launch.side]):
        text = f"role: got {options.role}, expected {' or '.join(roles)} for the {launch.side} side"
        found.append(finding("role-wrong", launch.where, text, f"set --role {roles[0]}"))
    if not is_loopback(options.http_host) and not options.http_is_guarded:
        text = f"http_access: {options.http_access} on {options.http_host}: anyone who can reach it can send requests"
        found.append(finding("http-open", launch.where, text, "set --http-access keys, or listen on loopback"))
    return options, found


# --- both


def _times(engine: ConfiguredEngine) -> Iterator[Finding]:
    told = engine.told
    assert told is not None
    for field in ("transfer_timeout", "defer_timeout"):
        if getattr(told, field) > engine.max_hold_s:
            found = f"{field} ({getattr(told, field):g} s) is above max_hold_s ({engine.max_hold_s:g} s), which ends it"
            fix = f"set {field} to at most {engine.max_hold_s:g}"
            yield finding("time-contradiction", engine.where, found, fix)


def _addresses(where: str, told: ConnectorSettings | WorkerOptions) -> Iterator[Finding]:
    host = told.control_host
    if host in ANYWHERE:
        found = f"control_host: {host!r} is a wildcard: it listens everywhere, and peers cannot connect to it"
        yield finding("control-wildcard", where, found, "set control_host to the address at which peers reach it")
    encrypt: Encrypt = told.encrypt
    try:
        check(encrypt, host)
    except ValueError as error:
        found = str(error).partition(f", and {MISSING}")[0]
        yield finding("encrypt-missing", where, found, MISSING.rpartition(": ")[2])


def _unknown(where: str, said: str, key: str, known: Iterable[str]) -> Finding:
    close = difflib.get_close_matches(key, list(known), 1, 0.6)
    fix = (
        f"did you mean {close[0]}?" if close else "remove it; docs/vllm.md and kvbaton worker --help list the settings"
    )
    return finding("setting-unknown", where, f"{said}: unknown setting", fix)


def _invalid(where: str, field: str, text: str) -> Finding:
    code = _BY_FIELD.get(field, "setting-invalid")
    expected = text.partition(", expected ")[2]
    fix = f"change {field}: {expected}" if expected else f"correct {field or 'it'}"
    if field == "ticket_ttl_s" and "at most" in text:
        code = "ticket-ttl"
    elif field == "max_hold_s" and "below" in text:
        code, fix = "time-contradiction", "raise max_hold_s, or lower lease_s"
    elif field == "keys":
        fix = "kvbaton keys new DIR router p0 d0, then set keys to DIR"
    return finding(code, where, text, fix)


def _field(text: str) -> str:
    match = _NAMED.search(text)
    return (match[1] or match[2]) if match else ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
