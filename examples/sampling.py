"""A small language model, trained here, and a sampler for its logits: temperature, top-k and top-p, each of them its
own for every text, in one jitted program."""

import jax
import jax.numpy as jnp

import jaxgpuops

TEXT = "the cat sat on the mat. the dog ate the bone. a man and a woman met at the old mill near the sea. " * 8
LETTERS = sorted(set(TEXT))
CONTEXT, WIDTH, K = 4, 32, 8


def logits_of(parameters, context):
    """Returns logits of the letter that follows each context, which is the last letters before it."""
    x = parameters["embedding"][context].reshape(*context.shape[:-1], CONTEXT * WIDTH)
    return jax.nn.relu(x @ parameters["hidden"]) @ parameters["output"]


def loss(parameters, contexts, letters):
    return jaxgpuops.softmax_cross_entropy(logits_of(parameters, contexts), letters, reduction="mean")


@jax.jit
def step(parameters, contexts, letters):
    value, gradient = jax.value_and_grad(loss)(parameters, contexts, letters)
    return value, jax.tree.map(lambda p, g: p - 0.5 * g, parameters, gradient)


def sample(key, logits, temperature, p):
    """Draws a letter for each row: among the K likeliest, and of these among the likeliest that have probability p
    together."""
    values, letters = jaxgpuops.topk(logits, K)
    probabilities = jaxgpuops.softmax(values, scale=1 / temperature[:, None])
    nucleus = jaxgpuops.cumsum(probabilities, exclusive=True) < p[:, None]  # the likeliest letter is always in it
    log_probabilities = jaxgpuops.log_softmax(values, scale=1 / temperature[:, None], where=nucleus)
    chosen = jax.random.categorical(key, log_probabilities)
    return jnp.take_along_axis(letters, chosen[:, None], 1)[:, 0]


@jax.jit
def generate(parameters, key, contexts, temperature, p):
    def next_letter(contexts, key):
        letters = sample(key, logits_of(parameters, contexts), temperature, p)
        return jnp.append(contexts[:, 1:], letters[:, None], 1), letters

    return jax.lax.scan(next_letter, contexts, jax.random.split(key, 60))[1].T


def main():
    tokens = jnp.array([LETTERS.index(letter) for letter in TEXT])
    contexts = jnp.stack([tokens[i : len(tokens) - CONTEXT + i] for i in range(CONTEXT)], 1)
    keys = jax.random.split(jax.random.key(0), 4)
    parameters = {
        "embedding": jax.random.normal(keys[0], (len(LETTERS), WIDTH)) / 4,
        "hidden": jax.random.normal(keys[1], (CONTEXT * WIDTH, 64)) / 8,
        "output": jax.random.normal(keys[2], (64, len(LETTERS))) / 8,
    }
    for i in range(301):
        value, parameters = step(parameters, contexts, tokens[CONTEXT:])
        if i % 100 == 0:
            print(f"step {i}: loss {value:.3f}")
    assert value < 0.5

    temperature, p = jnp.array([0.1, 1.0, 1.0, 2.0]), jnp.array([1.0, 0.5, 1.0, 1.0])
    start = jnp.tile(tokens[:CONTEXT], (len(p), 1))
    texts = ["".join(LETTERS[i] for i in row) for row in generate(parameters, keys[3], start, temperature, p)]
    for t, q, text in zip(temperature, p, texts, strict=True):
        print(f"temperature {t:.1f}, p {q:.1f}: {TEXT[:CONTEXT]}{text}")
    words = set(TEXT.replace(".", "").split())
    assert set(texts[0].replace(".", "").split()[1:-1]) <= words  # at a low temperature it repeats words of the text


if __name__ == "__main__":
    main()
