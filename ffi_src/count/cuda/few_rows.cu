// Segments of few rows, in one launch: a block has a range of segments and some columns, with an accumulator for each
// segment and column in shared memory, and goes through all rows. Atomics only add integers or take the larger of two,
// so the result does not depend on their order, nor on the number of blocks.
//
// Sums of floats: a first pass finds the largest exponent of each segment and column. The second one adds integers of
// 64 bits (of 96 for float64), scaled such that all rows could have the largest number and their sum just fits; bits
// that are 2^51 (2^83) times smaller than the largest number are rounded away, or where there are more than 2048 rows,
// those 2^49 (2^80) times smaller. So the error is far below that of one addition of floats.
//
// Every block reads all ids, from L2, and its own part of the data; a second pass has that part in registers, or finds
// it in L1.
#include "count/cuda/atomics.cuh"
#include "count/cuda/exact.cuh"
#include "count/cuda/few_rows.cuh"

namespace jaxgpuops::count {
namespace {

// A cell is one accumulator.
template <class Monoid, bool kLargest>
struct WholeCells {
  using Bits = typename Monoid::Bits;
  using Word = std::conditional_t<sizeof(Bits) == 8, uint64_t, uint32_t>;
  static constexpr int kPasses = 1, kBytes = sizeof(Word);

  const FewArgs& a;
  Word* words;

  __device__ WholeCells(const FewArgs& args, unsigned char* memory, int)
      : a(args), words(reinterpret_cast<Word*>(memory)) {}
  __device__ void clear(int cell) { words[cell] = 0; }
  template <int kPass>
  __device__ void add(int cell, Bits bits) {
    const auto word = static_cast<Word>(Monoid::load(bits, a.keys));
    if (kLargest && cell >= 0 && words[cell] >= word) cell = -1;
    const auto fold = [](Word x, Word y) { return !kLargest ? x + y : x > y ? x : y; };
    put_together(a.team_bits, cell, word, fold, [&](int at, Word sum) { atomic_fold<kLargest>(words + at, sum); });
  }
  __device__ Bits result(int cell) const {
    return Monoid::store(static_cast<typename Monoid::Acc>(words[cell]), a.keys);
  }
};

// A cell is the largest place (exponent) of its numbers, and their sum in words of 32 bits, the lowest first.
template <class Element>
struct ExactCells {
  using Bits = typename Element::Bits;
  using Wide = std::conditional_t<sizeof(Bits) == 8, __int128, int64_t>;
  static constexpr int kWords = sizeof(Bits) == 8 ? 3 : 2, kPasses = 2, kBytes = 4 * (1 + kWords);
  static constexpr uint32_t kSpecial = 1 << 16;  // greater than any place

  int cells, team_bits, most_shift;  // `most_shift`: by how many bits the largest numbers are shifted
  uint32_t *places, *words;          // `places`: the largest place plus 1, or 0 if there is none yet

  __device__ ExactCells(const FewArgs& a, unsigned char* memory, int count)
      : cells(count),
        team_bits(a.team_bits),
        most_shift(32 * kWords - 2 - a.row_bits - (Parts<Element>::kMantissa + 1)),
        places(reinterpret_cast<uint32_t*>(memory)),
        words(places + count) {}
  __device__ void clear(int cell) {
    places[cell] = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w * cells + cell] = 0;
  }
  template <int kPass>
  __device__ void add(int cell, Bits bits) {
    const Parts<Element> parts(bits);
    if constexpr (kPass == 0) {
      const uint32_t place = parts.special ? kSpecial : parts.integer ? parts.place + 1 : 0;
      if (cell >= 0 && place <= places[cell]) cell = -1;
      put_together(
          team_bits, cell, place, [](uint32_t x, uint32_t y) { return x > y ? x : y; },
          [&](int at, uint32_t most) { atomicMax(places + at, most); });
      return;
    }
    const uint32_t most = cell >= 0 ? places[cell] : parts.place + 1;
    if (most == kSpecial) {
      if (parts.special) atomicOr(words + cell, parts.special);
      cell = -1;
    }
    const int shift = most_shift - static_cast<int>(most - 1 - parts.place);
    Wide value = parts.integer;
    if (shift >= 0) {
      value <<= shift;
    } else {
      value = -shift > 54 ? 0 : ((value >> (-shift - 1)) + 1) >> 1;
    }
    if (parts.negative) value = -value;
    put_together(
        team_bits, cell, value, [](Wide x, Wide y) { return x + y; },
        [&](int at, Wide sum) { add_wide<kWords>(words + at, cells, sum); });
  }
  __device__ Bits result(int cell) const {
    using Acc = typename Element::Acc;
    const uint32_t most = places[cell];
    if (most == 0) return Element::store(Acc{0});
    if (most == kSpecial) return Element::store(special_sum(words[cell]));
    Wide value = static_cast<int32_t>(words[(kWords - 1) * cells + cell]);
#pragma unroll
    for (int w = kWords - 2; w >= 0; --w) value = (value << 32) + words[w * cells + cell];
    const bool negative = value < 0;
    if (negative) value = -value;
    double sum = static_cast<double>(static_cast<uint64_t>(value >> 32 * (kWords - 2)));
    if constexpr (kWords == 3) sum = sum * 4294967296.0 + static_cast<uint32_t>(value);
    sum = ldexp(sum, static_cast<int>(most) - 1 - most_shift + least_exponent(Element::kDType));
    return Element::store(static_cast<Acc>(negative ? -sum : sum));
  }
};

template <class Cells>
__global__ void __launch_bounds__(1024) segment_few_kernel(const __grid_constant__ FewArgs a) {
  using Bits = typename Cells::Bits;
  FewBlock<Bits> block(a);
  const int count = block.cells();
  Cells cells(a, dynamic_shared_memory(), count);
  for (int cell = threadIdx.x; cell < count; cell += blockDim.x) cells.clear(cell);
  __syncthreads();
  block.each_row([&](int, int cell, Bits bits) { cells.template add<0>(cell, bits); });
  if constexpr (Cells::kPasses > 1)
    block.each_row([&](int, int cell, Bits bits) { cells.template add<1>(cell, bits); });
  Bits* const out = static_cast<Bits*>(a.out) + (block.o * a.segments + block.first) * a.inner + block.column;
  block.each_segment([&](int s, int cell) { out[s * a.inner] = cells.result(cell); });
}

}  // namespace

cudaError_t launch_segment_few(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                               const SegmentsBuffers& buffers) {
  const FewArgs a(plan, problem, buffers);
  const auto run = [&](auto cells) {
    using Cells = typename decltype(cells)::type;
    return launch_few(stream, plan, a, Cells::kBytes, segment_few_kernel<Cells>);
  };
  return dispatch_monoid(problem, [&](auto monoid) {
    using Monoid = decltype(monoid);
    if constexpr (is_exact<Monoid>) {
      return run(std::common_type<ExactCells<typename Monoid::Element>>{});
    } else {
      return run(std::common_type<WholeCells<Monoid, is_extreme<Monoid>>>{});
    }
  });
}

}  // namespace jaxgpuops::count
