"""What is known to identify the machines of a validation and their people, told to the masker before it starts."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from hetctl.comm.contract.values import encode
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
    masker.learn("secret", secrets_of(os.environ if environment is None else environment))
    for entry in ground.entries:
        masker.learn("secret", secrets_of({name: value or "" for name, value in entry.access.env.items()}))
    _learn_hosts(masker, ground)
    _learn_people(masker, ground)
    masker.learn_facts(encode(ground.facts))
    for file in evidence.glob(f"*/{COMPARED}") if evidence else ():
        rows = [row for row in json.loads(file.read_text(encoding="utf-8")) if row["what"] in _IDENTIFYING]
        masker.learn("serial", (row[side] for row in rows for side in ("ours", "theirs")))
    return masker


def _learn_hosts(masker: ReportMasker, ground: ClaimHosts) -> None:
    names = [socket.gethostname(), socket.getfqdn(), *(h.name for h in ground.cluster.hosts)]
    names += [e.name for e in ground.entries] + [f.system.hostname or "" for f in ground.facts.values()]
    for entry in ground.entries:
        hops = (entry.access.proxy_jump or "").split(",")
        names += [entry.access.address or "", *(hop.split("@")[-1].split(":")[0] for hop in hops)]
    for name in dict.fromkeys(n for n in names if n and not _is_address(n)):
        short, _, domain = name.partition(".")
        masker.learn("host", (name, short), as_one=short)
        if "." in domain:
            masker.learn("domain", (domain,))


def _learn_people(masker: ReportMasker, ground: ClaimHosts) -> None:
    homes = [Path.home(), os.environ.get("HOME", "")]
    people = [_this_user(), *(f.system.user for f in ground.facts.values())]
    for access in (entry.access for entry in ground.entries):
        jumps = (access.proxy_jump or "").split(",")
        people += [access.user, *(hop.split("@")[0] for hop in jumps if "@" in hop)]
    masker.learn("user", people)
    masker.learn("home", (home for home in homes if str(home) not in ("/", "/root")))


def _is_address(name: str) -> bool:
    return all(c in "0123456789abcdefABCDEF.:" for c in name) and ("." in name or ":" in name) and name[:1].isdigit()


def _this_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""
