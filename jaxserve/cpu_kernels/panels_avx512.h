// What attention.h needs of AVX-512 beside the kinds of numbers. attention.cc includes this file.

constexpr int kLanes = 16;        // words of a vector
constexpr int kPanelRows = 6;     // with kPanelVectors, the largest block: a register for each sum and each vector
constexpr int kPanelVectors = 4;  // of a panel, and one for a row's word

// Floats times a number, without reading them where the number is 0.
INLINE __m512 scaled(const float* from, float by) {
  return by == 0 ? _mm512_setzero_ps() : _mm512_mul_ps(_mm512_loadu_ps(from), _mm512_set1_ps(by));
}

INLINE void store_floats(float* to, __m512 floats) { _mm512_storeu_ps(to, floats); }

// Stores word w of row r, counted from its number first, as to[w * stride + r]: kLanes words of kLanes rows.
template <class Number>
INLINE void transpose(const Number* const* rows, int64_t first, uint32_t* to, int64_t stride) {
  __m512i fours[4][4];  // of four rows each: in lane L of [i][j] the words 4 L + j of rows 4 i to 4 i + 3
  for (int i = 0; i < 4; i++) {
    const __m512i a = _mm512_loadu_si512(rows[4 * i] + first);
    const __m512i b = _mm512_loadu_si512(rows[4 * i + 1] + first);
    const __m512i c = _mm512_loadu_si512(rows[4 * i + 2] + first);
    const __m512i d = _mm512_loadu_si512(rows[4 * i + 3] + first);
    const __m512i low_ab = _mm512_unpacklo_epi32(a, b);
    const __m512i high_ab = _mm512_unpackhi_epi32(a, b);
    const __m512i low_cd = _mm512_unpacklo_epi32(c, d);
    const __m512i high_cd = _mm512_unpackhi_epi32(c, d);
    fours[i][0] = _mm512_unpacklo_epi64(low_ab, low_cd);
    fours[i][1] = _mm512_unpackhi_epi64(low_ab, low_cd);
    fours[i][2] = _mm512_unpacklo_epi64(high_ab, high_cd);
    fours[i][3] = _mm512_unpackhi_epi64(high_ab, high_cd);
  }
  for (int j = 0; j < 4; j++) {
    const __m512i even_low = _mm512_shuffle_i32x4(fours[0][j], fours[1][j], 0x88);  // lanes 0 and 2 of both
    const __m512i odd_low = _mm512_shuffle_i32x4(fours[0][j], fours[1][j], 0xdd);   // lanes 1 and 3
    const __m512i even_high = _mm512_shuffle_i32x4(fours[2][j], fours[3][j], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(fours[2][j], fours[3][j], 0xdd);
    _mm512_storeu_si512(to + j * stride, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
    _mm512_storeu_si512(to + (4 + j) * stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_si512(to + (8 + j) * stride, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    _mm512_storeu_si512(to + (12 + j) * stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
}
