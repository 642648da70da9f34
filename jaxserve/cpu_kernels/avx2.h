// Kinds of numbers for AVX2 and FMA: as avx512.h, with vectors of half the size and 16 registers instead of 32.

// Copies the last numbers of a row to where as many zeros follow that a whole vector can be read.
template <class Vector, class Number>
INLINE Vector padded(const Number* from, int64_t count) {
  Vector vector = {};
  std::memcpy(&vector, from, count * sizeof(Number));
  return vector;
}

INLINE float total_of_floats(__m256 sum) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The upper half of a float32 number is a bfloat16 number, so that a shift or a mask widens every second one.
struct Bfloat16 {
  struct Operand {
    __m256 even;
    __m256 odd;
  };
  using Number = uint16_t;
  using Result = float;
  using Vector = __m256i;
  using Sum = __m256;
  static constexpr int kStep = 16;
  static constexpr int kRows = 2;
  static constexpr int kOutputs = 4;
  static constexpr bool kMovesWeights = false;
  INLINE static Sum zero() { return _mm256_setzero_ps(); }
  INLINE static Vector whole(const Number* from) { return _mm256_loadu_si256((const __m256i*)from); }
  INLINE static Vector part(const Number* from, int64_t count) { return padded<Vector>(from, count); }
  INLINE static Vector word(const Number* from) { return _mm256_set1_epi32(word_at(from)); }
  INLINE static Operand widened(Vector read) {
    const __m256i even = _mm256_slli_epi32(read, 16);
    const __m256i odd = _mm256_and_si256(read, _mm256_set1_epi32(0xffff0000));
    return {_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd)};
  }
  INLINE static Operand of_weight(Vector read) { return widened(read); }
  INLINE static Operand of_row(Vector read) { return widened(read); }
  INLINE static Sum add(Sum sum, Operand w, Operand x) {
    return _mm256_fmadd_ps(w.odd, x.odd, _mm256_fmadd_ps(w.even, x.even, sum));
  }
  INLINE static Result total(Sum sum) { return total_of_floats(sum); }
};

struct Float32 {
  using Number = float;
  using Result = float;
  using Vector = __m256;
  using Operand = __m256;
  using Sum = __m256;
  static constexpr int kStep = 8;
  static constexpr int kRows = 3;
  static constexpr int kOutputs = 4;
  static constexpr bool kMovesWeights = false;
  INLINE static Sum zero() { return _mm256_setzero_ps(); }
  INLINE static Vector whole(const Number* from) { return _mm256_loadu_ps(from); }
  INLINE static Vector word(const Number* from) { return _mm256_set1_ps(*from); }
  INLINE static Vector part(const Number* from, int64_t count) { return padded<Vector>(from, count); }
  INLINE static Operand of_weight(Vector read) { return read; }
  INLINE static Operand of_row(Vector read) { return read; }
  INLINE static Sum add(Sum sum, Operand w, Operand x) { return _mm256_fmadd_ps(w, x, sum); }
  INLINE static Result total(Sum sum) { return total_of_floats(sum); }
};

// Numbers are widened to 16 bits: AVX2's product of 8-bit numbers would saturate.
struct Int8 {
  using Number = int8_t;
  using Result = int32_t;
  using Vector = __m128i;
  using Operand = __m256i;
  using Sum = __m256i;
  static constexpr int kStep = 16;
  static constexpr int kRows = 2;
  static constexpr int kOutputs = 4;
  static constexpr bool kMovesWeights = false;
  INLINE static Sum zero() { return _mm256_setzero_si256(); }
  INLINE static Vector whole(const Number* from) { return _mm_loadu_si128((const __m128i*)from); }
  INLINE static Vector part(const Number* from, int64_t count) { return padded<Vector>(from, count); }
  INLINE static Operand of_weight(Vector read) { return _mm256_cvtepi8_epi16(read); }
  INLINE static Operand of_row(Vector read) { return _mm256_cvtepi8_epi16(read); }
  INLINE static Sum add(Sum sum, Operand w, Operand x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
  INLINE static Result total(Sum sum) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
  }
};
