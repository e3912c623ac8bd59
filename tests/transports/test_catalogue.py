"""Which data planes are offered, and in which order: what an operator names, or what this machine has."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.transports import builtin_entries, catalogue
from kvbaton.transports.catalogue import PlaneSettings
from kvbaton.transports.catalogue_entry import loads
from kvbaton.transports.checksum import checksum_device
from kvbaton.transports.checksum.checksum_memory import Checksum
from kvbaton.transports.checksum.checksum_transport import SummedTransport
from kvbaton.transports.core.shared_memory import DeviceMemory, allocate
from kvbaton.transports.core.transport import HostTransport
from kvbaton.transports.cuda import cuda_transport
from kvbaton.transports.staged import staged_transport
from tests.transports.device.fake_gpu import FakeGpu

ME = PeerId(WorkerId("me"), Incarnation(1))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with every library and no device; a device is a file in the returned folder."""
    monkeypatch.setattr(builtin_entries, "RDMA_DEVICES", tmp_path)
    for name in catalogue.ORDER:
        monkeypatch.setitem(catalogue.PLANES, name, msgspec.structs.replace(catalogue.PLANES[name], usable=lambda: ""))
    return tmp_path


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(catalogue.PLANES, name, msgspec.structs.replace(catalogue.PLANES[name], usable=lambda: "gone"))


def test_without_rdma_the_best_are_our_own(machine: Path) -> None:
    assert catalogue.offered("auto") == ("shm", "tcp") and catalogue.rdma_devices() == ()


def test_with_rdma_it_comes_after_shared_memory_and_before_sockets(machine: Path) -> None:
    (machine / "mlx5_0").touch()
    assert catalogue.rdma_devices() == ("mlx5_0",)
    assert catalogue.offered("auto") == ("shm", "nixl", "tcp")


def test_device_memory_is_offered_what_reaches_it(machine: Path) -> None:
    assert catalogue.offered("auto", "cuda") == ("cuda", "staged-shm", "staged-tcp")
    assert catalogue.offered("staged-tcp,nixl", "cuda") == ("staged-tcp", "nixl"), "by name it is offered everywhere"
    (machine / "mlx5_0").touch()
    assert catalogue.offered("auto", "cuda") == ("cuda", "staged-shm", "nixl", "staged-tcp")


@pytest.mark.parametrize(("name", "device"), [("tcp", "cuda"), ("mooncake", "cuda"), ("cuda", "cpu")])
def test_a_named_plane_of_other_memory_is_an_error_at_start(machine: Path, name: str, device: str) -> None:
    with pytest.raises(OSError, match=f"transport {name} does not move .* memory; use .*nixl"):
        catalogue.offered(name, device)


def test_auto_leaves_out_what_is_not_there(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "mlx5_0").touch()
    without(monkeypatch, "shm")
    assert catalogue.offered("auto") == ("nixl", "tcp")


def test_an_operators_order_is_kept(machine: Path) -> None:
    assert catalogue.offered("tcp, shm") == ("tcp", "shm") and catalogue.offered("mooncake") == ("mooncake",)


def test_a_named_plane_that_cannot_be_used_is_an_error_with_its_reason(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "nixl")
    with pytest.raises(OSError, match="transport nixl cannot be used here: gone"):
        catalogue.offered("nixl,tcp")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pigeon", "got 'pigeon', expected auto, or some of cuda, shm"),
        ("", "got '', expected auto"),
        ("shm,shm", "names one twice"),
        ("auto,shm", "besides auto"),
        ("mori", "got 'mori', .*; mori comes with: pip install kvbaton-mori"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        catalogue.parse(text)


def test_a_library_that_breaks_is_a_reason_not_a_crash() -> None:
    def broken() -> None:
        raise AttributeError("half of it is missing")

    assert loads(broken)() == "AttributeError: half of it is missing"


@pytest.mark.parametrize("name", ["shm", "tcp", "nixl", "mooncake"])
def test_each_is_made_by_its_name_and_is_what_was_announced(name: str) -> None:
    memory = allocate(1 << 16)
    made = catalogue.make(name, ME, PlaneSettings(), [memory.view])
    try:
        assert made.capabilities == catalogue.capabilities(name) and made.capabilities.name == name
        assert made.endpoint(PeerId(WorkerId("you"), Incarnation(2)))
    finally:
        made.close()


def test_what_a_library_raises_when_it_is_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_me: PeerId, _told: PlaneSettings) -> HostTransport:
        raise RuntimeError("no device")

    monkeypatch.setitem(catalogue.PLANES, "nixl", msgspec.structs.replace(catalogue.PLANES["nixl"], make=broken))
    with pytest.raises(OSError, match="transport nixl cannot be used here: RuntimeError: no device"):
        catalogue.make("nixl", ME, PlaneSettings(), [])


@pytest.mark.parametrize("name", ["shm", "mooncake"])
def test_device_memory_does_not_go_over_a_host_plane(name: str) -> None:
    with pytest.raises(OSError, match="device memory; use cuda, staged-shm, nixl, staged-tcp"):
        catalogue.make_device(name, ME, PlaneSettings(), [DeviceMemory(4096, 64)])


@pytest.mark.parametrize("name", ["cuda", "nixl", "staged-shm", "staged-tcp"])
def test_without_a_gpu_a_device_plane_says_what_it_needs(name: str) -> None:
    assert catalogue.capabilities(name).name == name and "cuda" in catalogue.capabilities(name).device_kinds
    if catalogue.PLANES["cuda"].usable():
        with pytest.raises(OSError, match=f"transport {name} cannot be used here: .*require an NVIDIA driver"):
            catalogue.make_device(name, ME, PlaneSettings(), [DeviceMemory(4096, 64)])


def test_host_memory_does_not_go_over_a_device_plane() -> None:
    with pytest.raises(OSError, match="host memory; use shm, nixl, mooncake, tcp"):
        catalogue.make("cuda", ME, PlaneSettings(), [])


def test_a_name_that_is_no_address_is_told_for_mooncake() -> None:
    catalogue.check_host("mooncake", "10.1.2.3")
    catalogue.check_host("tcp", "somewhere")
    with pytest.raises(ValueError, match="host: 'somewhere'; mooncake requires"):
        catalogue.check_host("mooncake", "somewhere")


def test_who_insists_on_enforcement_is_offered_only_planes_that_lend() -> None:
    assert catalogue.offered("auto", require_enforcement=True) == ("tcp",)
    assert catalogue.offered("tcp", checksum="full", require_enforcement=True) == ("tcp+sums",)
    with pytest.raises(
        OSError, match=r"transport shm cannot confine a peer to the memory lent to it.*staged-shm, tcp, staged-tcp"
    ):
        catalogue.offered("shm,tcp", require_enforcement=True)


def test_what_enforces_is_what_the_page_says() -> None:
    assert {name for name in catalogue.ORDER if catalogue.capabilities(name).enforces} == {
        "tcp",
        "staged-shm",
        "staged-tcp",
    }


@pytest.mark.parametrize("between", catalogue.CHECKSUMS)
def test_checksums_that_are_auto_are_those_of_device_memory_between_hosts(
    machine: Path, monkeypatch: pytest.MonkeyPatch, between: catalogue.ChecksumMode
) -> None:
    monkeypatch.setattr(catalogue, "BETWEEN_HOSTS", between)
    plain = catalogue.offered("auto", "cuda")
    assert {"cuda", "staged-shm", "staged-tcp"} <= set(plain)
    wanted = [f"{name}+sums" if name == "staged-tcp" and between != "off" else name for name in plain]
    assert list(catalogue.offered("auto", "cuda", "auto")) == wanted
    assert catalogue.offered("shm,tcp", "cpu", "auto") == ("shm", "tcp")
    assert catalogue.offered("cuda,staged-tcp", "cuda", "full") == ("cuda+sums", "staged-tcp+sums")


@pytest.mark.parametrize("name", ["cuda+sums", "staged-shm+sums", "staged-tcp+sums"])
def test_device_planes_are_made_with_checksums_and_their_share(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, float]] = []
    gpu = FakeGpu()

    def make(device: int, share: float) -> FakeGpu:
        made.append((device, share))
        return gpu

    for module in (cuda_transport, staged_transport, checksum_device):
        monkeypatch.setattr(module, "CudaGpu", make)
    address = gpu.allocate(64)
    plane = catalogue.make_device(
        name, ME, PlaneSettings(checksum="full", copy_share=0.25), [DeviceMemory(address, 64)]
    )
    try:
        assert isinstance(plane, SummedTransport) and plane._sums.kind == "device"
        assert plane.capabilities == catalogue.capabilities(name) and made == [(0, 0.25)] * 2
        assert plane._config.mode is Checksum.FULL and plane._sums.size_of(0) == 64
    finally:
        plane.close()
        gpu.free(address)
