"""What a vLLM request's KV is of, and up to where it is handed over.

Laws: P and D compute the digest each from its own request, never from what the other says (rule 2). What takes long to
look at (an adapter's files, prompt embeddings) is looked at on a thread of ours (`Looker`), never in a hook; what is
not known in time, or cannot be known, is named by a text that only this process has: its KV is shared with nobody.

What is in a LoRA adapter: a text that two engines share if, and only if, they have the same files.

Laws: an adapter is known by the names and bytes of all its files, sub-folders included, wherever they lie; its path
stands for nothing. One that cannot be looked at, or that changed since it was first asked for, is named by a text that
only this process has: the engine may compute with what was there before. Reads files: never called in a hook.

Work that is too long for a hook, on one thread of ours: asked for by request, told when it is there.

Laws: no method waits. What is asked for is bounded in number and in time; beyond either the answer is that nothing is
known, and it stays so for that request. Work that raises is counted, and answers nothing.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from kvbaton.engines.side.guard import note
from kvbaton.engines.side.protocols import EndedTurn, Grouping
from kvbaton.engines.vllm import continued_requests
from kvbaton.engines.vllm.content import vllm_compat
from kvbaton.engines.vllm.content.weights_epoch import salted
from kvbaton.protocol.content import Content

WAITING_MAX = 256
"""Requests whose turn has not come; a further one is not waited for."""
WAIT_S = 10.0
"""From the first question: a 300 MB adapter is read in about one second, and then known."""

T = TypeVar("T")


@dataclass(slots=True)
class _Ask(Generic[T]):
    work: Callable[[], T] | None
    until: float
    found: T | None = None
    is_over: bool = False  # found, given up, or not taken at all


class Looker(Generic[T]):
    """One thread, started when it is first needed."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Condition()
        self._asks: dict[str, _Ask[T]] = {}
        self._queue: deque[_Ask[T]] = deque()
        self._thread: threading.Thread | None = None

    def ask(self, name: str, work: Callable[[], T]) -> bool:
        """Whether there is an answer for `name`; the first question has `work` done."""
        with self._lock:
            ask = self._asks.get(name)
            if ask is None:
                ask = self._asks[name] = self._begun(work)
            elif not ask.is_over and self._clock() >= ask.until:
                ask.is_over, ask.work = True, None
            return ask.is_over

    def found(self, name: str) -> T | None:
        """What was found for `name`: nothing while it is looked for, or when it was given up."""
        with self._lock:
            ask = self._asks.get(name)
            return None if ask is None else ask.found

    def forget(self, name: str) -> None:
        with self._lock:
            ask = self._asks.pop(name, None)
            if ask is not None:
                ask.is_over, ask.work = True, None

    def _begun(self, work: Callable[[], T]) -> _Ask[T]:
        ask = _Ask(work, self._clock() + WAIT_S)
        while self._queue and self._queue[0].work is None:
            self._queue.popleft()
        if len(self._queue) >= WAITING_MAX:
            ask.is_over, ask.work = True, None
            return ask
        self._queue.append(ask)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._lock.notify()
        return ask

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    self._lock.wait()
                ask = self._queue.popleft()
                work = ask.work
            if work is None:
                continue
            found = None
            try:
                found = work()
            except Exception as error:  # noqa: BLE001 - promise 4: whatever it was, nothing is known
                note("content", error)
            with self._lock:
                if not ask.is_over:  # else it came too late for its request
                    ask.found, ask.is_over, ask.work = found, True, None


log = logging.getLogger(__name__)

ADAPTERS_MAX = 256
FILES_MAX = 1024
"""Of one adapter, which has a handful."""
ONLY_HERE = secrets.token_hex(16)

Stamp = tuple[str, int, int, int, int, int]
"""A file's name below its adapter, and what changes with its content: device, inode, size, mtime and ctime."""

_seen: dict[tuple[int, str], str] = {}
"""Adapters as they were when first asked for, which is soon after vLLM loaded them; the first `ADAPTERS_MAX`."""
_said: set[str] = set()


def adapter_text(number: int, path: str) -> str:
    """What names this adapter's content. `number` is vLLM's own of it: loaded anew, it has another."""
    now, key = _now(path), (number, path)
    if now is None:
        return f"{path}:{ONLY_HERE}"
    if key not in _seen and len(_seen) >= ADAPTERS_MAX:
        return f"{now}:{ONLY_HERE}"
    return now if _seen.setdefault(key, now) == now else f"{now}:{ONLY_HERE}"


def _now(path: str) -> str | None:
    """The digest of its files as they are now; None where that cannot be told."""
    try:
        place = _place(path)
        stamps = _stamps(place)
        found = _digest(str(place), stamps)
        if _stamps(place) == stamps:
            return found
        why = "its files changed while they were read"
    except (OSError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    if path not in _said and len(_said) < ADAPTERS_MAX:
        _said.add(path)
        said = (
            "[adapter-unknown] kvbaton: adapter %s cannot be told by its files (%s): KV made with it is not handed over"
        )
        log.warning(said, path, why)
    return None


def _place(path: str) -> Path:
    """Where vLLM finds an adapter: a folder, or a hub's id whose snapshot it has in this host's cache."""
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.exists():
        raise ValueError("it is no folder")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:  # noqa: BLE001 - whatever it is, there are no files to look at
        raise ValueError(f"no folder, and no snapshot in this host's cache ({type(error).__name__})") from None


def _stamps(place: Path) -> tuple[Stamp, ...]:
    """Of all its files, through links; hidden ones are a download's or a repository's own book-keeping."""
    found: list[Stamp] = []
    entered: set[tuple[int, int]] = set()
    for folder, names, files in os.walk(place, followlinks=True, onerror=_raise):
        at = os.stat(folder)
        if (at.st_dev, at.st_ino) in entered:
            raise ValueError("a folder of it is linked twice")
        entered.add((at.st_dev, at.st_ino))
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(name for name in files if not name.startswith(".")):
            file = Path(folder) / name
            it = file.stat()
            below = file.relative_to(place).as_posix()
            found.append((below, it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns))
            if len(found) > FILES_MAX:
                raise ValueError(f"more than {FILES_MAX} files")
    if not found:
        raise ValueError("it has no files")
    return tuple(sorted(found))


def _raise(error: OSError) -> None:
    raise error


@functools.lru_cache(maxsize=ADAPTERS_MAX)
def _digest(place: str, stamps: tuple[Stamp, ...]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for below, _, _, size, _, _ in stamps:
        name = below.encode(errors="surrogateescape")
        state.update(b"%d %b %d " % (len(name), name, size))
        with (Path(place) / below).open("rb") as file:
            state.update(hashlib.file_digest(file, "blake2b").digest())
    return state.hexdigest()


class PromptParts(msgspec.Struct, frozen=True):
    """Of a request, what takes long to look at."""

    lora: str = ""
    embeddings: bytes = b""


UNKNOWN = PromptParts(ONLY_HERE, ONLY_HERE.encode())
"""Of a request whose parts are not known in time."""


def handed_position(prompt_tokens: int, windowed: bool, states: bool = False, lookahead: int = 0) -> int:
    """How many tokens of a prompt are handed over: all, or one fewer where a window slides or a layer keeps a state.

    D always computes the last token again, to have something to sample from. Behind a window that token still looks one
    token further back than the next one does, and vLLM drops that block at the end of a prefill: so D takes over one
    token less, and P pins what the last token needed. A state that has counted that token cannot be used to compute it:
    P stops before it, and of a prompt of one token there is nothing to hand over. Where drafters look `lookahead`
    tokens ahead, D computes as many positions itself (`drafting`).
    """
    if lookahead > 1:
        return max(prompt_tokens - lookahead, 0)
    if states:
        return prompt_tokens - 1
    return prompt_tokens - 1 if windowed and prompt_tokens > 1 else prompt_tokens


def content_of(request: Any, position: int) -> Content:
    """All that shapes the KV of a request's first `position` tokens: what vLLM's own block hashes cover, and more."""
    parts = _parts(request)
    return Content(
        tokens=continued_requests.tokens_of(request),
        position=position,
        lora=parts.lora,
        multimodal=tuple(_feature(feature) for feature in getattr(request, "mm_features", None) or ()),
        salt=salted(request),
        embeddings=parts.embeddings,
    )


def turn_content(request: Any, upto: int) -> Content | None:
    """Of the first `upto` tokens of a prompt and its answer, and of the pictures that begin among them."""
    if request.prompt_token_ids is None:
        return None
    content = content_of(request, upto)
    told = zip(getattr(request, "mm_features", None) or (), content.multimodal, strict=True)
    shown = tuple(text for feature, text in told if feature.mm_position.offset < upto)  # in whatever order they are
    return msgspec.structs.replace(content, tokens=list(request.all_token_ids[:upto]), multimodal=shown)


looker: Looker[PromptParts] = Looker("kvbaton-content")
"""One for the scheduler's process."""


def takes_long(request: Any) -> bool:
    return getattr(request, "lora_request", None) is not None or getattr(request, "prompt_embeds", None) is not None


def is_known(request: Any) -> bool:
    """Whether `content_of` has an answer now, whatever it is; begins to look at the request. Never blocks."""
    return not takes_long(request) or looker.ask(request.request_id, lambda: parts_of(request))


def shorten(request: Any, tokens: int, hash_tokens: int = 0, *, drafts: bool = False) -> None:
    """Let vLLM compute the first `tokens` tokens of a prompt and end, before it has looked at the request.

    `hash_tokens`: how many tokens one of the request's block hashes covers, where that is known. `drafts`: a drafter
    computes the prompt too, and must see which token comes after it.
    """
    if drafts and request.prompt_token_ids is not None:
        vllm_compat.answers_with(request, request.prompt_token_ids[tokens])
    dropped = request.num_prompt_tokens - tokens
    if request.prompt_token_ids is not None:
        request.prompt_token_ids = request.prompt_token_ids[:tokens]
    if getattr(request, "prompt_embeds", None) is not None:
        request.prompt_embeds = request.prompt_embeds[:tokens]
    del request._all_token_ids[len(request._all_token_ids) - dropped :]
    if hash_tokens:
        del request.block_hashes[tokens // hash_tokens :]
    request.num_prompt_tokens = tokens
    request.max_tokens = 1


class VllmRequests:
    """vLLM's requests, as the sides read them."""

    def __init__(self, grouping: Grouping, hash_tokens: int = 0) -> None:
        """`hash_tokens`: how many tokens one of vLLM's block hashes covers."""
        self._grouping = grouping
        self._hash_tokens = hash_tokens

    def handed_tokens(self, request: Any) -> int:
        grouping = self._grouping
        tokens = continued_requests.handed_tokens(request)
        return handed_position(tokens, grouping.slides, grouping.stateful, grouping.lookahead)

    def content(self, request: Any, position: int) -> Content:
        return content_of(request, position)

    def ended_turn(self, request: Any) -> EndedTurn | None:
        params = request.kv_transfer_params
        keep = params.get("keep") if isinstance(params, dict) else None
        if keep is None or request.prompt_token_ids is None:
            return None
        if getattr(request, "resumable", False):  # a session whose prompt grows: what its tokens are changes
            return None
        return EndedTurn(keep, request.num_tokens - 1)

    def turn_content(self, request: Any, upto: int) -> Content | None:
        return turn_content(request, upto)

    def tokens(self, request: Any, first: int, last: int) -> Sequence[int]:
        """With embeddings in the place of tokens none are known."""
        return () if request.prompt_token_ids is None else list(request.all_token_ids[first:last])

    def wants_whole_prompt(self, request: Any) -> bool:
        reads_all = bool(getattr(request, "skip_reading_prefix_cache", False))
        return reads_all or getattr(request, "pooling_params", None) is not None

    def shorten(self, request: Any, tokens: int, *, drafts: bool = False) -> None:
        shorten(request, tokens, self._hash_tokens, drafts=drafts)

    def arrived_at(self, request: Any) -> float | None:
        """When vLLM's front end took the request in: steps that ran meanwhile are part of its wait."""
        at = getattr(request, "arrival_time", None)
        return float(at) if isinstance(at, int | float) else None


def forget(request: Any) -> None:
    """The request is over."""
    looker.forget(request.request_id)


def parts_of(request: Any) -> PromptParts:
    """Reads files and hashes tensors: for a thread of its own."""
    lora = getattr(request, "lora_request", None)
    text = "" if lora is None else f"{lora.lora_name}:{adapter_text(lora.lora_int_id, lora.lora_path)}"
    return PromptParts(text, _embeddings(getattr(request, "prompt_embeds", None)))


def _parts(request: Any) -> PromptParts:
    if not takes_long(request):
        return PromptParts()
    found = looker.found(request.request_id)
    return UNKNOWN if found is None else found


def _feature(feature: Any) -> str:
    place = feature.mm_position
    return f"{feature.modality}:{feature.identifier}@{place.offset}+{place.length}"


def _embeddings(tensor: Any) -> bytes:
    if tensor is None:
        return b""
    import torch

    data = tensor.detach().cpu().contiguous()
    state = hashlib.blake2b(f"{tuple(data.shape)} {data.dtype}".encode(), digest_size=16)
    state.update(memoryview(data.view(torch.uint8).numpy()).cast("B"))  # without a copy, and without the GIL
    return state.digest()
