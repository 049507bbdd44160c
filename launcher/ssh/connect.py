"""Connecting: socket or jump, host key verified, authenticated by keys only; every failure under its own name."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import paramiko
from paramiko.auth_strategy import AuthSource, AuthStrategy, SourceResult
from paramiko.ssh_exception import IncompatiblePeer

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.shell import ShellError, timed_out
from hetctl.launcher.ssh.config import SshConfig, SshRoute
from hetctl.launcher.ssh.known_hosts import HostKey, KnownHosts
from hetctl.launcher.ssh.session import SshShell

CONNECT_S = 15.0  # a host that takes longer to answer a first packet is not there
DEAD_S = 10.0  # this long without an acknowledgement the way to a host counts as cut, however slow the host is
ALIVE_S = 3  # seconds between the packets that ask for one
_KINDS = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")


def connect(access: Access, book: SshConfig, deadline: Deadline) -> SshShell:
    """A shell on a host. Raises ShellError: unknown-host-key, authentication-failed, timeout, ... (see Problem)."""
    return SshShell(_client(book.route(access), access, book, deadline), access.address or "")


def show_host_keys(access: Access, book: SshConfig, deadline: Deadline) -> tuple[SshRoute, tuple[HostKey, ...]]:
    """The route to a host and the keys it shows, of every type it has; nothing is trusted and nobody logs in."""
    route = book.route(access)
    found: dict[str, HostKey] = {}
    for kind in _KINDS:
        transport = _transport(_socket(route, access, book, deadline), deadline, only=kind)
        try:
            transport.start_client(timeout=max(0.1, deadline.left()))
            shown = transport.get_remote_server_key()
            found[shown.get_name()] = HostKey(shown.get_name(), shown.asbytes())
        except IncompatiblePeer:
            continue  # it has no key of that type
        except Exception as error:
            raise _named(error, route, deadline) from None
        finally:
            transport.close()
    return route, tuple(found.values())


class VerifyHostKey(paramiko.MissingHostKeyPolicy):
    """Rejects every host key that known_hosts does not hold. paramiko asks it because it is given no keys itself."""

    def __init__(self, route: SshRoute, known: KnownHosts) -> None:
        self.route = route
        self.known = known

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Return for a pinned key. Raises ShellError for a revoked, a changed or an unknown one."""
        route, shown = self.route, HostKey(key.get_name(), key.asbytes())
        pinned = self.known.keys_of(route.known_as, route.port)
        if self.known.revoked(route.known_as, shown, route.port):
            raise ShellError("host-key-changed", f"{route} shows a host key that known_hosts marks as revoked")
        if shown in pinned:
            return
        if pinned:
            raise ShellError(
                "host-key-changed",
                f"{route} shows the host key {shown.fingerprint}, which is not the one in known_hosts",
                hint=f"ask who changed it; then: {route.forget_line} && hetctl hosts trust {route.name}",
            )
        raise ShellError(
            "unknown-host-key",
            f"{route} is not in known_hosts (it shows {shown.kind} {shown.fingerprint})",
            hint=f"compare the fingerprint, then: hetctl hosts trust {route.name}",
        )


class _Keys(AuthStrategy):
    """Identity files, then the agent's keys. No passwords, and no questions a host could make us ask."""

    def __init__(self, route: SshRoute, book: SshConfig) -> None:
        self.route = route
        self.book = book

    def get_sources(self) -> Iterator[AuthSource]:
        """None: `authenticate` tries the keys itself."""
        return iter(())

    def authenticate(self, transport: paramiko.Transport) -> list[SourceResult]:
        """Log in. Raises ShellError when no key is accepted."""
        tried: list[str] = []
        for what, key in self._offers(tried):
            try:
                further = transport.auth_publickey(self.route.user, key)
            except paramiko.BadAuthenticationType as error:
                raise self._refused(f"takes no keys (only {', '.join(error.allowed_types)})") from None
            except paramiko.AuthenticationException:
                tried.append(f"{what} was refused")
                continue
            if not further:
                return []
            raise self._refused(f"asks for a second factor ({', '.join(further)}) after {what}")
        raise self._refused("; ".join(tried) or "there is no key to offer: neither in ~/.ssh nor in an agent")

    def _offers(self, tried: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
        for file in self.route.keys:
            key = self.book.private_key(file)
            if isinstance(key, str):
                tried.append(key)
            else:
                yield str(file), key
        if self.route.agent:
            agent = paramiko.Agent()
            try:
                for number, held in enumerate(agent.get_keys(), start=1):
                    yield f"key {number} of the agent", held
            finally:
                agent.close()

    def _refused(self, why: str) -> ShellError:
        return ShellError(
            "authentication-failed",
            f"{self.route} does not let '{self.route.user}' in: {why}",
            hint=f"try: ssh {self.route.user}@{self.route.name}",
        )


def _client(route: SshRoute, access: Access, book: SshConfig, deadline: Deadline) -> paramiko.SSHClient:
    sock = _socket(route, access, book, deadline)
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(VerifyHostKey(route, book.known(route)))
    deadline.on_expiry(client.close)
    deadline.phase = f"shaking hands with {route}"
    left = max(0.1, deadline.left())
    preferred = [key.kind for key in book.known(route).keys_of(route.known_as, route.port)]
    try:
        client.connect(
            route.hostname,
            route.port,
            route.user,
            sock=sock,
            timeout=left,
            banner_timeout=left,
            auth_timeout=left,
            channel_timeout=left,
            transport_factory=lambda sock, **_: _transport(sock, deadline, first=preferred),
            auth_strategy=_Keys(route, book),
        )
    except Exception as error:
        client.close()
        sock.close()
        raise _named(error, route, deadline) from None
    if (transport := client.get_transport()) is not None:
        transport.set_keepalive(ALIVE_S)
    return client


def _transport(
    sock: socket.socket | paramiko.Channel, deadline: Deadline, *, first: list[str] | None = None, only: str = ""
) -> paramiko.Transport:
    """A transport that asks first (or only) for the host key types we can compare."""
    transport = paramiko.Transport(sock)
    transport.banner_timeout = max(0.1, deadline.left())
    options = transport.get_security_options()
    wanted = [only] if only else first or []
    algorithms = [a for kind in wanted for a in _algorithms(kind) if a in options.key_types]
    rest = [] if only else [a for a in options.key_types if a not in algorithms]
    if algorithms or rest:
        options.key_types = tuple(dict.fromkeys(algorithms + rest))
    return transport


def _algorithms(kind: str) -> tuple[str, ...]:
    """The signature algorithms of a key type; RSA keys sign with several."""
    return ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa") if kind == "ssh-rsa" else (kind,)


def _socket(route: SshRoute, access: Access, book: SshConfig, deadline: Deadline) -> socket.socket | paramiko.Channel:
    """A connection to the host's SSH port, straight or through its jump hosts. Raises ShellError."""
    if route.jumps:
        return _through(route, access, book, deadline)
    deadline.phase = f"looking up {route.hostname}"
    try:
        found = socket.getaddrinfo(route.hostname, route.port, type=socket.SOCK_STREAM)
        deadline.phase = f"connecting to {route}"
        return _first_that_answers(found, deadline)
    except Exception as error:
        raise _named(error, route, deadline) from None


def _first_that_answers(found: Sequence[tuple[Any, ...]], deadline: Deadline) -> socket.socket:
    last: Exception = OSError(errno.EADDRNOTAVAIL, "it has no address")
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        deadline.on_expiry(lambda sock=sock: _shut(sock))  # type: ignore[misc]
        sock.settimeout(max(0.1, min(CONNECT_S, deadline.left())))
        try:
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_S * 1000))
            sock.settimeout(max(0.1, deadline.left()))
            return sock
        except TimeoutError:
            sock.close()
            waited = min(CONNECT_S, deadline.seconds)
            last = ShellError("timeout", f"no answer within {waited:g} s (while {deadline.phase})")
        except OSError as error:
            sock.close()
            last = error
    raise last


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _through(route: SshRoute, access: Access, book: SshConfig, deadline: Deadline) -> paramiko.Channel:
    """A channel to the host from the last of its jump hosts, whose connection is shared."""
    *before, last = route.jumps
    jump = book.jump(route.jumps)
    deadline.phase = f"waiting for the jump host {last}"
    if not jump.lock.acquire(timeout=max(0.1, deadline.left())):
        raise timed_out(deadline)
    try:
        if jump.error is None and _live(jump.client) is None:
            jump.client = _open_jump(last, ",".join(before), access, book, deadline)
    except ShellError as error:
        failed = ShellError("proxy-failed", f"the jump host failed: {error.message}", hint=error.hint)
        if jump.client is not None:  # it worked before, and may again
            raise failed from None
        jump.error = failed
    finally:
        jump.lock.release()
    if jump.error is not None:
        raise jump.error
    transport = _live(jump.client)
    if transport is None:
        raise ShellError("proxy-failed", f"the jump host {last} closed the connection")
    deadline.phase = f"connecting to {route} through {last}"
    try:
        return transport.open_channel(
            "direct-tcpip", (route.hostname, route.port), ("127.0.0.1", 0), timeout=max(0.1, deadline.left())
        )
    except paramiko.ChannelException as error:
        problem = "connection-refused" if error.code == 2 else "proxy-failed"
        raise ShellError(problem, f"{last} cannot connect to {route}: {error.text}") from None  # type: ignore[arg-type]
    except Exception as error:
        raise _named(error, route, deadline) from None


def _live(client: paramiko.SSHClient | None) -> paramiko.Transport | None:
    transport = client.get_transport() if client is not None else None
    return transport if transport is not None and transport.is_active() else None


def _open_jump(hop: str, before: str, access: Access, book: SshConfig, deadline: Deadline) -> paramiko.SSHClient:
    user, _, place = hop.rpartition("@")
    host, colon, port = place.rpartition(":")
    host, port = (host, port) if colon and port.isdigit() and not host.count(":") else (place, "")
    jump = Access(
        address=host.strip("[]"),
        user=user or None,
        port=int(port) if port else None,
        identity_file=access.identity_file,
        proxy_jump=before or "none",
    )
    # not under the caller's own deadline closers: the connection outlives the host that opened it
    return _client(book.route(jump), jump, book, Deadline(max(0.1, deadline.left())))


def _named(error: Exception, route: SshRoute, deadline: Deadline) -> Exception:
    """A library's exception as the outcome it stands for."""
    if isinstance(error, (ShellError, ConfigError)):
        return error
    if deadline.passed or isinstance(error, TimeoutError):
        return timed_out(deadline)
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return ShellError(
            "name-not-found", f"the name '{route.hostname}' is not known here", hint="check the spelling, DNS"
        )
    if isinstance(error, ConnectionRefusedError):
        return ShellError(
            "connection-refused", f"{route} refuses the connection", hint="does sshd run there, on that port?"
        )
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL):
        return ShellError(
            "no-route", f"there is no way to {route}: {error.strerror}", hint="is it on, and in this network?"
        )
    if isinstance(error, IncompatiblePeer):
        return ShellError("not-ssh", f"{route} and hetctl have no algorithm in common: {error}")
    if isinstance(error, paramiko.SSHException) and "banner" in str(error).lower():
        return ShellError("not-ssh", f"what answers at {route} is not an SSH server", hint="is the port right?")
    said = str(error) or type(error).__name__
    return ShellError("connection-lost", f"{route} broke off while {deadline.phase}: {said}")
