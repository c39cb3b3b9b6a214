"""`paceline certs DIR`: certificates of a server and of workers, for development and tests.

Not by trustme: its authority does not end after --days, and its certificates of servers may be used
by clients.
"""

from __future__ import annotations

import datetime
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.errors import ConfigError, InvalidRequestError
from workers.process.atomic_files import replaced
from workers.process.mutual_tls import CA_FILE, CHAIN_FILE, KEY_FILE, NAME

USUAL_DAYS = 90
_ALWAYS = ("localhost", "127.0.0.1", "::1")
_SERVER = "server.pem"
_FILES = ("ca.pem", "ca-key.pem", _SERVER, "server-key.pem")
WORKERS_FOLDER = "workers"


def certs(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is absent.")],
    name: Annotated[
        list[str] | None,
        typer.Option(help="A host name or IP address of the server; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=825, help="How long they last.")] = USUAL_DAYS,
) -> None:
    """Make certificates for development: a new authority, a server's, and one for workers.

    The server's is for this host's name, localhost and the loopback addresses, and for each
    --name. With an authority in the folder already, that one signs, and the server keeps the
    names that it has. Stdout names the files.
    """
    try:
        kept = _names_in(folder / _SERVER)
        names = list(dict.fromkeys([*_ALWAYS, socket.gethostname(), *kept, *(name or ())]))
        write_certificates(folder, names, days=days)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None
    typer.echo(f"server: --tls-cert {folder / _SERVER} --tls-key {folder / _FILES[3]}")
    typer.echo(f"clients: --ca {folder / 'ca.pem'}")
    typer.echo(f'workers: [workers] tls = "{folder / WORKERS_FOLDER}"')


def write_certificates(folder: Path, names: Sequence[str], *, days: float = USUAL_DAYS) -> None:
    """Write ca.pem, ca-key.pem, server.pem, server-key.pem, and a worker's files in a folder.

    An authority that is there stays.

    Raises InvalidRequestError for a name that is no host, ConfigError for a broken authority.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ca_path, ca_key_path, server_path, server_key_path = (folder / name for name in _FILES)
    ca, ca_key = _authority(ca_path, ca_key_path, days)

    def signed(
        subject: str, names: Sequence[str], uses: Sequence[x509.ObjectIdentifier]
    ) -> tuple[bytes, bytes]:
        """Key and certificate, in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _begun(subject, key, ca.subject, days)
            .add_extension(x509.SubjectAlternativeName([_alternative(one) for one in names]), False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(_usage(signs=False), True)
            .add_extension(x509.ExtendedKeyUsage(uses), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
            )
            .sign(ca_key, hashes.SHA256())
        )
        return _private(key), certificate.public_bytes(Encoding.PEM)

    server_use = ExtendedKeyUsageOID.SERVER_AUTH
    key_pem, server_pem = signed("Paceline development server", names, [server_use])
    _write(server_key_path, key_pem, 0o600)
    _write(server_path, server_pem, 0o644)
    both_uses = [server_use, ExtendedKeyUsageOID.CLIENT_AUTH]
    key_pem, worker_pem = signed("Paceline development worker", [NAME], both_uses)
    workers = folder / WORKERS_FOLDER
    workers.mkdir(exist_ok=True)
    _write(workers / KEY_FILE, key_pem, 0o600)
    _write(workers / CHAIN_FILE, worker_pem, 0o644)
    _write(workers / CA_FILE, ca.public_bytes(Encoding.PEM), 0o644)


def _authority(
    path: Path, key_path: Path, days: float
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority that is there, else a new one, which is written."""
    if not (path.exists() and key_path.exists()):
        made = ec.generate_private_key(ec.SECP256R1())
        ca = (
            _begun("Paceline development authority", made, None, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
            .add_extension(_usage(signs=True), True)
            .sign(made, hashes.SHA256())
        )
        _write(key_path, _private(made), 0o600)
        _write(path, ca.public_bytes(Encoding.PEM), 0o644)
        return ca, made
    try:
        ca = x509.load_pem_x509_certificate(path.read_bytes())
        key = load_pem_private_key(key_path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} and {key_path} cannot be read as an authority: {error}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key_path}: expected a key that `paceline certs` made")
    return ca, key


def _begun(
    subject: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name | None, days: float
) -> x509.CertificateBuilder:
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(own)
        .issuer_name(issuer or own)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of clients may be behind.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names_in(path: Path) -> list[str]:
    """The names that a certificate is for; none if there is no certificate."""
    if not path.exists():
        return []
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes()).extensions
        names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{path} cannot be read as a certificate: {error}") from None
    return [str(one.value) for one in names]


def _alternative(name: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    if not name or not name.isascii() or any(c.isspace() or c in "/:@" for c in name):
        raise InvalidRequestError(
            "name", f"expected a host name or an IP address, got {name!r:.200}"
        )
    return x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file at once, so that a running server never reads half of it."""
    with replaced(path, mode=mode) as beside:
        beside.write_bytes(content)
