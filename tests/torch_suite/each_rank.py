"""A pytest plugin for tests that each rank of torchrun runs: its outcomes go into a file of its own."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.option.xmlpath += os.environ["RANK"]
