# SPDX-License-Identifier: Apache-2.0
"""A certificate authority of the tests."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from supervisor.transport.security import Security

LIFETIME = timedelta(hours=12)
#: DNS names of the certificates that the chart makes.
HOST = "resiliency-host"
CONTROL = tuple(f"resiliency-{part}" for part in ("sensor", "controller", "actuator", "operator"))


class Authority:
    """Issues certificates into `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of the tests")])
        self._certificate = self._sign(self._name, self._key, is_authority=True)
        self.path = directory / "ca.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, *names: str, file: str = "", lifetime: timedelta = LIFETIME) -> tuple[Path, Path]:
        """Certificate and key for a process of this machine with these DNS names.

        Args:
            file: name of both, which replace what is there; default: their names.
            lifetime: from now on; below 0 for a certificate that has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "any")])
        file = file or "+".join(names)
        certificate = self._directory / f"{file}.pem"
        certificate.write_bytes(
            self._sign(name, key, *names, lifetime=lifetime).public_bytes(serialization.Encoding.PEM)
        )
        private = self._directory / f"{file}.key"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate, private

    def security(self, *names: str) -> Security:
        certificate, key = self.issue(*names)
        return Security(certificate=certificate, key=key, authority=self.path)

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *names: str,
        is_authority: bool = False,
        lifetime: timedelta = LIFETIME,
    ) -> x509.Certificate:
        now = datetime.now(timezone.utc)
        # Its address says where a process is, and nothing about what it may do.
        alternatives = x509.SubjectAlternativeName(
            [
                *(x509.DNSName(name) for name in ("localhost", *names)),
                x509.IPAddress(ip_address("127.0.0.1")),
            ]
        )
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + lifetime)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(alternatives, critical=False)
            .sign(self._key, hashes.SHA256())
        )
