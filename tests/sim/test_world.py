from __future__ import annotations

from kvbaton.protocol.ids import WorkerId
from kvbaton_proof.sim.world.sim_memory import Shape, page_stamp
from kvbaton_proof.sim.world.sim_network import Network, NetworkFaults, SimControl
from kvbaton_proof.sim.world.world import World

A, B = WorkerId("a"), WorkerId("b")


def test_things_happen_in_the_order_of_their_times_and_then_of_their_making():
    world, seen = World(0), []
    for name, delay in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        world.after(delay, lambda name=name: seen.append((name, world.now)))
    world.run(1.5)
    assert seen == [("first", 1.0), ("second", 1.0)]
    assert world.now == 1.5
    world.run(5.0)
    assert seen[-1] == ("late", 2.0)


def deliveries(faults: NetworkFaults, frames: int = 200) -> list[bytes]:
    world = World(3)
    network = Network(world, faults)
    network.names |= {A, B}
    got: list[bytes] = []
    network.deliver = lambda source, target, frame: got.append(frame)
    control = SimControl(network, A)
    for n in range(frames):
        assert control.send(B, b"%d" % n)
    world.run(100.0)
    return got


def test_a_good_network_delivers_everything_once():
    assert sorted(deliveries(NetworkFaults())) == sorted(b"%d" % n for n in range(200))


def test_a_bad_network_loses_doubles_overtakes_and_garbles():
    assert 0 < len(deliveries(NetworkFaults(loss=0.5))) < 200
    assert len(deliveries(NetworkFaults(double=0.5))) > 200
    assert deliveries(NetworkFaults(slow=0.5)) != [b"%d" % n for n in range(200)]
    assert set(deliveries(NetworkFaults(garble=0.5))) - {b"%d" % n for n in range(200)}


def test_a_cut_is_one_way():
    world = World(0)
    network = Network(world, NetworkFaults())
    network.names |= {A, B}
    network.cut.add((A, B))
    got: list[tuple[WorkerId, bytes]] = []
    network.deliver = lambda source, target, frame: got.append((target, frame))
    SimControl(network, A).send(B, b"lost")
    SimControl(network, B).send(A, b"kept")
    world.run(1.0)
    assert got == [(A, b"kept")]


def test_an_unknown_worker_is_said_to_be_unknown():
    assert not SimControl(Network(World(0), NetworkFaults()), A).send(WorkerId("nobody"), b"x")


def test_every_page_of_every_prompt_has_its_own_bytes():
    shape = Shape(ranks=2, group_layers=(2, 1))
    pages = {
        page_stamp(shape, content, layer, index, rank, shape.block_tokens)
        for content in range(20)
        for layer in range(shape.layers)
        for index in range(4)
        for rank in range(2)
    }
    assert len(pages) == 20 * shape.layers * 4 * 2


def test_offsets_lead_back_to_their_blocks():
    for blocks_first in (False, True):
        shape = Shape(group_layers=(2, 1), blocks_first=blocks_first)
        offsets = {shape.page(layer, block): block for layer in range(3) for block in range(shape.blocks)}
        assert len(offsets) == 3 * shape.blocks
        assert all(
            shape.block_at(at) == shape.block_at(at + shape.page_bytes - 1) == block for at, block in offsets.items()
        )
