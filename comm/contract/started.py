"""What a launcher that is not ours tells a process: torchrun's variables, or those of MPI and Slurm in its words."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.comm.contract.errors import ConfigError

DEFAULT_PORT = "29500"  # torch's own
_FIRST_NODE = re.compile(r"(?P<name>[^\[,]+)(\[(?P<number>\d+))?(?P<rest>[^,]*\](?P<more>[^,\[]*))?")


@dataclass(frozen=True)
class Starter:
    """A launcher's variables: a rank, how many there are, and the same of those on its host."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    address: str  # how a person tells its ranks where rank 0 is


STARTERS = (
    Starter(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "mpirun -x MASTER_ADDR=HOST",
    ),
    Starter("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "mpiexec -genv MASTER_ADDR HOST"),
    Starter("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "export MASTER_ADDR=HOST"),
)


def as_torchrun_says(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as far as they are not set, from what a launcher of
    MPI's kind says; nothing where there is none, or RANK is set. Raises ConfigError where nobody says where rank 0 is.
    """
    starter = next((s for s in STARTERS if s.rank in environment and s.world_size in environment), None)
    if "RANK" in environment or starter is None:
        return {}
    told = {"RANK": environment[starter.rank], "WORLD_SIZE": environment[starter.world_size]}
    if starter.local_rank in environment:
        told["LOCAL_RANK"] = environment[starter.local_rank]
    told |= {"MASTER_ADDR": _address(starter, environment), "MASTER_PORT": DEFAULT_PORT}
    return {name: value for name, value in told.items() if name not in environment}


def address_towards(there: str) -> str:
    """This host's address on its way to another one. Raises ConfigError where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        try:
            towards.connect((there, 9))
        except OSError as error:
            raise ConfigError(f"{socket.gethostname()} has no way to MASTER_ADDR {there}: {error.strerror}") from None
        mine: str = towards.getsockname()[0]
        return mine


def _address(starter: Starter, environment: Mapping[str, str]) -> str:
    if given := environment.get("MASTER_ADDR"):
        return given
    world = environment[starter.world_size]
    if world == "1" or environment.get(starter.local_size) == world:
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if starter.name == "srun" and nodes and (first := _FIRST_NODE.match(nodes)):
        return first["name"] + (first["number"] or "") + (first["more"] or "")
    raise ConfigError(
        f"{starter.name} started {world} processes on several hosts, and MASTER_ADDR does not say where rank 0 is",
        hint=starter.address,
    )
