// Integer products on AVX2. Included inside an anonymous namespace, after simd_avx2.h.

constexpr int kRowsAtOnce = 4,
              kTilesAtOnce = 1;  // what 16 registers hold: 163 GOP/s a core, 2 x 2 and 4 x 2 140

inline __m256i broadcast4(const void* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

// out[t][r] lane c = sum over 32 k of codes(c, k) * rows[r][k], for 4-bit codes of 8 columns (128 bytes) of
// tile t, and the wide code's product. |row code| <= 127 and eight products of at most 2 * 15 * 127 a lane
// fit 16 bits: 30,480.
template <int kRows, int kTiles, int kTileBytes>
inline void dot_4bit(const uint8_t* codes, const int8_t* const (&rows)[kRows],
                     const WideCode* const (&wide)[kRows], I32x8 (&out)[kTiles][kRows]) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i sum[kTiles][kRows];
    for (int j = 0; j < 4; ++j) {
        __m256i first[kTiles], second[kTiles];
        for (int t = 0; t < kTiles; ++t) {
            const __m256i both =
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + t * kTileBytes + 32 * j));
            first[t] = _mm256_and_si256(both, low);
            second[t] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
        for (int r = 0; r < kRows; ++r) {
            const __m256i a = broadcast4(rows[r] + 8 * j), b = broadcast4(rows[r] + 8 * j + 4);
            for (int t = 0; t < kTiles; ++t) {
                const __m256i pair =
                    _mm256_add_epi16(_mm256_maddubs_epi16(first[t], a), _mm256_maddubs_epi16(second[t], b));
                sum[t][r] = j == 0 ? pair : _mm256_add_epi16(sum[t][r], pair);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        const WideCode& apart = *wide[r];
        const __m256i shift = _mm256_set1_epi32(apart.shift), code = _mm256_set1_epi32(apart.code);
        for (int t = 0; t < kTiles; ++t) {
            const __m256i lanes =
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + t * kTileBytes + apart.offset));
            const __m256i w = _mm256_and_si256(_mm256_srlv_epi32(lanes, shift), _mm256_set1_epi32(15));
            // Both factors fit 16 bits, and the upper half of w's lanes is 0: vpmaddwd is the cheaper
            // multiplication.
            out[t][r].v = _mm256_add_epi32(_mm256_madd_epi16(sum[t][r], _mm256_set1_epi16(1)),
                                           _mm256_madd_epi16(w, code));
        }
    }
}

// The same for 8-bit codes (256 bytes: pairs of k, 8 columns a pair), widened so that nothing saturates.
template <int kRows, int kTiles, int kTileBytes>
inline void dot_8bit(const uint8_t* codes, const int16_t* const (&rows)[kRows], I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t)
        for (int r = 0; r < kRows; ++r) out[t][r].v = _mm256_setzero_si256();
    for (int j = 0; j < 16; ++j) {
        __m256i w[kTiles];
        for (int t = 0; t < kTiles; ++t)
            w[t] = _mm256_cvtepi8_epi16(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + t * kTileBytes + 16 * j)));
        for (int r = 0; r < kRows; ++r) {
            const __m256i a = broadcast4(rows[r] + 2 * j);
            for (int t = 0; t < kTiles; ++t)
                out[t][r].v = _mm256_add_epi32(out[t][r].v, _mm256_madd_epi16(w[t], a));
        }
    }
}

inline double peak_int8_loop(int64_t iterations) {
    __m256i acc[8];
    for (int i = 0; i < 8; ++i) acc[i] = _mm256_set1_epi32(i);
    __m256i w = _mm256_set1_epi8(3);
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t n = 0; n < iterations; ++n) {
        asm volatile("" : "+x"(w));
        for (int i = 0; i < 8; ++i)
            acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(_mm256_maddubs_epi16(w, acc[i]), ones));
    }
    for (int i = 0; i < 8; ++i) asm volatile("" : "+x"(acc[i]));
    return static_cast<double>(iterations) * 8 * 64;
}
