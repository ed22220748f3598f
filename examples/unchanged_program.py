"""A program written for JAX alone, first as it is, then on our kernels: `jaxgpuops.install()` routes JAX's own top_k,
and argmax when asked for by name."""

import jax
import jax.numpy as jnp

import jaxgpuops


@jax.jit
def program(logits):
    """Greedy tokens, and the log-probability of the 5 likeliest; nothing here knows jaxgpuops."""
    values, _ = jax.lax.top_k(jax.nn.log_softmax(logits), 5)
    return jnp.argmax(logits, -1), values


def main():
    logits = jax.random.normal(jax.random.key(0), (16, 32_000))
    before = program(logits)
    with jaxgpuops.install(), jaxgpuops.install("argmax"):
        calls = jaxgpuops.explain(program, logits)
        after = program(logits)
    for call in calls:
        print(call)
    assert all(call.kernel for call in calls) and len(calls) == 2
    assert all(jnp.array_equal(a, b) for a, b in zip(before, after, strict=True))
    print("the same results")


if __name__ == "__main__":
    main()
