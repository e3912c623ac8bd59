"""The flags of `kvbaton bench turns`, apart from what needs an HTTP client."""

from __future__ import annotations

import argparse

from kvbaton.cli.arguments import whole


def add(parser: argparse.ArgumentParser) -> None:
    add_one = parser.add_argument
    add_one("--engine", choices=["embedded", "vllm"], default="embedded", help="what serves; vllm: a tiny model on CPU")
    add_one("--vllm-python", metavar="FILE", default=None, help="python that has vLLM (default: found)")
    add_one("--turns", type=whole(2, 50), default=5, metavar="N", help="turns of a conversation")
    add_one("--conversations", type=whole(1, 1000), default=5, metavar="N", help="medians over these")
    add_one("--first", type=whole(256, 3000), default=1200, metavar="N", help="tokens of the first prompt")
    add_one("--answer", type=whole(2, 1000), default=128, metavar="N", help="tokens of an answer")
    add_one("--more", type=whole(1, 1000), default=64, metavar="N", help="tokens that a client adds at each turn")
    add_one("--json", action="store_true", help="print one object with the figures")
