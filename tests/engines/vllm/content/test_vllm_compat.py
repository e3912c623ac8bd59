"""The compatibility key: the same weights and numbers, wherever they lie."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.engines.shared.weights_digest import weights_digest
from kvbaton.engines.vllm.content.vllm_compat import config_digest


class TestCompat:
    def weights(self, directory: Path, content: bytes) -> str:
        directory.mkdir()
        header = b'{"a":1}'
        (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)
        return weights_digest(str(directory), None)

    def test_the_same_weights_elsewhere_are_the_same_and_others_are_not(self, tmp_path: Path) -> None:
        plain = self.weights(tmp_path / "a", b"x" * 1_000_000)
        assert self.weights(tmp_path / "b", b"x" * 1_000_000) == plain
        assert self.weights(tmp_path / "c", b"x" * 999_999 + b"y") != plain
        assert self.weights(tmp_path / "d", b"x" * 999_999) != plain

    def test_a_single_file_is_known_by_its_content_too(self, tmp_path: Path) -> None:
        for name, data in (("a.gguf", b"x" * 9000), ("b.gguf", b"x" * 9000), ("c.gguf", b"y" * 9000)):
            (tmp_path / name).write_bytes(data)
        first, second, third = (weights_digest(str(tmp_path / f"{name}.gguf"), None) for name in "abc")
        assert first == second != third

    def test_a_name_alone_stands_for_no_weights(self) -> None:
        """Promise 1: two hosts may have cached different weights under one name of a hub."""
        with pytest.raises(ValueError, match="model_id: missing"):
            weights_digest("nobody/has-this-model", "main")

    def test_paths_and_versions_do_not_matter_and_numbers_do(self) -> None:
        def digest(**fields: Any) -> str:
            return config_digest(SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "rope": {"theta": 1.0}, **fields}))

        assert digest(_name_or_path="/a", transformers_version="1") == digest(_name_or_path="/b")
        assert digest(hidden_size=9) != digest() != digest(rope={"theta": 2.0})
