"""Certificates for tests: each signs itself, and is for one address."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def write_certificate(folder: Path, name: str, address: str = "127.0.0.1") -> tuple[str, str]:
    """A new key, and a certificate of its own, as `cert.pem` and `key.pem`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    place = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    serial = x509.random_serial_number()
    made = x509.CertificateBuilder(subject, subject, key.public_key(), serial, now - day, now + day)
    signed = made.add_extension(place, critical=False).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    cert, secret = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(signed.public_bytes(pem))
    secret.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return str(cert), str(secret)
