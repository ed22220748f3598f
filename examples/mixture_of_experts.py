"""A layer of a mixture of experts, trained on handwritten digits: route, dispatch, two `jax.lax.ragged_dot`s with
SwiGLU, combine. It is equal to a dense layer that asks every expert, forward and backward, on one device and with
experts that are split over eight. The gate is that of DeepSeek-V3: sigmoid scores, the best two of four groups of
experts, and a bias that only chooses and evens out the load."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jaxgpuops

with contextlib.suppress(RuntimeError):  # JAX has started already
    jax.config.update("jax_num_cpu_devices", 8)

EXPERTS, ACTIVE, WIDTH, HIDDEN, RATE = 16, 2, 64, 32, 0.4
STEPS, STEPS_ON_MESH = 40, 13  # virtual devices on a CPU are slow
GATE = {"score": "sigmoid", "groups": 4, "topk_groups": 2}
EXPERT_PARAMETERS = ("gate", "up", "down")


def feed_forward(parameters, rows, sizes):
    """SwiGLU, each group of rows by its own expert."""
    gate, up = (jax.lax.ragged_dot(rows, parameters[name], sizes) for name in ("gate", "up"))
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, parameters["down"], sizes)


def experts_of_one_device(parameters, x, logits, bias):
    weights, _, plan = jaxgpuops.moe_route(logits, ACTIVE, bias=bias, **GATE)
    y = feed_forward(parameters, jaxgpuops.moe_dispatch(x, plan), plan.group_sizes)
    return jaxgpuops.moe_combine(y, plan, weights)


def experts_of_all_devices(parameters, x, logits, bias):
    """Inside `jax.shard_map`: this device has some of the tokens and some of the experts."""
    weights, ids = jaxgpuops.topk_softmax(logits, ACTIVE, bias=bias, **GATE)
    plan = jaxgpuops.moe_plan(ids, EXPERTS, axis_name="devices")
    there, back, local_ids = plan.exchange
    rows = jaxgpuops.moe_dispatch(x, plan)
    came = exchange(rows, jnp.zeros((len(local_ids), x.shape[1]), x.dtype), there)
    own = jaxgpuops.moe_plan(local_ids, len(parameters["up"]))  # rows of one expert come from several devices
    y = feed_forward(parameters, jaxgpuops.moe_dispatch(came, own), own.group_sizes)
    answers = exchange(jaxgpuops.moe_combine(y, own), jnp.zeros_like(rows), back)
    return jaxgpuops.moe_combine(answers, plan, weights)


def exchange(rows, out, sizes):
    """`jax.lax.ragged_all_to_all`. On CPUs, where XLA lacks it, parts are padded to the size of the whole."""
    if jax.default_backend() != "cpu":
        return jax.lax.ragged_all_to_all(rows, out, *sizes, axis_name="devices")
    _, _, _, recv_sizes = sizes
    place = jnp.arange(len(rows))
    parts = jnp.take(rows, sizes.input_offsets[:, None] + place, axis=0, mode="fill", fill_value=0)
    came = jax.lax.all_to_all(parts, "devices", 0, 0)
    starts = jnp.cumsum(recv_sizes) - recv_sizes
    to = jnp.where(place < recv_sizes[:, None], starts[:, None] + place, len(out))
    return out.at[to].set(came, mode="drop")


def experts_of_every_token(parameters, x, logits, bias):
    """Plain and dense: all experts for all tokens."""
    scores = jax.nn.sigmoid(logits)
    keys = (scores + bias).reshape(len(x), GATE["groups"], -1)
    best = jax.lax.top_k(jax.lax.top_k(keys, 2)[0].sum(-1), GATE["topk_groups"])[1]
    kept = jax.nn.one_hot(best, GATE["groups"]).sum(1) > 0
    ids = jax.lax.top_k(jnp.where(kept[..., None], keys, -jnp.inf).reshape(scores.shape), ACTIVE)[1]
    chosen = jnp.take_along_axis(scores, ids, 1)
    weights = (jax.nn.one_hot(ids, EXPERTS) * (chosen / chosen.sum(1, keepdims=True))[..., None]).sum(1)
    gate, up = (jnp.einsum("td,edh->teh", x, parameters[name]) for name in ("gate", "up"))
    return jnp.einsum("te,teh,ehd->td", weights, jax.nn.silu(gate) * up, parameters["down"])


def loss(experts, parameters, bias, x, digits):
    logits = x @ parameters["router"]
    y = x + experts({name: parameters[name] for name in EXPERT_PARAMETERS}, x, logits, bias)
    _, ids = jaxgpuops.topk_softmax(logits, ACTIVE, bias=bias, **GATE)
    losses = jaxgpuops.moe_losses(logits, ids, score="sigmoid")
    value = jaxgpuops.softmax_cross_entropy(y @ parameters["head"], digits, reduction="mean")
    return value + 1e-3 * losses.load_balance + 1e-4 * losses.z, (value, jaxgpuops.bincount(ids.ravel(), EXPERTS))


def step(experts):
    @jax.jit
    def updated(parameters, bias, x, digits):
        (_, (value, load)), gradients = jax.value_and_grad(functools.partial(loss, experts), has_aux=True)(
            parameters, bias, x, digits
        )
        parameters = jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)
        return value, load, gradients, parameters, bias + 0.005 * jnp.sign(load.mean() - load)

    return updated


def train(updated, steps, parameters, x, digits):
    bias, values = jnp.zeros(EXPERTS), []
    for _ in range(steps):
        value, load, _, parameters, bias = updated(parameters, bias, x, digits)
        values.append(float(value))
    return values, load, parameters, bias


def main():
    images, classes = load_digits(return_X_y=True)
    x, digits = (images[:1024] / 8 - 1).astype(np.float32), classes[:1024].astype(np.int32)
    random = np.random.default_rng(0)
    shapes = {
        "router": (WIDTH, EXPERTS),
        "gate": (EXPERTS, WIDTH, HIDDEN),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
        "head": (WIDTH, 10),
    }
    parameters = {
        name: jnp.asarray(random.standard_normal(shape) / np.sqrt(shape[-2]) / 2, jnp.float32)
        for name, shape in shapes.items()
    }

    devices = jax.devices()[: min(8, 1 << (len(jax.devices()).bit_length() - 1))]
    mesh = Mesh(np.array(devices), ("devices",))
    split, everywhere = P("devices"), P()
    specs = dict.fromkeys(EXPERT_PARAMETERS, split), split, split, everywhere
    on_mesh = jax.shard_map(experts_of_all_devices, mesh=mesh, in_specs=specs, out_specs=split)
    ours, dense, together = step(experts_of_one_device), step(experts_of_every_token), step(on_mesh)
    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    parameters_on_mesh = {
        name: place(p, split if name in EXPERT_PARAMETERS else everywhere) for name, p in parameters.items()
    }
    x_on_mesh, digits_on_mesh = place(x, split), place(digits, split)

    first = {
        "one device": ours(parameters, jnp.zeros(EXPERTS), x, digits),
        f"{mesh.size} devices": together(parameters_on_mesh, jnp.zeros(EXPERTS), x_on_mesh, digits_on_mesh),
    }
    value, load, gradients, *_ = dense(parameters, jnp.zeros(EXPERTS), x, digits)
    for found in first.values():
        np.testing.assert_allclose(found[0], value, rtol=1e-5)
        np.testing.assert_array_equal(found[1], load)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(found[2][name], gradient, atol=1e-5 * float(jnp.abs(gradient).max()))
    print(f"loss and gradients of {' and of '.join(first)} are those of the dense layer")

    values, load, trained, bias = train(ours, STEPS, parameters, x, digits)
    on_all, *_ = train(together, STEPS_ON_MESH, parameters_on_mesh, x_on_mesh, digits_on_mesh)
    print(f"losses on one device:    {' '.join(f'{value:.3f}' for value in values[::12])}")
    print(f"losses on {mesh.size} devices:     {' '.join(f'{value:.3f}' for value in on_all[::12])}")
    np.testing.assert_allclose(on_all[:10], values[:10], rtol=1e-3)  # later, rounding may have chosen other experts
    print(f"samples of each expert: {load.tolist()}")
    others, labels = (images[1024:] / 8 - 1).astype(np.float32), classes[1024:]
    logits = others @ trained["router"]
    y = (others + experts_of_one_device(trained, others, logits, bias)) @ trained["head"]
    right = float((y.argmax(1) == labels).mean())
    print(f"{right:.1%} of {len(labels)} other digits are classified right")
    assert values[-1] < values[0] / 4 and on_all[-1] < on_all[0] / 3 and right > 0.85
    assert load.max() < 3 * load.mean()


if __name__ == "__main__":
    main()
