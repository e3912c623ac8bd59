"""What SGLang says of its KV cache (`KVArgs`) as a layout of the protocol, and what of it cannot be handed over.

`KVArgs` has raw addresses: of each layer its K, then of each layer its V, or one latent buffer a layer. A page is
`page_size` rows of tokens, in every buffer at the same number. So each buffer is a layer of one group, of which a page
is a block; how a row is ordered inside is the engines' own affair, and in the compatibility key. The metadata rows are
a second group, of one state each.

Law: the protocol has 64 regions a rank. More buffers than that are more of the protocol's ranks, all in this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbaton.engines.sglang.metadata_rows import ROW_BYTES, Storage
from kvbaton.protocol.geometry.layout import (
    Cell,
    EngineLayout,
    Group,
    GroupKind,
    Per,
    Place,
    Plane,
    Rank,
    Share,
    planes,
    validate,
)
from kvbaton.protocol.numbers import BLOCK_TOKENS_MAX, REGIONS_MAX

KV, METADATA = 0, 1
"""The groups."""


class NotHandedOver(RuntimeError):
    """This engine cannot hand KV over, and why."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One of SGLang's buffers, as storages of tensors are."""

    address: int
    size: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


_ONE = ("tp_size", "dp_size", "pp_size", "dcp_size", "attn_cp_size", "ep_size")
_OFF: Mapping[str, str] = {
    "enable_dp_attention": "DP attention",
    "enable_hisparse": "HiSparse",
    "enable_pd_role_switch": "the change of roles",
    "disaggregation_decode_enable_radix_cache": "D's radix cache",
    "disaggregation_decode_enable_offload_kvcache": "D's KV offload",
    "enable_lora": "LoRA adapters, which are loaded by name alone",
    "lora_paths": "LoRA adapters, which are loaded by name alone",
    "enable_unified_memory": "the unified memory, whose pages have two numbers",
    "speculative_algorithm": "speculative decoding",
}
STAGING_ENV = "SGLANG_DISAGG_STAGING_BUFFER"


def refusals(args: Any, server_args: Any) -> Iterator[str]:
    """What is asked for that is not handed over, each by its name in SGLang."""
    for name in _ONE:
        if (getattr(server_args, name, None) or 1) != 1:
            yield f"--{name.replace('_', '-')} {getattr(server_args, name)}: 1 is handed over"
    for name, what in _OFF.items():
        if getattr(server_args, name, None):
            yield f"--{name.replace('_', '-')}: {what} is not handed over"
    if (share := getattr(server_args, "disaggregation_decode_host_receive_threshold", 1)) < 1:
        yield f"--disaggregation-decode-host-receive-threshold {share}: pages of the host are not handed over"
    if (policy := getattr(server_args, "disaggregation_decode_allocation_policy", "early")) != "early":
        yield f"--disaggregation-decode-allocation-policy {policy}: D always waits for P"
    if os.environ.get(STAGING_ENV, "0").lower() not in ("", "0", "false"):
        yield f"{STAGING_ENV}: P and D have the same number of ranks, and nothing is staged"
    if kinds := [getattr(kind, "value", kind) for kind in getattr(args, "state_types", None) or ()]:
        yield f"a model with layers of {', '.join(sorted(set(kinds)))}: their states are not handed over"
    if getattr(args, "num_draft_entries", 0):
        yield "a draft model: its cache is not handed over"
    if not args.kv_data_ptrs:
        yield "a KV cache without buffers"
    elif len(set(args.kv_item_lens)) > 1 or len({*_pages(args)}) > 1:
        yield "KV buffers of different sizes: only layers that are alike are handed over"


def check(args: Any, server_args: Any) -> None:
    """`NotHandedOver` names all that is refused."""
    if found := list(refusals(args, server_args)):
        raise NotHandedOver(f"kvbaton: not with this SGLang: {'; '.join(found)}. See docs/sglang.md")


def _pages(args: Any) -> list[int]:
    return [length // item for length, item in zip(args.kv_data_lens, args.kv_item_lens, strict=True)]


@dataclass(frozen=True)
class SglangMemory:
    """An engine's KV cache: how it is laid out, and what the protocol's ranks have of it."""

    layout: EngineLayout
    pages: int
    slots: int
    storages: tuple[tuple[Storage, ...], ...]  # of each of the protocol's ranks

    @property
    def blocks(self) -> int:
        return self.pages + self.slots


def memory_of(args: Any, slots: int, rows: Storage, *, latent: bool) -> SglangMemory:
    """Of arguments that passed `check`; `rows` has one row for each page, which nobody uses, and then for each slot."""
    pages, item = _pages(args)[0], int(args.kv_item_lens[0])
    page_tokens = int(args.page_size)
    if item % page_tokens:
        raise NotHandedOver(f"kvbaton: a page of {item} bytes is not {page_tokens} tokens")
    buffers = [Buffer(address, size) for address, size in zip(args.kv_data_ptrs, args.kv_data_lens, strict=True)]
    parts = [buffers[at : at + REGIONS_MAX - 1] for at in range(0, len(buffers), REGIONS_MAX - 1)]
    token, row = (Cell("rows", item // page_tokens),), (Cell("row", ROW_BYTES, Per.PAGE),)
    groups = (
        Group(
            "kv",
            GroupKind.LATENT if latent else GroupKind.FULL,
            page_tokens,
            tuple(f"buffer.{number}" for number in range(len(buffers))),
            heads=1,
            cells=token,
            dtype=str(getattr(args, "kv_cache_dtype_str", None) or "bytes"),
        ),
        Group("metadata", GroupKind.STATE, BLOCK_TOKENS_MAX, ("row",), heads=1, cells=row, dtype="bytes"),
    )
    ranks, number = [], 0
    for stage, part in enumerate(parts):
        is_last = stage == len(parts) - 1
        kv = Share(
            head_start=0,
            head_count=1,
            block_count=pages,
            places=tuple(Place(number + region, 0, item, region) for region in range(len(part))),
            planes=planes("PHN", token, 1, page_tokens),
        )
        metadata = Share()
        if is_last:
            place = (Place(0, 0, ROW_BYTES, len(part)),)
            metadata = Share(0, 1, pages + slots, place, (Plane(0, ROW_BYTES, ROW_BYTES),))
        sizes = [each.size for each in part] + ([rows.nbytes()] if is_last else [])
        ranks.append(Rank(stage, 0, 0, tuple(sizes), (kv, metadata)))
        number += len(part)
    storages: Sequence[tuple[Storage, ...]] = [tuple(part) for part in parts]
    storages = [*storages[:-1], (*storages[-1], rows)]
    return SglangMemory(validate(EngineLayout(groups, tuple(ranks))), pages, slots, tuple(storages))
