"""Generalised advantage estimation: one call of `jaxgpuops.linear_scan` in place of a loop over time. The recurrence of
the advantages runs backwards, and a factor of 0 ends an episode: nothing of the next one leaks into it."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxgpuops

STEPS, ENVIRONMENTS, DISCOUNT, DECAY = 256, 512, 0.99, 0.95


def deltas_and_factors(rewards, values, dones):
    """``values`` has one step more than the others, for the states after the last step."""
    going_on = 1.0 - dones
    return rewards + DISCOUNT * going_on * values[1:] - values[:-1], DISCOUNT * DECAY * going_on


@jax.jit
def advantages(rewards, values, dones):
    """Returns arrays of shape (time, environment), as environments give them."""
    deltas, factors = deltas_and_factors(rewards, values, dones)
    return jaxgpuops.linear_scan(factors, deltas, axis=0, reverse=True)


@jax.jit
def advantages_by_loop(rewards, values, dones):
    def step(after, now):
        delta, factor = now
        advantage = delta + factor * after
        return advantage, advantage

    return jax.lax.scan(step, jnp.zeros(ENVIRONMENTS), deltas_and_factors(rewards, values, dones), reverse=True)[1]


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    rewards = jax.random.normal(keys[0], (STEPS, ENVIRONMENTS))
    values = 10 * jax.random.normal(keys[1], (STEPS + 1, ENVIRONMENTS))
    dones = jax.random.bernoulli(keys[2], 0.02, (STEPS, ENVIRONMENTS)).astype(jnp.float32)
    ours, loop = (np.asarray(fn(rewards, values, dones)) for fn in (advantages, advantages_by_loop))
    # In float32, both have errors of about 1e-7 of the terms that they add, which are at most 40 or so and become
    # smaller.
    np.testing.assert_allclose(ours, loop, rtol=1e-5, atol=1e-4)
    print(f"{STEPS} steps of {ENVIRONMENTS} environments: advantages up to {np.abs(loop).max():.1f}, which differ from")
    print(f"those of a loop by {np.abs(ours - loop).max():.1e} at most")

    # The end of an episode is final, whatever comes after it: 0 times NaN would be NaN.
    ended = advantages(rewards.at[100, 0].set(jnp.nan), values, dones.at[99, 0].set(1))
    assert jnp.isfinite(ended[:100]).all() and jnp.isnan(ended[100, 0])
    print("a broken reward after the end of an episode does not reach it")


if __name__ == "__main__":
    main()
