"""inventory.yaml as people write it: defaults under groups under hosts, decoded strictly, without passwords."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hetctl.comm.contract.cluster import SCHEMA_VERSION
from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.files import read_yaml
from hetctl.comm.contract.natives import NATIVES
from hetctl.comm.contract.pod_settings import PodSettings, check_pods, pods_over
from hetctl.comm.contract.values import decode
from hetctl.launcher.hosts.host_names import expand

_SECRET_KEY = re.compile(r"(^|_)pass$|pass(word|wd|phrase)$|secret|private_key$", re.IGNORECASE)
_SECRET_NAME = re.compile(r"TOKEN(?!S|IZ)|SECRET|PASSWORD|PASSPHRASE|API_?KEY|CREDENTIAL", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/@\s][^/@\s:]*:[^/@\s]+@")  # a URL that holds a password
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PYTHON = re.compile(r"[A-Za-z0-9_./~+-]+")


@dataclass(frozen=True)
class Settings:
    """What may be said of a host, a group, or all hosts; None is left to the level above."""

    user: str | None = None  # to log in as
    port: int | None = None  # of the SSH server
    identity_file: str | None = None  # a private key
    proxy_jump: str | None = None  # [user@]host[:port], several joined by commas
    python: str | Mapping[str, str] | None = None  # the interpreter on the host: a name or path; or each vendor's
    container: tuple[str, ...] | None = None  # what enters it there: [docker, exec, -i, NAME]
    env: Mapping[str, str | int | float | None] | None = None  # None: taken from the environment of who launches
    address: str | None = None  # where SSH connects, when the host's name does not say
    data_address: str | None = None  # where ranks talk
    gpus: tuple[int, ...] | None = None  # only these devices
    exclude_nics: tuple[str, ...] | None = None  # netdev or RDMA names
    slurm: tuple[str, ...] | None = None  # what sbatch is told of these nodes: [--partition=amd, --gres=gpu:8]
    kubernetes: PodSettings | None = None  # they are nodes of Kubernetes, entered by pods with these settings


@dataclass(frozen=True)
class HostGroup(Settings):
    """Hosts that share settings."""

    hosts: tuple[str, ...] = ()  # names, or ranges of names: node[01-16]


@dataclass(frozen=True)
class InventoryFile:
    """The whole file. Settings of `defaults` lie under those of a group, those under a host's own."""

    defaults: Settings = Settings()
    groups: Mapping[str, HostGroup] = field(default_factory=dict)
    hosts: Mapping[str, Settings | None] = field(default_factory=dict)
    networks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # CIDR blocks that one fabric routes between
    schema_version: int = SCHEMA_VERSION  # of this file's form


def read_inventory_file(file: Path) -> InventoryFile:
    """The file as values. Raises ConfigError naming the key, and its nearest match, for what does not belong."""
    data = read_yaml(file, what="inventory")
    _refuse_secrets(data, file.name)
    parsed = decode(InventoryFile, _unabbreviated(data), where=file.name)
    if parsed.schema_version != SCHEMA_VERSION:
        raise ConfigError(f"{file} has schema_version {parsed.schema_version}; this hetctl reads {SCHEMA_VERSION}")
    _check_networks(parsed.networks, file.name)
    for where, settings in _all_settings(parsed):
        _check_settings(settings, f"{file.name}.{where}")
    return parsed


def over(below: Settings, above: Settings) -> Settings:
    """`above` laid over `below`: what it says wins; environments and pods' settings are joined."""
    said = {f.name: getattr(above, f.name) for f in fields(Settings) if getattr(above, f.name) is not None}
    if above.env is not None and below.env is not None:
        said["env"] = {**below.env, **above.env}
    said["kubernetes"] = pods_over(below.kubernetes, above.kubernetes)
    base = {f.name: getattr(below, f.name) for f in fields(Settings)}
    return replace(Settings(**base), **said)


def _unabbreviated(data: Any) -> Any:
    """The short spellings written out: hosts as text or a list, groups likewise, `env` as a list of names."""
    if not isinstance(data, Mapping):
        return {"hosts": _patterns(data)} if isinstance(data, list) else data
    full = dict(data)
    if "hosts" in full and not isinstance(full["hosts"], Mapping):
        full["hosts"] = _patterns(full["hosts"])
    for level in ("groups", "hosts"):
        if isinstance(full.get(level), Mapping):
            full[level] = {name: _settings(value, group=level == "groups") for name, value in full[level].items()}
    if "defaults" in full:
        full["defaults"] = _settings(full["defaults"], group=False)
    return {k: v for k, v in full.items() if v is not None}


def _patterns(hosts: Any) -> Any:
    listed = [hosts] if isinstance(hosts, str) else hosts
    return dict.fromkeys(listed) if isinstance(listed, list) and all(isinstance(h, str) for h in listed) else hosts


def _settings(value: Any, *, group: bool) -> Any:
    if group and isinstance(value, (str, list)):
        value = {"hosts": value}
    if not isinstance(value, Mapping):
        return value
    full = dict(value)
    if isinstance(full.get("env"), list):
        full["env"] = dict.fromkeys(full["env"])
    if group and isinstance(full.get("hosts"), str):
        full["hosts"] = [full["hosts"]]
    return full


def _refuse_secrets(data: Any, where: str) -> None:
    """Raise ConfigError for a password anywhere in the file: it would be read by everybody who reads the file."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key == "kubernetes":
                continue  # it has names of Secrets, never what they hold
            if isinstance(key, str) and _SECRET_KEY.search(key):
                raise ConfigError(
                    f"{where}: '{key}' does not belong in an inventory: hetctl takes no passwords",
                    hint="use an SSH key: ssh-agent, or `identity_file`",
                )
            _refuse_secrets(value, f"{where}.{key}")
    elif isinstance(data, list):
        for value in data:
            _refuse_secrets(value, where)


def _all_settings(parsed: InventoryFile) -> list[tuple[str, Settings]]:
    groups = [(f"groups.{name}", group) for name, group in parsed.groups.items()]
    hosts = [(f"hosts.{name}", settings) for name, settings in parsed.hosts.items() if settings]
    return [("defaults", parsed.defaults), *groups, *hosts]


def _check_settings(settings: Settings, where: str) -> None:
    if settings.port is not None and not 0 < settings.port < 65536:
        raise ConfigError(f"{where}.port: {settings.port} is not a port (1 to 65535)")
    if settings.address is not None and [s.host for s in expand(settings.address)] != [settings.address]:
        raise ConfigError(f"{where}.address: '{settings.address}' is not one name or address")
    for hop in settings.proxy_jump.split(",") if settings.proxy_jump else ():
        expand(hop)
    _check_python(settings.python, f"{where}.python")
    if settings.kubernetes is not None:
        check_pods(settings.kubernetes, f"{where}.kubernetes")
    if settings.data_address is not None and not _is_address(settings.data_address):
        raise ConfigError(f"{where}.data_address: '{settings.data_address}' is not an IP address")
    for name, value in (settings.env or {}).items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"{where}.env: {name!r} is not the name of an environment variable")
        if value is not None and (_SECRET_NAME.search(name) or _LOGIN.search(str(value))):
            raise ConfigError(
                f"{where}.env: the value of {name} does not belong in an inventory",
                hint=f"name it without a value (`env: [{name}]`): it is then taken from your environment",
            )
    if settings.gpus is not None and (
        len(set(settings.gpus)) != len(settings.gpus) or min(settings.gpus, default=0) < 0
    ):
        raise ConfigError(f"{where}.gpus: device numbers are 0 or more, each once")


def _check_python(python: str | Mapping[str, str] | None, where: str) -> None:
    named = {} if python is None else {"": python} if isinstance(python, str) else python
    for vendor, path in named.items():
        if vendor and vendor not in NATIVES:
            raise ConfigError(f"{where}: '{vendor}' is no vendor", hint=nearest(vendor, NATIVES))
        if not _PYTHON.fullmatch(path) or path.startswith("-"):
            raise ConfigError(f"{where}: {path!r} is not a name or path of a Python")


def _check_networks(networks: Mapping[str, tuple[str, ...]], where: str) -> None:
    for name, blocks in networks.items():
        for block in blocks:
            try:
                ipaddress.ip_network(block)
            except ValueError as error:
                raise ConfigError(f"{where}.networks.{name}: {error}") from None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
