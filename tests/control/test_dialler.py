"""Connections that this side opens: attributed by key, bounded, and never lost for good."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq

from kvbaton.control.addressing import ControlLimits
from kvbaton.control.dialler import REFUSAL_S, Dialler
from kvbaton.control.sockets import SocketPlane
from kvbaton.protocol.ids import WorkerId

from .rig import Post, cluster, exchange, posted, repeat_until_answered, steady_bind, until

RINGS = cluster("p0", "p1", "p2", "d0")
P0 = WorkerId("p0")


def _silent_port() -> str:
    """An endpoint that nobody listens on."""
    return steady_bind()


@contextmanager
def _relay(target: str) -> Iterator[tuple[str, threading.Event]]:
    """Forwards bytes to `target` until told to go dark: connections then stay open, and nothing passes."""
    dark, done = threading.Event(), threading.Event()
    host, port = target.removeprefix("tcp://").rsplit(":", 1)
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not dark.is_set():
                    sink.sendall(data)
        except OSError:
            pass

    def serve() -> None:
        while not done.is_set():
            try:
                near, _ = listener.accept()
            except OSError:
                return
            held.append(near)
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:  # the test is over
                return
            held.append(far)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", dark
    finally:
        done.set()
        for each in (listener, *held):
            with suppress(OSError):  # ends the waits of the threads; closing alone does not
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def test_a_worker_that_is_in_no_directory_is_unknown() -> None:
    with posted(d0 := Post(RINGS["d0"])):
        assert d0.control.send(P0, b"x") is False


def test_what_comes_back_on_a_line_is_from_whom_it_was_dialled_to() -> None:
    with posted(p0 := Post(RINGS["p0"]), d0 := Post(RINGS["d0"], bind=None)):
        d0.knows(p0)
        exchange(d0, p0, answer=b"I am p1")
        assert d0.inbox == [("p0", b"I am p1")]


def test_an_impostor_at_a_peers_address_hears_and_says_nothing() -> None:
    with posted(p1 := Post(RINGS["p1"]), d0 := Post(RINGS["d0"])):
        d0.control.set_directory({P0: (p1.control.endpoint, RINGS["p0"].public)})
        assert d0.control.send(P0, b"for p0 only")
        until(lambda: p1.control.strangers >= 1, p1, d0)
        assert p1.inbox == [] and d0.inbox == []


def test_a_directory_entry_under_another_key_than_ours_is_not_dialled() -> None:
    with posted(p1 := Post(RINGS["p1"]), d0 := Post(RINGS["d0"])):
        d0.control.set_directory({P0: p1.address})
        assert d0.control.send(P0, b"x") is False
        assert d0.control.counters["mismatched"] == 1


def test_a_peer_restarted_at_the_same_endpoint_is_reached_again() -> None:
    p0, d0 = Post(RINGS["p0"], bind=steady_bind()), Post(RINGS["d0"])
    d0.knows(p0)
    with posted(d0):
        exchange(d0, p0)
        endpoint = p0.control.endpoint
        p0.control.close()
        with posted(again := Post(RINGS["p0"], bind=endpoint)):
            until(lambda: d0.send(again, b"again?") and again.inbox, again, d0)  # what went to the old one is lost
            exchange(d0, again)


def test_a_peer_that_moved_is_reached_at_its_new_endpoint() -> None:
    with posted(old := Post(RINGS["p0"]), new := Post(RINGS["p0"]), d0 := Post(RINGS["d0"])):
        d0.knows(old)
        exchange(d0, old)
        d0.knows(new)
        exchange(d0, new)
        until(lambda: not old.send(d0, b"?"), old)  # the old line was closed


def test_a_way_back_ends_when_the_directory_says_that_the_worker_moved() -> None:
    with posted(p0 := Post(RINGS["p0"]), old := Post(RINGS["d0"]), new := Post(RINGS["d0"])):
        old.knows(p0)
        p0.knows(old)
        exchange(old, p0)
        p0.knows(new)
        assert p0.send(new, b"at your new place")
        until(lambda: new.inbox, new, p0)
        assert new.inbox == [("p0", b"at your new place")]


def test_an_address_that_another_program_held_for_a_while_is_dialled_again() -> None:
    limits = ControlLimits(redial_s=0.05)
    with posted(d0 := Post(RINGS["d0"], limits=limits)):
        endpoint = steady_bind()
        with socket.create_server(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as squatter:
            d0.control.set_directory({P0: (endpoint, RINGS["p0"].public)})
            assert d0.control.send(P0, b"x")
            squatter.settimeout(20)
            near, _ = squatter.accept()
            with near:
                near.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20)
                until(lambda: d0.control.send(P0, b"x") and d0.control.counters["redialled"], d0)
        with posted(p0 := Post(RINGS["p0"], bind=endpoint)):
            until(lambda: d0.control.send(P0, b"at last") and p0.inbox, p0, d0)


def test_a_worker_with_two_keys_is_given_longer_under_each_until_it_answers() -> None:
    """Else one whose answer takes longer than `redial_s` is hung up on for ever, under the right key too."""
    now = [0.0]
    plane = SocketPlane(RINGS["d0"], ControlLimits(), lambda: now[0])
    plane.take(RINGS["d0"].peers, {P0: (RINGS["p1"].public,)})
    dialler = Dialler(plane)
    dialler.set_directory({P0: (_silent_port(), "")})
    changes = []
    for second in range(60):
        now[0] = float(second)
        before = plane.counters["redialled"]
        dialler.send(P0, b"x")
        changes += [second] if plane.counters["redialled"] > before else []
    dialler.close()
    plane.context.term()
    waits = [later - first for first, later in zip([0, *changes], changes, strict=False)]
    assert waits == sorted(waits)
    assert waits[0] == 2
    assert waits[-1] >= 10


def test_frames_for_a_peer_that_is_away_are_bounded_and_the_rest_counted_as_lost() -> None:
    limits = ControlLimits(frames_queued_max=16, linger_s=0.0)
    with posted(d0 := Post(RINGS["d0"], limits=limits)):
        d0.control.set_directory({P0: (_silent_port(), RINGS["p0"].public)})
        assert all(d0.control.send(P0, b"x") for _ in range(100))
        assert d0.control.counters["lost"] == 84
        assert d0.control.counters["frames_out"] == 16


def test_a_process_without_descriptors_loses_the_frame_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with posted(p0 := Post(RINGS["p0"]), d0 := Post(RINGS["d0"])):
        d0.knows(p0)
        with monkeypatch.context() as patched:
            patched.setattr(SocketPlane, "client", fail)
            assert d0.send(p0, b"x")
            assert d0.control.counters["lost"] == 1
        exchange(d0, p0)


def test_frames_above_the_bound_are_not_sent() -> None:
    with posted(p0 := Post(RINGS["p0"]), d0 := Post(RINGS["d0"], limits=ControlLimits(frame_bytes_max=1000))):
        d0.knows(p0)
        assert d0.send(p0, b"x" * 1001) and d0.send(p0, b"")
        assert d0.control.counters["lost"] == 2
        exchange(d0, p0, said=b"x" * 1000)


def test_dialled_peers_are_bounded_by_hanging_up_on_the_one_used_least_recently() -> None:
    sources = [Post(RINGS[name]) for name in ("p0", "p1", "p2")]
    d0 = Post(RINGS["d0"], limits=ControlLimits(peers_dialled_max=2))
    d0.knows(*sources)
    with posted(d0, *sources):
        p0, p1, p2 = sources
        for source in (p0, p1, p0, p2):
            exchange(d0, source)
        assert d0.control.counters["hung_up"] == 1
        until(lambda: not p1.send(d0, b"?"), *sources)
        assert p0.send(d0, b"?") and p2.send(d0, b"?")
        exchange(d0, p1)


def test_a_peer_behind_something_that_keeps_the_connection_and_carries_nothing_is_dialled_again() -> None:
    limits = ControlLimits(silence_s=0.6, redial_s=0.4, handshake_s=5.0)  # longer than a busy machine takes to dial
    p0, d0 = Post(RINGS["p0"], limits=limits), Post(RINGS["d0"], limits=limits)
    with posted(p0, d0), _relay(p0.control.endpoint) as (endpoint, dark):
        d0.control.set_directory({P0: (endpoint, RINGS["p0"].public)})
        exchange(d0, p0)
        assert d0.control.counters["redialled"] == 0
        dark.set()
        until(lambda: d0.send(p0, b"are you there?") and d0.control.counters["redialled"], p0, d0)
        dark.clear()
        repeat_until_answered(d0, p0)  # what went into the dark is lost


@pytest.mark.parametrize("answers", [True, False])
def test_a_peer_is_dialled_again_only_when_a_second_question_long_after_the_first_is_not_answered(
    answers: bool,
) -> None:
    """Not every frame is answered: one sent long ago that was not proves nothing."""
    now = [0.0]
    plane = SocketPlane(RINGS["d0"], ControlLimits(silence_s=6.0, redial_s=2.0), lambda: now[0])
    dialler = Dialler(plane)
    dialler.set_directory({P0: (_silent_port(), RINGS["p0"].public)})
    redialled = []
    for now[0] in (0.0, 5.9, 100.0, 101.9, 102.0):
        dialler.send(P0, b"x")
        redialled.append(plane.counters["redialled"])
        if answers and now[0] == 100.0:
            dialler.drain(P0, [], 1)
    dialler.close()
    plane.context.term()
    assert redialled == ([0, 0, 0, 0, 0] if answers else [0, 0, 0, 0, 1])


@pytest.mark.parametrize(
    ("endpoint", "key", "part"),
    [("tcp://127.0.0.1:0", None, "port 0"), ("nonsense", None, "not tcp"), ("tcp://127.0.0.1:5", "short", "Z85")],
)
def test_a_directory_with_a_bad_field_is_refused_where_it_is_set(endpoint: str, key: str | None, part: str) -> None:
    with posted(d0 := Post(RINGS["d0"])), pytest.raises(ValueError, match=part):
        d0.control.set_directory({P0: (endpoint, key or RINGS["p0"].public)})


def test_an_odd_message_from_a_server_is_dropped() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as router, posted(d0 := Post(RINGS["d0"])):
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_PUBLICKEY, RINGS["p0"].public.encode())
        router.setsockopt(zmq.CURVE_SECRETKEY, RINGS["p0"].secret.encode())
        port = router.bind_to_random_port("tcp://127.0.0.1")
        d0.control.set_directory({P0: (f"tcp://127.0.0.1:{port}", RINGS["p0"].public)})
        assert d0.control.send(P0, b"hello")
        assert router.poll(20_000)
        route, _ = router.recv_multipart()
        for parts in ([b""], [b"a", b"b"], [b"good"]):
            router.send_multipart([route, *parts])
        until(lambda: d0.inbox, d0)
        assert d0.inbox == [("p0", b"good")]
        assert d0.control.counters["malformed"] == 2
    context.term()


def test_a_peer_whose_process_has_ended_is_known_at_once() -> None:
    """Its host refuses the next connection: no silence has to be waited for."""
    gone: list[WorkerId] = []
    p0, d0 = Post(RINGS["p0"]), Post(RINGS["d0"])
    with posted(d0):
        d0.control.on_refused = gone.append
        with posted(p0):
            d0.knows(p0)
            exchange(d0, p0)
            assert not gone
        until(lambda: gone, d0, timeout_s=REFUSAL_S)
        assert set(gone) == {P0} and d0.control.counters["refused_lines"] == len(gone)


def test_where_nobody_ever_answered_one_waits_a_moment_for_another_address() -> None:
    gone: list[WorkerId] = []
    with posted(d0 := Post(RINGS["d0"])):
        d0.control.on_refused = gone.append
        d0.control.set_directory({P0: (_silent_port(), RINGS["p0"].public)})
        began = time.monotonic()
        assert d0.control.send(P0, b"hello")
        until(lambda: gone, d0)
        assert time.monotonic() - began >= REFUSAL_S


def test_connections_that_break_while_something_listens_are_no_death() -> None:
    gone: list[WorkerId] = []
    with posted(d0 := Post(RINGS["d0"])), socket.create_server(("127.0.0.1", 0)) as between:
        d0.control.on_refused = gone.append
        d0.control.set_directory({P0: (f"tcp://127.0.0.1:{between.getsockname()[1]}", RINGS["p0"].public)})
        assert d0.control.send(P0, b"hello")
        between.settimeout(20.0)
        began, cut = time.monotonic(), 0
        while time.monotonic() - began < 1.5 * REFUSAL_S or cut < 2:
            between.accept()[0].close()  # whoever listens is there
            cut += 1
            d0.turn()
        assert not gone
