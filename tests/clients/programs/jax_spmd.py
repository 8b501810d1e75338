"""Train with JAX on 4 devices of the host, a mesh of 2 x 2, under its profiler: `jax_spmd.py FOLDER`."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTH, HIDDEN, BATCH, STEPS = 64, 128, 32, 6
Weights = tuple[jax.Array, jax.Array]


def loss(weights: Weights, x: jax.Array) -> jax.Array:
    """Return the mean square of two layers, the second of which sums over `model`."""
    return jnp.mean((jax.nn.relu(x @ weights[0]) @ weights[1]) ** 2)


@jax.jit
def step(weights: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    """Train one step; gradients are summed over `data`."""
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return value, jax.tree.map(lambda weight, gradient: weight - 0.01 * gradient, weights, gradients)


def main() -> None:
    """Profile the steps after the first."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))

    def put(shape: tuple[int, int], *axes: str | None) -> jax.Array:
        return jax.device_put(jnp.ones(shape), NamedSharding(mesh, PartitionSpec(*axes)))

    x = put((BATCH, WIDTH), "data", None)
    weights = put((WIDTH, HIDDEN), None, "model"), put((HIDDEN, WIDTH), "model", None)
    value, weights = step(weights, x)
    value.block_until_ready()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(sys.argv[1], profiler_options=options):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                value, weights = step(weights, x)
                jax.block_until_ready((value, weights))


if __name__ == "__main__":
    main()
