"""What this user's SSH files say of a host: its real name, user, keys, jumps, and the host keys it may show."""

from __future__ import annotations

import getpass
import glob
import logging
import os
import shlex
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import paramiko

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.hosts.shell import ShellError
from hetctl.launcher.ssh.known_hosts import KnownHosts, read_known_hosts

_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_MAX_INCLUDES = 8  # levels


@dataclass(frozen=True)
class SshRoute:
    """How a host is reached, everything decided: inventory over ~/.ssh/config over defaults."""

    name: str  # as the person names it
    hostname: str
    port: int
    user: str
    keys: tuple[Path, ...]
    agent: bool
    jumps: tuple[str, ...]
    known_as: str  # the name its host keys are filed under
    known_hosts: tuple[Path, ...]

    @property
    def forget_line(self) -> str:
        """What forgets its host key: keys are filed under its address and port, whatever alias names it."""
        filed = self.known_as if self.port == 22 else f"[{self.known_as}]:{self.port}"
        return f"ssh-keygen -f {shlex.quote(str(self.known_hosts[0]))} -R {shlex.quote(filed)}"

    def __str__(self) -> str:
        where = self.hostname if self.port == 22 else f"{self.hostname}:{self.port}"
        return where if self.hostname == self.name else f"{self.name} ({where})"


class SshConfig:
    """~/.ssh/config, known_hosts and private keys, each read once, and the jump hosts that connections share."""

    def __init__(self, home: Path | None = None) -> None:
        logging.getLogger("paramiko").addHandler(logging.NullHandler())  # its tracebacks are our outcomes
        self.home = home or Path(os.path.expanduser("~"))
        self._config = _read_config(self.home / ".ssh" / "config")
        self._known: dict[tuple[Path, ...], KnownHosts] = {}
        self._keys: dict[Path, paramiko.PKey | str] = {}
        self._jumps: dict[object, _Jump] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> SshConfig:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def route(self, access: Access) -> SshRoute:
        """The way to a host. Raises ShellError for what cannot be followed (ProxyCommand, a missing key file)."""
        assert access.address is not None, "this machine needs no route"
        if access.address.startswith("-"):
            raise ShellError("invalid-name", f"'{access.address}' begins with '-': it is not a host name")
        config = self._lookup(access.address)
        if "proxycommand" in config and not access.proxy_jump and config["proxycommand"].lower() != "none":
            raise ShellError(
                "unsupported",
                f"~/.ssh/config reaches {access.address} by a ProxyCommand, which hetctl does not run",
                hint="write it as `ProxyJump HOST`",
            )
        port = access.port or _whole(config.get("port"), 22)
        hostname = config.get("hostname", access.address)
        return SshRoute(
            name=access.address,
            hostname=hostname,
            port=port,
            user=access.user or config.get("user") or getpass.getuser(),
            keys=self._key_files(access, config),
            agent=config.get("identitiesonly", "no").lower() != "yes" and config.get("identityagent", "") != "none",
            jumps=_jumps(access.proxy_jump or config.get("proxyjump")),
            known_as=config.get("hostkeyalias", hostname),
            known_hosts=self._known_files(config),
        )

    def known(self, route: SshRoute) -> KnownHosts:
        """The entries of the known_hosts files that speak for a route."""
        with self._lock:
            if route.known_hosts not in self._known:
                self._known[route.known_hosts] = read_known_hosts(route.known_hosts)
            return self._known[route.known_hosts]

    def private_key(self, file: Path) -> paramiko.PKey | str:
        """A private key, or the sentence that says why it cannot be used."""
        with self._lock:
            if file not in self._keys:
                self._keys[file] = _load_key(file)
            return self._keys[file]

    def jump(self, key: object) -> _Jump:
        """The one shared connection to a jump host; whoever takes its lock first opens it."""
        with self._lock:
            return self._jumps.setdefault(key, _Jump())

    def close(self) -> None:
        """Close the shared jump connections."""
        with self._lock:
            jumps, self._jumps = list(self._jumps.values()), {}
        for jump in jumps:
            if jump.client is not None:
                jump.client.close()

    def _lookup(self, host: str) -> Mapping[str, str]:
        try:
            with self._lock:
                found = self._config.lookup(host)
        except KeyError:
            raise ConfigError("this user has no name here", hint="export USER=NAME") from None
        except Exception as error:  # paramiko's parser raises many kinds for one cause: a file it cannot read
            raise ConfigError(f"~/.ssh/config cannot be read: {error}") from None
        return {k: v if isinstance(v, str) else "\n".join(v) for k, v in found.items() if v is not None}

    def _key_files(self, access: Access, config: Mapping[str, str]) -> tuple[Path, ...]:
        named = [access.identity_file] if access.identity_file else []
        files = [self._path(text) for text in named + config.get("identityfile", "").split("\n") if text]
        if access.identity_file and not os.path.exists(files[0]):
            raise ShellError("authentication-failed", f"the identity file {files[0]} does not exist")
        files += [] if files else [self.home / ".ssh" / name for name in _DEFAULT_KEYS]
        return tuple(file for file in files if os.path.exists(file))  # False too for a path that no system takes

    def _known_files(self, config: Mapping[str, str]) -> tuple[Path, ...]:
        own = config.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split()
        everybody = config.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts").split()
        return tuple(self._path(text) for text in own + everybody if text != "none")

    def _path(self, text: str) -> Path:
        bare = text.strip().strip('"')
        return self.home / bare[2:] if bare.startswith("~/") else Path(bare)


class _Jump:
    """A jump host's connection, opened once and shared by all that go through it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: paramiko.SSHClient | None = None
        self.error: ShellError | None = None


def _read_config(file: Path) -> paramiko.SSHConfig:
    try:
        return paramiko.SSHConfig.from_text("\n".join(_lines(file, 0)))
    except (paramiko.SSHException, ValueError) as error:  # the latter of an open quote
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _lines(file: Path, level: int) -> list[str]:
    """The lines of a config file, `Include` replaced by what it names (paramiko does not know it)."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines: list[str] = []
    for line in text.splitlines():
        words = line.replace("=", " ", 1).split()
        if not words or words[0].lower() != "include":
            lines.append(line)
            continue
        for pattern in words[1:] if level < _MAX_INCLUDES else ():
            where = os.path.join(file.parent, os.path.expanduser(pattern))
            for found in sorted(glob.glob(where)):
                lines += _lines(Path(found), level + 1)
    return lines


def _load_key(file: Path) -> paramiko.PKey | str:
    try:
        return paramiko.PKey.from_path(file)
    except (paramiko.PasswordRequiredException, TypeError):  # the latter is cryptography's word for an encrypted key
        return f"{file} needs a passphrase (load it into ssh-agent)"
    except Exception as error:  # whatever a broken file makes the parsers say: one key less
        return f"{file} cannot be read: {error}"


def _jumps(text: str | None) -> tuple[str, ...]:
    if text is None or text.lower() == "none":
        return ()
    return tuple(hop.strip() for hop in text.split(",") if hop.strip())


def _whole(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdigit() else default
