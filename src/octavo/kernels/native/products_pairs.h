// Products of 8-bit codes, widened to pairs of 16 bits so that nothing saturates; `dot2` is the path's own.
// Included inside an anonymous namespace by the products headers of the AVX2 family.

// out[t][r] lane c = sum over 32 k of codes(c, k) * rows[r][k], pairs of k.
template <class Codes, int kRows, int kTiles>
inline void dot_8bit(const uint8_t* codes, const int16_t* const (&rows)[kRows], I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t)
        for (int r = 0; r < kRows; ++r) out[t][r].v = _mm256_setzero_si256();
    for (int j = 0; j < 16; ++j) {
        __m256i w[kTiles];
        for (int t = 0; t < kTiles; ++t) {
            const uint8_t* tile = codes + t * Codes::kTileBytes;
            w[t] = Codes::kUnpacked ? load32(tile + j * kVectorBytes)
                                    : _mm256_cvtepi8_epi16(_mm_loadu_si128(
                                          reinterpret_cast<const __m128i*>(tile + j * kVectorBytes / 2)));
        }
        for (int r = 0; r < kRows; ++r) {
            const __m256i a = broadcast4(rows[r] + 2 * j);
            for (int t = 0; t < kTiles; ++t) out[t][r].v = dot2(out[t][r].v, w[t], a);
        }
    }
}
