"""The public tier: `jax.custom_vjp` functions over the primitives of `jaxgpuops.lax`."""
