"""SGLang's metadata of a prompt (its first token, log probabilities, counts) as one row of memory that can be lent.

P's row is written when its prompt is complete, and is the last that D reads; D's is unpacked into SGLang's own buffers
after the commit. Laws: what does not fit is refused, and never cut. A row says of which room it is. Rows are numbered
after the pages: one space of block ids, so that an epoch belongs to one of them.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from typing import Any, Protocol

from kvbaton.protocol.errors import ProtocolError, Reason

ROW_BYTES = 2048
"""First token, counts and 128 top log probabilities take 1.3 KiB. The row of a drafter's hidden states does not fit."""
_HEAD = struct.Struct("<QH")
_PART = struct.Struct("<H")


class MetadataBuffers:
    """SGLang's buffers by address, one row for each slot; in the host's memory."""

    def __init__(self, addresses: Sequence[int], lengths: Sequence[int], row_bytes: Sequence[int]) -> None:
        self.slots = min(length // size for length, size in zip(lengths, row_bytes, strict=True))
        self._rows = [
            [address + slot * size for slot in range(self.slots)]
            for address, size in zip(addresses, row_bytes, strict=True)
        ]
        self._sizes = tuple(row_bytes)

    def pack(self, room: int, slot: int) -> bytes:
        """What the buffers have in this slot. `BAD_MESSAGE` where that is more than a row holds."""
        parts = [_HEAD.pack(room, len(self._sizes))]
        for rows, size in zip(self._rows, self._sizes, strict=True):
            content = ctypes.string_at(rows[slot], size).rstrip(b"\0")
            if len(content) > ROW_BYTES:
                raise _too_long(len(content))
            parts += [_PART.pack(len(content)), content]
        row = b"".join(parts)
        if len(row) > ROW_BYTES:
            raise _too_long(len(row))
        return row.ljust(ROW_BYTES, b"\0")  # nothing of the slot's last prompt goes along

    def unpack(self, room: int, slot: int, row: bytes) -> None:
        """Fill the slot. `CONTENT_MISMATCH` for a row of another room, or of other buffers; nothing is written then."""
        found: list[bytes] = []
        told, count = _HEAD.unpack_from(row)
        at = _HEAD.size
        if told != room or count != len(self._sizes):
            raise ProtocolError(Reason.CONTENT_MISMATCH, f"metadata: of room {told}, {count} buffers; this is {room}")
        for size in self._sizes:
            if at + _PART.size > len(row):
                raise ProtocolError(Reason.CONTENT_MISMATCH, "metadata: the row ends within a buffer")
            (length,) = _PART.unpack_from(row, at)
            at += _PART.size
            if length > size or at + length > len(row):
                raise ProtocolError(Reason.CONTENT_MISMATCH, f"metadata: {length} bytes for a buffer of {size}")
            found.append(row[at : at + length])
            at += length
        for rows, size, content in zip(self._rows, self._sizes, found, strict=True):
            ctypes.memmove(rows[slot], content.ljust(size, b"\0"), size)


def _too_long(count: int) -> ProtocolError:
    detail = f"metadata: {count} bytes of one request, a row has {ROW_BYTES}: ask for fewer top log probabilities"
    return ProtocolError(Reason.BAD_MESSAGE, detail)


class Storage(Protocol):
    """A stretch of memory, as tensors' storages are."""

    def data_ptr(self) -> int: ...

    def nbytes(self) -> int: ...


class Rows(Storage, Protocol):
    """Rows in the kind of memory that the KV cache is in."""

    def write(self, row: int, content: bytes) -> None: ...

    def read(self, row: int) -> bytes: ...


class HostRows:
    """Pages of them that nobody wrote to take no memory."""

    def __init__(self, count: int) -> None:
        self._map = mmap.mmap(-1, count * ROW_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return len(self._map)

    def write(self, row: int, content: bytes) -> None:
        at = row * ROW_BYTES
        self._map[at : at + len(content)] = content

    def read(self, row: int) -> bytes:
        return self._map[row * ROW_BYTES : (row + 1) * ROW_BYTES]


class DeviceRows:
    """On a CUDA device, by PyTorch; on a stream of its own, so that nobody waits for a step to end."""

    def __init__(self, count: int, device: int) -> None:
        import torch

        self._torch: Any = torch
        self._rows = torch.zeros((count, ROW_BYTES), dtype=torch.uint8, device=f"cuda:{device}")
        self._stream = torch.cuda.Stream(device)

    def data_ptr(self) -> int:
        return int(self._rows.data_ptr())

    def nbytes(self) -> int:
        return int(self._rows.nbytes)

    def write(self, row: int, content: bytes) -> None:
        told = self._torch.frombuffer(bytearray(content), dtype=self._torch.uint8)
        with self._torch.cuda.stream(self._stream):
            self._rows[row, : len(content)].copy_(told)
        self._stream.synchronize()

    def read(self, row: int) -> bytes:
        with self._torch.cuda.stream(self._stream):
            found = self._rows[row].cpu()
        return bytes(found.numpy().tobytes())
