"""Top-k sampling of the next token for a batch of prompts, each with its own temperature: jit, vmap, one kernel call."""

import jax
import jax.numpy as jnp

import jaxgpuops

VOCABULARY, K = 128_256, 50


def sample(key, logits, temperature):
    """A token of one prompt: one of the K likeliest, drawn in proportion to its probability."""
    values, tokens = jaxgpuops.topk(logits, K)
    return tokens[jax.random.categorical(key, values / temperature)]


def main():
    batch = 8
    logits = 3 * jax.random.normal(jax.random.key(0), (batch, VOCABULARY))
    temperatures = jnp.linspace(0.01, 2, batch)
    keys = jax.random.split(jax.random.key(1), batch)
    tokens = jax.jit(jax.vmap(sample))(keys, logits, temperatures)
    ranks = (logits > jnp.take_along_axis(logits, tokens[:, None], 1)).sum(1)
    for temperature, token, rank in zip(temperatures, tokens, ranks, strict=True):
        print(f"temperature {temperature:.2f}: token {token}, number {rank + 1} by likelihood")
    assert (ranks < K).all()


if __name__ == "__main__":
    main()
