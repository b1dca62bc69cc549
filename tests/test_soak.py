"""
Long runs: neither memory nor figures may drift.

The model is that of ``test_exact``, whose invariant distribution is known exactly.
"""

import gc
from pathlib import Path
import time

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
import pytest
from test_exact import Exact, Y, model

from numpyro_mhbt import MHBT, RSGLD, Taylor
from numpyro_mhbt.chain import _mean

STATUS = Path("/proc/self/status")
COMPILED = "/jax/core/compile/backend_compile_duration"
STEPS, PIECES, DRAWS = 10**7, 20, 500
SLACK = 8  # MiB: what the allocator may keep, a byte for each step that would leak


def resident():
    """MiB of memory in use."""
    gc.collect()
    (line,) = (x for x in STATUS.read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.fixture
def compilations():
    """Durations of all compilations since."""
    found = []

    def listen(event, duration, **_):
        if event == COMPILED:
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
@pytest.mark.long_chains
@pytest.mark.filterwarnings("ignore:MHBT. ")  # six rows
@pytest.mark.skipif(not STATUS.exists(), reason="reads Linux' own account of memory")
def test_ten_million_steps(compilations):
    kernel = MHBT(
        model,
        RSGLD(0.3, 1.5),
        c_n=3.0,
        control_variate=Taylor(order=0, ref_params={"mu": jnp.array(0.3)}),
        steps_per_draw=STEPS // PIECES // DRAWS,
    )
    # Without a bar NumPyro compiles its loop anew in each call, whatever the kernel.
    mcmc = MCMC(kernel, num_warmup=500, num_samples=DRAWS)
    mcmc.progress_bar = True
    draws, rates, noises, memory, arrays, programs = [], [], [], [], [], []
    begin = time.perf_counter()
    for piece in range(PIECES):
        mcmc.run(random.key(piece), Y, extra_fields=("accept_prob",))
        draws.append(np.asarray(mcmc.get_samples()["mu"], np.float64))
        rates.append(float(np.mean(mcmc.get_extra_fields()["accept_prob"])))
        noises.append(float(mcmc.last_state.mean_noise_variance))
        mcmc.post_warmup_state = mcmc.last_state
        memory.append(resident())
        arrays.append(len(jax.live_arrays()))
        programs.append(len(compilations))
    print(f"\n{STEPS} steps in {time.perf_counter() - begin:.0f} s")
    print("MiB", np.round(memory, 1), "arrays", arrays, "programs", programs)

    # The second piece is the first that goes on from another.
    assert memory[-1] < memory[1] + SLACK
    assert arrays[-1] <= arrays[1]
    assert programs[-1] == programs[1]

    state = mcmc.last_state
    assert state.i == 500 + PIECES * DRAWS
    assert state.mean_accept_prob == pytest.approx(np.mean(rates), abs=1e-4)
    assert noises[-1] == pytest.approx(np.mean(noises), rel=0.1)
    exact = Exact(3.0, reference=0.3, correct=True)
    for part in (draws, draws[-PIECES // 10 :]):
        # A thousand steps apart, draws are independent.
        mu = np.concatenate(part)
        scores = score(mu, exact.mean), score((mu - exact.mean) ** 2, exact.variance)
        print("scores of mean and variance", np.round(scores, 2))
        assert np.all(np.abs(scores) < 4)


def score(values, exact):
    return (values.mean() - exact) / (values.std() / np.sqrt(values.size))


def test_running_mean_does_not_drift_beyond_single_precision():
    """From 2^24 on steps of a plain mean are lost to rounding, but not all alike."""
    rate, first = 0.3, 2**24

    def advance(i, mean):
        # As good as random: the multiples of the golden section.
        u = (i.astype(jnp.uint32) * np.uint32(2654435769)).astype(jnp.float32) / 2.0**32
        return _mean(mean, (u < rate).astype(jnp.float32), i)

    start = jnp.array(rate, jnp.float32)
    mean = jax.jit(lambda: lax.fori_loop(first, 3 * first, advance, start))()
    assert mean == pytest.approx(rate, abs=0.01)
