// Products of few rows with a weight, for a CPU with AVX-512: y[R, N] = x[R, K] w, as calls of XLA's FFI.
//
// A weight lies as [K, N] ("in_out") or as [N, K] ("out_in"). Pairs of numbers: bfloat16 and float32 with a float32
// result, int8 with an int32 result. K and N are multiples of 64. A row's sum has the same order whatever R is.
//
// A measurement, not a part of jaxserve: python -m benchmarks.native_products

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")))

namespace {

constexpr int kRows = 4;       // rows that share what was read of the weight
constexpr int kOutputs = 4;    // outputs of a block of [N, K]
constexpr int kColumns = 64;   // columns of a tile of [K, N]
constexpr int kDepth = 16;     // rows of [K, N] that are read side by side
constexpr int kShares = 4;     // shares of the work for each thread, so that a late thread has fewer

// ---- a step of a sum: 16 lanes of the accumulator, 64 bytes of each operand

struct Bfloat16 {
  using Number = uint16_t;
  using Result = float;
  using Sum = __m512;
  static constexpr int kStep = 32;
  AVX512 static Sum zero() { return _mm512_setzero_ps(); }
  AVX512 static Sum add(Sum sum, __m512i w, __m512i x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
  AVX512 static Result total(Sum sum) { return _mm512_reduce_add_ps(sum); }
};

struct Float32 {
  using Number = float;
  using Result = float;
  using Sum = __m512;
  static constexpr int kStep = 16;
  AVX512 static Sum zero() { return _mm512_setzero_ps(); }
  AVX512 static Sum add(Sum sum, __m512i w, __m512i x) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
  }
  AVX512 static Result total(Sum sum) { return _mm512_reduce_add_ps(sum); }
};

// VNNI multiplies unsigned with signed numbers: x is moved by 128, and 128 times the weight's sum is taken away.
struct Int8 {
  using Number = int8_t;
  using Result = int32_t;
  using Sum = __m512i;
  static constexpr int kStep = 64;
  AVX512 static Sum zero() { return _mm512_setzero_si512(); }
  AVX512 static Sum add(Sum sum, __m512i w, __m512i x) {
    return _mm512_dpbusd_epi32(sum, _mm512_xor_si512(x, _mm512_set1_epi8(-128)), w);
  }
  AVX512 static Result total(Sum sum) { return _mm512_reduce_add_epi32(sum); }
};

// ---- [N, K]: numbers that are summed up lie side by side

template <class Kind, int R>
AVX512 void block_out_in(const typename Kind::Number* x, const typename Kind::Number* w, int64_t K,
                         typename Kind::Result* y, int64_t N) {
  typename Kind::Sum sums[R][kOutputs];
  __m512i weights[kOutputs];
  for (int b = 0; b < kOutputs; b++) {
    weights[b] = _mm512_setzero_si512();
    for (int r = 0; r < R; r++) sums[r][b] = Kind::zero();
  }
  for (int64_t k = 0; k < K; k += Kind::kStep) {
    __m512i row[R];
    for (int r = 0; r < R; r++) row[r] = _mm512_loadu_si512(x + r * K + k);
    for (int b = 0; b < kOutputs; b++) {
      const __m512i some = _mm512_loadu_si512(w + b * K + k);
      if constexpr (std::is_same_v<Kind, Int8>) {
        weights[b] = _mm512_dpbusd_epi32(weights[b], _mm512_set1_epi8(1), some);
      }
      for (int r = 0; r < R; r++) sums[r][b] = Kind::add(sums[r][b], some, row[r]);
    }
  }
  for (int b = 0; b < kOutputs; b++) {
    const auto moved = 128 * _mm512_reduce_add_epi32(weights[b]);
    for (int r = 0; r < R; r++) y[r * N + b] = Kind::total(sums[r][b]) - (std::is_same_v<Kind, Int8> ? moved : 0);
  }
}

template <class Kind>
void columns_out_in(const typename Kind::Number* x, int64_t R, const typename Kind::Number* w, int64_t K,
                    typename Kind::Result* y, int64_t N, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n += kOutputs) {
    int64_t r = 0;
    for (; r + kRows <= R; r += kRows) block_out_in<Kind, kRows>(x + r * K, w + n * K, K, y + r * N + n, N);
    for (; r < R; r++) block_out_in<Kind, 1>(x + r * K, w + n * K, K, y + r * N + n, N);
  }
}

// ---- [K, N]: columns lie side by side, and sums stay in y from one part of K to the next

template <int R>
AVX512 void tile_in_out(const float* x, const float* w, int64_t K, float* y, int64_t N, int64_t begin, int64_t end) {
  __m512 sums[R][4];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < 4; b++) sums[r][b] = begin ? _mm512_loadu_ps(y + r * N + 16 * b) : _mm512_setzero_ps();
  for (int64_t k = begin; k < end; k++)
    for (int b = 0; b < 4; b++) {
      const __m512 some = _mm512_loadu_ps(w + k * N + 16 * b);
      for (int r = 0; r < R; r++) sums[r][b] = _mm512_fmadd_ps(some, _mm512_set1_ps(x[r * K + k]), sums[r][b]);
    }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < 4; b++) _mm512_storeu_ps(y + r * N + 16 * b, sums[r][b]);
}

// Two rows of the weight are interleaved, so that lanes have pairs; `unfold` puts the columns back in their order.
template <int R>
AVX512 void tile_in_out(const uint16_t* x, const uint16_t* w, int64_t K, float* y, int64_t N, int64_t begin,
                        int64_t end) {
  __m512 sums[R][4];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < 4; b++) sums[r][b] = begin ? _mm512_loadu_ps(y + r * N + 16 * b) : _mm512_setzero_ps();
  for (int64_t k = begin; k < end; k += 2) {
    __m512i pairs[4];
    for (int half = 0; half < 2; half++) {
      const __m512i upper = _mm512_loadu_si512(w + k * N + 32 * half);
      const __m512i lower = _mm512_loadu_si512(w + (k + 1) * N + 32 * half);
      pairs[2 * half] = _mm512_unpacklo_epi16(upper, lower);
      pairs[2 * half + 1] = _mm512_unpackhi_epi16(upper, lower);
    }
    for (int r = 0; r < R; r++) {
      int32_t two;
      __builtin_memcpy(&two, x + r * K + k, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
      for (int b = 0; b < 4; b++) sums[r][b] = _mm512_dpbf16_ps(sums[r][b], (__m512bh)pairs[b], both);
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < 4; b++) _mm512_storeu_ps(y + r * N + 16 * b, sums[r][b]);
}

AVX512 void unfold(float* y) {
  const __m512 low = _mm512_loadu_ps(y);
  const __m512 high = _mm512_loadu_ps(y + 16);
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  _mm512_storeu_ps(y, _mm512_permutex2var_ps(low, first, high));
  _mm512_storeu_ps(y + 16, _mm512_permutex2var_ps(low, second, high));
}

template <class Kind>
void columns_in_out(const typename Kind::Number* x, int64_t R, const typename Kind::Number* w, int64_t K, float* y,
                    int64_t N, int64_t first, int64_t last) {
  for (int64_t k = 0; k < K; k += kDepth)
    for (int64_t n = first; n < last; n += kColumns) {
      int64_t r = 0;
      for (; r + kRows <= R; r += kRows) tile_in_out<kRows>(x + r * K, w + n, K, y + r * N + n, N, k, k + kDepth);
      for (; r < R; r++) tile_in_out<1>(x + r * K, w + n, K, y + r * N + n, N, k, k + kDepth);
    }
  if constexpr (std::is_same_v<Kind, Bfloat16>)
    for (int64_t r = 0; r < R; r++)
      for (int64_t n = first; n < last; n += 32) unfold(y + r * N + n);
}

// ---- calls

// Runs work(first, last) for all columns, on XLA's threads and on this one.
template <class Work>
void share_out(ffi::ThreadPool& pool, int64_t N, Work work) {
  struct Shares {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto shares = std::make_shared<Shares>();  // a thread may come when everything is done
  const int64_t threads = pool.num_threads();
  const int64_t size = std::max<int64_t>(1, N / kColumns / (threads * kShares)) * kColumns;
  const int64_t count = (N + size - 1) / size;
  auto help = [=] {
    for (int64_t share; (share = shares->next++) < count;) {
      work(share * size, std::min(N, (share + 1) * size));
      shares->done++;
    }
  };
  for (int64_t thread = 1; thread < threads; thread++) pool.Schedule([help] { help(); });
  help();
  while (shares->done < count) _mm_pause();
}

template <class Kind, ffi::DataType kNumber, ffi::DataType kResult, bool kOutIn>
ffi::Error product(ffi::ThreadPool pool, ffi::Buffer<kNumber> x, ffi::Buffer<kNumber> w,
                   ffi::ResultBuffer<kResult> y) {
  const int64_t R = x.dimensions()[0];
  const int64_t K = x.dimensions()[1];
  const int64_t N = y->dimensions()[1];
  if (K % 64 || N % 64) return ffi::Error::InvalidArgument("K and N have to be multiples of 64");
  auto* rows = static_cast<const typename Kind::Number*>(x.untyped_data());
  auto* weight = static_cast<const typename Kind::Number*>(w.untyped_data());
  auto* result = static_cast<typename Kind::Result*>(y->untyped_data());
  share_out(pool, N, [=](int64_t first, int64_t last) {
    if constexpr (kOutIn) columns_out_in<Kind>(rows, R, weight, K, result, N, first, last);
    else columns_in_out<Kind>(rows, R, weight, K, result, N, first, last);
  });
  return ffi::Error::Success();
}

}  // namespace

#define PRODUCT(name, kind, number, result, out_in)                                           \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (product<kind, ffi::number, ffi::result, out_in>),      \
                                ffi::Ffi::Bind()                                              \
                                    .Ctx<ffi::ThreadPool>()                                   \
                                    .Arg<ffi::Buffer<ffi::number>>()                          \
                                    .Arg<ffi::Buffer<ffi::number>>()                          \
                                    .Ret<ffi::Buffer<ffi::result>>())

PRODUCT(bfloat16_out_in, Bfloat16, BF16, F32, true);
PRODUCT(bfloat16_in_out, Bfloat16, BF16, F32, false);
PRODUCT(float32_out_in, Float32, F32, F32, true);
PRODUCT(float32_in_out, Float32, F32, F32, false);
PRODUCT(int8_out_in, Int8, S8, S32, true);
