"""
A logistic regression at T = 1 on forced host devices, in one process or several.

Prints what a test wants to know as one line of JSON. Run by ``tests/test_mesh.py``.
"""

import argparse
import json
import os

N, M, DIM = 4000, 400, 2


def rows():
    """All rows; each process keeps its own."""
    import numpy as np

    generator = np.random.default_rng(0)
    x = generator.normal(size=(N, DIM)).astype(np.float32)
    p = 1 / (1 + np.exp(-x @ np.array([1.0, -0.5])))
    return x, (generator.random(N) < p).astype(np.float32)


def main(args):
    import jax

    if args.coordinator:
        jax.config.update("jax_platforms", "cpu")
        jax.distributed.initialize(
            args.coordinator, args.num_processes, args.process_id
        )
    from jax import random
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC

    from numpyro_mhbt import MHBT, Taylor, batch_report

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([DIM]).to_event(1))
        with numpyro.plate("N", len(x), subsample_size=M):
            xb = numpyro.subsample(x, event_dim=1)
            yb = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Bernoulli(logits=xb @ w), obs=yb)

    devices = np.array(jax.devices()).reshape(args.chain_groups, -1)
    mesh = Mesh(devices, ("chains", "data"))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    share = N // args.num_processes
    mine = slice(args.process_id * share, (args.process_id + 1) * share)
    x, y = (jax.make_array_from_process_local_data(sharding, a[mine]) for a in rows())
    mcmc = MCMC(
        MHBT(model, control_variate=Taylor(order=2), temperature=1.0),
        num_warmup=200,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(0), x, y)
    w = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], np.float64)
    found = {
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "rows": [shard.data.shape[0] for shard in x.addressable_shards],
        "chains": str(mcmc.last_state.z["w"].sharding.spec),
        "temperature": batch_report(mcmc).temperature,
        "draws": w.tolist(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1, help="of each process")
    parser.add_argument("--chain-groups", type=int, default=1)
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int, default=1)
    parser.add_argument("--process-id", type=int, default=0)
    given = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={given.devices}"
    os.environ["XLA_FLAGS"] = flag
    main(given)
