// What an operation must tell the row engine (engine.cuh): a policy, all of whose functions are static.
//
//   struct Policy {
//     using Element = ..;                     // common/cuda/element.h
//     static constexpr int kOperands;         // full arrays that are read: x, or x and y
//     static constexpr int kSums;             // statistics that are sums
//     static constexpr bool kPeak;            // one more statistic: a maximum, which sums may be relative to
//     static constexpr bool kNumericPeak;     // kPeak: the maximum is a number, never NaN
//     static constexpr bool kDecoded;         // lanes keep what decode() makes of elements, not what is stored
//     static constexpr bool kMasked;          // the call may have masks
//     static constexpr bool kHole;            // the statistics may leave out one element of a row
//     static constexpr bool kOutput;          // the call may want results of the full shape
//     static constexpr bool kPackedPeak;      // kernels compare the elements of a word together, as they are stored
//     static constexpr bool kPackedSum;       // kernels add up the elements of a word together
//     static constexpr bool kStoredPeak;      // the largest stored element also has the largest value()
//     static constexpr bool kPlainSum;        // if add_plain(args), the last sum is that of all elements, hole too
//     static constexpr bool kKeeps;           // results may be multiples of summands, which are kept: see keeps()
//     // Which kernels are compiled (RowTraits). Those that walk, and those of flat rows, always are if unmasked.
//     static constexpr bool kFast, kLarge, kPackColumns, kSingleColumns;
//     static constexpr bool kAlignedRows;     // another kernel for aligned rows, which is faster
//     static constexpr bool kAlong;           // along_kernel: statistics only, of vectors of columns
//     static constexpr bool kShort;           // spread_kernel and wide_kernel: few short rows
//     struct Args;                            // of the call
//     struct Row;                             // of a row, known before its statistics
//     struct Final;                           // of a row, made of its statistics
//     static Row row(args, outer, i, length, inner);
//     static void with_args(args, f);         // calls f with args, or with a type that knows more of them
//     static void with_sum_args(args, f);     // the same, for add()
//     static bool skip(row);                  // the kernel need not read the row
//     static int64_t hole(row);               // the element left out; -1: none
//     static bool counts(args, outer, i);     // kHole: !skip() of that row
//     static Row begun(args, outer, i, length, inner);  // kHole: the first half of row(), which issues loads
//     static Row completed(args, begun, outer, i, length, inner);  // kHole: the second half, which uses them
//     static Row counted(row);                // kHole: the row, known not to be skipped
//     static Args of_statistics(args);        // lean_rows_kernel: args, known to ask for no full results
//     static Bits pad(args, operand);         // stands in for missing or masked elements; adds nothing to statistics
//     static Acc value(args, x);              // the value of a stored element; kDecoded: decode(args, row, x, bias)
//     static Acc larger(a, b), lowest();      // kPeak
//     static uint32_t ordered_pair(args, word), larger_pair(a, b);  // kPackedPeak: what is compared, and how
//     static Acc add_word(sum, word);         // kPackedSum
//     static Acc ordered_value(args, x);      // kPackedPeak: value() of an element that ordered_pair() made
//     static Shift guard(peak);               // the peak of a part or of a row, as add() takes it
//     static Acc add(args, k, sum, x, y, shift);
//     static Acc scaled(k, sum, weight), weight(peak, shift of the whole row);  // merge sums of different peaks
//     static Final finish(args, row, stat);
//     static void write_row(args, index, row, final);
//     static Acc output(args, row, final, x, y), masked_output(args), hole_output(args, row, final);
//     static bool keeps(args);                // kKeeps: results are what add() added for an element, times a factor
//     static Acc factor_of_kept(final, peak); // kKeeps: that factor, if add() had this peak for a shift
//   };
#pragma once

#include <type_traits>

namespace jaxgpuops::row_engine {

// The base of policies to whose functions it is enough to know all of Args when the kernel runs.
struct PlainArgs {
  static constexpr bool kShort = true;

  template <class Args, class F>
  __device__ static void with_args(const Args& args, F f) {
    f(args);
  }
  template <class Args, class F>
  __device__ static void with_sum_args(const Args& args, F f) {
    f(args);
  }
};

// Returns true if the policy keeps all rules; else compiling fails with a message that names the broken rule.
template <class P>
constexpr bool is_policy() {
  using Bits = typename P::Element::Bits;
  static_assert(P::kOperands == 1 || P::kOperands == 2, "kernels read one array or two");
  static_assert(P::kSums > 0 || P::kPeak, "a row has at least one statistic");
  static_assert(std::is_trivially_copyable_v<typename P::Args>, "Args is copied to the GPU with the launch");
  static_assert(std::is_trivially_copyable_v<typename P::Final>, "Final goes through memory, from kernel to kernel");
  static_assert(!P::kStoredPeak || P::kPeak, "kStoredPeak says how the peak is found");
  static_assert(!(P::kPackedPeak || P::kPackedSum) || sizeof(Bits) < 4, "a word holds several elements");
  static_assert(!P::kPackedPeak || !P::kDecoded, "packed elements are compared as they are stored");
  static_assert(!P::kPackedSum || (P::kOperands == 1 && P::kSums == 1 && !P::kPeak), "a sum of what is stored");
  static_assert(!P::kPlainSum || P::kSums > 0, "kPlainSum is about the last sum");
  static_assert(!P::kKeeps || (P::kOperands == 1 && P::kSums == (P::kPlainSum ? 2 : 1) && !P::kDecoded),
                "one summand for each element");
  static_assert(!P::kLarge || P::kFast, "kLarge adds one more size to those of kFast");
  static_assert(!P::kAlong || !P::kMasked, "along_kernel reads vectors of columns, so it takes no masks");
  static_assert(!P::kMasked || P::kSingleColumns, "masked columns are read one by one");
  return true;
}

}  // namespace jaxgpuops::row_engine
