"""A process started the way ranks are started: its resource limits, and variables that somebody forgot in it."""

from __future__ import annotations

from hetctl.comm.contract.facts import Bytes
from hetctl.comm.contract.units import GiB, listed, show_bytes
from hetctl.doctor.check import Check, HostCase
from hetctl.doctor.verdict import Verdict, fail, ok, unknown, warn

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


def memlock(case: HostCase) -> Verdict:
    if not case.rdma_ports:
        return ok("no RDMA port here that would pin memory")
    limit = case.facts.rdma.memlock_bytes
    if limit is None:
        return unknown(case.facts.why_unknown("rdma.memlock_bytes") or "it is not known")
    if limit == "unlimited":
        return ok("unlimited")
    if limit >= 32 * GiB:
        return warn(f"{show_bytes(limit)} of memory may be pinned, not all")
    return fail(f"a process started as ranks are may pin {show_bytes(limit)}")


def _count(case: HostCase, name: str, *, good: int, least: int) -> Verdict:
    limit = case.facts.limits.get(name)
    soft: Bytes | None = limit.soft if limit else None
    if soft is None:
        return unknown("it is not known")
    if soft == "unlimited" or soft >= good:
        return ok(str(soft))
    return warn(f"{soft}, {good} are better") if soft >= least else fail(f"{soft}, at least {least} are needed")


def nofile(case: HostCase) -> Verdict:
    if not case.checked.several and not case.gpus:
        return ok("no GPU and one host: the usual limit will do")
    return _count(case, "nofile", good=65_536, least=4096)


def nproc(case: HostCase) -> Verdict:
    return _count(case, "nproc", good=65_536, least=4096)


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


_LINE = (
    "echo '* - {0} {1}' | sudo tee /etc/security/limits.d/90-{0}.conf && sudo systemctl restart ssh"
    "  # on {{host}}, then log in anew"
)
CHECKS = (
    Check(
        "lim.memlock",
        "getrlimit in a process started as ranks are",
        "nccl-tests#206, ucx#8229; a plain ssh command gives 8192 KiB",
        _LINE.format("memlock", "unlimited"),
        rule=memlock,
        essential=True,
    ),
    Check("lim.nofile", "getrlimit", "Primus host_limits", _LINE.format("nofile", "65536"), rule=nofile),
    Check("lim.nproc", "getrlimit", "Primus host_limits", _LINE.format("nproc", "65536"), rule=nproc),
    Check(
        "env.debug_leftovers",
        "the environment of a process started as ranks are, /etc/nccl.conf",
        "NCCL's manual: debugging variables do not belong in production",
        "unset {names}  # on {host}: ~/.bashrc, /etc/environment, or `env` in the inventory",
        rule=debug_leftovers,
    ),
)
