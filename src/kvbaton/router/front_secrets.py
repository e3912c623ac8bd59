"""Secrets of the router's front, as they are given: each process of a router makes its own of them.

Law: never printed. They travel to the router's other processes over the pair of sockets that each is born with.
"""

from __future__ import annotations

import msgspec

from kvbaton.api.http.tls_server import TlsFiles
from kvbaton.router.front_access import ApiKeys, FrontKeys, KeyFileError


class FrontSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """What the front shows, and wants to be shown."""

    keys: tuple[str, ...] = ()  # of clients, as given by flag or environment
    key_file: str = ""  # further ones; read again when it changes
    operator_keys: tuple[str, ...] = ()  # that open operators' pages from elsewhere, as given by the environment
    operator_key_file: str = ""  # further ones; read again when it changes
    worker_key: str = ""  # what workers want from whom they answer
    tls: tuple[str, str] | None = None  # files of a certificate and its key

    def __repr__(self) -> str:
        return "FrontSecrets(…)"

    def client_keys(self) -> ApiKeys:
        """`KeyFileError` names what is wrong."""
        return ApiKeys(self.keys, self.key_file)

    def front_keys(self) -> FrontKeys:
        """`KeyFileError` names what is wrong."""
        return FrontKeys(self.client_keys(), ApiKeys(self.operator_keys, self.operator_key_file, may_be_empty=True))

    def check(self) -> None:
        """When the command begins; a key that is in both later is a client's. `KeyFileError`."""
        found = self.front_keys()
        if found.clients.shares(found.operators):
            raise KeyFileError("one of these keys is a client's too, and clients are not shown operators' pages")
        if self.operator_key_file and not found.operators:
            raise KeyFileError(f"{self.operator_key_file}: 0 keys, expected 1 or more, one a line")

    def tls_files(self) -> TlsFiles | None:
        """`TlsError` names what is wrong."""
        return None if self.tls is None else TlsFiles(*self.tls)
