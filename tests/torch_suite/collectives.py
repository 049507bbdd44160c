"""The tests of collectives that torch brings along, each in processes of its own: worlds of three ranks.

The suite chooses by name between gloo and nccl in decorators and inside tests, so it is told "gloo", and that way the
tests that it reserves for gloo run too.
"""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("WORLD_SIZE", "3")
os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="hetctl-torch-suite-"))

import torch.distributed as dist
from torch.testing._internal.common_distributed import DistTestCases

for _feature in DistTestCases.backend_feature.values():
    _feature.add("het")

from torch.testing._internal.distributed import distributed_test  # noqa: E402

from tests.torch_suite import forked  # noqa: E402

for _list in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
    getattr(distributed_test, _list).append("het")

forked.SERVER.set_forkserver_preload([*forked.PRELOADED, distributed_test.__name__])
BY_NAME = {"test_get_backend"}  # asks for the name of the back end: here the suite is told the true one


class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All tests of the suite."""

    @classmethod
    def _run(cls, rank: int, test_name: str, *rest: object, **more: object) -> None:
        if test_name in BY_NAME and os.environ.get("HETCTL_AS_NCCL"):
            distributed_test.BACKEND = "het"
        super()._run(rank, test_name, *rest, **more)

    def setUp(self) -> None:
        assert not dist.is_initialized()
        super().setUp()
        self._spawn_processes()
