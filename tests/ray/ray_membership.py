"""A registry and its join door, and what every replica is given to become a member: one configuration for all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kvbaton.control import keyring
from kvbaton.control.joining import admission_files
from kvbaton.control.joining.admission import Admission
from kvbaton.control.joining.join_door import JoinDoor
from kvbaton.control.registry import RegistryServer
from kvbaton.protocol.legality import Role

TOKEN_S = 3600.0


@contextlib.contextmanager
def membership(directory: Path) -> Iterator[dict[str, str]]:
    """`kv_connector_extra_config`, good while the block lasts."""
    keys, token_file = directory / "keys", directory / "token"
    keyring.mint(keys, ["router"])
    token = admission_files.new_token(keys, Role.BOTH, TOKEN_S, 0)
    with open(os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token.text)
    own = keyring.load(keys, "router")
    admission = Admission(own)
    registry = RegistryServer(own, admission=admission)
    door = JoinDoor(admission, "tcp://127.0.0.1:0", registry)
    registry.start()
    door.start()
    try:
        yield {"registry": registry.endpoint, "join_at": door.endpoint, "join_token_file": str(token_file)}
    finally:
        door.close()
        registry.close()
