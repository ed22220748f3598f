"""The CPU handlers, and the plans of the CUDA kernels: what a call takes on a GPU, found without one.

``workspace_bytes`` below 0 asks for the best plan; else it is what the call has.
"""

from typing import Any

def ffi_api_version() -> tuple[int, int]: ...
def build_info() -> dict[str, Any]: ...
def targets() -> dict[str, Any]: ...
def plan_topk(
    outer: int,
    length: int,
    inner: int,
    k: int,
    key_bits: int,
    sorted: bool,
    compute_capability: int,
    workspace_bytes: int = -1,
) -> dict[str, Any]: ...
def plan_argmax(
    outer: int, length: int, inner: int, key_bits: int, compute_capability: int, workspace_bytes: int = -1
) -> dict[str, Any]: ...
def plan_topk_softmax(
    outer: int, length: int, inner: int, k: int, groups: int, biased: bool, sums_rows: bool
) -> dict[str, Any]: ...
def plan_scan(
    op: str,
    outer: int,
    length: int,
    inner: int,
    dtype: str,
    segmented: bool,
    groups: int,
    compute_capability: int,
    workspace_bytes: int = -1,
    exclusive: bool = False,
    transpose: bool = True,
    initial: bool = False,
    dense: bool = True,
    from_x: bool = False,
    a_axis_stride: int = 0,
    a_outer_stride: int = 0,
) -> dict[str, Any]: ...
def plan_softmax(
    op: str,
    outer: int,
    length: int,
    inner: int,
    dtype: str,
    factor: float,
    scaled: bool,
    biased: bool,
    masked: bool,
    compute_capability: int,
    workspace_bytes: int = -1,
    transpose: bool = True,
    of_logits: bool = False,
) -> dict[str, Any]: ...
def plan_reduce(
    op: str,
    outer: int,
    length: int,
    inner: int,
    dtype: str,
    masked: bool,
    compute_capability: int,
    workspace_bytes: int = -1,
) -> dict[str, Any]: ...
def plan_sort(
    outer: int,
    length: int,
    inner: int,
    key_bits: int,
    values: bool,
    indices: bool,
    compute_capability: int,
    kth: int = -1,
    carries: bool = False,
    workspace_bytes: int = -1,
) -> dict[str, Any]: ...
def plan_lexsort(
    outer: int, length: int, inner: int, compute_capability: int, workspace_bytes: int = -1
) -> dict[str, Any]: ...
def plan_sort_segments(
    outer: int,
    length: int,
    inner: int,
    offsets: int,
    key_bits: int,
    compute_capability: int,
    values: bool = True,
    indices: bool = True,
    shared: bool = True,
    workspace_bytes: int = -1,
) -> dict[str, Any]: ...
def plan_bincount(
    outer: int, length: int, inner: int, bins: int, dtype: str, compute_capability: int
) -> dict[str, Any]: ...
def plan_histogram(
    outer: int, length: int, inner: int, bins: int, dtype: str, compute_capability: int
) -> dict[str, Any]: ...
def plan_choose(
    outer: int, length: int, inner: int, size: int, starts: bool, compute_capability: int
) -> dict[str, Any]: ...
def plan_unique(
    outer: int,
    length: int,
    inner: int,
    size: int,
    bits: int,
    index: bool,
    inverse: bool,
    counted: bool,
    compute_capability: int,
) -> dict[str, Any]: ...
def plan_select(
    outer: int, length: int, inner: int, count: int, key_bits: int, compute_capability: int
) -> dict[str, Any]: ...
def plan_segments(
    op: str,
    outer: int,
    length: int,
    inner: int,
    segments: int,
    dtype: str,
    sorted: bool,
    byte_ids: bool,
    compute_capability: int,
) -> dict[str, Any]: ...
def plan_segment_softmax(
    outer: int, length: int, inner: int, segments: int, dtype: str, sorted: bool, compute_capability: int
) -> dict[str, Any]: ...
def plan_moe(
    outer: int,
    assignments: int,
    experts: int,
    capacity: int,
    align: int,
    compute_capability: int,
    workspace_bytes: int = -1,
) -> dict[str, Any]: ...
