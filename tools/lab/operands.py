"""Operands of the labs' calls: element types, and operands that broadcast, as the C interfaces take them."""

import ctypes

import numpy as np


class DType:
    """An element type of dtype.h: how NumPy stores it, and its values as float64, complex128 or integers."""

    def __init__(self, number, name, storage, tolerance=0.0):
        self.number, self.name, self.storage, self.tolerance = number, name, np.dtype(storage), tolerance
        self.integer = tolerance == 0.0
        self.complex = name.startswith("complex")
        self.table = None
        if name.startswith("float8"):
            exponent, mantissa, bias = (4, 3, 7) if "e4m3" in name else (5, 2, 15)
            byte = np.arange(256)
            e, m = byte >> mantissa & (1 << exponent) - 1, byte & (1 << mantissa) - 1
            value = np.where(e == 0, m * 2.0 ** (1 - bias - mantissa), (1 + m / 2**mantissa) * 2.0 ** (e - bias))
            if exponent == 5:
                value = np.where(e == 31, np.where(m == 0, np.inf, np.nan), value)
            else:
                value = np.where((e == 15) & (m == 7), np.nan, value)
            self.table = np.where(byte >> 7, -value, value)

    def decode(self, bits):
        if self.table is not None:
            return self.table[bits]
        if self.name == "bfloat16":
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if self.integer:
            return bits
        return bits.astype(np.complex128 if self.complex else np.float64)

    def encode(self, values):
        """The nearest elements to values, more or less."""
        with np.errstate(all="ignore"):
            if self.table is not None:
                order = np.argsort(self.table[:255][np.isfinite(self.table[:255])], kind="stable")
                finite = np.flatnonzero(np.isfinite(self.table[:255]))[order]
                at = np.searchsorted((self.table[finite][1:] + self.table[finite][:-1]) / 2, values)
                bits = finite[at].astype(np.uint8)
                for special in np.flatnonzero(~np.isfinite(self.table)):
                    same = np.isnan(values) if np.isnan(self.table[special]) else values == self.table[special]
                    bits = np.where(same, np.uint8(special), bits)
                return bits
            if self.name == "bfloat16":
                word = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
                rounded = (word + 0x7FFF + (word >> 16 & 1)) >> 16
                return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
            return np.asarray(values).astype(self.storage)


DTYPES = [
    *(DType(i, n, n) for i, n in enumerate(["bool", "int8", "int16", "int32", "int64"])),
    *(DType(5 + i, n, n) for i, n in enumerate(["uint8", "uint16", "uint32", "uint64"])),
    DType(9, "float8_e4m3fn", np.uint8, 0.07),
    DType(10, "float8_e5m2", np.uint8, 0.14),
    DType(11, "float16", np.float16, 1.1e-3),
    DType(12, "bfloat16", np.uint16, 8e-3),
    DType(13, "float32", np.float32, 1e-5),
    DType(14, "float64", np.float64, 1e-12),
    DType(15, "complex64", np.complex64, 1e-5),
    DType(16, "complex128", np.complex128, 1e-12),
]
DTYPE = {dtype.name: dtype for dtype in DTYPES}


def index_map(whole, part):
    """IndexMap: groups of neighbouring dimensions, innermost first; the strides count elements of all of `part`."""
    sizes, strides, stride = [], [], 1
    for big, small in reversed(list(zip(whole, part))):
        here = 0 if small == 1 and big != 1 else stride
        if big != 1:
            if sizes and ((here == 0 and strides[-1] == 0) or (here and here == strides[-1] * sizes[-1])):
                sizes[-1] *= big
            else:
                sizes.append(big)
                strides.append(here)
        stride *= small
    return sizes, strides, stride


def broadcast(shape, axis, part):
    inner_sizes, inner_strides, inner = index_map(shape[axis + 1 :], part[axis + 1 :])
    outer_sizes, outer_strides, _ = index_map(shape[:axis], part[:axis])
    outer_strides = [s * inner * part[axis] for s in outer_strides]

    def words(sizes, strides):
        return [len(sizes), *sizes, *[1] * (8 - len(sizes)), *strides, *[0] * (8 - len(strides))]

    axis_stride = inner if part[axis] > 1 or shape[axis] == 1 else 0
    return (ctypes.c_int64 * 35)(*words(outer_sizes, outer_strides), *words(inner_sizes, inner_strides), axis_stride)
