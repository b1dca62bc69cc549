import gc
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import warnings

import jax
import numpyro
import pytest

numpyro.set_host_device_count(4)  # before JAX starts, for chain_method="parallel"

MAPS = Path("/proc/self/maps")


# Compiles in half the time. XLA stops at flags that it does not know (any more).
QUICK = "--xla_cpu_use_fusion_emitters=false"


def pytest_configure(config):
    # ArviZ 0.23 writes a file once a day, and workers would race for it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import arviz  # noqa: F401
    # Most of the time would go into compiling, and much of that the same programs.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        config.compiled = tempfile.mkdtemp()
        os.environ["JAX_COMPILATION_CACHE_DIR"] = config.compiled  # of workers
        flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"
        start = [sys.executable, "-c", "import jax; jax.devices()"]
        env = {**os.environ, "XLA_FLAGS": flags}
        if subprocess.run(start, env=env, capture_output=True).returncode == 0:
            os.environ["XLA_FLAGS"] = flags
    jax.config.update(
        "jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"]
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_unconfigure(config):
    if hasattr(config, "compiled"):
        shutil.rmtree(config.compiled, ignore_errors=True)


@pytest.fixture(autouse=True)
def fast_to_compile(request):
    """Programs that hardly run are not worth optimising."""
    brief = request.node.get_closest_marker("long_chains") is None
    jax.config.update("jax_disable_most_optimizations", brief)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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
