// Kinds of numbers for AVX-512: 64 bytes of each operand in a step. products.cc includes this file.
//
// A kind says how operands are read (`whole`, or `part` of a vector with zeros behind it), what is done to them before
// they are multiplied (`of_weight`, `of_row`), and how products are added to a sum. kRows and kOutputs are the largest
// block; of the 32 registers it takes one for each sum, for each row's operand and for what is read of a weight. They
// are those that were fastest on a Zen 4.

struct Bfloat16 {
  using Number = uint16_t;
  using Result = float;
  using Vector = __m512i;
  using Operand = __m512bh;
  using Sum = __m512;
  static constexpr int kStep = 32;
  static constexpr int kRows = 6;
  static constexpr int kOutputs = 4;
  static constexpr bool kMovesWeights = false;
  INLINE static Sum zero() { return _mm512_setzero_ps(); }
  INLINE static Vector whole(const Number* from) { return _mm512_loadu_si512(from); }
  INLINE static Vector part(const Number* from, int64_t count) {
    return _mm512_maskz_loadu_epi16((1u << count) - 1, from);
  }
  INLINE static Vector word(const Number* from) { return _mm512_set1_epi32(word_at(from)); }
  INLINE static Operand of_weight(Vector read) { return (__m512bh)read; }
  INLINE static Operand of_row(Vector read) { return (__m512bh)read; }
  INLINE static Sum add(Sum sum, Operand w, Operand x) { return _mm512_dpbf16_ps(sum, w, x); }
  INLINE static Result total(Sum sum) { return _mm512_reduce_add_ps(sum); }
};

struct Float32 {
  using Number = float;
  using Result = float;
  using Vector = __m512;
  using Operand = __m512;
  using Sum = __m512;
  static constexpr int kStep = 16;
  static constexpr int kRows = 6;
  static constexpr int kOutputs = 4;
  static constexpr bool kMovesWeights = false;
  INLINE static Sum zero() { return _mm512_setzero_ps(); }
  INLINE static Vector whole(const Number* from) { return _mm512_loadu_ps(from); }
  INLINE static Vector part(const Number* from, int64_t count) {
    return _mm512_maskz_loadu_ps((1u << count) - 1, from);
  }
  INLINE static Vector word(const Number* from) { return _mm512_set1_ps(*from); }
  INLINE static Operand of_weight(Vector read) { return read; }
  INLINE static Operand of_row(Vector read) { return read; }
  INLINE static Sum add(Sum sum, Operand w, Operand x) { return _mm512_fmadd_ps(w, x, sum); }
  INLINE static Result total(Sum sum) { return _mm512_reduce_add_ps(sum); }
};

// VNNI multiplies unsigned with signed numbers. The weight is made unsigned by 128 more, and a row's total is later
// made right by 128 times the row's sum, which all outputs share. Sums wrap around, so that none can saturate.
struct Int8 {
  using Number = int8_t;
  using Result = int32_t;
  using Vector = __m512i;
  using Operand = __m512i;
  using Sum = __m512i;
  static constexpr int kStep = 64;
  static constexpr int kRows = 4;
  static constexpr int kOutputs = 4;
  static constexpr bool kMovesWeights = true;
  INLINE static Sum zero() { return _mm512_setzero_si512(); }
  INLINE static Vector whole(const Number* from) { return _mm512_loadu_si512(from); }
  INLINE static Vector part(const Number* from, int64_t count) {
    return _mm512_maskz_loadu_epi8((uint64_t{1} << count) - 1, from);
  }
  INLINE static Operand of_weight(Vector read) { return _mm512_xor_si512(read, _mm512_set1_epi8(-128)); }
  INLINE static Operand of_row(Vector read) { return read; }
  INLINE static Sum add(Sum sum, Operand w, Operand x) { return _mm512_dpbusd_epi32(sum, w, x); }
  INLINE static Result total(Sum sum) { return _mm512_reduce_add_epi32(sum); }
  // What the totals of a row have too much.
  TARGET static Result surplus(const Number* row, int64_t K) {
    const Operand moved = _mm512_set1_epi8(-128);
    Sum sum = zero();
    int64_t k = 0;
    for (; k + kStep <= K; k += kStep) sum = add(sum, moved, whole(row + k));
    if (k < K) sum = add(sum, moved, part(row + k, K - k));
    return total(sum);
  }
};
