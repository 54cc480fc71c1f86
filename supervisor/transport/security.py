# SPDX-License-Identifier: Apache-2.0
"""Who may speak to the parts of the supervisor, and how they prove it.

TLS is the default, from files.  The DNS names in a certificate say which `Role` its holder has, as a server
and as a client.  A host's certificate may also name the host, and then it is good for that host only.
Where `token_file` is set, callers prove their role by a token in their metadata instead.  Plaintext works
only where it was asked for.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from resiliency.errors import ConfigError
from supervisor.transport.errors import Reason, Refused
from supervisor.transport.roles import CONTROL, Role

logger = logging.getLogger(__name__)

CERT_ENV, KEY_ENV, CA_ENV = "SUPERVISOR_TLS_CERT", "SUPERVISOR_TLS_KEY", "SUPERVISOR_TLS_CA"
TOKEN_ENV, CONTROL_TOKEN_ENV = "SUPERVISOR_TOKEN_FILE", "SUPERVISOR_CONTROL_TOKEN_FILE"
PLAINTEXT_ENV = "SUPERVISOR_PLAINTEXT"

_SHORTEST_TOKEN = 16
_LOOPBACK = "127.0.0.1"
#: Between the name of a host and the role, in a certificate that is good for that host only.
_OF_HOST = f".{Role.HOST.value}"


def is_loopback(address: str) -> bool:
    """Whether only programs of this machine reach a server that listens at `address`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Whom a call comes from.

    Attributes:
        roles: that it has proved.
        hosts: that it can speak for, in lower case; empty: any, because its certificate or token names none.
    """

    roles: frozenset[Role]
    hosts: frozenset[str] = frozenset()

    def speaks_for(self, host: str) -> bool:
        return not self.hosts or host.lower() in self.hosts


class TokenFile:
    """Tokens, one a line: the first is sent, all are accepted; read again when the file changes."""

    def __init__(self, path: Path, variable: str) -> None:
        self._path, self._variable = path, variable
        self._stamp: tuple[int, int] | None = None
        self._tokens: tuple[str, ...] = ()
        self.read()

    def read(self) -> tuple[str, ...]:
        """The tokens; those of before while the file is away or unreadable after its first reading."""
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
            if stamp != self._stamp:
                tokens = tuple(self._path.read_text().split())
                self._check(tokens)
                self._tokens, self._stamp = tokens, stamp
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            if self._stamp is None:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"{self._variable}: cannot read {self._path}: {error}.", variable=self._variable
                ) from error
        return self._tokens

    def accepts(self, token: str) -> bool:
        return any(hmac.compare_digest(token.encode(), known.encode()) for known in self.read())

    def _check(self, tokens: tuple[str, ...]) -> None:
        if not tokens or any(len(token) < _SHORTEST_TOKEN or not token.isascii() for token in tokens):
            raise ConfigError(
                f"{self._variable}: {self._path} must hold a token of at least {_SHORTEST_TOKEN} ASCII "
                f"characters a line, found {len(tokens)} tokens.",
                hint="Make one with: openssl rand -hex 32",
                variable=self._variable,
            )


#: When each of some files was written, and its inode.
Stamp = tuple[tuple[int, int], ...]


def _stamp(*files: Path | None) -> Stamp:
    """Of those of `files` that are there now."""
    found = []
    for file in files:
        with suppress(OSError):
            if file is not None:
                stat = file.stat()
                found.append((stat.st_mtime_ns, stat.st_ino))
    return tuple(found)


class _ServedFiles:
    """What a server shows and asks for, read again at the first connection after the files have changed."""

    def __init__(self, certificate: Path, key: Path, authority: Path | None) -> None:
        self._certificate, self._key, self._authority = certificate, key, authority
        self._stamp: Stamp = ()

    def read(self) -> grpc.ServerCertificateConfiguration:
        stamp = _stamp(self._certificate, self._key, self._authority)
        made = grpc.ssl_server_certificate_configuration(
            [(self._key.read_bytes(), self._certificate.read_bytes())],
            root_certificates=self._authority.read_bytes() if self._authority else None,
        )
        self._stamp = stamp
        return made

    def read_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """For gRPC, before each handshake, in a thread of its own; None: as before.

        gRPC also goes on with what it had where files do not belong together, because only one has been
        replaced yet.
        """
        if _stamp(self._certificate, self._key, self._authority) == self._stamp:
            return None
        try:
            return self.read()
        except OSError as error:
            logger.warning("certificates of this server stay as they were: %s", error)
            return None


@dataclass(frozen=True, kw_only=True)
class Security:
    """Files of certificates and tokens; one is made per process.

    Args:
        certificate, key: of this process, as a server and, without tokens, as a client.
        authority: that the other side's certificate must come from.
        tokens: of training hosts.
        control_tokens: of the supervisor's own parts and of operators; a daemon has none.
        plaintext: no TLS.
    """

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    tokens: TokenFile | None = None
    control_tokens: TokenFile | None = None
    plaintext: bool = False

    def __post_init__(self) -> None:
        if self.plaintext and (self.certificate or self.key or self.authority):
            raise ConfigError(
                f"--plaintext contradicts {CERT_ENV}, {KEY_ENV} and {CA_ENV}: leave out one or the other.",
                flag="--plaintext",
            )
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(f"{CERT_ENV} and {KEY_ENV} must be set together.", variable=CERT_ENV)
        if not self.plaintext and self.authority is None:
            raise ConfigError(
                f"{CA_ENV} is not set: the supervisor speaks TLS.",
                hint=f"Set {CA_ENV}, {CERT_ENV} and {KEY_ENV}, or allow plaintext with --plaintext.",
                variable=CA_ENV,
            )
        if not self.plaintext and self.certificate is None and self.tokens is None:
            raise ConfigError(
                f"{CERT_ENV} or {TOKEN_ENV} must be set: others must be able to tell who this process is.",
                variable=CERT_ENV,
            )
        if self.control_tokens is not None and self.tokens is None:
            raise ConfigError(f"{CONTROL_TOKEN_ENV} needs {TOKEN_ENV}.", variable=CONTROL_TOKEN_ENV)

    @classmethod
    def from_env(cls, env: Mapping[str, str], *, plaintext: bool = False) -> Security:
        """As the variables say; `plaintext` is the flag.

        Raises:
            ConfigError: which variable cannot work, and why.
        """
        asked = env.get(PLAINTEXT_ENV, "0") or "0"
        if asked not in ("0", "1"):
            raise ConfigError(f"{PLAINTEXT_ENV} must be 0 or 1, found {asked!r}.", variable=PLAINTEXT_ENV)

        def file(variable: str) -> Path | None:
            text = env.get(variable)
            if not text:
                return None
            try:
                Path(text).read_bytes()
            except OSError as error:
                raise ConfigError(
                    f"{variable}: cannot read {text}: {error.strerror}.", variable=variable
                ) from error
            return Path(text)

        token, control = file(TOKEN_ENV), file(CONTROL_TOKEN_ENV)
        return cls(
            certificate=file(CERT_ENV),
            key=file(KEY_ENV),
            authority=file(CA_ENV),
            tokens=TokenFile(token, TOKEN_ENV) if token else None,
            control_tokens=TokenFile(control, CONTROL_TOKEN_ENV) if control else None,
            plaintext=plaintext or asked == "1",
        )

    def listen_address(self, asked: str | None) -> str:
        """Where a server listens: as `asked`, else on all interfaces, in plaintext on loopback only."""
        return asked or (_LOOPBACK if self.plaintext else "0.0.0.0")  # noqa: S104

    def warn_of_plaintext(self, address: str) -> None:
        """Log a warning where a server at `address` speaks plaintext to other machines."""
        if self.plaintext and not is_loopback(address):
            logger.warning(
                "plaintext at %s: every program that reaches this address can read and forge what is said "
                "there, commands to all jobs included; use certificates, or --listen=%s",
                *(address, _LOOPBACK),
            )

    @property
    def can_serve(self) -> bool:
        return self.plaintext or self.certificate is not None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None means plaintext.  Client certificates are demanded where no tokens are.

        Raises:
            ConfigError: this process has no certificate.
        """
        if self.plaintext:
            return None
        if self.certificate is None or self.key is None or self.authority is None:
            raise ConfigError(f"a server needs {CERT_ENV}, {KEY_ENV} and {CA_ENV}.", variable=CERT_ENV)
        demand = self.tokens is None
        files = _ServedFiles(self.certificate, self.key, self.authority if demand else None)
        return grpc.dynamic_ssl_server_credentials(
            files.read(), files.read_changed, require_client_authentication=demand
        )

    @property
    def version(self) -> Stamp:
        """Another one after each change of the files that `channel_credentials` reads."""
        return _stamp(self.certificate, self.key, self.authority)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None means plaintext.  Files are read again for each connection, so that they may be rotated."""
        if self.plaintext or self.authority is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=self.authority.read_bytes(),
            private_key=self.key.read_bytes() if self.key else None,
            certificate_chain=self.certificate.read_bytes() if self.certificate else None,
        )

    @property
    def for_daemons(self) -> Security:
        """What a daemon has, and what a daemon is called with: no token of the supervisor's own parts.

        A host chooses the address at which it is called.
        """
        return replace(self, control_tokens=None)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call of this process carries."""
        tokens = self.control_tokens or self.tokens
        return () if tokens is None else (("authorization", f"Bearer {tokens.read()[0]}"),)

    def admit(self, context: grpc.aio.ServicerContext, wanted: Role) -> Caller:
        """The caller, which has the role `wanted`.

        Raises:
            Refused: it does not prove who it is, or may not do this.
        """
        caller = self._identify(context)
        if wanted not in caller.roles:
            found = ", ".join(sorted(role.value for role in caller.roles)) or "none of these"
            raise Refused(
                f"this call is for {wanted.value}, and the caller is {found}.",
                hint="DNS names in a certificate say what its holder is; see Security in docs/supervisor.md.",
                reason=Reason.ROLE,
            )
        return caller

    def _identify(self, context: grpc.aio.ServicerContext) -> Caller:
        if self.tokens is not None:
            given = dict(context.invocation_metadata() or ()).get("authorization", "")
            token = given.removeprefix("Bearer ") if isinstance(given, str) else ""
            if self.control_tokens is not None and self.control_tokens.accepts(token):
                return Caller(roles=CONTROL)
            if self.tokens.accepts(token):
                # A sensor shows a daemon no other token; a daemon is what has no control tokens.
                probes = frozenset() if self.control_tokens is not None else frozenset({Role.SENSOR})
                return Caller(roles=probes | {Role.HOST})
            raise Refused(
                "the token is missing." if not token else "the token is not one that this process accepts.",
                hint=f"Give caller and server the same file in {TOKEN_ENV}.",
                reason=Reason.IDENTITY,
            )
        if self.plaintext:
            return Caller(roles=frozenset(Role))
        names = {
            name.decode("ascii", "replace").lower() for name in context.auth_context().get("peer_dns", ())
        }
        return Caller(
            roles=frozenset(role for role in Role if role.value in names),
            hosts=frozenset(name.removesuffix(_OF_HOST) for name in names if name.endswith(_OF_HOST)),
        )
