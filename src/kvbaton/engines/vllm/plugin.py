"""A plugin of vLLM that lets every process of it, and a platform around it, find our connector by its name.

vLLM's MultiConnector looks its children's statistics up in the factory's list, by the name of the class, in the front
end; one that was loaded by its module's path is not in it, and the first request ended the API server. Dynamo's
prefill worker looks up, by the same name, how `kv_transfer_params` travel between P and D, and refuses names that are
not in its table; ours travel as NIXL's do: P's answer goes to D as it is. And vLLM's front end learns to repeat an
answer that is continued (`repeated_answers`).

Law: each list gets our name once, however often and by whomever this is called. Nothing here raises, and nothing of
the connector is loaded: the factory does that when somebody asks. Dynamo is not imported: where it serves, its worker
has imported the table before vLLM loads plugins.
"""

from __future__ import annotations

import importlib
import sys

from kvbaton.engines.side.guard import guarded, returns
from kvbaton.engines.vllm import repeated_answers
from kvbaton.engines.vllm.launch.launching import CONNECTOR
from kvbaton.engines.vllm.launch.parent_watch import watch_parent

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
DYNAMO = "dynamo.vllm.kv_connector_protocols"


@guarded(returns(None))
def register() -> None:
    """The entry point; also called when the connector itself is imported."""
    watch_parent()
    repeated_answers.install()
    _register_with_dynamo()
    name, module = CONNECTOR["kv_connector"], CONNECTOR["kv_connector_module_path"]
    factory = importlib.import_module(_FACTORY).KVConnectorFactory
    if name not in factory._registry:
        factory.register_connector(name, module, name)


@guarded(returns(None))
def _register_with_dynamo() -> None:
    protocols = sys.modules.get(DYNAMO)
    if protocols is not None:
        protocols.KV_CONNECTOR_PROTOCOLS.setdefault(CONNECTOR["kv_connector"], protocols.NixlConnectorProtocol)
