"""vLLM's OffloadingConnector without a GPU: its own scheduler and manager, and a worker that copies on the host.

vLLM refuses its CPU tier on CPUs (0.32.0, `CPUOffloadingSpec.get_worker`); what is tried here is how it and our
connector live together, for which it does not matter where the bytes go. Named to vLLM by `spec_module_path`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "kvbaton.proof.conformance.offloading_host",
        "cpu_bytes_to_use": 16 << 20,
    },
}


class HostOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once; a job has ended when somebody asks."""

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self._caches = [each.tensor for each in kv_caches.tensors]
        self._kept = [torch.zeros((chunks, *cache.shape[1:]), dtype=cache.dtype) for cache in self._caches]
        self._ended: list[TransferResult] = []
        self.loads = 0

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, kept in zip(self._caches, self._kept, strict=True):
            kept[list(dst_spec.block_ids)] = cache[list(src_spec.block_ids)]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.loads += 1
        for cache, kept in zip(self._caches, self._kept, strict=True):
            cache[list(dst_spec.block_ids)] = kept[list(src_spec.block_ids)]
        return self._end(job_id)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Every job has ended when it was submitted."""

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, True, 1, 0.001))
        return True


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """One block a chunk."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            self._worker = HostOffloadingWorker(kv_caches, self.num_chunks)
        return self._worker
