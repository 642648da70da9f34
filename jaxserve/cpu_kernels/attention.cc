// Attention over keys and values in pages on an x86-64 CPU, as calls of XLA's FFI. Sizes and results are those of
// pallas_kernels/paged_attention/api.py; the letters too: T tokens, N query heads, H numbers of a key, V of a value,
// P pages of K kv heads and Z tokens, R rows with W table entries.
//
// Queries are bfloat16 or float32, pages of the same or of fewer bits; int8 and float8 pages have a scale for each
// token and head, and float8 numbers come as their bits, uint8. Results are float32. Floating-point settings are XLA's: to the nearest, subnormal numbers count as
// zero.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#include "bits.h"
#include "shapes.h"
#include "threads.h"

constexpr int64_t kBlock = 64;    // kv positions of a step of the walk
constexpr int64_t kTile = 96;     // query rows of a tile
constexpr float kMasked = -1e30;  // score of a position that a query does not see

struct Float8 {
  uint8_t bits;  // e4m3fn: no infinity, and one NaN
};

template <class Stored>
constexpr bool kIsScaled = sizeof(Stored) == 1;

// Query rows of one row and kv head: a token and one of the head's G query heads each, token after token.
struct Tile {
  int64_t row, head, first, count;
};

template <class Kind, class Stored>
struct Attention {
  const typename Kind::Number* q;
  const Stored *k, *v;  // the same for latent pages
  const float *k_scale, *v_scale;
  const int32_t *tables, *lengths, *starts;
  const float* sinks;
  float *out, *lse;
  int64_t T, N, H, V, P, K, Z, R, W;
  float scale, softcap;
  int64_t window;

  int64_t group() const { return N / K; }
  int64_t begin(int64_t row) const { return std::clamp<int64_t>(starts[row], 0, T); }
  int64_t tokens(int64_t row) const { return std::max<int64_t>(begin(row + 1) - begin(row), 0); }
  // Index of a tile's query row among the [T, N] of the step.
  int64_t query(const Tile& tile, int64_t m) const {
    const int64_t token = begin(tile.row) + (tile.first + m) / group();
    return token * N + tile.head * group() + (tile.first + m) % group();
  }
  // Position of a query row within its row; negative where it sees nothing.
  int64_t position(const Tile& tile, int64_t m) const {
    return lengths[tile.row] - tokens(tile.row) + (tile.first + m) / group();
  }
  int64_t first_seen(int64_t position) const { return std::max<int64_t>(position - window + 1, 0); }
};

#define INLINE TARGET inline __attribute__((always_inline))

namespace avx512 {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")))
#include "avx512.h"
#include "panels_avx512.h"
#include "attention.h"
#undef TARGET
}  // namespace avx512

namespace avx2 {
#define TARGET __attribute__((target("avx2,fma")))
#include "avx2.h"
#include "panels_avx2.h"
#include "attention.h"
#undef TARGET
}  // namespace avx2

// ---- threads

// Cuts the query rows of each row and kv head into as few tiles as can be, of nearly the same size; those with the
// longest contexts come first, so that no thread begins one when the others have ended.
template <class Kind, class Stored>
std::vector<Tile> tiles(const Attention<Kind, Stored>& a) {
  std::vector<Tile> found;
  for (int64_t row = 0; row < a.R; row++) {
    const int64_t count = a.tokens(row) * a.group();
    const int64_t parts = (count + kTile - 1) / kTile;
    for (int64_t part = 0; part < parts; part++) {
      const int64_t first = count * part / parts;
      const int64_t next = count * (part + 1) / parts;
      for (int64_t head = 0; head < a.K; head++) found.push_back({row, head, first, next - first});
    }
  }
  const auto is_longer = [&](const Tile& one, const Tile& other) {
    return a.position(one, one.count - 1) > a.position(other, other.count - 1);
  };
  std::stable_sort(found.begin(), found.end(), is_longer);
  return found;
}

// Bytes that the step would read if each query read its keys and values itself.
template <class Kind, class Stored>
int64_t bytes(const Attention<Kind, Stored>& a) {
  int64_t positions = 0;
  for (int64_t row = 0; row < a.R; row++)
    positions += a.tokens(row) * std::min<int64_t>(a.lengths[row], a.window);
  return positions * a.N * (a.H + a.V) * static_cast<int64_t>(sizeof(typename Kind::Number));
}

template <class Kind, class Stored>
ffi::Error attend_all(ffi::ThreadPool& pool, const Attention<Kind, Stored>& a) {
  const int64_t from = a.begin(a.R);
  std::fill(a.out + from * a.N * a.V, a.out + a.T * a.N * a.V, 0.0f);
  std::fill(a.lse + from * a.N, a.lse + a.T * a.N, -std::numeric_limits<float>::infinity());
  const auto found = std::make_shared<const std::vector<Tile>>(tiles(a));
  return share_out(pool, useful_threads(pool, bytes(a)), found->size(),
                   [=](int64_t share) { attend(a, (*found)[share]); });
}

// ---- calls

struct Inputs {
  ffi::AnyBuffer q, k, v;
  ffi::Buffer<ffi::F32> k_scale, v_scale;
  ffi::Buffer<ffi::S32> tables, lengths, starts;
  ffi::Buffer<ffi::F32> sinks;
  ffi::ResultBuffer<ffi::F32> out, lse;
  float scale, softcap;
  int64_t window;
};

// What is wrong with the shapes; empty where nothing is.
std::string misfit(const Inputs& in) {
  const auto q = in.q.dimensions(), k = in.k.dimensions(), out = in.out->dimensions();
  if (q.size() != 3 || k.size() != 4 || out.size() != 3 || in.tables.dimensions().size() != 2)
    return "q and out have to be [T, N, H], pages [P, K, Z, H] and tables [R, W]";
  const int64_t rows = in.tables.dimensions()[0];
  const bool agree = q[2] == k[3] && out[0] == q[0] && out[1] == q[1] && out[2] <= k[3] && k[0] && k[1] && k[2] &&
                     q[1] % k[1] == 0 && in.v.dimensions() == k &&
                     in.lengths.element_count() == static_cast<size_t>(rows) &&
                     in.starts.element_count() == static_cast<size_t>(rows + 1) &&
                     in.sinks.element_count() == static_cast<size_t>(q[1]) &&
                     in.lse->element_count() == static_cast<size_t>(q[0] * q[1]);
  return agree ? "" : "sizes disagree";
}

template <class Kind, class Stored>
ffi::Error attend_as(ffi::ThreadPool& pool, const Inputs& in) {
  const auto q = in.q.dimensions(), k = in.k.dimensions();
  const size_t scales = kIsScaled<Stored> ? k[0] * k[1] * k[2] : 0;
  if (in.k_scale.element_count() != scales || in.v_scale.element_count() != scales)
    return ffi::Error::InvalidArgument("pages of 8 bits have a scale for each token and head, others none");
  const Attention<Kind, Stored> attention = {
      static_cast<const typename Kind::Number*>(in.q.untyped_data()),
      static_cast<const Stored*>(in.k.untyped_data()),
      static_cast<const Stored*>(in.v.untyped_data()),
      in.k_scale.typed_data(),
      in.v_scale.typed_data(),
      in.tables.typed_data(),
      in.lengths.typed_data(),
      in.starts.typed_data(),
      in.sinks.typed_data(),
      in.out->typed_data(),
      in.lse->typed_data(),
      q[0],
      q[1],
      q[2],
      in.out->dimensions()[2],
      k[0],
      k[1],
      k[2],
      in.tables.dimensions()[0],
      in.tables.dimensions()[1],
      in.scale,
      in.softcap,
      in.window > 0 ? in.window : std::numeric_limits<int32_t>::max(),
  };
  return attend_all(pool, attention);
}

template <class Kind>
ffi::Error attend_with(ffi::ThreadPool& pool, const Inputs& in) {
  switch (in.k.element_type()) {
    case ffi::BF16: return attend_as<Kind, uint16_t>(pool, in);
    case ffi::S8: return attend_as<Kind, int8_t>(pool, in);
    case ffi::U8: return attend_as<Kind, Float8>(pool, in);
    case ffi::F32:
      if constexpr (std::is_same_v<typename Kind::Number, float>) return attend_as<Kind, float>(pool, in);
    default: return ffi::Error::InvalidArgument("pages of these numbers are not supported for such queries");
  }
}

template <class Bfloat16, class Float32>
ffi::Error call(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                ffi::Buffer<ffi::F32> k_scale, ffi::Buffer<ffi::F32> v_scale, ffi::Buffer<ffi::S32> tables,
                ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::F32> sinks,
                ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> lse, float scale, float softcap,
                int64_t window) {
  const Inputs in = {q, k, v, k_scale, v_scale, tables, lengths, starts, sinks, out, lse, scale, softcap, window};
  const std::string problem = misfit(in);
  if (!problem.empty())
    return ffi::Error::InvalidArgument(problem + ": q " + shape(q.dimensions()) + ", pages " + shape(k.dimensions()) +
                                       " and " + shape(v.dimensions()) + ", tables " + shape(tables.dimensions()) +
                                       ", out " + shape(out->dimensions()));
  if (k.element_type() != v.element_type())
    return ffi::Error::InvalidArgument("keys and values are of different numbers");
  if (q.element_type() == ffi::F32) return attend_with<Float32>(pool, in);
  if (q.element_type() == ffi::BF16 && k.dimensions()[3] % 2 == 0) return attend_with<Bfloat16>(pool, in);
  return ffi::Error::InvalidArgument("queries have to be float32, or bfloat16 with an even H");
}

}  // namespace

#pragma GCC visibility push(default)

#define ATTENTION(instructions)                                                                               \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attention_##instructions,                                            \
                                (call<instructions::Bfloat16, instructions::Float32>),                        \
                                ffi::Ffi::Bind()                                                              \
                                    .Ctx<ffi::ThreadPool>()                                                   \
                                    .Arg<ffi::AnyBuffer>()                                                    \
                                    .Arg<ffi::AnyBuffer>()                                                    \
                                    .Arg<ffi::AnyBuffer>()                                                    \
                                    .Arg<ffi::Buffer<ffi::F32>>()                                             \
                                    .Arg<ffi::Buffer<ffi::F32>>()                                             \
                                    .Arg<ffi::Buffer<ffi::S32>>()                                             \
                                    .Arg<ffi::Buffer<ffi::S32>>()                                             \
                                    .Arg<ffi::Buffer<ffi::S32>>()                                             \
                                    .Arg<ffi::Buffer<ffi::F32>>()                                             \
                                    .Ret<ffi::Buffer<ffi::F32>>()                                             \
                                    .Ret<ffi::Buffer<ffi::F32>>()                                             \
                                    .Attr<float>("scale")                                                     \
                                    .Attr<float>("softcap")                                                   \
                                    .Attr<int64_t>("window"))

ATTENTION(avx512);
ATTENTION(avx2);

#pragma GCC visibility pop
