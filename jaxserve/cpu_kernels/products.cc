// Products of few rows with a weight on an x86-64 CPU, as calls of XLA's FFI: y[R, N] = x[R, K] w[N, K]^T.
//
// Pairs of numbers: bfloat16 and float32 with a float32 result, int8 with an int32 result, which is exact (modulo
// 2^32). Each is compiled for AVX-512 and for AVX2 into one library; the caller names the one that its processor has.
// Floating-point settings are XLA's: to the nearest, subnormal numbers count as zero.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#include "bits.h"
#include "shapes.h"
#include "threads.h"

template <class Kind>
struct Product {
  const typename Kind::Number* x;
  const typename Kind::Number* weight;
  typename Kind::Result* y;
  int64_t R, N, K;
};

// Signed numbers must not overflow in C++; unsigned ones wrap around.
inline int32_t wrapped_difference(int32_t total, int32_t surplus) {
  return static_cast<int32_t>(static_cast<uint32_t>(total) - static_cast<uint32_t>(surplus));
}

#define INLINE TARGET inline __attribute__((always_inline))

namespace avx512 {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")))
#include "avx512.h"
#include "blocks.h"
#undef TARGET
}  // namespace avx512

namespace avx2 {
#define TARGET __attribute__((target("avx2,fma")))
#include "avx2.h"
#include "blocks.h"
#undef TARGET
}  // namespace avx2

// ---- threads

constexpr int64_t kAligned = 16;  // outputs of a cache line of the result, which one thread writes
constexpr int64_t kShares = 4;    // shares of the work for each thread, so that a late thread has fewer

// Shares the outputs among XLA's threads and this one. Rows count as if each read the weight itself.
template <class Kind>
ffi::Error multiply_all(ffi::ThreadPool& pool, const Product<Kind>& product) {
  const int64_t bytes = product.R * product.N * product.K * static_cast<int64_t>(sizeof(typename Kind::Number));
  const int64_t threads = useful_threads(pool, bytes);
  const int64_t parts = threads == 1 ? 1 : threads * kShares;
  const int64_t size = (product.N + parts * kAligned - 1) / (parts * kAligned) * kAligned;
  const int64_t count = (product.N + size - 1) / size;
  return share_out(pool, threads, count, [=](int64_t share) {
    multiply(product, share * size, std::min(product.N, (share + 1) * size));
  });
}

// ---- calls

bool agree(ffi::Span<const int64_t> x, ffi::Span<const int64_t> weight, ffi::Span<const int64_t> y) {
  if (x.size() != 2 || weight.size() != 2 || y.size() != 2) return false;
  return x[1] == weight[1] && y[0] == x[0] && y[1] == weight[0];
}

template <class Kind, ffi::DataType kNumber, ffi::DataType kResult>
ffi::Error call(ffi::ThreadPool pool, ffi::Buffer<kNumber> x, ffi::Buffer<kNumber> weight,
                ffi::ResultBuffer<kResult> y) {
  if (!agree(x.dimensions(), weight.dimensions(), y->dimensions())) {
    return ffi::Error::InvalidArgument("a product is [R, K] and [N, K] to [R, N], not " + shape(x.dimensions()) +
                                       " and " + shape(weight.dimensions()) + " to " + shape(y->dimensions()));
  }
  const Product<Kind> product = {
      static_cast<const typename Kind::Number*>(x.untyped_data()),
      static_cast<const typename Kind::Number*>(weight.untyped_data()),
      static_cast<typename Kind::Result*>(y->untyped_data()),
      x.dimensions()[0],
      weight.dimensions()[0],
      x.dimensions()[1],
  };
  return product.R && product.N ? multiply_all(pool, product) : ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

#define PRODUCT(name, kind, number, result)                                \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_product_##name,                   \
                                (call<kind, ffi::number, ffi::result>),    \
                                ffi::Ffi::Bind()                           \
                                    .Ctx<ffi::ThreadPool>()                \
                                    .Arg<ffi::Buffer<ffi::number>>()       \
                                    .Arg<ffi::Buffer<ffi::number>>()       \
                                    .Ret<ffi::Buffer<ffi::result>>())

PRODUCT(bfloat16_avx512, avx512::Bfloat16, BF16, F32);
PRODUCT(float32_avx512, avx512::Float32, F32, F32);
PRODUCT(int8_avx512, avx512::Int8, S8, S32);
PRODUCT(bfloat16_avx2, avx2::Bfloat16, BF16, F32);
PRODUCT(float32_avx2, avx2::Float32, F32, F32);
PRODUCT(int8_avx2, avx2::Int8, S8, S32);

// The instructions that this processor and its operating system have, the best first; "" for neither.
extern "C" const char* jaxserve_instructions() {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx2 && avx512) return "avx512";
  return avx2 ? "avx2" : "";
}

extern "C" int jaxserve_ffi_minor() { return XLA_FFI_API_MINOR; }

#pragma GCC visibility pop
