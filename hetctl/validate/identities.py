"""What is known to identify the machines of a validation and their people, told to the masker before it starts."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from hetctl.comm.contract.facts import GpuFacts, HostFacts
from hetctl.probe.masking import ReportMasker, secrets_of
from hetctl.validate.discovery import COMPARED
from hetctl.validate.ground import ClaimHosts

_IDENTIFYING = ("serial", "uuid", "node GUID")  # of what discovery is compared by


def masker_for(
    ground: ClaimHosts, *, evidence: Path | None = None, environment: Mapping[str, str] | None = None
) -> ReportMasker:
    """A masker that knows the hosts, their people and devices, this machine, and what its environment keeps secret.

    `evidence` is the claims' folder: second tools may have named devices otherwise than discovery does.
    """
    masker = ReportMasker()
    environment = os.environ if environment is None else environment
    masker.learn("secret", secrets_of(environment))
    for entry in ground.entries:
        masker.learn("secret", secrets_of({name: value or "" for name, value in entry.access.env.items()}))
    _learn_hosts(masker, ground)
    _learn_people(masker, ground)
    for facts in ground.facts.values():
        _learn_devices(masker, facts)
        masker.learn_versions(v for v in _versions(facts) if v)
    for file in evidence.glob(f"*/{COMPARED}") if evidence else ():
        rows = [row for row in json.loads(file.read_text(encoding="utf-8")) if row["what"] in _IDENTIFYING]
        masker.learn("serial", (row[side] for row in rows for side in ("ours", "theirs")))
    return masker


def _learn_hosts(masker: ReportMasker, ground: ClaimHosts) -> None:
    names = [socket.gethostname(), socket.getfqdn(), *(h.name for h in ground.cluster.hosts)]
    names += [e.name for e in ground.entries] + [f.system.hostname or "" for f in ground.facts.values()]
    for entry in ground.entries:
        names += [entry.access.address or "", *_jumps(entry.access.proxy_jump)]
    for name in dict.fromkeys(n for n in names if n and not _is_address(n)):
        short, _, domain = name.partition(".")
        masker.learn("host", (name, short), as_one=short)
        if "." in domain:
            masker.learn("domain", (domain,))


def _learn_people(masker: ReportMasker, ground: ClaimHosts) -> None:
    homes = [Path.home(), os.environ.get("HOME", "")]
    people = [_this_user(), *(e.access.user or "" for e in ground.entries)]
    people += [f.system.user or "" for f in ground.facts.values()]
    people += [
        e.access.proxy_jump.split("@")[0] for e in ground.entries if e.access.proxy_jump and "@" in e.access.proxy_jump
    ]
    masker.learn("user", people)
    masker.learn("home", (home for home in homes if str(home) not in ("/", "/root")))


def _learn_devices(masker: ReportMasker, facts: HostFacts) -> None:
    for gpu in facts.gpus:
        masker.learn("serial", (gpu.serial,))
        for uuid in (gpu.uuid, *(i.uuid for i in gpu.partition.instances)):
            masker.learn("gpu", _spellings(uuid), as_one=uuid or "")
    for nic in facts.nics:
        masker.learn("guid", (nic.guid, (nic.guid or "").replace(":", "")), as_one=nic.guid or "")
        masker.learn("mac", (nic.mac,))
    masker.learn("id", (facts.system.machine_id, facts.system.boot_id))


def _spellings(uuid: str | None) -> Iterable[str]:
    """GPU-<64 bits in hexadecimal>, as AMD's tools write it: also bare, with 0x, and in decimal."""
    text = (uuid or "").removeprefix("GPU-")
    yield uuid or ""
    if len(text) == 16 and all(c in "0123456789abcdefABCDEF" for c in text):
        yield from (text, f"0x{text}", str(int(text, 16)))


def _versions(facts: HostFacts) -> Iterable[str | None]:
    gpus: Iterable[GpuFacts] = facts.gpus
    for gpu in gpus:
        yield from (gpu.driver, gpu.firmware)
    for nic in facts.nics:
        yield nic.firmware
    for python in facts.interpreters:
        yield from (python.version, python.torch, python.cuda, python.hip, python.nccl, python.rccl)
        yield from python.packages.values()
    yield from facts.system.modules.values()
    yield facts.system.kernel


def _jumps(text: str | None) -> list[str]:
    return [hop.split("@")[-1].split(":")[0] for hop in (text or "").split(",")]


def _is_address(name: str) -> bool:
    return all(c in "0123456789abcdefABCDEF.:" for c in name) and ("." in name or ":" in name) and name[:1].isdigit()


def _this_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""
