# pyright: reportArgumentType=true, reportAttributeAccessIssue=true
"""Calls that pyright checks (.ci/run) as a user's editor would; they are not run. Where an error is expected and
pyright finds none, the check fails."""

from typing import assert_type

import jax
import jax.numpy as jnp

import jaxgpuops
from jaxgpuops import *  # noqa: F403  max, min and sum stay those of Python

x = jnp.ones((4, 8))
labels = jnp.zeros(4, int)

values, indices = jaxgpuops.topk(x, 3, axis=0, largest=False)
assert_type(values, jax.Array)
assert_type(jaxgpuops.topk(x, 3).indices, jax.Array)
assert_type(jaxgpuops.lax.top_k(x, 3), tuple[jax.Array, jax.Array])
assert_type(jaxgpuops.lax.argmax(x, 1, jnp.int32), jax.Array)
assert_type(jaxgpuops.cumsum(x, reverse=True, segment_starts=x > 1), jax.Array)

assert_type(jaxgpuops.linear_scan(0.9, x), jax.Array)
assert_type(jaxgpuops.linear_scan(0.9, x, return_last=True), tuple[jax.Array, jax.Array])
assert_type(jaxgpuops.lax.linear_scan(0.9, x, return_last=False), jax.Array)
jaxgpuops.linear_scan(0.9, x, return_last=True).sum()  # pyright: ignore[reportAttributeAccessIssue]

assert_type(jaxgpuops.softmax(x, axis=(0, 1), where=x > 0, scale=0.5), jax.Array)
assert_type(jaxgpuops.softmax_cross_entropy(x, labels, reduction="mean"), jax.Array)
jaxgpuops.softmax_cross_entropy(x, labels, reduction="max")  # pyright: ignore[reportArgumentType]
assert_type(jaxgpuops.topk_softmax(x, 2, score="sigmoid").weights, jax.Array)
assert_type(jaxgpuops.moe_route(x, 2, groups=2, topk_groups=1, scale=2.5)[2], jaxgpuops.MoEPlan)
assert_type(jaxgpuops.moe_route(x, 2, losses=True)[3], jaxgpuops.MoELosses)
assert_type(jaxgpuops.moe_plan(labels[:, None], 8, axis_name="x").exchange, jaxgpuops.MoEExchange)
assert_type(jaxgpuops.moe_losses(x, labels[:, None], score="sqrt_softplus").load_balance, jax.Array)
jaxgpuops.topk_softmax(x, 2, score="relu")  # pyright: ignore[reportArgumentType]

assert_type(jaxgpuops.searchsorted(x[0], x, "right"), jax.Array)
assert_type(jaxgpuops.quantile(x, [0.1, 0.9], axis=None, method="lower"), jax.Array)
assert_type(jaxgpuops.unique(x, size=3), jax.Array)
assert_type(jaxgpuops.unique(x, size=3, return_counts=True), tuple[jax.Array, ...])
jaxgpuops.quantile(x, 0.5, method="mean")  # pyright: ignore[reportArgumentType]

assert_type(jaxgpuops.sum(x, axis=None), jax.Array)
assert_type(jaxgpuops.lax.max(x, axis=[0, 1], keepdims=True), jax.Array)
assert_type(max(1, 2), int)
assert_type(cumsum(x), jax.Array)  # noqa: F405
jaxgpuops.lax.scan  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]

with jaxgpuops.install(["top_k"]) as installed:
    assert_type(installed.names, list[str])
assert_type(jaxgpuops.explain(jnp.sum, x, platform="cuda")[0].kernel, str | None)
jaxgpuops.explain(jnp.sum, x, platform="tpu")  # pyright: ignore[reportArgumentType]
