"""The manager that SGLang makes once a scheduler process: memory, node and cluster of one SGLang engine.

One file says who this engine is, with the keys of vLLM's `kv_connector_extra_config` (`ConnectorSettings`); its path is
in `KVBATON_SGLANG_CONFIG`. What SGLang itself knows (its role, its cache, its model) is asked of it.

Laws: what is not handed over is refused here, before anything listens. A prefill engine's control socket is at the port
after its bootstrap port, unless the file says another: that is how D finds the member behind the `bootstrap_host` and
`bootstrap_port` of a request, among those that discovery named; an address that it did not name leads nowhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from kvbaton.api.params import CONTROL_AFTER_BOOTSTRAP, SGLANG
from kvbaton.control.addressing import split_endpoint
from kvbaton.engines.sglang.handoffs import Handoffs, HowEnded
from kvbaton.engines.sglang.metadata_rows import DeviceRows, HostRows, MetadataBuffers, Rows
from kvbaton.engines.sglang.sglang_layout import NotHandedOver, check, memory_of
from kvbaton.engines.shared.caches import DeviceCache, HostCache, planes_over
from kvbaton.engines.shared.connector_settings import FIELD, ConnectorSettings
from kvbaton.engines.shared.presence import Presence
from kvbaton.engines.shared.store_setup import enrolment_of
from kvbaton.engines.shared.weights_digest import weights_digest
from kvbaton.node.cluster_node import EngineFacts, new_life
from kvbaton.node.pin_budget import budget_of
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import LeaseId, WorkerId
from kvbaton.protocol.legality import Role
from kvbaton.protocol.machines.lease import ReaderState
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.ranks.rank_host import RankHost

CONFIG_ENV = "KVBATON_SGLANG_CONFIG"


def settings_of(environ: Mapping[str, str] = os.environ) -> ConnectorSettings:
    """This engine's file; ValueError names the file and the key that is wrong."""
    path = environ.get(CONFIG_ENV, "")
    settings = read_settings(path, CONFIG_ENV)
    if settings.store or settings.turn_s or settings.moriio is not None:
        raise ValueError(f"{CONFIG_ENV}: {path}: store, turn_s and moriio are not served here (docs/sglang.md)")
    return settings


def read_settings(path: str, named: str) -> ConnectorSettings:
    """`named`: where the path was given."""
    if not path:
        raise ValueError(f"{named}: not set; expected the path of a JSON file with name, keys and registry")
    try:
        told = json.loads(Path(path).read_text())
        if not isinstance(told, dict):
            raise ValueError("not an object")
        return ConnectorSettings.parse(told).settled()
    except (OSError, ValueError) as error:
        raise ValueError(f"{named}: {path}: {str(error).removeprefix(FIELD + '.')}") from None


def how_ended(ledger: Ledger) -> HowEnded:
    """Of a lease that this ledger has released; read after its `UnpinBlocks` came, which is behind it."""

    def look(lease: LeaseId) -> Reason | None:
        found = ledger.producer.tombstones.get(lease)
        if found is None:
            return Reason.UNKNOWN_LEASE
        if any(seat.state is ReaderState.COMMITTED for seat in found.seats.values()):
            return None
        return found.traffic.why_over or Reason.LEASE_EXPIRED

    return look


class OneRankEach:
    """What SGLang's prefill engines look like: SGLang asks before it makes a receiver, and must not wait for it."""

    follow_bootstrap_room = True
    dp_size = attn_tp_size = attn_cp_size = pp_size = 1

    def get(self, address: str) -> OneRankEach:
        return self


class BatonManager:
    """SGLang's `BaseKVManager` of one scheduler process."""

    enable_deferred_decode_kv_release = False
    supports_host_destination = False
    supports_role_switch = False
    supports_deferred_decode_kv_release = False
    enable_all_cp_ranks_for_transfer = False
    is_dummy_cp_rank = False
    no_metric: Callable[[], Any] = SimpleNamespace

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        settings = settings_of()
        check(args, server_args)
        role = Role(str(disaggregation_mode.value))
        port = int(server_args.disaggregation_bootstrap_port)
        if role is Role.PREFILL and not settings.control_port:
            settings = msgspec.structs.replace(settings, control_port=port + CONTROL_AFTER_BOOTSTRAP)
        self.kv_args = args
        self.prefill_info_table = OneRankEach()
        metadata = MetadataBuffers(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)
        device = str(getattr(server_args, "device", None) or "cuda")
        rows = rows_of(args, metadata.slots, device)
        memory = memory_of(args, metadata.slots, rows, latent=bool(is_mla_backend))
        caches = [_cache(storages, device, int(args.gpu_id)) for storages in memory.storages]
        enrolment = enrolment_of(settings, role)
        facts = EngineFacts(
            me=new_life(enrolment.keyring.name),
            role="prefill" if role is Role.PREFILL else "decode",
            blocks=memory.blocks,
            layout=memory.layout,
            compat=compat_key(args, server_args, settings.model_id),
            model=str(getattr(server_args, "served_model_name", None) or server_args.model_path),
        )
        host = settings.control_host
        self.hosts = [RankHost(rank, planes_over(cache, settings), host) for rank, cache in enumerate(caches)]
        for each in self.hosts:
            each.start()
        self.presence = Presence(settings, enrolment, facts, [each.invitation for each in self.hosts], modes=(SGLANG,))
        node = self.presence.node
        node.doorway.budget = budget_of(memory.pages, settings.pin_share, settings.pin_wait_s)
        self.handoffs = Handoffs(node.doorway, memory, rows, metadata, how_ended(node.ledger))
        self._rows = rows  # the transports' memory: for as long as they live
        self.presence.start()

    def register_to_bootstrap(self) -> None:
        """Discovery is the cluster's: routers and peers learn of this engine as of every other."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        return True

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        return True

    def source_at(self, bootstrap_addr: str) -> WorkerId | None:
        """The member whose bootstrap is at `host:port`."""
        try:
            host, port = split_endpoint(bootstrap_addr)
        except ValueError:
            return None
        host = "127.0.0.1" if host == "localhost" else host
        return self.presence.node.book.at(host, port + CONTROL_AFTER_BOOTSTRAP)

    def watch(self, allocator: Any, *, exact: bool) -> None:
        """The allocator whose pages these are. Not `exact`: not each of its ways to free them is told, so nothing is
        believed of a lease once its pages are let go."""
        self.presence.node.ledger.desk.identity.exact_epochs = exact
        allocator._kvbaton_freed = self.handoffs.freed

    def close(self) -> None:
        self.presence.stop()
        for each in self.hosts:
            each.stop()


def rows_of(args: Any, slots: int, device: str) -> Rows:
    count = int(args.kv_data_lens[0]) // int(args.kv_item_lens[0]) + slots
    if device == "cpu":
        return HostRows(count)
    if device != "cuda":
        raise NotHandedOver(f"kvbaton: --device {device}: only CUDA memory is handed over")
    return DeviceRows(count, int(args.gpu_id))


def _cache(storages: tuple[Any, ...], device: str, number: int) -> HostCache | DeviceCache:
    return HostCache(storages) if device == "cpu" else DeviceCache(storages, number)


def compat_key(args: Any, server_args: Any, model_id: str) -> dict[str, str]:
    """What changes the meaning of a page's bytes. No engine of another kind has the same."""
    asked = {
        name: str(getattr(server_args, name, None) or "default")[:200]
        for name in ("dtype", "kv_cache_dtype", "quantization", "json_model_override_args", "context_length")
    }
    return {
        "engine": "sglang",
        "weights": model_id or weights_digest(server_args.model_path, getattr(server_args, "revision", None)),
        **asked,
        "page": f"{args.page_size} tokens, {getattr(args, 'kv_layout', None) or 'rows of tokens'}",
        "kv": str(getattr(args, "kv_cache_dtype_str", None) or "unknown"),
        "metadata": ",".join(map(str, args.aux_item_lens)),
        "info.model": str(server_args.model_path)[-200:],
    }
