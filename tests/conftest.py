import gc
from pathlib import Path

import jax
import numpyro
import pytest

numpyro.set_host_device_count(4)  # before JAX starts, for chain_method="parallel"

MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def few_programs():
    """
    Compiled programs are dropped before there are too many.

    Each takes several memory maps, of which Linux allows a process 65530.
    """
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()
        gc.collect()
