"""Derivatives of cumulative operations and linear recurrences."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scan_reference
from test_scan import INF, NAMES, NAN, values

import jaxgpuops
from jaxgpuops.lax import scan_primitives

# cumsum, cumprod and linear_scan are linear in each single element: on small integers the difference quotient is the
# derivative, exactly, and so are mixed second ones.


def difference(f, x, i):
    """df/dx_i of a function that is linear in x_i."""
    up, down = x.copy(), x.copy()
    up.flat[i], down.flat[i] = 1, 0
    return f(up) - f(down)


def exact_jacobian(f, x):
    """The exact Jacobian of an array function in NumPy, of shape (*result, *x.shape)."""
    columns = [difference(f, x, i) for i in range(x.size)]
    return np.stack(columns, -1).reshape(*columns[0].shape, *x.shape)


def jacobians(public, lax_tier, x):
    """Jacobians in reverse mode by both tiers, in forward mode, and by linearize."""
    yield jax.jacrev(public)(x)
    yield jax.jacrev(lax_tier)(x)
    yield jax.jacfwd(lax_tier)(x)
    push = jax.linearize(lax_tier, x)[1]
    basis = np.eye(x.size, dtype=x.dtype).reshape(x.size, *x.shape)
    out = np.stack([push(t) for t in basis], -1)
    yield out.reshape(*out.shape[:-1], *x.shape)


FLAGS = [
    {"reverse": reverse, "exclusive": exclusive, "starts": starts}
    for reverse in (False, True)
    for exclusive in (False, True)
    for starts in (None, np.array([False, False, True, False, False, True, False]))
]


def tiers(name, flags):
    options = {"reverse": flags["reverse"], "exclusive": flags["exclusive"], "segment_starts": flags["starts"]}
    return functools.partial(getattr(jaxgpuops, name), axis=0, **options), functools.partial(
        getattr(jaxgpuops.lax, name), axis=0, **options
    )


@pytest.mark.parametrize("zeros", range(4), ids="zeros={}".format)
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_jacobian_is_exact(name, zeros):
    x = np.array([2.0, -1.0, 3.0, 1.0, -2.0, 2.0, 1.0])
    x[np.random.default_rng(zeros).permutation(7)[:zeros]] = 0
    with jax.enable_x64(True):
        for flags in FLAGS:
            expected = exact_jacobian(lambda x: scan_reference.cumulative(name, x, 0, **flags), x)
            for jacobian in jacobians(*tiers(name, flags), x):
                np.testing.assert_array_equal(jacobian, expected.astype(float), err_msg=str(flags))


@pytest.mark.parametrize("zeros", range(4), ids="zeros={}".format)
def test_second_derivatives_of_cumprod_are_exact(zeros):
    x = np.array([2.0, -1.0, 3.0, 1.0, -2.0])
    x[np.random.default_rng(zeros).permutation(5)[:zeros]] = 0
    weights = np.array([1.0, 2.0, -1.0, 3.0, 1.0])
    with jax.enable_x64(True):
        for reverse, exclusive in itertools.product((False, True), repeat=2):
            flags = {"reverse": reverse, "exclusive": exclusive, "starts": None}
            total = lambda x: (weights * scan_reference.cumulative("cumprod", x, 0, **flags)).sum()
            expected = exact_jacobian(lambda x: exact_jacobian(total, x), x)
            np.fill_diagonal(expected, 0)  # no element occurs twice in a product
            public, lax_tier = ((lambda x, fn=fn: (weights * fn(x)).sum()) for fn in tiers("cumprod", flags))
            for hessian in (
                jax.hessian(public),
                jax.jacrev(jax.grad(public)),
                jax.jacfwd(jax.jacfwd(lax_tier)),
                jax.jacrev(jax.jacfwd(lax_tier)),
                jax.jacrev(jax.grad(lax_tier)),
            ):
                np.testing.assert_array_equal(jax.jit(hessian)(x), expected.astype(float), err_msg=str(flags))


def test_third_derivatives_of_cumprod():
    x = np.array([2.0, 0.0, 3.0, 0.0])
    with jax.enable_x64(True):
        third = jax.jacfwd(jax.hessian(lambda x: jaxgpuops.cumprod(x)[-1]))(x)
        expected = np.zeros((4, 4, 4))
        for i, j, k in itertools.permutations(range(4), 3):
            expected[i, j, k] = np.prod(np.delete(x, [i, j, k]))
        np.testing.assert_array_equal(third, expected)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_gradient_of_extremes_goes_to_the_last_of_equal_elements(name):
    x = np.array([1.0, 2.0, 2.0, -1.0, 2.0, 3.0, 0.0])
    with jax.enable_x64(True):
        for flags in FLAGS:
            x = -x if name == "cummin" else x
            expected = np.zeros((7, 7))
            source = [None] * 7
            now = None
            for k in scan_reference.positions(7, flags["reverse"]):
                if scan_reference.begins(flags["starts"], k, flags["reverse"]):
                    now = None
                takes = now is None or (x[k] >= x[now] if name == "cummax" else x[k] <= x[now])
                before, now = now, k if takes else now
                source[k] = before if flags["exclusive"] else now
            for k, j in enumerate(source):
                if j is not None:
                    expected[k, j] = 1
            for jacobian in jacobians(*tiers(name, flags), x):
                np.testing.assert_array_equal(jacobian, expected, err_msg=str(flags))


def test_gradient_of_extremes_with_nans():
    x = np.array([1.0, NAN, 3.0, NAN, 2.0], np.float32)
    gradient = jax.grad(lambda x: (jaxgpuops.cummax(x) * jnp.array([1.0, 2.0, 3.0, 4.0, 5.0])).sum())(x)
    assert gradient.tolist() == [1.0, 5.0, 0.0, 9.0, 0.0]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: f"{f['reverse']}-{f['exclusive']}-{f['starts'] is not None}")
def test_derivatives_of_cumlogsumexp(flags):
    x = np.array([0.5, -1.0, 30.0, -INF, 2.0, 1.0, -3.0])
    finite = np.flatnonzero(np.isfinite(x))
    with jax.enable_x64(True):
        f = lambda x: scan_reference.cumulative("cumlogsumexp", x, 0, **flags)
        y = f(x)
        seen = np.isfinite(y)
        # dy_k / dx_j = e^(x_j - y_k) for every j that is summed at k.
        expected = np.zeros((7, 7))
        for j in finite:
            changed = np.copy(x)
            changed[j] += 1
            summed = seen & (f(changed) != y)
            expected[summed, j] = np.exp(x[j] - y[summed])
        public, lax_tier = tiers("cumlogsumexp", flags)
        for jacobian in jacobians(public, lax_tier, x):
            np.testing.assert_allclose(np.asarray(jacobian)[seen], expected[seen], rtol=1e-12, atol=1e-15)
        # Second derivatives, by central differences of the first.
        weights = np.where(seen, np.arange(1.0, 8.0), 0)
        total = lambda x, fn: jnp.where(seen, fn(x) * weights, 0).sum()
        gradient = jax.jit(jax.grad(functools.partial(total, fn=public)))
        numeric = np.zeros((7, 7))
        for j in finite:
            step = 1e-5 * np.eye(7)[j]
            numeric[:, j] = (gradient(x + step) - gradient(x - step)) / 2e-5
        for hessian in (
            jax.hessian(functools.partial(total, fn=public)),
            jax.jacrev(jax.grad(functools.partial(total, fn=public))),
            jax.jacfwd(jax.jacfwd(functools.partial(total, fn=lax_tier))),
        ):
            np.testing.assert_allclose(jax.jit(hessian)(x), numeric, atol=1e-8)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", scan_primitives.TANGENT)
def test_derivatives_that_are_left_to_xla_on_a_gpu(name, length):
    kernel = scan_primitives.TANGENT[name]
    rng = np.random.default_rng(length)
    x = rng.standard_normal((50, length)).astype(np.float32)
    x[0], x[1, 0], x[2] = 0, -INF, 1
    t, x = jnp.asarray(x[::-1]), jnp.asarray(x)
    starts = jnp.asarray(rng.random((50, length)) < 0.3)
    for reverse, exclusive, transpose in itertools.product([False, True], repeat=3):
        for rest in ((), (starts,)):
            flags = {"axis": 1, "reverse": reverse, "exclusive": exclusive}
            [y] = scan_primitives.CUMULATIVE[name].fallback(x, *rest, **flags)
            for remade, given in zip(
                kernel.left(t, x, jnp.full_like(y, NAN), *rest, **flags, transpose=transpose),
                kernel.fallback(t, x, y, *rest, **flags, transpose=transpose),
                strict=True,
            ):
                np.testing.assert_allclose(remade, given, rtol=1e-5, atol=1e-6)


def test_short_derivatives_of_cumlogsumexp_of_any_numbers():
    """The formula for short axes gives infinities and NaNs the weights that the kernel for longer axes gives them, and
    large equal numbers have equal weights."""
    kernel = scan_primitives.TANGENT["cumlogsumexp"]
    numbers = np.array([0, 1, -3, 50, -80, INF, -INF, NAN], np.float32)
    x = np.stack(np.meshgrid(numbers, numbers, numbers), -1).reshape(-1, 3)
    t = jnp.asarray(np.random.default_rng(0).standard_normal(x.shape, np.float32))
    for reverse, exclusive, transpose in itertools.product([False, True], repeat=3):
        flags = {"axis": 1, "reverse": reverse, "exclusive": exclusive}
        [y] = scan_primitives.CUMULATIVE["cumlogsumexp"].fallback(jnp.asarray(x), **flags)
        [remade] = kernel.left(t, jnp.asarray(x), y, **flags, transpose=transpose)
        [given] = kernel.fallback(t, jnp.asarray(x), y, **flags, transpose=transpose)
        np.testing.assert_allclose(remade, given, rtol=1e-5, atol=1e-5)  # y is near 50
    flags = {"axis": 0, "reverse": False, "exclusive": False, "transpose": True}
    large, ones = jnp.full(2, 1e30, jnp.float32), jnp.ones(2, jnp.float32)
    assert kernel.left(ones, large, large, **flags)[0].tolist() == [1.5, 0.5]


def test_gradient_of_cumlogsumexp_is_stable():
    x = np.array([-INF, 1000.0, -1000.0, 1000.0, -INF, 1e30], np.float32)
    gradient = jax.grad(lambda x: jaxgpuops.cumlogsumexp(x)[1:].sum())(x)
    # e^(x - y), where y = 1000 + log 2 is rounded.
    np.testing.assert_allclose(gradient, [0, 1 + 1 + 0.5 + 0.5, 0, 0.5 + 0.5, 0, 1], rtol=1000 * 2.0**-23)
    nothing = np.full(3, -INF, np.float32)
    assert jax.grad(lambda x: jaxgpuops.cumlogsumexp(x).sum())(nothing).tolist() == [0.0] * 3


@pytest.mark.parametrize("tier", [jaxgpuops, jaxgpuops.lax], ids=["public", "lax"])
@pytest.mark.parametrize("mean", [0.0, -np.log(2.0**22)], ids=["large", "near 0"])
def test_gradient_of_cumlogsumexp_along_a_long_axis(mean, tier):
    """Towards the end y changes from one element to the next by less than it is rounded, and it is rounded differently
    where it is near 0. Errors of 2^22 positions must not add up, though each is in the gradient of all before it."""
    n = 1 << 22
    x = (mean + 0.01 * np.random.default_rng(0).standard_normal(n)).astype(np.float32)
    gradient = np.asarray(jax.jit(jax.grad(lambda x: tier.cumlogsumexp(x)[-1]))(x), np.float64)
    error = n**0.5 * 2.0**-23  # as of the sum of so many independent roundings
    assert abs(gradient.sum() - 1) < error
    exponentials = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(gradient, exponentials / exponentials.sum(), rtol=error)


A_SHAPES = [(2, 5, 3), (1, 5, 1), (3,), (5, 1), (2, 1, 3), ()]


@pytest.mark.parametrize("a_shape", A_SHAPES, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_derivatives_of_recurrences_are_exact(a_shape, reverse):
    rng = np.random.default_rng(0)
    shape, axis = (2, 5, 3), 1
    args = (
        rng.integers(-2, 3, a_shape).astype(float),
        rng.integers(-2, 3, shape).astype(float),
        np.array([1.0, 0.0, 2.0]),
    )
    starts = np.array([False, False, True, False, True])[:, None]
    weights = rng.integers(-2, 3, shape)
    with jax.enable_x64(True):
        for segments in (None, starts):
            options = {"axis": axis, "reverse": reverse}
            h = lambda *args: scan_reference.linear(*args, **options, starts=segments)
            public, lax_tier = (
                functools.partial(fn, **options, segment_starts=segments)
                for fn in (jaxgpuops.linear_scan, jaxgpuops.lax.linear_scan)
            )
            out, pull = jax.vjp(public, *args)
            np.testing.assert_array_equal(out, h(*args).astype(float))
            tier_pull = jax.vjp(lax_tier, *args)[1]
            # A scan is linear in each element of b and h0, and in each element of a that is not shared along the axis.
            for i, (ct, tier_ct) in enumerate(zip(pull(weights * 1.0), tier_pull(weights * 1.0), strict=True)):
                np.testing.assert_array_equal(ct, tier_ct)
                if i == 0 and a_shape and (len(a_shape) < 2 or a_shape[-2] == 1) or a_shape == ():
                    continue
                of_one = lambda x, i=i: (weights * h(*args[:i], x, *args[i + 1 :])).sum()
                np.testing.assert_array_equal(ct, exact_jacobian(of_one, args[i]).astype(float))
            # Elements of a that steps share: the sum over the steps.
            full = np.broadcast_to(args[0], shape).copy()
            by_step = jax.vjp(public, full, *args[1:])[1](weights * 1.0)[0]
            axes = tuple(d for d, n in enumerate((1,) * (3 - len(a_shape)) + a_shape) if n != shape[d])
            shared = np.asarray(by_step).sum(axes, keepdims=True).reshape(a_shape)
            np.testing.assert_array_equal(pull(weights * 1.0)[0], shared)
            # Forward mode: the pairing of tangents and cotangents.
            tangents = tuple(rng.integers(-2, 3, np.shape(x)).astype(float) for x in args)
            push = (weights * jax.jvp(lax_tier, args, tangents)[1]).sum()
            assert push == sum((t * c).sum() for t, c in zip(tangents, tier_pull(weights * 1.0), strict=True))


LONG = [((3000,), 0), ((2, 700), 1), ((1025, 4), 0), ((2, 1030, 3), 1), ((1537, 40), 0), ((3, 2049), 0)]


@pytest.mark.parametrize("shape, axis", LONG, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_long_rows(shape, axis, reverse):
    """Lengths at which rows are divided into blocks and parts. Nothing is rounded, so results are compared with the
    sums themselves."""
    rng = np.random.default_rng(0)
    n, steps = shape[axis], slice(None, None, -1 if reverse else 1)
    along = lambda x: np.moveaxis(np.asarray(x), axis, 0)[steps]  # puts the steps in the order of the scan
    a, b, g = rng.integers(-1, 2, (3, *shape)).astype(np.float32)
    h0 = rng.integers(-2, 3, shape[:axis] + shape[axis + 1 :]).astype(np.float32)
    h, pull = jax.vjp(functools.partial(jaxgpuops.linear_scan, axis=axis, reverse=reverse), a, b, h0)
    da, db, dh0 = pull(jnp.asarray(g))
    before = np.concatenate([h0[None], along(h)[:-1]])
    np.testing.assert_array_equal(along(h), along(a) * before + along(b))
    after = np.concatenate([(along(a) * along(db))[1:], np.zeros_like(h0[None])])
    np.testing.assert_array_equal(along(db), along(g) + after)
    np.testing.assert_array_equal(along(da), along(db) * before)
    np.testing.assert_array_equal(dh0, along(a)[0] * along(db)[0])

    x = rng.permuted(np.broadcast_to(np.arange(n, dtype=np.float32), (*h0.shape, n)), axis=-1)
    x = np.moveaxis(x, -1, axis)
    y, pull = jax.vjp(functools.partial(jaxgpuops.cummax, axis=axis, reverse=reverse), x)
    takes = along(y) == along(x)
    # The sums from one position that takes the extreme to the next.
    totals = np.cumsum(along(g)[::-1], 0)[::-1] * takes
    later = np.concatenate([totals, np.zeros_like(h0[None])])
    for k in range(n - 1, -1, -1):
        later[k] = np.where(takes[k], later[k], later[k + 1])
    np.testing.assert_array_equal(along(pull(jnp.asarray(g))[0]), takes * (later[:-1] - later[1:]))

    signs = rng.choice(np.float32([-1, 1]), shape)
    y, pull = jax.vjp(functools.partial(jaxgpuops.cumprod, axis=axis, reverse=reverse), signs)
    expected = np.cumsum(along(g * y)[::-1], 0)[::-1] * along(signs)
    np.testing.assert_array_equal(along(pull(jnp.asarray(g))[0]), expected)

    with jax.enable_x64(True):  # weights e^(x_j - y_k) that sum to 1, of equal elements: 1 / (k + 1)
        gradient = jax.vjp(functools.partial(jaxgpuops.cumlogsumexp, axis=axis, reverse=reverse), np.zeros(shape))[1]
        shares = along(g).astype(float) / np.arange(1.0, n + 1).reshape(n, *(1 for _ in h0.shape))
        bound = 4 * n * 2.0**-53 * np.cumsum(abs(shares)[::-1], 0)[::-1]
        wrong = abs(along(gradient(jnp.asarray(g, float))[0]) - np.cumsum(shares[::-1], 0)[::-1]) > bound
        assert not wrong.any()


@pytest.mark.parametrize("a_shape", [(2, 3), (3,), (2, 1)], ids=str)
def test_second_derivatives_of_recurrences(a_shape):
    # Against the same recurrence, unrolled.
    rng = np.random.default_rng(0)
    a, b = rng.integers(-2, 3, a_shape).astype(float), rng.integers(-2, 3, (2, 3)).astype(float)
    h0 = np.array([1.0, 2.0])

    def unrolled(a, b, h0):
        a, states = jnp.broadcast_to(a, b.shape), []
        for k in range(3):
            h0 = a[:, k] * h0 + b[:, k]
            states.append(h0)
        return jnp.stack(states, 1)

    loss = lambda fn: lambda *args: (fn(*args) ** 2 * jnp.arange(1.0, 7.0).reshape(2, 3)).sum()
    with jax.enable_x64(True):
        every = (0, 1, 2)
        expected = jax.jit(jax.hessian(loss(unrolled), every))(a, b, h0)
        for fn in (
            jax.hessian(loss(jaxgpuops.linear_scan), every),
            jax.jacrev(jax.grad(loss(jaxgpuops.linear_scan), every), every),
            jax.hessian(loss(jaxgpuops.lax.linear_scan), every),
            jax.jacfwd(jax.jacfwd(loss(jaxgpuops.lax.linear_scan), every), every),
            jax.jacrev(jax.grad(loss(jaxgpuops.lax.linear_scan), every), every),
        ):
            jax.tree.map(np.testing.assert_array_equal, jax.jit(fn)(a, b, h0), expected)


@pytest.mark.parametrize("tier", [jaxgpuops, jaxgpuops.lax], ids=["public", "lax"])
def test_gradients_without_steps(tier):
    """Without steps the last state is the first one, and nothing else depends on it."""
    a, b, h0 = np.ones((0, 3), np.float32), np.zeros((0, 3), np.float32), np.arange(3, dtype=np.float32)
    for reverse, last in itertools.product((False, True), repeat=2):

        def loss(a, b, h0, reverse=reverse, last=last):
            h, *state = jax.tree.leaves(tier.linear_scan(a, b, h0, axis=0, reverse=reverse, return_last=last))
            return h.sum() + sum((s**2).sum() for s in state)

        da, db, dh0 = jax.grad(loss, argnums=(0, 1, 2))(a, b, h0)
        assert da.shape == db.shape == (0, 3)
        np.testing.assert_array_equal(dh0, 2 * h0 if last else np.zeros(3))


def test_gradients_in_narrow_and_complex_types():
    rng = np.random.default_rng(0)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x = values(rng, (3, 40), dtype, "cumprod")
        for name in NAMES:
            loss = lambda x, name=name: getattr(jaxgpuops, name)(x).astype(np.float32).sum()
            narrow, exact = jax.grad(loss)(x), jax.grad(loss)(x.astype(np.float32))
            assert narrow.dtype == dtype
            if name not in ("cummax", "cummin"):  # these have ties after rounding
                # x is exact and y, up to ~40, is rounded: factors e^(x - y) are off by 40 times its eps.
                eps = float(ml_dtypes.finfo(dtype).eps)
                np.testing.assert_allclose(narrow.astype(np.float32), exact, rtol=40 * eps, atol=40 * eps)
    z = (rng.integers(-2, 3, (2, 6)) + 1j * rng.integers(-2, 3, (2, 6))).astype(np.complex64)
    w = z[:, ::-1].copy()
    for ours, theirs in [
        (jaxgpuops.cumsum, lambda z: jax.lax.cumsum(z, 1)),
        (jaxgpuops.cumprod, lambda z: jax.lax.cumprod(z, 1)),
        (
            lambda z: jaxgpuops.linear_scan(z, w),
            lambda z: jax.lax.associative_scan(lambda s, t: (s[0] * t[0], t[0] * s[1] + t[1]), (z, w), axis=1)[1],
        ),
    ]:
        np.testing.assert_allclose(jax.vjp(ours, z)[1](w)[0], jax.vjp(theirs, z)[1](w)[0], rtol=1e-5)


def test_shared_factors_are_not_copied_by_vmap():
    # The gradient with respect to factors that a batch shares equals the sum over the batch.
    rng = np.random.default_rng(0)
    a, b = rng.integers(-2, 3, (5,)).astype(np.float32), rng.integers(-2, 3, (4, 5)).astype(np.float32)
    for fn in (jaxgpuops.linear_scan, jaxgpuops.lax.linear_scan):
        loss = lambda a, fn=fn: (jax.vmap(fn, (None, 0))(a, b) ** 2).sum()
        one_by_one = sum(jax.grad(lambda a, row=row: (fn(a, row) ** 2).sum())(a) for row in b)
        np.testing.assert_array_equal(jax.grad(loss)(a), one_by_one)


@pytest.mark.parametrize("batched", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_pullback_of_batched_tangents(batched):
    # Tangents have a batch dimension that a, b and h0 lack; the other way round, they share what the others have.
    rng = np.random.default_rng(0)
    integers = lambda *shape: rng.integers(-2, 3, shape).astype(np.float32)
    one, many = (integers(5, 3), integers(5, 3), integers(3)), (integers(4, 5, 3), integers(4, 5, 3), integers(4, 3))
    weights = integers(4, 5, 3)
    step = lambda h, ab: (ab[0] * h + ab[1],) * 2
    ours = lambda a, b, h0: jaxgpuops.lax.linear_scan(a, b, h0, axis=0)
    loop = lambda a, b, h0: jax.lax.scan(step, h0, (a, b))[1]
    axes = tuple(0 if i in batched else None for i in range(3))
    some = tuple(many[i] if i in batched else one[i] for i in range(3))

    def of_tangents(fn, tangents):
        push = lambda *tangents: jax.jvp(fn, one, tangents)[1]
        return (jax.vmap(push, axes)(*tangents) * weights).sum()

    def of_shared_tangents(fn, tangents):
        push = lambda *primals: jax.jvp(fn, primals, tangents)[1]
        return (jax.vmap(push, axes)(*some) * weights).sum()

    for total, tangents in ((of_tangents, some), (of_shared_tangents, one)):
        actual, expected = (jax.grad(functools.partial(total, fn))(tangents) for fn in (ours, loop))
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


# ---- Errors -----------------------------------------------------------------------------------------------------------


def test_forward_mode_is_for_the_primitive_tier():
    x = np.ones(3, np.float32)
    for fn in (*(getattr(jaxgpuops, name) for name in NAMES), functools.partial(jaxgpuops.linear_scan, 0.5)):
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(fn, (x,), (x,))


def test_integers_have_no_gradient():
    x = np.array([1, 2, 3])
    _, pull = jax.vjp(jaxgpuops.cumsum, x)
    assert pull(np.zeros(3, jax.dtypes.float0))[0].dtype == jax.dtypes.float0
    assert jax.jvp(jaxgpuops.lax.cumprod, (x,), (np.zeros(3, jax.dtypes.float0),))[1].dtype == jax.dtypes.float0
