"""A person's first two machines: `green1` dressed as NVIDIA, `red1` as AMD; CPU processes stand for their GPUs.

What is typed on them is done, by a real sshd's shell: a virtual environment is made, pip finds torch in it, a link gets
another MTU. Their torch only claims to be a build for GPUs, where the probe looks, and computes on the CPU.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

from tests.hetctl.doctor.test_namespaces import OWN_ADDRESS, UNLIMITED
from tests.rigs import netns
from tests.rigs.dress import Costume, Dress, dress_host, write

SITE = next((path for path in sys.path if path.endswith("site-packages")), "")
COSTUMES = (
    Costume("green1", 0, gpus=1, nics=0, management={"eth0": ""}, tool_delay_s=0),
    Costume("red1", 1, vendor="amd", gpus=1, nics=0, management={"eth0": ""}, tool_delay_s=0),
)
FILES = {
    "/proc/sys/net/ipv4/ip_local_port_range": "32768 60999",
    "/proc/swaps": "Filename Type Size Used Priority",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
}
BUILDS = {"nvidia": ("2.13.0+cu128", "cuda: str = '12.8'"), "amd": ("2.13.0+rocm7.2", "hip: str = '7.2'")}


@contextlib.contextmanager
def first_hosts(folder: Path, *, hide: Path) -> Iterator[netns.Rig]:
    """Both hosts, which see nothing of `hide`, and whose keys nobody has compared yet."""
    specs = [_spec(folder / costume.name, costume, hide) for costume in COSTUMES]
    with netns.hosts(specs, folder / "rig") as rig:
        subprocess.run(["ip", "-n", rig.hosts[1].namespace, "link", "set", "eth0", "mtu", "1400"], check=True)
        yield rig


def _spec(folder: Path, costume: Costume, hide: Path) -> netns.HostSpec:
    dress = dress_host(folder, costume)
    for path, content in FILES.items():
        write(dress.root, path, content)
    shutil.rmtree(dress.root / "sys/class/net")  # the network is the rig's own
    (dress.root / "sys/class/net").symlink_to("/sys/class/net")
    (dress.tools / "ip").unlink()
    (dress.tools / "ip").symlink_to(str(shutil.which("ip")))
    tools = {"python3": _python3(dress, _claiming(folder / "claims", costume)), "sudo": '#!/bin/sh\nexec "$@"\n'}
    quiet = {"PIP_CONFIG_FILE": "/dev/null", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"}
    return netns.HostSpec(costume.name, tools=tools, hide=(str(hide),), known=False, env=quiet)


def _claiming(folder: Path, costume: Costume) -> Path:
    """A Python whose torch says that it was built for the vendor: what the probe reads, no rank runs."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "torch").mkdir()
    version, build = BUILDS[costume.vendor]
    (packages / "torch" / "version.py").write_text(f"__version__ = '{version}'\n{build}\n")
    (packages / "torch" / "__init__.py").write_text("raise ImportError('no GPU stands behind this name')\n")
    for found in Path(SITE).glob("numpy-*.dist-info"):
        shutil.copytree(found, packages / found.name)
    return folder / "bin" / "python"


def _python3(dress: Dress, claiming: Path) -> str:
    """The host's `python3`: the environments that it makes hold this one's packages, and dress whoever reads them."""
    real = f"python3.{sys.version_info[1]}"
    edit = (
        f'{UNLIMITED}; s/state != 5/True/; s|"root": ""|"root": "{dress.root}"|; s|"path": ""|"path": "{dress.tools}"|'
    )
    dressed = "\n".join(
        [
            "#!/bin/sh",
            f"""case "$*" in
  "-I -") exec unshare -u sh -c 'hostname {OWN_ADDRESS}; sed "$0" | exec {claiming} -I -' '{edit}';;
  *json.dumps*sys.prefix*) exec {claiming} "$@";;
  *) exec "$(dirname "$0")/{real}" "$@";;
esac""",
        ]
    )
    return "\n".join(
        [
            "#!/bin/sh",
            f'[ "$1 $2" = "-m venv" ] || exec {netns.PYTHON} "$@"',
            f'{netns.PYTHON} -m venv --without-pip "$3" || exit',
            f'echo {shlex.quote(SITE)} > "$3/lib/{real}/site-packages/here.pth"',
            f'ln -sf {netns.PYTHON} "$3/bin/{real}"',
            'rm "$3/bin/python"',
            f"""cat > "$3/bin/python" <<'END'\n{dressed}\nEND""",
            'chmod +x "$3/bin/python"',
            "",
        ]
    )
