"""Where vLLM's KV lies, in the words of the protocol's geometry: one rank's facts, and the engine's layout from them.

Laws: addresses are read from the registered tensors themselves (strides, storage), so a view of another shape is other
numbers and not other code. What cannot be described is refused at start, by the name of the layer and what is odd.

On CPU vLLM's attention keeps each head's K and then its V in an order of its own (by block size and instruction set),
so a head of a block is the smallest thing that moves. Elsewhere, and for MLA, rows of tokens are, and block sizes may
differ. A layer's state moves whole, whatever tensors it consists of, and from a rank to the same rank (decision 0019).

Every kind of cache that vLLM describes: what it is in the protocol's geometry, or why it is refused at start.

Laws: a kind is known by the name of its spec's class; a subclass that is not listed keeps other things in its pages,
and is refused. `tests/vllm` compares the table with the classes of the installed vLLM. Nothing of vLLM is imported
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import msgspec

from kvbaton.protocol.geometry.layout import (
    NAME_CHARS_MAX,
    Cell,
    EngineLayout,
    Group,
    GroupKind,
    Per,
    Place,
    Plane,
    Rank,
    Share,
    validate,
)

HANDED_OVER: Mapping[str, GroupKind] = {
    "FullAttentionSpec": GroupKind.FULL,
    "RSWASpec": GroupKind.FULL,  # its window is over generated tokens; the prompt stays whole
    "MLAAttentionSpec": GroupKind.LATENT,
    "SlidingWindowSpec": GroupKind.SLIDING,
    "SlidingWindowMLASpec": GroupKind.SLIDING,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNKED,
    "MambaSpec": GroupKind.STATE,
}
ONE_LATENT = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
"""One head of rows, the same on every tensor-parallel rank."""

REFUSED: Mapping[str, str] = {
    "SinkFullAttentionSpec": "its sinks lie in blocks that no request's list names",
    "CircularBufferSpec": "it is a ring of keys to be compressed, and where the ring begins is not in the cache",
    "HiddenStateCacheSpec": "hidden states are extracted by the engine that computed them",
    "CrossAttentionSpec": "it is of an encoder's output, which is not the prompt's",
    "EncoderOnlyAttentionSpec": "an encoder alone has no KV that a decoder could go on from",
    "HiSparseHotSpec": "it holds copies of pages in host memory, which no other engine can find again",
    "HiSparseResidentSpec": "it holds pages that belong to host memory, and come and go",
}
CONTAINERS = frozenset({"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"})
"""No kinds of their own: bases, and a group of layers that have a spec each."""


def kind_of(layer: str, spec: Any) -> GroupKind:
    """ValueError names the layer, the spec and the reason."""
    name = type(spec).__name__
    kind = HANDED_OVER.get(name)
    why = REFUSED.get(name, "this version does not know what is in its pages")
    if kind is not None:
        why = _oddity(spec)
    if kind is None or why:
        raise ValueError(f"layer {layer}: caches of kind {name} are not handed over: {why}")
    return kind


def window_of(spec: Any, kind: GroupKind) -> int:
    """How many tokens back a layer looks; 0: all. What it keeps beyond for drafts is part of it."""
    if kind is GroupKind.SLIDING:
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    return int(spec.attention_chunk_size) if kind is GroupKind.CHUNKED else 0


def _oddity(spec: Any) -> str:
    """Why a spec of a kind that is handed over is not, after all."""
    if getattr(spec, "bounded_replay", False):
        return "bounded_replay: its window is computed again after a hit, and not kept"
    covered = getattr(spec, "tokens_per_state", 1)
    if type(spec).__name__ != "MambaSpec" and covered != 1:
        return f"tokens_per_state: {covered}: a row of it is not of one token"
    return ""


def stateful(kv_cache_config: Any) -> bool:
    """Whether a model has layers with states."""
    return any(type(spec).__name__ == "MambaSpec" for spec in layer_specs(kv_cache_config))


def state_blocks(kv_cache_config: Any) -> int:
    """Blocks of a state group that computing a request takes at most at one time."""
    found = [spec for spec in layer_specs(kv_cache_config) if type(spec).__name__ == "MambaSpec"]
    extra = ("num_speculative_blocks", "num_prefill_checkpoint_blocks")
    return max((2 + sum(getattr(spec, name, 0) for name in extra) for spec in found), default=0)


def layer_specs(kv_cache_config: Any) -> list[Any]:
    """Of all groups that are handed over; a group may hold layers of several shapes."""
    found = []
    for group in kv_cache_config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        if getattr(group, "enable_kv_transfer", True):
            found += [group.kv_cache_spec] if inner is None else list(inner.values())
    return found


class GroupFacts(msgspec.Struct, frozen=True):
    """Layers of one vLLM group, all of one shape, as one rank has them."""

    vllm_group: int
    kind: GroupKind
    block_tokens: int
    window: int
    heads: int  # of all ranks together
    head_start: int
    head_count: int
    dtype: str
    optional: bool
    cells: tuple[Cell, ...]
    planes: tuple[Plane, ...]
    layers: tuple[str, ...]
    places: tuple[Place, ...]
    block_count: int


class RankFacts(msgspec.Struct, frozen=True):
    """What a worker tells its scheduler of its cache."""

    pp: int
    tp: int
    region_bytes: tuple[int, ...]
    groups: tuple[GroupFacts, ...]
    page: str  # how the inside of a page is ordered, for the compatibility key


class Parallel(msgspec.Struct, frozen=True):
    """Where a rank stands."""

    pp: int
    tp: int
    tp_size: int
    total_kv_heads: int


class VllmLayer(msgspec.Struct, frozen=True):
    """One layer's tensor."""

    name: str
    region: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    item: int
    dtype: str


def regions_of(tensors: Mapping[str, Any]) -> list[Any]:
    """The distinct storages behind the layers, each one region of memory. ValueError for what is no tensor."""
    found: dict[int, Any] = {}
    for name, tensor in tensors.items():
        if not hasattr(tensor, "untyped_storage"):
            raise ValueError(
                f"layer {name}: its cache is a {type(tensor).__name__}, not one tensor; states are handed over with "
                "vLLM 0.32 or newer"
            )
        storage = tensor.untyped_storage()
        found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def rank_facts(tensors: Mapping[str, Any], config: Any, parallel: Parallel, *, opaque_pages: bool) -> RankFacts:
    """The facts of this rank. ValueError names the layer or group that cannot be handed over."""
    storages = regions_of(tensors)
    starts = [storage.data_ptr() for storage in storages]
    groups: list[GroupFacts] = []
    for number, group in enumerate(config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue
        for spec, names in _by_spec(group):
            layers = [_layer(name, tensors[name], starts) for name in names if name in tensors]
            if layers:
                groups.append(_group(number, group, spec, layers, config.num_blocks, parallel, opaque_pages))
    if not groups:
        raise ValueError("kv_cache_groups: none of them has a cache that can be handed over")
    page = "heads of whole blocks" if opaque_pages and any(_opaque(group) for group in groups) else "rows of tokens"
    return RankFacts(parallel.pp, parallel.tp, tuple(s.nbytes() for s in storages), tuple(groups), page)


def engine_layout(ranks: Sequence[RankFacts]) -> EngineLayout:
    """One engine's layout from its ranks, in the order (pp, tp). ValueError where they do not fit together."""
    listed: dict[tuple[object, ...], list[str]] = {}
    for rank in ranks:
        for facts in rank.groups:
            names = listed.setdefault(_key(facts), [])
            names += [name for name in facts.layers if name not in names]
    groups = tuple(_named(index, key, tuple(names), ranks) for index, (key, names) in enumerate(listed.items()))
    found = EngineLayout(groups, tuple(_rank(rank, list(listed.items())) for rank in ranks))
    return validate(found)


def vllm_groups(ranks: Sequence[RankFacts]) -> tuple[int, ...]:
    """For each group of `engine_layout` the vLLM group whose block list it uses."""
    found = dict.fromkeys((_key(facts), facts.vllm_group) for rank in ranks for facts in rank.groups)
    return tuple(number for _, number in found)


def _by_spec(group: Any) -> Iterable[tuple[Any, list[str]]]:
    """Layers of a group with the spec they share; a group may hold layers of several page sizes."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if inner is None:
        return [(group.kv_cache_spec, list(group.layer_names))]
    found: list[tuple[Any, list[str]]] = []
    for name in group.layer_names:
        alike = next((names for spec, names in found if spec == inner[name]), None)
        if alike is None:
            found.append((inner[name], [name]))
        else:
            alike.append(name)
    return found


def _layer(name: str, tensor: Any, starts: Sequence[int]) -> VllmLayer:
    item = tensor.element_size()
    storage = tensor.untyped_storage()
    return VllmLayer(
        name,
        starts.index(storage.data_ptr()),
        tensor.data_ptr() - storage.data_ptr(),
        tuple(tensor.shape),
        tuple(stride * item for stride in tensor.stride()),
        item,
        _plain(tensor.dtype),
    )


def _group(
    number: int, group: Any, spec: Any, layers: list[VllmLayer], blocks: int, parallel: Parallel, opaque: bool
) -> GroupFacts:
    shape = layers[0]
    kind = kind_of(shape.name, spec)
    latent = type(spec).__name__ in ONE_LATENT
    if kind is GroupKind.STATE:
        interior = _state(shape, blocks, spec)
        heads, start = (1, 0) if getattr(spec, "tp_replicated", False) else (parallel.tp_size, parallel.tp)
    else:
        is_opaque = opaque and not latent
        interior = _opaque_page(shape, blocks) if is_opaque else _rows(shape, blocks, spec.block_size)
        heads, start = _heads(interior.heads, parallel, latent=latent)
    return GroupFacts(
        vllm_group=number,
        kind=kind,
        block_tokens=spec.block_size,
        window=window_of(spec, kind),
        heads=heads,
        head_start=start,
        head_count=interior.heads,
        dtype=_told(spec) if kind is GroupKind.STATE else _plain(getattr(spec, "dtype", shape.dtype)),
        optional=bool(getattr(group, "is_eagle_group", False)),
        cells=interior.cells,
        planes=interior.planes,
        layers=tuple(layer.name for layer in layers),
        places=tuple(_place(index, layer, shape, interior.block_stride) for index, layer in enumerate(layers)),
        block_count=blocks,
    )


class _Interior(msgspec.Struct, frozen=True):
    heads: int
    block_stride: int
    cells: tuple[Cell, ...]
    planes: tuple[Plane, ...]


def _opaque_page(layer: VllmLayer, blocks: int) -> _Interior:
    """CPU attention: [block, head, token, K and V], in which each head has all its K first and all its V after it."""
    shape, strides = layer.shape, layer.strides
    size = shape[-2] * shape[-1] * layer.item // 2
    if len(shape) != 4 or shape[0] != blocks or strides[1] != 2 * size:
        raise _odd(layer, f"{blocks} blocks of dense heads")
    cells = (Cell("k", size, Per.HEAD), Cell("v", size, Per.HEAD))
    return _Interior(shape[1], strides[0], cells, (Plane(0, strides[1], 0), Plane(size, strides[1], 0)))


def _rows(layer: VllmLayer, blocks: int, block_tokens: int) -> _Interior:
    """[block, head, token, bytes]: rows of tokens. A block may consist of several blocks of the kernel."""
    shape, strides = layer.shape, layer.strides
    ratio, rest = divmod(shape[0], blocks)
    if len(shape) != 4 or rest or shape[2] * ratio != block_tokens or strides[3] != layer.item:
        raise _odd(layer, f"{blocks} blocks of {block_tokens} tokens")
    if ratio > 1 and (shape[1] > 1 or strides[0] != shape[2] * strides[2]):
        raise _odd(layer, f"heads that lie together across {ratio} kernel blocks")
    cell = Cell("kv", shape[3] * layer.item)
    return _Interior(shape[1], strides[0] * ratio, (cell,), (Plane(0, strides[1], strides[2]),))


def _state(layer: VllmLayer, blocks: int, spec: Any) -> _Interior:
    """[block, bytes of all the state's tensors]; the rest of the page is padding."""
    shape, strides = layer.shape, layer.strides
    size = int(spec.state_content_size_bytes)
    inside = range(1, len(shape))
    dense = all(shape[at] == 1 or strides[at] == layer.item * prod(shape[at + 1 :]) for at in inside)
    if shape[0] != blocks or prod(shape[1:]) * layer.item != size or not dense or strides[0] < size:
        raise _odd(layer, f"{blocks} states of {size} bytes")
    return _Interior(1, strides[0], (Cell("state", size, Per.PAGE),), (Plane(0, 0, 0),))


def _told(spec: Any) -> str:
    """A state's tensors, as both sides must have them."""
    kind = getattr(spec.mamba_type, "name", spec.mamba_type)
    tensors = " ".join(
        f"{'x'.join(map(str, shape))}:{_plain(dtype)}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return f"{kind} {tensors}"[:NAME_CHARS_MAX]


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _odd(layer: VllmLayer, expected: str) -> ValueError:
    got = f"a cache of shape {layer.shape} with strides {layer.strides}"
    return ValueError(f"layer {layer.name}: {got}, expected {expected}; see docs/vllm.md for supported versions")


def _heads(mine: int, parallel: Parallel, *, latent: bool) -> tuple[int, int]:
    """(heads of all ranks, the first of ours). With more ranks than heads, neighbours have the same one."""
    if latent:
        return 1, 0
    if parallel.total_kv_heads >= parallel.tp_size:
        return mine * parallel.tp_size, mine * parallel.tp
    return parallel.total_kv_heads, parallel.tp * parallel.total_kv_heads // parallel.tp_size


def _place(index: int, layer: VllmLayer, first: VllmLayer, block_stride: int) -> Place:
    if (layer.shape, layer.strides) != (first.shape, first.strides):
        raise ValueError(f"layer {layer.name}: its cache has another shape than that of {first.name} in its group")
    return Place(index, layer.offset, block_stride, layer.region)


def _opaque(facts: GroupFacts) -> bool:
    return any(cell.per is Per.HEAD for cell in facts.cells)


def _key(facts: GroupFacts) -> tuple[object, ...]:
    """What must be equal on every rank for layers to be one group."""
    return (facts.vllm_group, facts.kind, facts.block_tokens, facts.window, facts.heads, facts.cells, facts.dtype)


def _named(index: int, key: tuple[object, ...], layers: tuple[str, ...], ranks: Sequence[RankFacts]) -> Group:
    facts = next(facts for rank in ranks for facts in rank.groups if _key(facts) == key)
    return Group(
        name=f"{index}.{facts.kind}",
        kind=facts.kind,
        block_tokens=facts.block_tokens,
        layers=layers,
        heads=facts.heads,
        cells=facts.cells,
        dtype=facts.dtype,
        window=facts.window,
        optional=facts.optional,
    )


def _rank(rank: RankFacts, listed: list[tuple[tuple[object, ...], list[str]]]) -> Rank:
    shares: list[Share] = []
    for key, names in listed:
        facts = next((each for each in rank.groups if _key(each) == key), None)
        if facts is None:
            shares.append(Share())
            continue
        places = tuple(
            msgspec.structs.replace(place, layer=names.index(name))
            for name, place in zip(facts.layers, facts.places, strict=True)
        )
        shares.append(Share(facts.head_start, facts.head_count, facts.block_count, places, facts.planes))
    return Rank(pp=rank.pp, tp=rank.tp, dcp=0, region_bytes=rank.region_bytes, shares=tuple(shares))
