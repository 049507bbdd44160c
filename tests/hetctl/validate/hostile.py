"""A validation whose every file names what must not leave the house, in every way that files do."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from hetctl.comm.contract.cluster import Access, Cluster, Host
from hetctl.comm.contract.facts import GpuFacts, HostFacts, NicFacts, System
from hetctl.discovery.inventory import InventoryHost
from hetctl.validate.ground import ClaimHosts

HOSTS = ("atlas-gpu07.lab.acme.example", "mars")
USERS = ("alice.smith", "svcbot")
SECRET, BARE_TOKEN = "tr0ub4dor-and-3", "hf_" + "Q" * 34
KEY_BODY = base64.b64encode(b"not a real key, but as long as one " * 9).decode()
PRIVATE = "-----BEGIN OPENSSH PRIVATE KEY-----\n" + KEY_BODY + "\n-----END OPENSSH PRIVATE KEY-----"
PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "Zq7" * 14 + " alice.smith@atlas-gpu07"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbGljZSJ9.c2lnbmF0dXJlLW9mLW5vdGhpbmc"
UNIQUE = 0xA1B2C3D4E5F60718
ADDRESSES = ("10.31.7.42", "203.0.113.77", "fd12:3456:789a:1::42", "fe80::5e6b:4bff:fe03:c2f0")
MACS = ("5c:6b:4b:03:c2:f0", "5C-6B-4B-03-C2-F1")
GUIDS = ("b859:9f03:00d4:1e2a", "0xb8599f0300d41e2b")
GID = "0000:0000:0000:0000:0000:ffff:0a1f:072a"  # of 10.31.7.42
IB_ADDRESS = "00:00:10:49:fe:80:00:00:00:00:00:00:b8:59:9f:03:00:d4:1e:2a"
UUIDS = ("GPU-7f3c1a20-9b1e-4c55-8d02-1f2e3d4c5b6a", f"GPU-{UNIQUE:016x}", "4c4c4544-0043-3510-8052-b4c04f4d3532")
SERIALS = ("1654922003871", "692251000417", "PCB9J2K77")
MACHINE_ID = "9b1deb4d3b7d4bad9bdd2b0d7b3dcb6d"
FINGERPRINT = "SHA256:nThbg6kXUpJWGl7E1IGOCspRomTxdCARLviKw6E5SY8"
PASSWORD = "hunter2hunter2"
EMAIL = "bob.jones@acme.example"

ORIGINALS = (
    *(*HOSTS, "atlas-gpu07", "lab.acme", "acme.example", *USERS, SECRET, BARE_TOKEN, KEY_BODY[:40], KEY_BODY[-40:]),
    *("AAAAC3NzaC1lZDI1", JWT, JWT.split(".")[1], *ADDRESSES, *MACS, *GUIDS, GID, "0a1f:072a", IB_ADDRESS),
    *("b8:59:9f:03", *UUIDS, f"{UNIQUE:x}", f"{UNIQUE:X}", str(UNIQUE), *SERIALS, MACHINE_ID, FINGERPRINT, PASSWORD),
    *(EMAIL, "bob.jones", "/home/alice", "/Users/carol", "carol"),
)
LINE = (
    f"[mars:4211] {USERS[0]}@{HOSTS[0]}: cannot reach {ADDRESSES[0]}:29500, [{ADDRESSES[2]}]:22 or {ADDRESSES[1]}.\n"
    f"NCCL INFO Bootstrap: Using ib0:{ADDRESSES[0]}<0> hw {MACS[0]} {MACS[1]} {IB_ADDRESS} on ATLAS-GPU07_rail0\n"
    f"\x1b[31mmars\x1b[0m: {UUIDS[0]} {UUIDS[1]} unique_id {UNIQUE} 0x{UNIQUE:X} node_guid: {GUIDS[0]} {GUIDS[1]}\n"
    f"Serial Number : {SERIALS[0]}\n<serial>{SERIALS[1]}</serial>\nboard serial={SERIALS[2]}\n"
    f"gid {GID} {ADDRESSES[3]}%ib0\n"
    f"/home/{USERS[0]}/.ssh/id_ed25519 /Users/carol/x WANDB_API_KEY={SECRET} token: '{PASSWORD}' {BARE_TOKEN}\n"
    f"Authorization: Bearer {JWT}\nhttps://{USERS[1]}:{PASSWORD}@{HOSTS[0]}/repo {EMAIL} {MACHINE_ID} {FINGERPRINT}\n"
    f"system uuid {UUIDS[2]}; proxy http://x:{PASSWORD}@mars:3128/\n{PUBLIC}\n{PRIVATE}\n"
)


def ground() -> ClaimHosts:
    """Two hosts as discovery knows them: some of what stands in the files, not all of it."""
    facts = {
        HOSTS[0]: HostFacts(
            system=System(hostname="atlas-gpu07", user=USERS[0], machine_id=MACHINE_ID, kernel="6.8.0-45-generic"),
            gpus=(
                GpuFacts("none", 0, uuid=UUIDS[1], serial=SERIALS[1], driver="6.12.12", firmware="113-M3000100-102"),
            ),
            nics=(NicFacts("ib0", mac=IB_ADDRESS, guid=GUIDS[0], firmware="229.2.52.0"),),
        ),
        HOSTS[1]: HostFacts(system=System(hostname="mars", user=USERS[1])),
    }
    access = Access(HOSTS[0], user=USERS[0], proxy_jump=f"{USERS[1]}@mars:2222")
    entries = (InventoryHost(HOSTS[0], access), InventoryHost(HOSTS[1], Access()))
    return ClaimHosts(Cluster(tuple(Host(name) for name in HOSTS), ()), entries, facts, {}, quick=True, timeout_s=60)


def evidence(folder: Path) -> None:
    """The same text as a log, as JSON, as lines of JSON, as JSON in JSON, quoted by repr, and in names of files."""
    (folder / "bridge.tcp" / "mars-ranks").mkdir(parents=True)
    write = {
        "bridge.tcp/log.txt": LINE,
        "bridge.tcp/mars-ranks/rank-0.log": LINE * 3,
        "bridge.tcp/bench.json": json.dumps({"mars": LINE, "deep": [{"password": PASSWORD, "id": UNIQUE, "x": LINE}]}),
        "bridge.tcp/events.jsonl": json.dumps({"line": LINE})
        + "\n"
        + json.dumps({HOSTS[0]: json.dumps({"a": LINE})})
        + "\n",
        "bridge.tcp/nested.json": json.dumps({"said": json.dumps({"again": json.dumps(LINE)})}),
        "bridge.tcp/broken.json": json.dumps({"line": LINE})[:-3],
        "bridge.tcp/quoted.txt": repr(LINE) + repr(LINE.encode()),
        f"bridge.tcp/{USERS[1]}.yaml": f"hosts:\n- {{name: {HOSTS[0]}, user: {USERS[0]}, address: {ADDRESSES[0]}}}\n",
    }
    for name, text in write.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "bridge.tcp" / "link.txt").symlink_to("/etc/hostname")
    (folder / "bridge.tcp" / "bytes.bin").write_bytes(b"\xff\xfe\x00mars\x00" + LINE.encode())
