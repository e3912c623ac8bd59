"""SGLang's senders and receivers around a fake of its queues, in virtual time: every way to go right, and to fail.

Other requests write to every free page before each step, so bytes that arrive in a page that SGLang has let go, or are
read from one, are seen as a wrong answer.
"""

from __future__ import annotations

import pytest

from kvbaton.protocol.errors import Reason
from tests.engines.sglang.fake_sglang import PAGES, SLOTS, FakeDecode, FakePrefill, first_token, prompt_pair
from tests.engines.sglang.sglang_rig import SglangRig, Side

LENGTHS = (1, 3, 4, 5, 8, 9, 20, 31)
STEPS = 12
"""More than a handoff of four chunks takes."""


def test_answers_are_those_of_one_engine() -> None:
    """With the first token and the log probabilities of P; single chunks, several, whole pages and others."""
    rig = SglangRig()
    for length in LENGTHS:
        p, d = rig.ask(prompt_pair(length, seed=length))
        rig.ended(p, d)
        assert (p.finished, d.finished, d.answer) == ("length", "length", "right")
        assert d.first_token == first_token(d.origin_input_ids)
    assert rig.d.counted("ends.delivered") == len(LENGTHS)
    rig.rest()


def test_many_at_once_share_slots_and_pages() -> None:
    """Rows and pages are given to the next ones as soon as SGLang has them back."""
    rig = SglangRig()
    pairs = [rig.ask(prompt_pair(9 + each % 5, seed=each)) for each in range(3 * SLOTS)]
    rig.ended(*(req for pair in pairs for req in pair))
    assert {d.answer for _, d in pairs} == {"right"}
    rig.rest()


def test_more_layers_than_a_rank_of_the_protocol_has_regions() -> None:
    """32 layers of K and V are 64 buffers, and the metadata rows one more."""
    rig = SglangRig(buffers=64)
    assert len(rig.p.door.config.me.worker) and rig.p.door.config.ranks == 2
    p, d = rig.ask(prompt_pair(9))
    rig.ended(p, d)
    assert d.answer == "right"
    rig.rest()


def test_one_latent_buffer_a_layer() -> None:
    """MLA."""
    rig = SglangRig(buffers=3, latent=True)
    p, d = rig.ask(prompt_pair(20))
    rig.ended(p, d)
    assert d.answer == "right"
    rig.rest()


def test_d_gives_up_no_page_before_p_has_begun() -> None:
    """What D preallocates is bounded by what P has admitted."""
    rig = SglangRig()
    p, d = prompt_pair(9)
    rig.decode.add(d)
    rig.later(5.0)
    assert d in rig.decode.prealloc and not d.pages
    rig.prefill.add(p)
    rig.ended(p, d)
    assert d.answer == "right"
    rig.rest()


def test_d_reads_behind_p() -> None:
    """The first chunk's pages are in D's before the last is computed; its answer comes after the last."""
    rig = SglangRig()
    p, d = rig.ask(prompt_pair(31))
    rig.until("a chunk", lambda: p.computed == 16)
    rig.prefill.is_stopped = True
    rig.later(1.0)
    assert bytes(rig.d.memory.kv.item(0, d.pages[0])) == bytes(rig.p.memory.kv.item(0, p.pages[0]))
    assert not d.finished and d in rig.decode.transfer
    rig.prefill.is_stopped = False
    rig.ended(p, d)
    assert d.answer == "right"
    rig.rest()


def test_pages_wait_for_the_event_that_sglang_names() -> None:
    """Of an early send: what is behind the event is announced when it is over, in order, and nobody waits for it."""

    class Event:
        is_over = False

        def query(self) -> bool:
            return self.is_over

    rig = SglangRig()
    p, d = rig.ask(prompt_pair(20))
    rig.until("waiting", lambda: p in rig.prefill.waiting)
    event = p.poller._early_send_wait_event = Event()
    rig.until("all sent", lambda: p in rig.prefill.inflight)
    rig.later(2.0)
    assert not d.finished and not p.finished
    event.is_over = True
    rig.ended(p, d)
    assert d.answer == "right"
    rig.rest()


@pytest.mark.parametrize("who", ["p", "d", "both"])
@pytest.mark.parametrize("is_held", [False, True], ids=["at once", "copies hang"])
def test_an_abort_after_every_step(who: str, is_held: bool) -> None:
    """Each side ends, once; bytes that land later land in pages that nobody else has."""
    for steps in range(STEPS):
        rig = SglangRig()
        p, d = rig.ask(prompt_pair(31, seed=3))
        for _ in range(steps):
            rig.step()
        rig.fabric.is_held = is_held
        rig.step()
        if who != "d" and not p.finished:
            rig.prefill.abort(p)
        if who != "p" and not d.finished:
            rig.decode.abort(d)
        rig.later(1.0)
        held = not d.finished and d.pages
        other = rig.ask(prompt_pair(9, seed=5))
        rig.fabric.is_held = False
        if held:
            before = list(d.pages)
            rig.later(0.0)
            assert d.pages == before, "pages were given away while bytes were on their way"
        rig.ended(p, d, *other)
        assert d.answer != "WRONG" and other[1].answer == "right"
        assert d.answer == "right" or "kvbaton: no KV for room" in d.finished
        rig.rest()


def test_d_is_told_of_a_prompt_that_p_will_not_begin() -> None:
    """Aborted while it waits at P: D's client does not wait for a deadline."""
    rig = SglangRig()
    rig.p.memory.free_slots.clear()
    p, d = rig.ask(prompt_pair(9))
    rig.later(1.0)
    assert p in rig.prefill.bootstrap and not d.finished
    rig.prefill.abort(p)
    began = rig.now
    rig.ended(p, d)
    assert rig.now - began < 1.0 and str(Reason.SOURCE_ABORTED) in d.finished


def test_bytes_that_land_after_an_abort_find_their_pages() -> None:
    """D's pages are its own until the copy that nobody can cancel has ended."""
    rig = SglangRig()
    p, d = rig.ask(prompt_pair(20))
    rig.fabric.is_held = True
    rig.until("D has pages", lambda: bool(d.pages))
    rig.later(0.5)
    pages = list(d.pages)
    rig.decode.abort(d)
    rig.later(60.0)
    assert d.pages == pages and not d.finished and not set(pages) & set(rig.d.memory.free_pages)
    rig.fabric.is_held = False
    rig.ended(p, d)
    assert "aborted" in d.finished
    rig.rest()


def test_what_p_lets_go_too_early_is_not_committed() -> None:
    """SGLang frees a prompt's pages behind the sender's back, and others write to them: an error, no wrong answer."""
    rig = SglangRig()
    p, d = rig.ask(prompt_pair(20))
    rig.fabric.is_held = True
    rig.until("all is computed, and D reads", lambda: p in rig.prefill.inflight and bool(d.pages))
    rig.later(0.25)
    pages, p.pages = p.pages, []
    rig.p.memory.free(pages)
    rig.step()  # others write to them
    rig.fabric.is_held = False
    rig.ended(d)
    assert d.answer == "" and str(Reason.STALE) in d.finished
    rig.ended(p)
    rig.rest()


def test_without_the_hook_it_would_be() -> None:
    """The epochs of freed pages are what the case above stands on."""
    rig = SglangRig()
    rig.p.memory.on_free = lambda pages: None
    p, d = rig.ask(prompt_pair(20))
    rig.fabric.is_held = True
    rig.until("all is computed, and D reads", lambda: p in rig.prefill.inflight and bool(d.pages))
    rig.later(0.25)
    pages, p.pages = p.pages, []
    rig.p.memory.free(pages)
    rig.step()
    rig.fabric.is_held = False
    rig.ended(d)
    assert d.answer == "WRONG"


def test_a_row_that_is_written_again_is_not_committed() -> None:
    """P's metadata slot goes to another prompt while D still reads of the first: its epoch was raised."""
    rig = SglangRig()
    p, d = rig.ask(prompt_pair(9))
    rig.fabric.is_held = True
    rig.until("all is computed, and D reads", lambda: p in rig.prefill.inflight and bool(d.pages))
    rig.later(0.25)
    rig.p.memory.free_slots.appendleft(p.slot)
    p.slot = -1
    other_p, other_d = rig.ask(prompt_pair(9, seed=9))
    rig.until("the other is computed", lambda: other_p in rig.prefill.inflight)
    rig.fabric.is_held = False
    rig.ended(p, d, other_p, other_d)
    assert (d.answer, other_d.answer) == ("", "right") and str(Reason.STALE) in d.finished
    rig.rest()


@pytest.mark.parametrize("steps", range(STEPS))
def test_p_dies_at_every_step(steps: int) -> None:
    """D's client is told, within the deadlines of the protocol."""
    rig = SglangRig()
    _, d = rig.ask(prompt_pair(31))
    for _ in range(steps):
        rig.step()
    rig.dead.add("p")
    rig.until("D ends", lambda: bool(d.finished), steps=20_000)
    assert rig.now < 100.0
    assert d.answer == "right" or "kvbaton: no KV for room" in d.finished
    rig.rest()


@pytest.mark.parametrize("steps", range(STEPS))
def test_d_dies_at_every_step(steps: int) -> None:
    """P keeps its pages for the lease, and has them back after it."""
    rig = SglangRig()
    p, _ = rig.ask(prompt_pair(31))
    for _ in range(steps):
        rig.step()
    rig.dead.add("d")
    rig.until("P ends", lambda: bool(p.finished), steps=20_000)
    assert p.finished == "length" or str(Reason.LEASE_EXPIRED) in p.finished
    rig.rest()


def test_p_that_comes_back_is_another() -> None:
    """The same name in its next life: what the first one promised is not read from the second."""
    rig = SglangRig()
    _, d = rig.ask(prompt_pair(31))
    rig.until("D has pages", lambda: bool(d.pages))
    rig.p = Side("p", rig, life=2)
    rig.prefill = FakePrefill(rig.p.manager, rig.p.memory)
    rig.until("D ends", lambda: bool(d.finished), steps=20_000)
    assert d.answer == "" and "kvbaton: no KV for room" in d.finished
    again = rig.ask(prompt_pair(31))
    rig.ended(*again)
    assert again[1].answer == "right"
    rig.rest()


def test_d_that_comes_back_is_another() -> None:
    rig = SglangRig()
    p, d = rig.ask(prompt_pair(31))
    rig.until("D has pages", lambda: bool(d.pages))
    rig.d = Side("d", rig, life=2)
    rig.decode = FakeDecode(rig.d.manager, rig.d.memory)
    again = rig.ask(prompt_pair(20))
    rig.ended(p, *again)
    assert again[1].answer == "right" and "no D has committed it" in p.finished
    rig.rest()


def test_p_is_never_asked() -> None:
    """One leg alone: D ends at its deadline, with an error."""
    rig = SglangRig()
    _, d = prompt_pair(9)
    rig.decode.add(d)
    rig.until("D ends", lambda: bool(d.finished), steps=20_000)
    assert rig.now < 70.0 and "kvbaton: no KV for room" in d.finished
    rig.rest()


def test_d_is_never_asked() -> None:
    """P's pages are back when the lease is over, and its client is told why."""
    rig = SglangRig()
    p, _ = prompt_pair(9)
    rig.prefill.add(p)
    rig.until("P ends", lambda: bool(p.finished), steps=20_000)
    assert rig.now < 70.0 and str(Reason.LEASE_EXPIRED) in p.finished
    rig.rest()


def test_d_has_no_room_for_longer_than_p_holds() -> None:
    """P keeps what D has claimed while D waits for room, and not for ever."""
    rig = SglangRig()
    rig.decode.is_full = True
    p, d = rig.ask(prompt_pair(9))
    rig.later(60.0)
    assert not p.finished and not d.finished
    rig.later(240.0)
    rig.decode.is_full = False
    rig.ended(p, d)
    assert d.answer == "" and "kvbaton: no KV for room" in d.finished and p.finished != "length"
    rig.rest()


def test_no_room_to_pin() -> None:
    """A prompt that P cannot hold for D waits, and is refused; D is told at once."""
    rig = SglangRig()
    rig.scribbles = False
    first = prompt_pair(4 * (PAGES - 1) - 20)
    rig.prefill.add(first[0])
    rig.until("it is computed", lambda: first[0] in rig.prefill.inflight)
    second = rig.ask(prompt_pair(40, seed=2))
    began = rig.now
    rig.ended(second[0])
    assert rig.now - began < 6.0 and str(Reason.PINS_FULL) in second[0].finished
    rig.ended(second[1])
    assert rig.now - began < 7.0 and str(Reason.PINS_FULL) in second[1].finished
    rig.decode.add(first[1])
    rig.ended(*first)
    assert first[1].answer == "right"
    rig.rest()


def test_prompts_that_differ_are_not_handed_over() -> None:
    """One room, two prompts: D has an error, and nothing was read."""
    rig = SglangRig()
    p, _ = prompt_pair(9)
    _, d = prompt_pair(9, seed=2, room=p.bootstrap_room)
    rig.ask((p, d))
    rig.ended(d, p)
    assert str(Reason.CONTENT_MISMATCH) in d.finished and p.finished != "length"
    rig.rest()


def test_a_stranger_is_refused() -> None:
    """A D that does not have the cluster's ticket keys makes no ticket that P takes."""
    rig = SglangRig(keys={"d": (b"of another cluster, or of nobody",)})
    p, d = rig.ask(prompt_pair(9))
    rig.until("both end", lambda: bool(p.finished and d.finished), steps=20_000)
    assert "kvbaton: no KV for room" in d.finished and str(Reason.LEASE_EXPIRED) in p.finished
    rig.rest()


def test_a_room_is_of_one_request_at_a_time() -> None:
    """Whoever draws the room of another has an error, on both sides; the other goes on."""
    rig = SglangRig()
    p, d = rig.ask(prompt_pair(9))
    rig.fabric.is_held = True
    rig.until("D has pages", lambda: bool(d.pages))
    again = rig.ask(prompt_pair(9, room=p.bootstrap_room))
    rig.ended(*again)
    assert all("another request here has" in req.finished for req in again)
    rig.fabric.is_held = False
    rig.ended(p, d)
    assert d.answer == "right"
    later = rig.ask(prompt_pair(5, seed=8, room=p.bootstrap_room))
    rig.ended(*later)
    assert later[1].answer == "right"
    rig.rest()


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("multimodal_inputs", object(), "images"),
        ("lora_id", "a", "LoRA"),
        ("input_embeds", [[0.0]], "embeddings"),
        ("bootstrap_room", None, "bootstrap_room"),
        ("bootstrap_room", 0, "bootstrap_room"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_by_name(field: str, value: object, named: str) -> None:
    rig = SglangRig()
    p, d = prompt_pair(9)
    for req in (p, d):
        setattr(req, field, value)
    rig.ask((p, d))
    rig.ended(p, d)
    assert named in p.finished and named in d.finished
    rig.rest()


def test_a_request_that_was_not_bound_has_failed() -> None:
    """Of a SGLang whose hooks are others."""
    rig = SglangRig()
    p, d = prompt_pair(9)
    rig.prefill.add(p, binds=False)
    rig.decode.add(d, binds=False)
    rig.ended(p, d)
    assert "hook" in p.finished and "hook" in d.finished
    rig.rest()


def test_a_p_that_nobody_knows() -> None:
    rig = SglangRig()
    _, d = prompt_pair(9)
    rig.decode.add(d, address="10.9.9.9:8998")
    rig.ended(d)
    assert "10.9.9.9:8998" in d.finished and str(Reason.PEER_UNKNOWN) in d.finished
    rig.rest()


def test_prompts_with_other_salts_are_others() -> None:
    rig = SglangRig()
    p, d = prompt_pair(9)
    p.extra_key = "of a tenant"
    rig.ask((p, d))
    rig.ended(d, p)
    assert str(Reason.CONTENT_MISMATCH) in d.finished
    rig.rest()


@pytest.mark.parametrize("whose", ["p", "d"])
def test_a_fault_of_ours_is_a_failed_request_and_no_dead_scheduler(
    whose: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`poll` never raises: SGLang's scheduler would die of it, and every request with it."""
    rig = SglangRig()
    p, d = rig.ask(prompt_pair(9))
    rig.step()
    poller = (p if whose == "p" else d).poller
    monkeypatch.setattr(poller, "_look", lambda: 1 // 0)
    rig.ended(p, d)
    assert "a fault of kvbaton" in (p if whose == "p" else d).finished and "hook-failed" in caplog.text
    rig.rest()
