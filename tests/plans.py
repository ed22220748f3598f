"""What the tests of plans share: see test_plan.py."""

import jaxgpuops

plan_topk = jaxgpuops._native.modules["cpu"].plan_topk
plan_argmax = jaxgpuops._native.modules["cpu"].plan_argmax
plan_scan = jaxgpuops._native.modules["cpu"].plan_scan

# KB of shared memory that a block may have, from the table of compute capabilities in the CUDA programming guide.
SHARED_LIMIT = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
CAPABILITIES = tuple(SHARED_LIMIT)

OUTER = (1, 3, 100, 600, 65536)
LENGTHS = (2, 33, 256, 1000, 4096, 16385, 50_000, 128256, 1 << 20, (1 << 31) - 1)
KS = (1, 2, 32, 65, 2048, 2049, 100_000)  # of top-k
BITS = (8, 16, 32, 64)

SCANS = ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "linear_scan", "linear_scan_vjp"]
SCANS += ["cumprod_jvp", "cummax_jvp", "cummin_jvp", "cumlogsumexp_jvp"]
