"""A particle filter for many tracks at once: a step forward, weights, and systematic resampling, which is a cumulative
sum and a search; then quantiles of the estimates."""

import jax
import jax.numpy as jnp

import jaxgpuops

TRACKS, PARTICLES, STEPS = 64, 512, 40
DRIFT, NOISE, ERROR = 0.9, 0.5, 1.0


def resample(key, particles, log_weights):
    """Repeats particles in proportion to their weights: in each row, takes those at evenly spaced points of the
    cumulative sum."""
    shares = jaxgpuops.cumsum(jaxgpuops.softmax(log_weights))
    offset = jax.random.uniform(key, (len(particles), 1))
    points = (jnp.arange(PARTICLES) + offset) / PARTICLES * shares[:, -1:]
    chosen = jaxgpuops.searchsorted(shares, points).clip(0, PARTICLES - 1)
    return jnp.take_along_axis(particles, chosen, 1)


@jax.jit
def filtered(key, observed):
    """The estimate of each track after each observation: the median, and a range of 80 %."""

    def step(particles, inputs):
        key, seen = inputs
        move, choose = jax.random.split(key)
        particles = DRIFT * particles + NOISE * jax.random.normal(move, particles.shape)
        log_weights = -((seen[:, None] - particles) ** 2) / (2 * ERROR**2)
        particles = resample(choose, particles, log_weights)
        return particles, jaxgpuops.quantile(particles, [0.1, 0.5, 0.9])

    first, rest = jax.random.split(key)
    particles = jax.random.normal(first, (TRACKS, PARTICLES))
    return jax.lax.scan(step, particles, (jax.random.split(rest, STEPS), observed))[1]


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    steps = NOISE * jax.random.normal(keys[0], (STEPS, TRACKS))
    truth = jaxgpuops.linear_scan(DRIFT, steps, axis=0)
    observed = truth + ERROR * jax.random.normal(keys[1], truth.shape)
    low, middle, high = filtered(keys[2], observed).transpose(1, 0, 2)

    error = lambda x: float(jnp.sqrt(((x - truth) ** 2).mean()))
    inside = float(((low <= truth) & (truth <= high)).mean())
    print(f"error of the observations {error(observed):.2f}, of the medians {error(middle):.2f}")
    print(f"{inside:.0%} of the true positions are between the quantiles 0.1 and 0.9")
    assert error(middle) < 0.7 * error(observed) and 0.7 < inside < 0.9


if __name__ == "__main__":
    main()
