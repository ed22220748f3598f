"""The rows of a mixture of experts: route, plan, dispatch, combine and their gradients, and all that a layer moves in a
training step. They are compared with the idioms of JAX programs, with the fastest plain JAX that we found, with the
idioms of torch, and with kernels in Triton."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jaxgpuops
from benchmarks.runner import Case

GPU = [
    # (tokens, k, experts, hidden)
    (32, 8, 128, 7168),
    (128, 8, 128, 7168),
    (512, 8, 128, 7168),
    (4096, 8, 128, 7168),
    (8192, 2, 8, 4096),
    (16384, 6, 64, 2048),
]
CPU = [(32, 8, 128, 1024), (512, 8, 128, 1024), (2048, 2, 8, 1024)]

# Targets on an H200, in us of kernel time. They follow from known kernels, and from some that were written to see what
# is possible.
TARGETS = {
    "route": [None] * 6,
    "plan": [2.5, 3.6, 4.2, 7, 3.2, 10],
    "dispatch": [1.8, 4.4, 16.5, 132, 51, 122],
    "gradient of dispatch": [2.1, None, 16.5, 118, 48.5, 105],
    "combine": [2.0, None, 16.5, 118, 48.5, 105],
    "gradient of combine": [3.8, 9.0, 31.5, 240, 80.5, 212],
    "layer": [13, 27, 86, 620, 235, 555],
}


# ---- The idioms of JAX programs -----------------------------------------------------------------------------------------


def plain_plan(ids, experts):
    """Computes the order, its inverse, the counts and the offsets with two argsorts and a bincount."""
    order = jnp.argsort(ids.ravel())
    sizes = jnp.bincount(ids.ravel(), length=experts).astype(jnp.int32)
    return order, jnp.argsort(order).reshape(ids.shape), sizes, jnp.append(0, jnp.cumsum(sizes))


def plain_route(logits, k, groups, topk_groups, plan=plain_plan):
    """A gate of groups by their best logits, and its plan, as programs write them."""
    experts = logits.shape[1]
    grouped = logits.reshape(-1, groups, experts // groups)
    kept = jax.nn.one_hot(jax.lax.top_k(grouped.max(-1), topk_groups)[1], groups).sum(1) > 0
    ids = jax.lax.top_k(jnp.where(kept[..., None], grouped, -jnp.inf).reshape(logits.shape), k)[1]
    scores = jnp.take_along_axis(jax.nn.sigmoid(logits), ids, 1)
    return 2.5 * scores / scores.sum(1, keepdims=True), ids, *plan(ids, experts)


def our_route(logits, k, groups, topk_groups):
    options = {"score": "sigmoid", "groups": groups, "topk_groups": topk_groups, "scale": 2.5}
    weights, ids, plan = jaxgpuops.moe_route(logits, k, **options)
    return weights, ids, *plan[:4]


def plain_dispatch(x, order, k):
    return jnp.take(x, order // k, axis=0)


def plain_combine(y, inverse, weights):
    tokens, k = inverse.shape
    rows = jnp.take(y, inverse.ravel(), axis=0).reshape(tokens, k, -1)
    return jnp.einsum("tkd,tk->td", rows.astype(jnp.float32), weights).astype(y.dtype)


# ---- Rewritten: no second sort, and gradients that gather instead of scattering -----------------------------------------


def _gather(rows, indices):
    return rows.at[indices.ravel()].get(mode="promise_in_bounds")


def rewritten_plan(ids, experts):
    """Computes the rank of each assignment among those of its expert by a sum over one-hot vectors."""
    flat = ids.ravel()
    before = jnp.cumsum(jax.nn.one_hot(flat, experts, dtype=jnp.int32), axis=0)
    sizes = before[-1]
    offsets = jnp.append(0, jnp.cumsum(sizes))
    inverse = offsets[flat] + jnp.take_along_axis(before, flat[:, None], 1)[:, 0] - 1
    order = jnp.zeros_like(flat).at[inverse].set(jnp.arange(len(flat)), mode="promise_in_bounds", unique_indices=True)
    return order, inverse.reshape(ids.shape), sizes, offsets


def rewritten_dispatch_gradient(ct, inverse):
    rows = _gather(ct, inverse).reshape(*inverse.shape, -1)
    return rows.astype(jnp.float32).sum(1).astype(ct.dtype)


def rewritten_combine_gradient(y, weights, ct, order, inverse):
    k = inverse.shape[1]
    of_rows = _gather(ct, order // k).astype(jnp.float32) * _gather(weights.ravel(), order)[:, None]
    rows = _gather(y, inverse).reshape(*inverse.shape, -1)
    return of_rows.astype(y.dtype), (rows.astype(jnp.float32) * ct[:, None].astype(jnp.float32)).sum(-1)


@jax.custom_vjp
def rewritten_dispatch(x, order, inverse):
    return _gather(x, order // inverse.shape[1])


rewritten_dispatch.defvjp(
    lambda x, order, inverse: (rewritten_dispatch(x, order, inverse), inverse),
    lambda inverse, ct: (rewritten_dispatch_gradient(ct, inverse), None, None),
)


@jax.custom_vjp
def rewritten_combine(y, weights, order, inverse):
    return plain_combine(y, inverse, weights)


rewritten_combine.defvjp(
    lambda y, weights, *plan: (rewritten_combine(y, weights, *plan), (y, weights, plan)),
    lambda kept, ct: (*rewritten_combine_gradient(kept[0], kept[1], ct, *kept[2]), None, None),
)


# ---- Those of torch -------------------------------------------------------------------------------------------------


def _torch_plan(ids, experts):
    import torch

    order = ids.flatten().argsort(stable=True)
    sizes = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    sizes.scatter_add_(0, ids.flatten().long(), torch.ones_like(ids.flatten()))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=ids.device)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    return order.int(), inverse.int().reshape(ids.shape), sizes, offsets.int()


def _torch_combine(y, inverse, weights):
    rows = y[inverse.flatten().long()].unflatten(0, inverse.shape).float()
    return ((rows * weights[..., None]).sum(1).to(y.dtype),)


def _torch_combine_gradient(y, weights, ct, order, inverse):
    order = order.long()
    of_rows = (ct[order // inverse.shape[1]].float() * weights.flatten()[order][:, None]).to(y.dtype)
    rows = y[inverse.flatten().long()].unflatten(0, inverse.shape)
    return of_rows, (rows.float() * ct[:, None].float()).sum(-1)


def _triton_dispatch(x, order, k):
    from benchmarks.triton_moe import gather_rows

    return (gather_rows(x, order, k),)


def _triton_combine(y, inverse, weights=None):
    from benchmarks.triton_moe import sum_rows

    return (sum_rows(y, inverse, weights),)


def _triton_combine_gradient(y, weights, ct, inverse):
    from benchmarks.triton_moe import sum_rows_gradient

    return sum_rows_gradient(y, weights, ct, inverse)


# ---- Cases ----------------------------------------------------------------------------------------------------------


def _operands(tokens, k, experts, hidden, dtype, key):
    """Returns logits, tokens, weights, a cotangent of the tokens and one of the rows."""
    keys = jax.random.split(key, 5)
    normal = lambda i, shape: jax.random.normal(keys[i], shape).astype(dtype)
    return (
        jax.random.normal(keys[0], (tokens, experts)),
        normal(1, (tokens, hidden)),
        jax.random.uniform(keys[2], (tokens, k)),
        normal(3, (tokens, hidden)),
        normal(4, (tokens * k, hidden)),
    )


def _ids(logits, k):
    return jax.lax.top_k(logits, k)[1]


def cases_of(tokens, k, experts, hidden, dtype="bfloat16", targets=None):
    assignments, size = tokens * k, hidden * jnp.dtype(dtype).itemsize
    rows, all_tokens = assignments * size, tokens * size
    operands = functools.partial(_operands, tokens, k, experts, hidden, dtype)
    shape = jax.ShapeDtypeStruct((tokens, hidden), dtype)

    def planned(key):
        ids = _ids(operands(key)[0], k)
        return jaxgpuops.moe_plan(ids, experts)[:4]

    plan_of = lambda *plan: jaxgpuops.MoEPlan(*plan)
    case = functools.partial(_case, f"({tokens}, {k} of {experts}, {hidden}) {dtype}", targets or {})
    # Results of 16 bits may differ by a rounding, and gradients of tokens are added in another order.
    near = {"tolerance": 0.02}

    def our_dispatch_gradient(ct, *plan):  # this one does not read the zeros
        dispatch = lambda x: jaxgpuops.moe_dispatch(x, plan_of(*plan))
        return jax.vjp(dispatch, jnp.zeros(shape.shape, shape.dtype))[1](ct)

    def our_gradient(y, weights, ct, *plan):
        combine = lambda y, weights: jaxgpuops.moe_combine(y, plan_of(*plan), weights)
        return jax.vjp(combine, y, weights)[1](ct)

    def plain_gradient(y, weights, ct, *plan):
        return jax.vjp(lambda y, weights: plain_combine(y, plan[1], weights), y, weights)[1](ct)

    groups = math.gcd(experts, 8), max(1, math.gcd(experts, 8) // 2)  # half of the groups are chosen
    return [
        case(
            "route",
            inputs=lambda key: operands(key)[:1],
            functions={
                "jaxgpuops": lambda logits: our_route(logits, k, *groups),
                "jax": lambda logits: plain_route(logits, k, *groups),
                "rewritten": lambda logits: plain_route(logits, k, *groups, plan=rewritten_plan),
            },
            moved=4 * tokens * experts + 16 * assignments + 8 * experts,
            tolerance=1e-5,
        ),
        case(
            "plan",
            inputs=lambda key: (_ids(operands(key)[0], k),),
            functions={
                "jaxgpuops": lambda ids: tuple(jaxgpuops.moe_plan(ids, experts)[:4]),
                "jax": lambda ids: plain_plan(ids, experts),
                "rewritten": lambda ids: rewritten_plan(ids, experts),
                "torch": lambda ids: _torch_plan(ids, experts),
            },
            moved=12 * assignments + 8 * experts,
            hostile={
                "one expert": lambda ids: (jnp.broadcast_to(jnp.arange(k, dtype=ids.dtype), ids.shape),),
                "skewed": lambda ids: (ids**2 // experts,),
            },
        ),
        case(
            "dispatch",
            inputs=lambda key: (operands(key)[1], *planned(key)),
            functions={
                "jaxgpuops": lambda x, *plan: (jaxgpuops.moe_dispatch(x, plan_of(*plan)),),
                "jax": lambda x, order, *_: (plain_dispatch(x, order, k),),
                "torch": lambda x, order, *_: (x[order.long() // k],),
                "triton": lambda x, order, *_: _triton_dispatch(x, order, k),
            },
            moved=all_tokens + rows,
        ),
        case(
            "gradient of dispatch",
            inputs=lambda key: (operands(key)[4], *planned(key)),
            functions={
                "jaxgpuops": our_dispatch_gradient,
                "jax": lambda ct, order, *_: jax.linear_transpose(lambda x: plain_dispatch(x, order, k), shape)(ct),
                "rewritten": lambda ct, order, inverse, *_: (rewritten_dispatch_gradient(ct, inverse),),
                "torch": lambda ct, order, *_: (
                    ct.new_zeros(tokens, hidden).float().index_add_(0, order.long() // k, ct.float()).to(ct.dtype),
                ),
                "triton": lambda ct, order, inverse, *_: _triton_combine(ct, inverse),
            },
            moved=all_tokens + rows,
            **near,
        ),
        case(
            "combine",
            inputs=lambda key: (operands(key)[4], operands(key)[2], *planned(key)),
            functions={
                "jaxgpuops": lambda y, weights, *plan: (jaxgpuops.moe_combine(y, plan_of(*plan), weights),),
                "jax": lambda y, weights, _, inverse, *__: (plain_combine(y, inverse, weights),),
                "torch": lambda y, weights, _, inverse, *__: _torch_combine(y, inverse, weights),
                "triton": lambda y, weights, _, inverse, *__: _triton_combine(y, inverse, weights),
            },
            moved=all_tokens + rows,
            **near,
        ),
        case(
            "gradient of combine",
            inputs=lambda key: (operands(key)[4], operands(key)[2], operands(key)[3], *planned(key)),
            functions={
                "jaxgpuops": our_gradient,
                "jax": plain_gradient,
                "rewritten": lambda y, weights, ct, *plan: rewritten_combine_gradient(y, weights, ct, *plan[:2]),
                "torch": lambda y, weights, ct, *plan: _torch_combine_gradient(y, weights, ct, *plan[:2]),
                "triton": lambda y, weights, ct, *plan: _triton_combine_gradient(y, weights, ct, plan[1]),
            },
            moved=all_tokens + 2 * rows,
            **near,
        ),
        case(
            "layer",
            inputs=operands,
            functions={
                "jaxgpuops": functools.partial(_layer, _our_layer, k),
                "jax": functools.partial(_layer, _plain_layer, k),
                "rewritten": functools.partial(_layer, _rewritten_layer, k),
            },
            moved=4 * all_tokens + 5 * rows,  # dispatch and combine move them, and both gradients
            hostile={
                "one expert": lambda logits, *rest: (jnp.broadcast_to(-jnp.arange(1.0 * experts), logits.shape), *rest)
            },
            **near,
        ),
    ]


def _our_layer(k, logits, x, y):
    weights, _, plan = jaxgpuops.moe_route(logits, k)
    rows = jaxgpuops.moe_dispatch(x, plan)
    return jaxgpuops.moe_combine(_experts(rows, y), plan, weights), rows


def _plain_layer(k, logits, x, y):
    chosen, ids = jax.lax.top_k(logits, k)
    order, inverse, _, _ = plain_plan(ids, logits.shape[1])
    rows = plain_dispatch(x, order, k)
    return plain_combine(_experts(rows, y), inverse, jax.nn.softmax(chosen)), rows


def _rewritten_layer(k, logits, x, y):
    chosen, ids = jax.lax.top_k(logits, k)
    order, inverse, _, _ = rewritten_plan(ids, logits.shape[1])
    rows = rewritten_dispatch(x, order, inverse)
    return rewritten_combine(_experts(rows, y), jax.nn.softmax(chosen), order, inverse), rows


# This stands for the experts, without their arithmetic: their answers are y, and the cotangent of their rows is that of
# the answers.
@jax.custom_vjp
def _experts(rows, y):
    return y


_experts.defvjp(lambda rows, y: (y, None), lambda _, ct: (jax.lax.optimization_barrier(ct), None))


def _layer(layer, k, logits, x, weights, ct, y):
    """The forward and the backward pass of a layer, and its rows. As in a training step, the backward pass begins after
    the forward pass: XLA would let a gradient run before the result of combine, on which nothing here depends."""
    out, pull, rows = jax.vjp(lambda logits, x: layer(k, logits, x, y), logits, x, has_aux=True)
    out, ct = jax.lax.optimization_barrier((out, ct))
    return out, *pull(ct), rows


def _case(about, targets, name, *, inputs, functions, moved, **more):
    return Case(
        name=f"{name} {about}",
        inputs=inputs,
        functions=functions,
        bytes=moved,
        floor=("copy", moved),
        facts={"goal": targets.get(name)},
        **more,
    )


def cases(platform: str) -> list[Case]:
    points = GPU if platform == "gpu" else CPU
    targets = [{name: goals[i] for name, goals in TARGETS.items()} for i in range(len(GPU))]
    found = [
        case
        for i, point in enumerate(points)
        for case in cases_of(*point, targets=targets[i] if platform == "gpu" else None)
    ]
    return sorted(found, key=lambda case: list(TARGETS).index(case.name.partition(" (")[0]))
