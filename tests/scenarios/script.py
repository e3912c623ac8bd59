"""The commands of a scenario: who does what, what is lost or delayed, and how time passes.

A scenario is a text file of steps: a command, `----`, and what follows from it, up to an empty line. Lines that begin
with `#` are for the reader. Everything is delivered and done at once, unless the script says otherwise.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pair import Pair
from party import Party, Source, digest_of, transfer
from stage import Stage
from transcript import lines

from kvbaton.protocol import events as ev
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import GroupProgress
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Role
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.messages import Versions
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_transport import KINDS, LENT_TCP, TCP

HABITS = {"copies": "copies", "fences": "fences", "blocks": "allocates", "store": "store"}


class Script:
    """One scenario being played."""

    def __init__(self) -> None:
        self.pair = Pair()
        self.sources: dict[tuple[str, int], Source] = {}
        self.stage: Stage | None = None  # of scenarios that begin with `engines`

    def play(self, command: str) -> str:
        """Do one command; what was said and done because of it."""
        verb, *words = command.split()
        flags = {word for word in words if "=" not in word}
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        if verb == "engines":
            self.stage = Stage(plain, options)
            return ""
        if self.stage is not None:
            return self.stage.play(verb, plain, options)
        if verb == "workers":
            self._workers(plain, options)
            return ""
        begin = len(self.pair.log)
        ending = getattr(self, "do_" + verb.replace("-", "_"))(plain, options, flags)
        self.pair.settle()
        return "\n".join([*lines(self.pair, begin), *([ending] if ending else [])])

    def _workers(self, names: list[str], options: dict[str, str]) -> None:
        """`workers p d lease_s=3 d.model=other p.ranks=2`."""
        first, *others = names
        self.pair = Pair(first, **worker(self._options_of(first, options)))
        self.pair.options = {}  # those were the first one's alone
        for name in others:
            self.pair.add(name, **worker(self._options_of(name, options)))
        roles = {name: self._options_of(name, options).get("role", "both") for name in names}
        for name, party in self.pair.parties.items():
            identity = party.ledger.desk.identity
            identity.exact_epochs = self._options_of(name, options).get("epochs") != "inexact"
            identity.role_of = lambda worker: Role(roles[worker])

    def _options_of(self, name: str, options: dict[str, str]) -> dict[str, str]:
        mine = {key.removeprefix(f"{name}."): value for key, value in options.items()}
        return {key: value for key, value in mine.items() if "." not in key}

    # --- P

    def do_prefill(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`prefill p 1 tokens=5 readers=2`: a prompt is finished and leased (pull); `keep=30`: for the next turn."""
        self._begin(words, options, deferred=False)
        source, p = self._source(words), self._party(words)
        p.chunk(source, -(-source.tokens // p.shape.block_tokens))
        p.complete(source)

    def do_begin(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`begin p 1 tokens=5 target=d`: a prompt that the router has announced is scheduled."""
        self._begin(words, options, deferred=True)

    def _begin(self, words: list[str], options: dict[str, str], deferred: bool) -> None:
        self.sources[words[0], int(words[1])] = self._party(words).begin(
            int(words[1]),
            int(options.get("tokens", 5)),
            max_readers=int(options.get("readers", 1)),
            target=options.get("target", ""),
            deferred=deferred,
            keep_s=float(options.get("keep", 0)),
        )

    def do_chunk(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`chunk p 1 blocks=2`: computed and ready; `computing`: pinned, but not ready yet."""
        ready = "computing" not in flags
        self._party(words).chunk(self._source(words), int(options.get("blocks", 1)), ready=ready)

    def do_ready(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`ready p 1 done=0 ahead=2 layers=1 rank=0`."""
        numbers = (int(options.get(name, 0)) for name in ("done", "ahead", "layers"))
        rank = int(options["rank"]) if "rank" in options else None
        self._party(words).progress(self._source(words), (GroupProgress(*numbers),), rank)

    def do_complete(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self._party(words).complete(self._source(words))

    def do_preempt(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self._party(words).tell(ev.SourceEnded(self._source(words).lease, Reason.SOURCE_PREEMPTED))

    def do_refuse(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self._party(words).tell(ev.SourceEnded(self._source(words).lease, Reason.PINS_FULL))

    def do_discard(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`discard p 1`: the registry tells p that the router took the ticket of handoff 1 back."""
        self._party(words).tell(ev.Discarded(transfer(int(words[1]))))

    def do_reuse(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`reuse p 2 3`: the pool hands blocks out again."""
        self._party(words).reuse(*map(int, words[1:]))

    # --- D

    def do_want(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`want d r 1 [push] [prompt=9] [from=p] [for=e]`: a request with the ticket of handoff 1."""
        number, source = int(words[2]), options.get("from", "p")
        leased, target = self.sources.get((source, number)), WorkerId(options.get("for", ""))
        p = self.pair.parties.get(WorkerId(source))
        pulled = leased is not None and "push" not in flags and "stream" not in flags and p is not None
        ticket = p.ticket(leased) if pulled else self.pair.router_ticket(number, source=source, target=target)  # type: ignore[union-attr]
        self._party(words).want(
            words[1],
            ticket,
            number,
            int(options.get("tokens", 5)),
            content=int(options.get("prompt", number)),
            push="push" in flags,
            source=source,
        )

    def do_allocate(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self._party(words).allocate(words[1], int(options.get("first_token", 0)))

    def do_give_up(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self._party(words).give_up(words[1])

    # --- ranks

    def do_hold(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`hold d copies|fences|blocks` or `hold Offer`: until told otherwise."""
        if len(words) > 1 and words[1] in HABITS:
            setattr(self._party(words).habits, HABITS[words[1]], False)
        else:
            self.pair.hold(kind(words[0]), float(options.get("times", 1)))

    def do_go(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        setattr(self._party(words).habits, HABITS[words[1]], True)

    def do_copy(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`copy d 1 arrives|fails|restless|rests`."""
        party, job, how = self._party(words), int(words[1]), words[2]
        if how == "rests":
            party.rest(job)
        else:
            reason = None if how == "arrives" else Reason.TRANSFER_FAILED
            party.finish(job, reason, at_rest=how != "restless")

    def do_put(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self._party(words).put(int(words[1]))

    def do_store(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`store p fails`: whatever it is storing; `store p answers` likewise."""
        self._party(words).end_puts(Reason.STORE_FAILED if words[1] == "fails" else None)

    def do_shut(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`shut d rdma`: its copies over that data plane find it closed; `shut d` opens all again."""
        self._party(words).habits.shut = frozenset(words[1:])

    # --- the wire and the world

    def do_say(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`say p d Renewed lease=1 attempt=1 ttl_s=0.001 work=0 [times=3]`: a lie, in the session that the two have."""
        values = {key: msgspec.json.decode(value) for key, value in options.items() if key != "times"}
        if "digest" in values:  # `digest=1`: of prompt 1, of 5 tokens
            values["digest"] = digest_of(values["digest"], 5)
        message = kind(words[2])(**values)
        for _ in range(int(options.get("times", 1))):
            self.pair.inject(words[0], words[1], message)

    def do_greet(self, words: list[str], options: dict[str, str], flags: set[str]) -> str:
        """`greet d p times=9`: with another nonce each time. What is answered is told, and how many are not."""
        source, target = self._party(words), self._party(words[1:])
        before, times = target.counts["over_quota.greetings"], int(options["times"])
        card = source.ledger.desk.identity.card()
        for nonce in range(times):
            self.pair.inject(words[0], words[1], m.Hello(1000 + nonce, card), session=0, to=0)
        passed_over = target.counts["over_quota.greetings"] - before
        return f"  {target.name}       has passed over {passed_over} of {times} greetings"

    def do_lose(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self.pair.lose(kind(words[0]), float(options.get("times", 1)))

    def do_double(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self.pair.double(kind(words[0]), float(options.get("times", 1)))

    def do_release(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self.pair.release(kind(words[0]))

    def do_silence(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`silence p`: nothing that it says arrives."""
        self.pair.cut(words[0])

    def do_heal(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self.pair.heal()

    def do_wait(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self.pair.run(float(words[0]))

    def do_restart(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self.pair.restart(words[0])

    def do_leave(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self._party(words).leave()

    def do_drain(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        self._party(words).tell(ev.DrainStarted())

    def do_departed(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`departed d p`: d hears that p is gone."""
        self._party(words).tell(ev.Departed(WorkerId(words[1])))

    def do_removed(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`removed d p`: d hears that p is no member any more."""
        party = self._party(words)
        party.ledger.desk.identity.is_gone = lambda origin: origin in words[1:]
        party.tell(ev.MembersGone())

    def do_forgotten(self, words: list[str], options: dict[str, str], flags: set[str]) -> None:
        """`forgotten d`: no request finds a block from before."""
        self._party(words).tell(ev.CacheReplaced(forgotten=True))

    def do_rest(self, words: list[str], options: dict[str, str], flags: set[str]) -> str:
        """Let everything come to rest and check all promises; must be the last step."""
        self.pair.finish()
        return "everything is at rest"

    # --- helpers

    def _party(self, words: list[str]) -> Party:
        return self.pair.parties[WorkerId(words[0])]

    def _source(self, words: list[str]) -> Source:
        return self.sources[words[0], int(words[1])]


def kind(name: str) -> type:
    found: type = getattr(m, name)
    return found


def worker(options: dict[str, str]) -> dict[str, Any]:
    """A worker's options as `Party` takes them."""
    found: dict[str, Any] = {}
    times = {field.name for field in msgspec.structs.fields(Settings)}
    given = {key: float(value) if "." in value else int(value) for key, value in options.items() if key in times}
    if given:
        found["settings"] = Settings(**given)  # type: ignore[arg-type]
    if "model" in options:
        found["compat"] = {"model": options["model"]}
    if "speaks" in options:
        oldest, _, newest = options["speaks"].partition("-")
        found["versions"] = Versions(int(oldest), int(newest or oldest))
    if "transport" in options:  # `lent`: tcp as it is, which enforces what is lent; elsewhere it would be noise
        names = options["transport"].split(",")
        found["transports"] = tuple(LENT_TCP if n == "lent" else TCP if n == "tcp" else KINDS[n] for n in names)
    sizes = {key: int(options[key]) for key in ("ranks", "block_tokens", "heads") if key in options}
    if sizes:
        found["shape"] = Shape(**sizes)  # type: ignore[arg-type]
    return found
