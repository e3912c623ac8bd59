"""Parameters that no P ever gave: what a client can send to D's own port in place of them.

Law: pure, and the same for both connectors: a mutation names what a part of the parameters is for (source, blocks),
and a connector says in which field it keeps that. kvbaton keeps all of it in its ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Params = Mapping[str, Any]

FIELDS: Mapping[str, Mapping[str, str]] = {
    "nixl": {"source": "remote_engine_id", "blocks": "remote_block_ids"},
    "kvbaton": {"source": "ticket", "blocks": "ticket"},
}


def poisoned(name: str, connector: str, params: Params) -> dict[str, Any]:
    """What P gave, changed as `name` says; KeyError if there is no such change."""
    fields = FIELDS[connector]
    missing = sorted(field for field in set(fields.values()) if field not in params)
    if missing:
        raise ValueError(f"kv_transfer_params: P gave no {missing[0]}; is this {connector}?")
    return _CHANGES[name](dict(params), fields["source"], fields["blocks"])


def _without(params: Params, field: str) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != field}


def _half(value: Any) -> Any:
    """The first half of a ticket's characters or of each group's blocks."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [_half(group) for group in value]
    return value[: len(value) // 2]


def _huge(value: Any) -> Any:
    """2**62 wherever a number could be."""
    if isinstance(value, list):
        return [_huge(each) for each in value]
    return 2**62


_CHANGES: Mapping[str, Callable[[dict[str, Any], str, str], dict[str, Any]]] = {
    "only the flag": lambda params, source, blocks: {"do_remote_prefill": True},
    "both flags": lambda params, source, blocks: {**params, "do_remote_prefill": True, "do_remote_decode": True},
    "no source": lambda params, source, blocks: _without(params, source),
    "no blocks": lambda params, source, blocks: _without(params, blocks),
    "empty blocks": lambda params, source, blocks: {**params, blocks: type(params[blocks])()},
    "half the blocks": lambda params, source, blocks: {**params, blocks: _half(params[blocks])},
    "a number of 2**62": lambda params, source, blocks: {**params, blocks: _huge(params[blocks])},
    "a list as source": lambda params, source, blocks: {**params, source: ["x"]},
    "unknown source": lambda params, source, blocks: {**params, source: "nobody-of-this-name"},
}
