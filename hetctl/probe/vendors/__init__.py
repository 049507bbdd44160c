"""The table of vendors that the probe knows: a further one is one more file beside these and one more entry here."""

from hetctl.probe.vendors import amd, hygon, intel, mthreads, nvidia
from hetctl.probe.vendors.base import Vendor

VENDORS: tuple[Vendor, ...] = (nvidia.VENDOR, amd.VENDOR, intel.VENDOR, hygon.VENDOR, mthreads.VENDOR)
