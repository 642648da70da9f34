// What attention.h needs of AVX2 beside the kinds of numbers: as panels_avx512.h. attention.cc includes this file.

constexpr int kLanes = 8;
constexpr int kPanelRows = 4;
constexpr int kPanelVectors = 2;

INLINE __m256 scaled(const float* from, float by) {
  return by == 0 ? _mm256_setzero_ps() : _mm256_mul_ps(_mm256_loadu_ps(from), _mm256_set1_ps(by));
}

INLINE void store_floats(float* to, __m256 floats) { _mm256_storeu_ps(to, floats); }

template <class Number>
INLINE void transpose(const Number* const* rows, int64_t first, uint32_t* to, int64_t stride) {
  __m256i fours[2][4];
  for (int i = 0; i < 2; i++) {
    const __m256i a = _mm256_loadu_si256((const __m256i*)(rows[4 * i] + first));
    const __m256i b = _mm256_loadu_si256((const __m256i*)(rows[4 * i + 1] + first));
    const __m256i c = _mm256_loadu_si256((const __m256i*)(rows[4 * i + 2] + first));
    const __m256i d = _mm256_loadu_si256((const __m256i*)(rows[4 * i + 3] + first));
    const __m256i low_ab = _mm256_unpacklo_epi32(a, b);
    const __m256i high_ab = _mm256_unpackhi_epi32(a, b);
    const __m256i low_cd = _mm256_unpacklo_epi32(c, d);
    const __m256i high_cd = _mm256_unpackhi_epi32(c, d);
    fours[i][0] = _mm256_unpacklo_epi64(low_ab, low_cd);
    fours[i][1] = _mm256_unpackhi_epi64(low_ab, low_cd);
    fours[i][2] = _mm256_unpacklo_epi64(high_ab, high_cd);
    fours[i][3] = _mm256_unpackhi_epi64(high_ab, high_cd);
  }
  for (int j = 0; j < 4; j++) {
    _mm256_storeu_si256((__m256i*)(to + j * stride), _mm256_permute2x128_si256(fours[0][j], fours[1][j], 0x20));
    _mm256_storeu_si256((__m256i*)(to + (4 + j) * stride), _mm256_permute2x128_si256(fours[0][j], fours[1][j], 0x31));
  }
}
