"""Accelerators that a host may hold and nothing here computes on: named, so that nobody wonders where they are.

Ids from pci.ids (2026-08; GPL-2.0 or BSD-3-Clause) and, of Ascend, from the driver's own scripts; facts only.
"""

from __future__ import annotations

from hetctl.probe.raw import Raw
from hetctl.probe.topology import PCI
from hetctl.probe.vendors.base import COMPUTING

# Beginnings of vendor:device, the longest that fits holds; what names a vendor alone counts in these classes only.
FOREIGN = {
    "1da3:0001": "Goya",
    "1da3:0030": "Greco",
    "1da3:10": "Gaudi",
    "1da3:102": "Gaudi2",
    "1da3:106": "Gaudi3",
    "19e5:d": "Ascend",  # the vendor's ZIP engines are processing accelerators, too
    "19e5:d100": "Ascend 310",
    "19e5:d500": "Ascend 310P",
    "19e5:d801": "Ascend 910",
    "19e5:d802": "Ascend 910B",
    "19e5:d803": "Ascend 910C",
    "1d0f:7064": "Inferentia",
    "1d0f:7164": "Trainium",
    "1d0f:7264": "Inferentia2",
    "1d0f:7364": "Trainium2",
    "1d0f:756": "Trainium3",
    "1d22:3684": "Kunlun",
    "1d22:3685": "Kunlun2",
    "9999:": "MetaX",
    "9999:0a01": "MetaX C500",
    "1ee0:": "Biren",
    "cabc:": "Cambricon MLU",
    "cabc:0270": "Cambricon MLU270",
    "cabc:0370": "Cambricon MLU370",
    "1e3e:": "Iluvatar",
    "1e36:": "Enflame",
    "1d95:": "Graphcore IPU",
    "1e52:": "Tenstorrent",
}
# Of classes that hold much else: the file that tells, and how it begins for these.
UNUSUAL = ("modalias", "pci:v00001D0Fd00007", "pci:v00001D22d0000368")


def foreign(raw: Raw) -> dict[str, int]:
    """Product -> how many of it are on the PCI bus, SR-IOV's virtual functions not counted."""
    found: dict[str, int] = {}
    for path in sorted(p for p in raw.files if p.startswith(PCI) and p.endswith("/vendor")):
        base = path.removesuffix("/vendor")
        if base + "/physfn" not in raw.links and (product := _product(raw, base)):
            found[product] = found.get(product, 0) + 1
    return found


def _product(raw: Raw, base: str) -> str | None:
    vendor, device, kind = (raw.text(f"{base}/{file}") or "" for file in ("vendor", "device", "class"))
    identity = f"{vendor[2:]}:{device[2:]}".lower()
    fits = [
        known for known in FOREIGN if identity.startswith(known) and (known[-1] != ":" or kind.startswith(COMPUTING))
    ]
    return FOREIGN[max(fits, key=len)] if fits else None
