"""What the tests of handlers that are called wrongly share (test_refusals.py, test_refusals_rows.py).

Python checks all arguments before a handler sees them. These tests go around it: a handler must answer a call that
makes no sense with an error that can be read, and must never abort or write out of bounds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpuops import _primitive

S = jax.ShapeDtypeStruct
F32, S32 = jnp.float32, jnp.int32
X = S((4, 8), F32)


def call(target, results, *operands, **attributes):
    """Runs a handler on zeros. Attributes are int64, float64 and bool, as everywhere."""
    if jax.default_backend() == "gpu" and _primitive.KERNELS[target].plan:
        axis = min(attributes["axis"], len(operands[0].shape) - 1)
        results = [*results, S((*operands[0].shape[:axis], 0), jnp.uint8)]  # the workspace
    numbers = {int: np.int64, float: np.float64}
    attributes = {key: numbers.get(type(value), bool)(value) for key, value in attributes.items()}
    run = jax.ffi.ffi_call(f"jaxgpuops.{target}", results)
    return jax.block_until_ready(run(*(jnp.zeros(x.shape, x.dtype) for x in operands), **attributes))


def refuses(target, message):
    """Expects the error of a handler; ``message`` is a regular expression for the beginning of its text."""
    return pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: jaxgpuops.{target}: {message}")
