"""Certificates for tests, issued for each test, and a server that shows one."""

from __future__ import annotations

import datetime
import ssl
import tempfile
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


def issue(name: str, issuer: tuple[x509.Certificate, Any] | None = None) -> tuple[x509.Certificate, Any]:
    """A certificate for a name, its own issuer unless one is given."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    return built, key


def pem(pair: tuple[x509.Certificate, Any]) -> Pair:
    """The two as files have them."""
    key = pair[1].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(pair[0].public_bytes(serialization.Encoding.PEM), key)


def server_context(shown: Pair, clients_from: Pair | None = None) -> ssl.SSLContext:
    """What a server shows, and whose clients it lets in; None: all."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:  # Python reads certificates from files only
        file.write(shown.certificate + shown.key)
        file.flush()
        context.load_cert_chain(file.name)
    if clients_from is not None:
        context.load_verify_locations(cadata=clients_from.certificate.decode())
        context.verify_mode = ssl.CERT_REQUIRED
    return context
