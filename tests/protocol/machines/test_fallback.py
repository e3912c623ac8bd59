"""Rule 23: a data plane that cannot be opened costs no handoff where the pair has another, and is tried again later."""

from __future__ import annotations

import pytest
from pair import Make, Pair
from party import Load, delivered

from kvbaton.protocol.effects import Connect, Disconnect, GivenUp, StartCopy
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded, Departed, PlaneFailed
from kvbaton.protocol.ids import JobId, WorkerId
from kvbaton.protocol.machines.pairing_state import Shunned
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import Claim, Commit, Goodbye, Hello, Joined, Linked, Welcome
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_transport import RDMA, SHM, TCP

BOTH = (SHM, TCP)


def of(pair: Pair, kind: type) -> list[str]:
    return [effect.transport for effect in pair.done(kind, "d")]


def asks(pair: Pair, number: int = 1) -> Load:
    load = pair.d.want(f"r{number}", pair.p.grant(number), number)
    pair.settle()
    return load


def shut(pair: Pair, *names: str) -> None:
    pair.d.habits.shut = frozenset(names)


@pytest.fixture
def two_planes(make_pair: Make) -> Pair:
    return make_pair("p", "d", transports=BOTH)


def test_the_best_plane_is_opened_before_anything_depends_on_it(two_planes: Pair) -> None:
    assert delivered(asks(two_planes))
    probe, *copies = two_planes.done(StartCopy, "d")
    assert not probe.copy.spans and probe.transport == "shm"
    assert copies and all(copy.copy.spans and copy.transport == "shm" for copy in copies)
    assert two_planes.d.counts["links.shm"] == 1 and not two_planes.done(GivenUp)


def test_a_single_plane_is_not_probed(make_pair: Make) -> None:
    pair = make_pair("p", "d", transports=(TCP,))
    assert delivered(asks(pair)) and all(each.copy.spans for each in pair.done(StartCopy, "d"))


def test_a_plane_that_reaches_only_this_host_is_no_fallback_elsewhere(make_pair: Make) -> None:
    pair = make_pair("p", "d", transports=(TCP, SHM))
    pair.add("d", host="another")
    assert delivered(asks(pair)) and all(each.copy.spans for each in pair.done(StartCopy, "d"))


def test_a_plane_that_cannot_be_opened_costs_no_handoff(two_planes: Pair) -> None:
    shut(two_planes, "shm")
    assert delivered(asks(two_planes))
    assert of(two_planes, Connect) == ["shm", "tcp"] and of(two_planes, Disconnect) == ["shm"]
    assert two_planes.d.counts["planes_given_up.shm"] == 1 and of(two_planes, GivenUp) == ["shm"]
    assert [hello.card.transports for hello in two_planes.said(Hello)] == [("shm", "tcp"), ("tcp",)]
    assert len(two_planes.said(Joined)) == 1  # the source heard of the first pairing only that it was not meant


def test_the_planes_are_tried_in_order_until_one_opens(make_pair: Make) -> None:
    pair = make_pair("p", "d", transports=(SHM, RDMA, TCP))
    shut(pair, "shm", "rdma")
    assert delivered(asks(pair)) and of(pair, Connect) == ["shm", "rdma", "tcp"]


def test_with_none_left_the_handoff_fails_and_the_next_tries_all_again(make_pair: Make) -> None:
    pair = make_pair("p", "d", transports=(SHM, RDMA))
    shut(pair, "shm", "rdma")
    load = asks(pair)
    assert load.end is not None and load.end.reason is Reason.UNREACHABLE
    assert of(pair, Connect) == ["shm", "rdma"]
    shut(pair)
    assert delivered(asks(pair, 2)) and of(pair, Connect) == ["shm", "rdma"]  # the link stood; rdma works now


def test_an_only_plane_that_fails_is_not_asked_for_again_at_once(make_pair: Make) -> None:
    pair = make_pair("p", "d", transports=(SHM,))
    load = pair.d.want("r", pair.p.grant())
    pair.lose(Linked)
    pair.settle()
    pair.d.tell(PlaneFailed(pair.p.me, pair.done(Connect, "d")[0].holder))
    pair.settle()
    assert load.failed is not None and load.failed.reason is Reason.UNREACHABLE and len(pair.said(Hello)) == 1


def test_endpoints_that_cannot_be_used_are_a_plane_that_cannot_be_opened(two_planes: Pair) -> None:
    two_planes.d.habits.copies = False
    load = two_planes.d.want("r", two_planes.p.grant())
    two_planes.settle()  # as far as the probe
    two_planes.d.tell(PlaneFailed(two_planes.p.me, two_planes.done(Connect, "d")[0].holder, "of no use"))
    two_planes.d.habits.copies = True
    two_planes.settle()
    assert delivered(load) and of(two_planes, Connect) == ["shm", "tcp"]
    assert two_planes.done(GivenUp)[0].detail == "of no use"


def test_a_source_that_answers_before_it_was_told_links_nothing(two_planes: Pair) -> None:
    """Linked is the answer to Joined, which waits for the probe: the link was up, and its timer ran on."""
    two_planes.d.habits.copies = False
    load = two_planes.d.want("r", two_planes.p.grant())
    two_planes.settle()  # as far as the probe
    two_planes.inject("p", "d", Linked(), session=next(iter(two_planes.p.ledger.sessions.by_number)))
    assert not two_planes.said(Claim) and two_planes.d.counts["illegal.linked"] == 1
    two_planes.d.finish()
    two_planes.d.habits.copies = True
    two_planes.settle()
    assert delivered(load)


def test_a_plane_that_does_not_answer_is_given_up_in_time(two_planes: Pair) -> None:
    two_planes.d.habits.copy_s = 60.0
    load = two_planes.d.want("r", two_planes.p.grant())
    two_planes.run(2.4)
    assert of(two_planes, Connect) == ["shm"] and not two_planes.said(Joined)
    two_planes.d.habits.copy_s = 0.0  # of what is begun from now on
    two_planes.run(0.2)
    assert delivered(load) and of(two_planes, Connect) == ["shm", "tcp"]
    assert two_planes.done(GivenUp)[0].detail == "could not be opened in time"


def test_it_is_tried_again_after_a_while(make_pair: Make) -> None:
    pair = make_pair("p", "d", transports=BOTH, settings=Settings(shun_s=60.0))
    shut(pair, "shm")
    asks(pair)
    shut(pair)
    pair.run(59.0)
    assert delivered(asks(pair, 2)) and of(pair, Connect) == ["shm", "tcp"] and not pair.said(Goodbye)
    pair.run(2.0)
    assert delivered(asks(pair, 3)) and of(pair, Connect) == ["shm", "tcp", "shm"]  # by an idle link's goodbye
    assert delivered(asks(pair, 4)) and len(pair.said(Goodbye)) == 1


def test_what_the_source_gave_up_is_tried_again_too(make_pair: Make) -> None:
    """Found by the simulator: D remembered only its own failures, and the pair kept to what P had fallen back on."""
    pair = make_pair("p", "d", transports=BOTH, settings=Settings(shun_s=60.0))
    pair.hold(Joined)
    load = asks(pair)
    pair.p.tell(PlaneFailed(pair.d.me, ("session", 1), "no such device"))
    pair.release(Joined)
    pair.settle()
    assert delivered(load) and of(pair, Connect) == ["shm", "tcp"]
    pair.run(61.0)
    assert delivered(asks(pair, 2)) and of(pair, Connect) == ["shm", "tcp", "shm"]
    pair.run(61.0)
    assert delivered(asks(pair, 3)) and len(of(pair, Connect)) == 3, "and then it stays"


def test_what_only_the_source_has_was_not_given_up(make_pair: Make) -> None:
    pair = make_pair("p", transports=(RDMA, TCP))
    pair.add("d", transports=(TCP,))
    assert delivered(asks(pair)) and of(pair, Connect) == ["tcp"]
    pair.run(61.0)
    assert delivered(asks(pair, 2)) and of(pair, Connect) == ["tcp"], "there is nothing to try again"


def test_a_link_in_use_is_not_given_up_for_a_better_plane(make_pair: Make) -> None:
    pair = make_pair("p", "d", transports=BOTH, settings=Settings(shun_s=5.0, transfer_timeout=60.0))
    shut(pair, "shm")
    asks(pair)
    shut(pair)
    pair.d.habits.copies = False
    slow = pair.d.want("slow", pair.p.grant(2), 2)
    pair.run(6.0)
    other = asks(pair, 3)
    assert of(pair, Connect) == ["shm", "tcp"]
    pair.d.habits.copies = True
    pair.settle()
    assert delivered(slow) and delivered(other)


def test_a_plane_that_fails_at_the_source_gives_way_too(two_planes: Pair) -> None:
    """P cannot mint an endpoint, or cannot use D's: D hears nothing, or a Reset, and is given another plane."""
    two_planes.lose(Welcome)
    load = two_planes.d.want("r", two_planes.p.grant())
    two_planes.settle()
    (session,) = two_planes.p.ledger.sessions.by_number
    two_planes.p.tell(PlaneFailed(two_planes.d.me, ("session", session), "no endpoint"))
    two_planes.run(1.0)
    assert delivered(load) and of(two_planes, Connect) == ["tcp"] and two_planes.p.counts["planes_given_up.shm"] == 1
    two_planes.p.tell(PlaneFailed(two_planes.d.me, ("session", 999)), PlaneFailed(two_planes.d.me, ("link", 999)))
    assert delivered(asks(two_planes, 2))


def test_a_failure_of_one_role_leaves_the_other_alone(make_pair: Make) -> None:
    pair = make_pair("p", "d", transports=BOTH)
    assert delivered(asks(pair))
    back = pair.p.want("back", pair.d.grant(2), 2, source="d")
    pair.settle()
    assert delivered(back)
    (session,) = [number for number, each in pair.d.ledger.sessions.by_number.items() if each.joined]
    pair.d.tell(PlaneFailed(pair.p.me, ("session", session)))
    assert pair.d.ledger.consumer.links.by_worker  # by which d reads from p
    assert delivered(asks(pair, 3)) and of(pair, Connect).count("tcp") == 0


def test_a_source_that_can_use_no_plane_does_not_keep_its_reader_greeting(make_pair: Make) -> None:
    """P confirms and then finds that it cannot connect, every time: a bounded number of greetings, then an end."""
    pair = make_pair("p", "d", transports=(SHM,))

    def fail_each_session(arrived: int) -> None:
        for number, session in list(pair.p.ledger.sessions.by_number.items()):
            if session.joined:
                pair.p.tell(PlaneFailed(pair.d.me, ("session", number)))

    pair.on_delivery = fail_each_session
    load = asks(pair)
    pair.on_delivery = None
    assert load.failed is not None and len(pair.said(Hello)) == 1 + 8


def test_a_source_that_takes_what_was_not_offered_is_refused(two_planes: Pair) -> None:
    shut(two_planes, "shm")
    two_planes.lose(Hello, times=99)
    load = two_planes.d.want("r", two_planes.p.grant())
    link = two_planes.d.ledger.consumer.links.by_worker[WorkerId("p")]
    links = two_planes.d.ledger.consumer.links
    links._shunned.add(WorkerId("p"), "shm", two_planes.d.now)
    endpoints = (b"1",)
    card = two_planes.p.ledger.desk.identity.card()
    two_planes.inject("p", "d", Welcome(link.greeting.nonce, card, "shm", endpoints, 0), session=7)
    two_planes.heal()
    assert load.failed is not None and load.failed.reason is Reason.NO_TRANSPORT
    assert load.failed.detail == "transport: the peer chose 'shm', not offered"


def test_what_has_all_its_bytes_is_not_lost_with_the_plane(two_planes: Pair) -> None:
    two_planes.lose(Commit)
    done = two_planes.d.want("done", two_planes.p.grant(1), 1)
    two_planes.settle()
    assert done.end is None and two_planes.said(Commit)
    shut(two_planes, "shm")
    load = asks(two_planes, 2)
    assert load.end is not None and load.end.reason is Reason.UNREACHABLE and done.end is None
    two_planes.run(1.0)
    assert delivered(done)
    assert delivered(asks(two_planes, 3)) and of(two_planes, Connect) == ["shm", "tcp"]


def test_a_plane_that_shuts_later_costs_that_handoff_and_no_other(two_planes: Pair) -> None:
    assert delivered(asks(two_planes))
    shut(two_planes, "shm")
    load = asks(two_planes, 2)
    assert load.end is not None and load.end.reason is Reason.UNREACHABLE
    assert delivered(asks(two_planes, 3)) and of(two_planes, Connect) == ["shm", "tcp"]


def test_a_link_that_goes_while_its_plane_is_opened_leaves_nothing(two_planes: Pair) -> None:
    two_planes.d.habits.copy_s = 1.0
    two_planes.d.habits.cancels = False  # so that the probe ends, and rests, after its link
    load = two_planes.d.want("r", two_planes.p.grant())
    two_planes.settle()
    assert two_planes.said(Welcome) and not two_planes.said(Joined)
    two_planes.d.tell(Departed(WorkerId("p"), two_planes.p.me.incarnation))
    two_planes.run(5.0)
    assert load.failed is not None and load.failed.reason is Reason.PEER_GONE
    assert not two_planes.d.ledger.desk.owners and not two_planes.said(Joined)


def test_a_probe_of_an_old_link_says_nothing_of_the_new_one(two_planes: Pair) -> None:
    two_planes.d.habits.copy_s = 1.0
    two_planes.d.want("r1", two_planes.p.grant())
    two_planes.settle()
    links = two_planes.d.ledger.consumer.links
    old = links.by_worker[WorkerId("p")]
    assert old.probes is not None and old.probes.moving
    two_planes.d.tell(Departed(WorkerId("p"), two_planes.p.me.incarnation))
    two_planes.d.want("r2", two_planes.p.grant(2), 2)
    two_planes.settle()
    for reason in (None, Reason.UNREACHABLE):
        links.on_probe_ended(old, CopyEnded(JobId(1), reason), two_planes.d.now)
    assert not two_planes.said(Joined) and not two_planes.done(GivenUp)
    two_planes.run(5.0)
    assert len(two_planes.said(Joined)) == 1 and of(two_planes, Connect) == ["shm", "shm"]


def test_news_of_an_old_link_leave_the_new_one_alone(two_planes: Pair) -> None:
    assert delivered(asks(two_planes))
    old = two_planes.d.ledger.consumer.links.by_worker[WorkerId("p")]
    two_planes.d.tell(Departed(WorkerId("p"), two_planes.p.me.incarnation))
    assert delivered(asks(two_planes, 2))
    two_planes.d.ledger.consumer.links.avoid(old, "late", two_planes.d.now)
    assert delivered(asks(two_planes, 3)) and of(two_planes, Connect) == ["shm", "shm"] and not two_planes.done(GivenUp)


def test_every_pair_of_ranks_is_opened(make_pair: Make) -> None:
    pair = make_pair("p", "d", transports=BOTH, shape=Shape(ranks=2))
    assert delivered(asks(pair))
    probes = [each for each in pair.done(StartCopy, "d") if not each.copy.spans]
    assert sorted((each.rank, each.copy.peer.worker) for each in probes) == [
        (0, "p#0"), (0, "p#1"), (1, "p#0"), (1, "p#1"),
    ]  # fmt: skip


def test_which_planes_are_left() -> None:
    shunned, p, names = Shunned(10.0), WorkerId("p"), ("shm", "tcp")
    shunned.add(p, "shm", 100.0)
    assert shunned.without(p, names, 109.9) == ("tcp",) and shunned.without(WorkerId("q"), names, 109.9) == names
    assert shunned.without(p, names, 110.0) == names
