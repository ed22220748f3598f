"""A head of a language model, trained with its vocabulary split over eight devices, and on one: the same losses.

The logits of all words are never on one device: each device has those of its words, and devices exchange a few numbers
for each token. The exchanged bytes are read from the compiled program, and compared with those of the same step in
plain JAX.
"""

import contextlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxgpuops

with contextlib.suppress(RuntimeError):  # JAX has started already
    jax.config.update("jax_num_cpu_devices", 8)

TOKENS, WIDTH, WORDS, STEPS, RATE = 64, 32, 2048, 20, 4.0


def step(cross_entropy):
    def loss(parameters, tokens, following):
        embedding, head = parameters
        return cross_entropy(embedding[tokens] @ head, following)

    @jax.jit
    def updated(parameters, tokens, following):
        value, gradients = jax.value_and_grad(loss)(parameters, tokens, following)
        return value, jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)

    return updated


def by_jax(logits, labels):  # as in optax
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


ours = step(lambda logits, labels: jaxgpuops.softmax_cross_entropy(logits, labels, reduction="mean"))
plain = step(by_jax)


def train(updated, parameters, batches):
    losses = []
    for tokens, following in batches:
        value, parameters = updated(parameters, tokens, following)
        losses.append(float(value))
    return losses


def bytes_moved(updated, *arguments):
    """The bytes of the results of all collectives in a compiled program, for one device."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    text = updated.lower(*arguments).compile().as_text()
    results = re.findall(rf" = (.*?) (?:{names})(?:-done)?\(", text)
    shapes = [shape for result in results for shape in re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", result)]
    return sum(int(bits) // 8 * math.prod(int(n) for n in dims.split(",") if n) for bits, dims in shapes)


# Text in which each word mostly decides the next.
random = np.random.default_rng(0)
successor = random.permutation(WORDS)
batches = []
for _ in range(STEPS):
    tokens = random.integers(0, WORDS // 8, TOKENS)
    batches.append((tokens.astype(np.int32), successor[tokens].astype(np.int32)))
embedding = random.standard_normal((WORDS, WIDTH)).astype(np.float32)
head = (0.02 * random.standard_normal((WIDTH, WORDS))).astype(np.float32)

devices = jax.devices()[: min(8, 1 << (len(jax.devices()).bit_length() - 1))]
mesh = jax.make_mesh((len(devices),), ("words",), axis_types=(AxisType.Auto,), devices=devices)
everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "words"))
parameters = jax.device_put(embedding, everywhere), jax.device_put(head, split)

alone = train(ours, (embedding, head), batches)
together = train(ours, parameters, batches)
np.testing.assert_allclose(together, alone, rtol=1e-4)
assert together[-1] < 0.8 * together[0]
print(f"losses on one device:    {' '.join(f'{loss:.3f}' for loss in alone[::4])}")
print(f"losses on {mesh.size} devices:     {' '.join(f'{loss:.3f}' for loss in together[::4])}")

moved, by_plain_jax = (bytes_moved(updated, parameters, *batches[0]) for updated in (ours, plain))
print(f"bytes a device and step: {moved}, of plain JAX {by_plain_jax}; all logits are {4 * TOKENS * WORDS}")
assert moved <= by_plain_jax
