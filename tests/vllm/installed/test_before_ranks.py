"""vLLM's own scheduler, a connector that never heard of its workers, requests in NIXL's words: no promised prompt is
computed in silence under `fail`, none waits for ever, and no KV that nobody vouched for is decoded on."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.control import keyring
from kvbaton_proof.conformance import configs
from kvbaton_proof.conformance.configs import EngineShape

pytestmark = pytest.mark.timeout(300)

FOR_NIXL = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_request_id": "r0",
    "remote_block_ids": [[1, 2, 3]], "remote_host": "192.0.2.1", "remote_port": 5600, "tp_size": 1,
}  # fmt: skip
PROMPT = list(range(10))


class Core:
    """A scheduler and one worker's connector, without the handshake between them."""

    def __init__(self, policy: Any, keys: str) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.sched.scheduler import Scheduler

        shape = EngineShape(policy=policy, role="kv_consumer", prefix_caching=False)
        config = configs.vllm_config(
            shape, {"name": "d0", "keys": keys}, module=configs.CONNECTOR_MODULE, connector=configs.CONNECTOR_CLASS
        )
        planned = configs.kv_cache_config(config, shape)
        self.worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, copy.deepcopy(planned))
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=planned,
            structured_output_manager=SimpleNamespace(),
            block_size=shape.block_tokens,
            log_stats=True,
        )

    def ask(self, params: Any) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
        request = Request("r1", PROMPT, sampling, None)
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """One step in which nothing is computed; what the worker says goes back. Returns what was scheduled."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput

        scheduled = self.scheduler.schedule()
        if scheduled.total_num_scheduled_tokens:
            return scheduled
        self.worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        told = self.worker.get_transfer_results(scheduled.finished_req_ids)
        self.worker.clear_connector_metadata()
        output = copy.deepcopy(EMPTY_MODEL_RUNNER_OUTPUT)
        output.kv_connector_output = KVConnectorOutput(
            finished_recving=told.finished_recving, failed_recving=told.failed_recving
        )
        self.scheduler.update_from_output(scheduled, output)
        return scheduled


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    configs.prepare()
    folder = tmp_path_factory.mktemp("cluster") / "keys"
    keyring.mint(folder, ["p0", "d0"])
    return str(folder)


def test_with_fail_it_ends_as_an_error_and_holds_nothing(keys: str) -> None:
    core = Core("fail", keys)
    free = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    request = core.ask(dict(FOR_NIXL))
    for _ in range(3):
        assert not core.step().num_scheduled_tokens, "a prompt that was promised is not computed in silence"
    assert request.status.name == "FINISHED_ERROR"
    assert core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert not core.scheduler.requests


def test_with_recompute_it_is_computed(keys: str) -> None:
    core = Core("recompute", keys)
    core.ask(dict(FOR_NIXL))
    assert core.step().num_scheduled_tokens == {"r1": len(PROMPT)}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_request_of_its_own_is_computed_under_either(keys: str, policy: str) -> None:
    core = Core(policy, keys)
    core.ask(None)
    assert core.step().num_scheduled_tokens == {"r1": len(PROMPT)}
