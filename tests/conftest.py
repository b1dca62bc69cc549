import numpyro

numpyro.set_host_device_count(4)  # before JAX starts, for chain_method="parallel"
