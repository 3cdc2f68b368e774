"""What every test starts from: one thread, a fixed seed, no network, and a rank pool that ends with the session."""

import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from tests import ranks


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _end_of_pool() -> Iterator[None]:
    yield
    ranks.close()
