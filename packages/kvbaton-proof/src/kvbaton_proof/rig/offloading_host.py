"""vLLM's OffloadingConnector without a GPU: its own scheduler and manager, and a worker that copies on the host.

vLLM refuses its CPU tier on CPUs (0.32.0, `CPUOffloadingSpec.get_worker`); what is tried here is how it and our
connector live together, for which it does not matter where the bytes go. Named to vLLM by `spec_module_path`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvbaton_proof.conformance.runner import OrderedCopies, device_of

OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "kvbaton_proof.rig.offloading_host",
        "cpu_bytes_to_use": 16 << 20,
    },
}


class HostOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies behind the steps that the device was given before, each direction in its order, as vLLM's own does."""

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self._caches = [each.tensor for each in kv_caches.tensors]
        self._kept = [torch.zeros((chunks, *cache.shape[1:]), dtype=cache.dtype) for cache in self._caches]
        device = device_of(self._caches[0])
        self._stores, self._loads = OrderedCopies(device), OrderedCopies(device)
        self._ended: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._stores.begin(job_id, lambda: self._copy(self._caches, src_spec, self._kept, dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._loads.begin(job_id, lambda: self._copy(self._kept, src_spec, self._caches, dst_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = [*self._ended, *self._stores.ended(), *self._loads.ended()], []
        return [TransferResult(job, True, 1, 0.001) for job in ended]

    def wait(self, job_ids: set[int]) -> None:
        self._ended += [*self._stores.wait(job_ids), *self._loads.wait(job_ids)]

    def _copy(self, sources: list[Any], src_spec: Any, targets: list[Any], dst_spec: Any) -> None:
        for source, target in zip(sources, targets, strict=True):
            target[list(dst_spec.block_ids)] = source[list(src_spec.block_ids)]


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """One block a chunk."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            self._worker = HostOffloadingWorker(kv_caches, self.num_chunks)
        return self._worker
