"""A model's weights, known by what is in their files: names, shapes and samples of the content.

Law: names of models stand for nothing: a checkpoint that was retrained under the same name is another model.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096
HEADER_BYTES_MAX = 64 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


def weights_digest(model: str, revision: str | None) -> str:
    """A digest of the weights' files, wherever they lie on this host; ValueError where there are none to look at."""
    place = Path(model)
    if not place.exists():
        place = _snapshot(model, revision)
    files = [place] if place.is_file() else sorted({path for each in _WEIGHTS for path in place.glob(each)})
    if not files:
        raise ValueError(
            f"kv_connector_extra_config.model_id: missing, and there are no weights to tell {model!r} by in {place}; "
            "give P and D the same text, and another one whenever the weights change"
        )
    state = hashlib.blake2b(digest_size=16)
    for path in files:
        state.update((b"" if place.is_file() else path.name.encode()) + b"\0")
        _sample(path, state)
    return state.hexdigest()


def _snapshot(model: str, revision: str | None) -> Path:
    """Where a model of a hub lies in this host's cache; the engine has loaded it from there."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001 - whatever it is, there are no files to look at
        return Path(model)


def _sample(path: Path, state: Any) -> None:
    """The head of a file (safetensors: all names and shapes), its size, and samples spread over the rest."""
    size = path.stat().st_size
    state.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little") if path.suffix == ".safetensors" else SAMPLE_BYTES
        state.update(head + file.read(min(length, HEADER_BYTES_MAX)))
        first = file.tell()
        for number in range(SAMPLES_PER_FILE):
            file.seek(first + (max(size - first - SAMPLE_BYTES, 0) * number) // (SAMPLES_PER_FILE - 1), os.SEEK_SET)
            state.update(file.read(SAMPLE_BYTES))
