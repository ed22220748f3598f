// Maps the bits of an element to an unsigned key whose integer order is the order of the operation, and back.
//
// One formula serves every dtype, so that kernels are compiled for each key width and not for each dtype:
//     key = bits ^ (negative(bits) ? magnitude : 0) ^ flip
// where `negative` is the top bit. The map is a bijection, so that a key gives back the exact bits of its element.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define JAXGPUOPS_HD __host__ __device__ __forceinline__
#else
#define JAXGPUOPS_HD inline
#endif

namespace jaxgpuops {

enum class KeyKind { kUnsigned, kSigned, kFloat };  // bool is unsigned; all floats are sign and magnitude

struct KeyOrder {
  uint64_t magnitude = 0;
  uint64_t flip = 0;
};

// Returns the order in which larger keys come first. Floats follow the IEEE total order (+NaN first, +0 before -0, -NaN
// last), as in XLA's sort.
inline KeyOrder key_order(KeyKind kind, int bits, bool largest) {
  const uint64_t all = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  const uint64_t sign = uint64_t{1} << (bits - 1);
  KeyOrder order;
  order.magnitude = kind == KeyKind::kFloat ? all ^ sign : 0;
  order.flip = (kind == KeyKind::kUnsigned ? 0 : sign) ^ (largest ? 0 : all);
  return order;
}

template <class Key>
JAXGPUOPS_HD Key sign_mask(Key bits) {  // all ones if the top bit is set, else 0
  using Signed = std::make_signed_t<Key>;
  return static_cast<Key>(static_cast<Signed>(bits) >> (8 * sizeof(Key) - 1));
}

template <class Key>
JAXGPUOPS_HD Key encode(Key bits, KeyOrder order) {
  return static_cast<Key>(bits ^ (sign_mask(bits) & static_cast<Key>(order.magnitude)) ^ static_cast<Key>(order.flip));
}

template <class Key>
JAXGPUOPS_HD Key decode(Key key, KeyOrder order) {
  const Key bits = static_cast<Key>(key ^ static_cast<Key>(order.flip));
  return static_cast<Key>(bits ^ (sign_mask(bits) & static_cast<Key>(order.magnitude)));
}

// The order of argmax and argmin, which compare differently: NaN is larger than every number, and -0 equals +0. `sign`
// is the mask of the sign bit, and `nan_above` the largest magnitude that is not NaN: infinity, or the largest finite
// value of a format without infinity. For integers the defaults make neither rule apply.
struct ArgOrder {
  KeyOrder order;
  uint64_t sign = 0;
  uint64_t nan_above = ~uint64_t{0};
};

template <class Key>
JAXGPUOPS_HD Key encode_arg(Key bits, ArgOrder arg) {
  const Key magnitude = static_cast<Key>(bits & static_cast<Key>(~arg.sign));
  if (magnitude > static_cast<Key>(arg.nan_above)) return static_cast<Key>(~Key{0});
  return encode(magnitude == 0 ? magnitude : bits, arg.order);
}

}  // namespace jaxgpuops
