// Everything the handlers need from XLA's FFI. No other file includes xla/ffi, and no .cu file includes this one: the
// headers cost nvcc seconds a file.
//
// A handler is a function of typed buffers and attributes whose body runs inside handle(): it throws a Failure, or
// whatever the standard library throws, and XLA sees an FFI error that starts with the name of the target.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/ordered_key.h"
#include "common/cpu/parallel.h"
#include "common/rows.h"
#include "common/sort_order.h"

namespace jaxgpuops {

namespace ffi = ::xla::ffi;

// One entry of a module's table: what Python registers under `name` on the platform of the module.
struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
};

// ---- Errors ---------------------------------------------------------------------------------------------------------

struct Failure : std::runtime_error {
  Failure(ffi::ErrorCode code, const std::string& text) : std::runtime_error(text), code(code) {}
  ffi::ErrorCode code;
};

template <class... Parts>
Failure failure(ffi::ErrorCode code, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return Failure(code, text.str());
}

template <class... Parts>
Failure invalid(const Parts&... parts) {
  return failure(ffi::ErrorCode::kInvalidArgument, parts...);
}

// Runs the body of the handler of `target`.
template <class Body>
ffi::Error handle(const char* target, Body body) {
  const auto error = [target](ffi::ErrorCode code, const char* text) {
    return ffi::Error(code, std::string(target) + ": " + text);
  };
  try {
    body();
    return ffi::Error::Success();
  } catch (const Failure& e) {
    return error(e.code, e.what());
  } catch (const std::bad_alloc&) {
    return error(ffi::ErrorCode::kResourceExhausted, "out of host memory");
  } catch (const std::exception& e) {
    return error(ffi::ErrorCode::kInternal, e.what());
  }
}

// ---- Element types --------------------------------------------------------------------------------------------------

// An element type that has an order.
struct Element {
  const char* name;
  KeyKind kind;
  int bits;
  uint64_t nan_above = ~uint64_t{0};  // see ArgOrder
};

inline std::optional<Element> ordered_element(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::PRED: return Element{"bool", KeyKind::kUnsigned, 8};
    case ffi::DataType::U8: return Element{"uint8", KeyKind::kUnsigned, 8};
    case ffi::DataType::U16: return Element{"uint16", KeyKind::kUnsigned, 16};
    case ffi::DataType::U32: return Element{"uint32", KeyKind::kUnsigned, 32};
    case ffi::DataType::U64: return Element{"uint64", KeyKind::kUnsigned, 64};
    case ffi::DataType::S8: return Element{"int8", KeyKind::kSigned, 8};
    case ffi::DataType::S16: return Element{"int16", KeyKind::kSigned, 16};
    case ffi::DataType::S32: return Element{"int32", KeyKind::kSigned, 32};
    case ffi::DataType::S64: return Element{"int64", KeyKind::kSigned, 64};
    case ffi::DataType::F8E4M3FN: return Element{"float8_e4m3fn", KeyKind::kFloat, 8, 0x7e};
    case ffi::DataType::F8E5M2: return Element{"float8_e5m2", KeyKind::kFloat, 8, 0x7c};
    case ffi::DataType::F16: return Element{"float16", KeyKind::kFloat, 16, 0x7c00};
    case ffi::DataType::BF16: return Element{"bfloat16", KeyKind::kFloat, 16, 0x7f80};
    case ffi::DataType::F32: return Element{"float32", KeyKind::kFloat, 32, 0x7f800000};
    case ffi::DataType::F64: return Element{"float64", KeyKind::kFloat, 64, 0x7ff0000000000000};
    default: return std::nullopt;
  }
}

inline XLA_FFI_DataType printable(ffi::DataType dtype) { return static_cast<XLA_FFI_DataType>(dtype); }

inline Element require_ordered(const char* name, ffi::AnyBuffer buffer) {
  if (const auto element = ordered_element(buffer.element_type())) return *element;
  throw invalid(name, " has an element type without an order: ", printable(buffer.element_type()));
}

// The order of argmax (or, if not `largest`, of argmin) of such elements.
inline ArgOrder arg_order_of(const Element& element, bool largest) {
  ArgOrder order;
  order.order = key_order(element.kind, element.bits, largest);
  order.sign = element.kind == KeyKind::kFloat ? uint64_t{1} << (element.bits - 1) : 0;
  order.nan_above = element.nan_above;
  return order;
}

// The order of a sort of such elements.
inline SortOrder sort_order_of(const Element& element, bool descending) {
  SortOrder order;
  order.ascending = arg_order_of(element, true);  // larger elements have larger keys
  order.invert = descending ? ~uint64_t{0} : 0;
  return order;
}

// Width in bytes of an element that is moved and not looked at: 1, 2, 4 or 8.
inline int require_movable(const char* name, ffi::AnyBuffer buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F8E3M4:
    case ffi::DataType::F8E4M3:
    case ffi::DataType::F8E4M3B11FNUZ:
    case ffi::DataType::F8E5M2FNUZ:
    case ffi::DataType::F8E4M3FNUZ:
    case ffi::DataType::F8E8M0FNU: return 1;
    case ffi::DataType::C64: return 8;
    default: break;
  }
  if (const auto element = ordered_element(buffer.element_type())) return element->bits / 8;
  throw invalid(name, " has elements that are not 1, 2, 4 or 8 bytes wide: ", printable(buffer.element_type()));
}

// Returns the dtype of a buffer whose elements are computed with.
inline DType require_dtype(const char* name, ffi::AnyBuffer buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::PRED: return DType::kBool;
    case ffi::DataType::S8: return DType::kInt8;
    case ffi::DataType::S16: return DType::kInt16;
    case ffi::DataType::S32: return DType::kInt32;
    case ffi::DataType::S64: return DType::kInt64;
    case ffi::DataType::U8: return DType::kUint8;
    case ffi::DataType::U16: return DType::kUint16;
    case ffi::DataType::U32: return DType::kUint32;
    case ffi::DataType::U64: return DType::kUint64;
    case ffi::DataType::F8E4M3FN: return DType::kFloat8E4M3FN;
    case ffi::DataType::F8E5M2: return DType::kFloat8E5M2;
    case ffi::DataType::F16: return DType::kFloat16;
    case ffi::DataType::BF16: return DType::kBFloat16;
    case ffi::DataType::F32: return DType::kFloat32;
    case ffi::DataType::F64: return DType::kFloat64;
    case ffi::DataType::C64: return DType::kComplex64;
    case ffi::DataType::C128: return DType::kComplex128;
    default: throw invalid(name, " has an unsupported element type: ", printable(buffer.element_type()));
  }
}

// Calls body with a zero of the unsigned type that is `bytes` wide.
template <class Body>
void with_width(int bytes, const Body& body) {
  switch (bytes) {
    case 1: return body(uint8_t{});
    case 2: return body(uint16_t{});
    case 4: return body(uint32_t{});
    case 8: return body(uint64_t{});
  }
}

// ---- Shapes ---------------------------------------------------------------------------------------------------------

using Dims = std::vector<int64_t>;

inline Dims dims_of(ffi::AnyBuffer buffer) {
  const auto dims = buffer.dimensions();
  return Dims(dims.begin(), dims.end());
}

inline std::string text_of(const Dims& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + (dims.size() == 1 ? ",)" : ")");
}

inline void require_shape(const char* name, ffi::AnyBuffer buffer, const Dims& expected) {
  const Dims dims = dims_of(buffer);
  if (dims != expected) throw invalid(name, " has shape ", text_of(dims), ", expected ", text_of(expected));
}

inline void require_type(const char* name, ffi::AnyBuffer buffer, ffi::DataType expected) {
  if (buffer.element_type() != expected)
    throw invalid(name, " has element type ", printable(buffer.element_type()), ", expected ", printable(expected));
}

// Checks that a buffer has as many dimensions as another one.
inline void require_rank_of(const char* name, ffi::AnyBuffer buffer, ffi::AnyBuffer other) {
  const size_t rank = buffer.dimensions().size(), expected = other.dimensions().size();
  if (rank != expected) throw invalid(name, " has rank ", rank, ", expected ", expected);
}

// `dims` with the entry at `axis` replaced, or removed.
inline Dims with_axis(Dims dims, int64_t axis, int64_t length) {
  dims[axis] = length;
  return dims;
}

inline Dims without_axis(Dims dims, int64_t axis) {
  dims.erase(dims.begin() + axis);
  return dims;
}

// The buffer as (outer, length, inner).
inline Rows rows_of(const char* name, ffi::AnyBuffer buffer, int64_t axis) {
  const auto dims = buffer.dimensions();
  const auto rank = static_cast<int64_t>(dims.size());
  if (axis < 0 || axis >= rank) throw invalid("axis ", axis, " is not an axis of ", name, ", which has rank ", rank);
  Rows rows;
  for (int64_t i = 0; i < axis; ++i) rows.outer *= dims[i];
  rows.length = dims[axis];
  for (int64_t i = axis + 1; i < rank; ++i) rows.inner *= dims[i];
  return rows;
}

// Like rows_of(), but checks that the length fits in int32, since indices along the axis are int32.
inline Rows require_rows(const char* name, ffi::AnyBuffer buffer, int64_t axis) {
  const Rows rows = rows_of(name, buffer, axis);
  if (rows.length > INT32_MAX) throw invalid(name, " has length ", rows.length, " at the axis; int32 cannot index it");
  return rows;
}

// Returns where an operand has the elements of a problem of the dimensions `whole`. The operand is row-major, and some
// of its dimensions may be 1. The index counts the dimensions [begin, end). `stride` is the stride of dimension end -
// 1, and is changed to that of dimension begin - 1.
inline IndexMap index_map(const char* name, const Dims& dims, const Dims& whole, int64_t begin, int64_t end,
                          int64_t& stride) {
  IndexMap map;
  for (int64_t i = end - 1; i >= begin; --i) {
    if (whole[i] == 1) continue;
    const bool has = dims[i] != 1;
    if (map.groups > 0 && has == (map.stride[map.groups - 1] != 0)) {
      map.size[map.groups - 1] *= whole[i];
    } else {
      if (map.groups == IndexMap::kMaxGroups) throw invalid(name, " broadcasts in too many separate dimensions");
      map.size[map.groups] = whole[i];
      map.stride[map.groups++] = has ? stride : 0;
    }
    stride *= dims[i];
  }
  return map;
}

// The operand may have size 1 in any dimension.
inline Broadcast require_broadcast(const char* name, ffi::AnyBuffer buffer, const Dims& whole, int64_t axis) {
  const Dims dims = dims_of(buffer);
  bool fits = dims.size() == whole.size();
  for (size_t i = 0; fits && i < dims.size(); ++i) fits = dims[i] == whole[i] || dims[i] == 1;
  if (!fits) throw invalid(name, " has shape ", text_of(dims), ", which does not broadcast to ", text_of(whole));
  Broadcast broadcast;
  int64_t stride = 1;
  broadcast.inner = index_map(name, dims, whole, axis + 1, static_cast<int64_t>(dims.size()), stride);
  broadcast.axis_stride = dims[axis] == 1 ? 0 : stride;
  stride *= dims[axis];
  broadcast.outer = index_map(name, dims, whole, 0, axis, stride);
  return broadcast;
}

// Operand `index` of those that a handler takes without naming them.
inline ffi::AnyBuffer require_buffer(const char* name, ffi::RemainingArgs arguments, size_t index) {
  const auto buffer = arguments.get<ffi::AnyBuffer>(index);
  if (buffer.has_error()) throw invalid(name, ": ", buffer.error().message());
  return *buffer;
}

// Result `index` of those that a handler takes without naming them.
inline ffi::AnyBuffer require_buffer(const char* name, ffi::RemainingRets results, size_t index) {
  auto buffer = results.get<ffi::AnyBuffer>(index);
  if (buffer.has_error()) throw invalid(name, ": ", buffer.error().message());
  return **buffer;
}

// Hands out the operands that a handler takes without naming them, in order. All of them must be taken.
class Rest {
 public:
  explicit Rest(ffi::RemainingArgs arguments) : arguments_(arguments) {}

  ffi::AnyBuffer next(const char* name) {
    if (taken_ == arguments_.size()) throw invalid(name, " is missing although the attributes say it is there");
    return require_buffer(name, arguments_, taken_++);
  }

  void require_end() const {
    if (taken_ < arguments_.size()) throw invalid("there are ", arguments_.size() - taken_, " operands too many");
  }

 private:
  ffi::RemainingArgs arguments_;
  size_t taken_ = 0;
};

// The hidden last result of a CUDA target: bytes for each outer index, shaped (*dimensions before the axis, bytes) so
// that it shards with the batch. Returns bytes per outer index.
inline int64_t require_workspace(ffi::AnyBuffer workspace, ffi::AnyBuffer x, int64_t axis) {
  require_type("workspace", workspace, ffi::DataType::U8);
  const auto rank = static_cast<int64_t>(workspace.dimensions().size());
  if (rank != axis + 1) throw invalid("workspace has rank ", rank, ", expected ", axis + 1);
  const int64_t bytes = workspace.dimensions()[axis];
  Dims expected = dims_of(x);
  expected.resize(axis + 1);
  expected[axis] = bytes;
  require_shape("workspace", workspace, expected);
  return bytes;
}

// ---- Bindings -------------------------------------------------------------------------------------------------------

// A backend. The bindings in call.h are written once and take it as a parameter: start() begins a binding with the
// context that handlers of the backend get, and scratch() adds the workspace, which only CUDA handlers have.
struct OnCpu {
  static auto start() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

  template <class Binding>
  static Binding&& scratch(Binding&& binding) {
    return std::move(binding);
  }
};

// ---- XLA's thread pool ----------------------------------------------------------------------------------------------

inline Workers workers_of(ffi::ThreadPool pool) {
  return Workers{std::max<int64_t>(1, pool.num_threads()),
                 [pool](std::function<void()> task) mutable { pool.Schedule(std::move(task)); }};
}

}  // namespace jaxgpuops
