"""A liar's process: one errand, told on the command line as JSON; what came of each lie, told on stdout as JSON.

`python -m kvbaton_proof.chaos.liars.liar_main ERRAND`

Law: it ends by itself, soon after its time, whatever others do or leave out; it is taken off the registry before.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping

import msgspec

from kvbaton_proof.chaos.liars import lies, lies_to_engines, lies_to_places
from kvbaton_proof.chaos.liars.liar_http import Door
from kvbaton_proof.chaos.liars.liar_post import Errand, Post
from kvbaton_proof.chaos.liars.lies_to_engines import Telling

SLACK_S = 15.0
"""Beyond its time: answers that are waited for, and an orderly end."""

TELLINGS: Mapping[str, Telling] = {
    **lies_to_engines.TELLINGS,
    **lies_to_places.TELLINGS,
}


def run(errand: Errand) -> lies.Tally:
    """Tell all lies of the errand, each in its share of the time that is left."""
    tally = lies.Tally()
    post = Post(errand)
    door = Door(errand.address, post.me, post.keyring.ticket_keys[0], post.rng)
    with contextlib.closing(door), contextlib.closing(post):
        until = time.monotonic() + errand.seconds
        for number, text in enumerate(errand.lies):
            told = lies.parse(text)
            post.begin_life(door.address)
            door.me = post.me
            post.forget()
            post.count = tally.of(told.lie.name)
            now = time.monotonic()
            share_s = max(0.1, until - now) / (len(errand.lies) - number)
            TELLINGS[told.lie.name](post, door, told.to, now + share_s)
        post.count = lies.Count()
    return tally


def main(text: str) -> int:
    errand = msgspec.json.decode(text, type=Errand)
    end = threading.Timer(errand.seconds + SLACK_S, os._exit, (3,))
    end.daemon = True
    end.start()
    sys.stdout.buffer.write(lies.encode(run(errand)) + b"\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
