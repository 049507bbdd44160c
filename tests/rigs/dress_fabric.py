"""Adds to a dressed host what stands around its RDMA ports: managers, partition keys, flow control, counters."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.dress import Costume, Dress, netdev_name, rdma_name, slot, tool, write

MASTER, STANDBY = "0x0002c90300000001", "0x0002c90300000005"
# as `saquery SMIR` of infiniband-diags prints (src/saquery.c, dump_sm_info_record)
RECORD = (
    "SMInfoRecord dump:\n\t\tRID\n\t\tLID...................{lid}\n\t\tSMInfo dump:\n\t\tGUID..................{guid}\n"
    "\t\tSM_Key................0x0000000000000000\n\t\tActCount..............506\n"
    "\t\tPriority..............{priority}\n\t\tSMState...............{state}\n"
)
# two printings: an OpenSM under ibsim, and old hosts that break the line
SMINFO = "sminfo: sm lid {lid} sm guid {guid}, activity count 506 priority {priority} state 3 SMINFO_MASTER\n"
# the kernel's mailing list, net: hns3: "fix wrong response of pfc query"
DCB = "pfc-cap 8 macsec-bypass off delay 0\nprio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off\n"
ETHTOOL = "NIC statistics:\n     rx_prio3_pause: 0\n     rx_prio3_pause_duration: 0\n     tx_prio3_pause: 0\n"


def port_folder(dress: Dress, costume: Costume, index: int) -> Path:
    return dress.root / f"sys/{slot(index)[1]}/infiniband/{rdma_name(costume, index)}/ports/1"


def dress_fabric(dress: Dress, costume: Costume) -> None:
    """A healthy fabric: one master and one standby, everybody a full member of the default partition; PFC on 3."""
    ports = [rdma_name(costume, i) for i in range(costume.nics)]
    for index in range(costume.nics):
        folder = port_folder(dress, costume, index)
        write(folder, "lid_mask_count", 0)
        write(folder, "counters/port_xmit_wait", 0)
        for entry in range(4):
            write(folder, f"pkeys/{entry}", "0x0000" if entry else "0xffff")
        write(dress.root, f"/dev/infiniband/umad{index}", "")
    if costume.fabric == "infiniband":
        tool(dress.tools, "sminfo", {f"-C {p} -P 1": sminfo() for p in ports}, delay_s=0)
        tool(dress.tools, "saquery", {f"-C {p} -P 1 SMIR": records() for p in ports}, delay_s=0)
    else:
        names = [netdev_name(costume, i) for i in range(costume.nics)]
        tool(dress.tools, "dcb", {f"pfc show dev {n}": DCB for n in names}, delay_s=0)
        tool(dress.tools, "ethtool", {f"-S {n}": ETHTOOL for n in names}, delay_s=0)


def sminfo(*, lid: int = 1, guid: str = MASTER, priority: int = 14) -> str:
    return SMINFO.format(lid=lid, guid="0x" + guid[2:].lstrip("0"), priority=priority)


def records(*, standby: int = 3) -> str:
    master = RECORD.format(lid=1, guid=MASTER, priority=14, state=3)
    return master + RECORD.format(lid=5, guid=STANDBY, priority=standby, state=2)
