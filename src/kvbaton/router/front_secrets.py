"""Secrets of the router's front, as they are given: each process of a router makes its own of them.

Law: never printed. They travel to the router's other processes over the pair of sockets that each is born with.
"""

from __future__ import annotations

import msgspec

from kvbaton.router.front_access import ClientKeys
from kvbaton.router.http.tls_server import TlsFiles


class FrontSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """What the front shows, and wants to be shown."""

    keys: tuple[str, ...] = ()  # of clients, as given by flag or environment
    key_file: str = ""  # further ones; read again when it changes
    worker_key: str = ""  # what workers want from whom they answer
    tls: tuple[str, str] | None = None  # files of a certificate and its key

    def __repr__(self) -> str:
        return "FrontSecrets(…)"

    def client_keys(self) -> ClientKeys:
        """`KeyFileError` names what is wrong."""
        return ClientKeys(self.keys, self.key_file)

    def tls_files(self) -> TlsFiles | None:
        """`TlsError` names what is wrong."""
        return None if self.tls is None else TlsFiles(*self.tls)
