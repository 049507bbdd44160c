"""Variables somebody set while debugging, and forgot."""

from __future__ import annotations

from hetctl.doctor.check import Check, HostCase, Verdict, fail, listed, ok, warn

_SLOW = (
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "CUDA_LAUNCH_BLOCKING",
    "AMD_SERIALIZE_KERNEL",
)
_WRONG = ("HSA_OVERRIDE_GFX_VERSION",)
_NO_RDMA = ("NCCL_IB_DISABLE", "RCCL_IB_DISABLE")


def debug_leftovers(case: HostCase) -> Verdict:
    environment, settings = case.facts.system.environment, case.facts.system.settings
    wrong = [name for name in _WRONG if name in environment]
    wrong += [name for name in _NO_RDMA if environment.get(name, "0") not in ("0", "") and case.rdma_ports]
    slow = [name for name in _SLOW if environment.get(name, "0") not in ("0", "")]
    if wrong:
        says = f"{listed([f'{n}={environment[n]}' for n in wrong])} contradicts what this host has"
        return fail(says, names=" ".join(wrong))
    if slow:
        return warn(f"{listed([f'{n}={environment[n]}' for n in slow])} is set", names=" ".join(slow))
    if settings.get("nccl.conf"):
        return warn("/etc/nccl.conf sets something for every run", "cat /etc/nccl.conf  # on {host}")
    return ok("none")


CHECKS = (
    Check(
        "env.debug_leftovers",
        "the environment of a process started as ranks are, /etc/nccl.conf",
        "NCCL's manual: debugging variables do not belong in production",
        "unset {names}  # on {host}: ~/.bashrc, /etc/environment, or `env` in the inventory",
        rule=debug_leftovers,
    ),
)
