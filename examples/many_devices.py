"""
Logistic regression with rows spread over many devices, on one machine or many.

Each process makes (elsewhere: reads) the rows that its devices hold, and no other. A
step sends a gradient across the network, whatever the number of rows. The rows here
are made up from known coefficients, so the picture shows whether they were found.

    python examples/many_devices.py --devices 8         # of this machine's CPU

On a cluster, in each process, with addresses of your own:

    python examples/many_devices.py \\
        --coordinator host-0:1234 --num-processes 4 --process-id 0
"""

from __future__ import annotations

import argparse
import os

DIM = 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--devices", type=int, help="to make of this machine's CPU")
    parser.add_argument("--chain-groups", type=int, default=1, help="1: all data")
    parser.add_argument("--coordinator", help="address and port of the first process")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--rows", type=int, default=2**20, help="of all devices")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--smoke", action="store_true", help="seconds, few rows")
    parser.add_argument("--out", default="many_devices", help="name of the picture")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    # JAX must not have started before the number of devices and processes is known.
    import jax

    if args.coordinator:
        jax.distributed.initialize(
            args.coordinator, args.num_processes, args.process_id
        )

    from jax import random
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC

    from numpyro_mhbt import MHBT, Taylor, batch_report

    def model(x: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([DIM]).to_event(1))
        with numpyro.plate("N", len(x), subsample_size=args.batch_size):
            xb = numpyro.subsample(x, event_dim=1)
            yb = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Bernoulli(logits=xb @ w), obs=yb)

    devices = np.array(jax.devices()).reshape(args.chain_groups, -1)
    mesh = Mesh(devices, ("chains", "data"))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    truth = np.linspace(-1, 1, DIM, dtype=np.float32)
    generator = np.random.default_rng(jax.process_index())
    x = generator.normal(size=(args.rows // jax.process_count(), DIM))
    y = generator.random(len(x)) < 1 / (1 + np.exp(-x @ truth))
    rows = [
        jax.make_array_from_process_local_data(sharding, part.astype(np.float32))
        for part in (x, y)
    ]
    mcmc = MCMC(
        MHBT(model, control_variate=Taylor(order=2)),
        num_warmup=100 if args.smoke else 500,
        num_samples=200 if args.smoke else 2000,
        num_chains=4,
        chain_method="vectorized",
        jit_model_args=True,
        progress_bar=False,
    )
    # All processes do the same to the end, or those that go on would wait for others.
    mcmc.run(random.key(0), *rows)
    report, w = batch_report(mcmc), np.asarray(mcmc.get_samples()["w"])
    if jax.process_index() > 0:
        return
    print(report)
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.errorbar(np.arange(DIM), w.mean(0) - truth, 2 * w.std(0), fmt="o")
    axes.axhline(0, color="grey", lw=1)
    axes.set(xlabel="coefficient", ylabel="posterior less truth, two sd")
    axes.set_title(f"{args.rows} rows on {jax.device_count()} devices")
    figure.savefig(f"{args.out}.png", dpi=150)


if __name__ == "__main__":
    given = parse()
    if given.smoke:
        given.rows = 2**14
        given.devices = given.devices or 8
    if given.devices:
        flag = f"--xla_force_host_platform_device_count={given.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    main(given)
