"""A plugin of vLLM that lets every process of it find our connector by its name.

vLLM's MultiConnector looks its children's statistics up in the factory's list, by the name of the class, in the front
end; one that was loaded by its module's path is not in it, and the first request ended the API server.

Law: the list gets our name once, however often and by whomever this is called. Nothing here raises, and nothing of the
connector is loaded: the factory does that when somebody asks.
"""

from __future__ import annotations

import importlib

from kvbaton.engines.vllm.guard import guarded, returns
from kvbaton.engines.vllm.launching import CONNECTOR

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@guarded(returns(None))
def register() -> None:
    """The entry point; also called when the connector itself is imported."""
    name, module = CONNECTOR["kv_connector"], CONNECTOR["kv_connector_module_path"]
    factory = importlib.import_module(_FACTORY).KVConnectorFactory
    if name not in factory._registry:
        factory.register_connector(name, module, name)
