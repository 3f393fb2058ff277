// Integer products with vpdpbusd and vpdpwssd, 256 bits wide: the same sums in fewer instructions, nothing
// widened on the way. AVX-VNNI and AVX-512 VNNI name them differently; the latter has 32 registers, and
// 512 bits for many rows (products_avx512.h). Included inside an anonymous namespace, after simd_avx2.h.

constexpr int kTableOffset = 128;  // vpdpbusd multiplies unsigned bytes
#include "planes_avx2.h"

#if defined(__AVX512VNNI__)
inline __m256i dot4(__m256i sum, __m256i u8, __m256i s8) { return _mm256_dpbusd_epi32(sum, u8, s8); }
inline __m256i dot2(__m256i sum, __m256i a, __m256i b) { return _mm256_dpwssd_epi32(sum, a, b); }
#else
inline __m256i dot4(__m256i sum, __m256i u8, __m256i s8) { return _mm256_dpbusd_avx_epi32(sum, u8, s8); }
inline __m256i dot2(__m256i sum, __m256i a, __m256i b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
#endif
inline I32x8 dot2(I32x8 sum, I16x16 a, I16x16 b) { return {dot2(sum.v, a.v, b.v)}; }

constexpr RegisterTiles register_tiles(WeightType type) {
    const WeightLayout layout = weight_layout(type);
    const bool decoded = layout.high_bits > 0 || layout.table;  // by more than a mask
    RegisterTiles tiles{.packed = {4, 2}, .unpack_from = decoded ? 8 : 0, .unpacked = {4, 2}};
#if defined(OCTAVO_SIXTEEN_LANES)
    const RegisterTile wide{.rows = 4, .tiles = 2, .lanes = 16};
    if (layout.table) tiles.unpack_from = 16;
    tiles.packed = layout.low_bits == 2 || layout.high_bits > 0 ? RegisterTile{4, 4} : wide;
    tiles.unpacked = layout.sub_scales == 2 ? RegisterTile{.rows = 4, .tiles = 2, .lanes = 16} : wide;
#endif
    return tiles;
}

template <class Codes, int kFirst, int kLast, int kRows, int kTiles>
inline void dot_codes(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&start)[kRows],
                      I32x8 (&out)[kTiles][kRows]) {
    for (int r = 0; r < kRows; ++r)
        for (int t = 0; t < kTiles; ++t) out[t][r].v = _mm256_set1_epi32(start[r]);
    CodeReader<Codes, kFirst> codes[kTiles];
    for (int t = 0; t < kTiles; ++t) codes[t].start(group + t * Codes::kTileBytes);
    for (int step = kFirst; step < kLast; step += 2) {
        __m256i first[kTiles], second[kTiles];
        for (int t = 0; t < kTiles; ++t) codes[t].next(first[t], second[t]);
        for (int r = 0; r < kRows; ++r) {
            const __m256i a = broadcast4(rows[r] + 4 * step), b = broadcast4(rows[r] + 4 * step + 4);
            for (int t = 0; t < kTiles; ++t) out[t][r].v = dot4(dot4(out[t][r].v, first[t], a), second[t], b);
        }
    }
}

// out[t][r] lane c = sum over a group of table value(c, k) * rows[r][k]: 128 is added to the values and taken
// from the sum, of which `sums` are the row codes' sums.
template <class Codes, int kRows, int kTiles>
inline void dot_table(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&sums)[kRows],
                      I32x8 (&out)[kTiles][kRows]) {
    int32_t start[kRows];
    for (int r = 0; r < kRows; ++r) start[r] = -kTableOffset * sums[r];
    dot_codes<Codes, 0, 8>(group, rows, start, out);
}

#include "products_pairs.h"

// Independent products in registers as wide as the path's.
inline double peak_int8_loop(int64_t iterations) {
#if defined(OCTAVO_SIXTEEN_LANES)
    __m512i acc[12];
    for (int i = 0; i < 12; ++i) acc[i] = _mm512_set1_epi32(i);
    __m512i w = _mm512_set1_epi8(3);
    const auto dot = [](__m512i sum, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sum, a, b); };
#else
    __m256i acc[12];
    for (int i = 0; i < 12; ++i) acc[i] = _mm256_set1_epi32(i);
    __m256i w = _mm256_set1_epi8(3);
    const auto dot = dot4;
#endif
    for (int64_t n = 0; n < iterations; ++n) {
        asm volatile("" : "+v"(w));
        for (int i = 0; i < 12; ++i) acc[i] = dot(acc[i], w, w);
    }
    for (int i = 0; i < 12; ++i) asm volatile("" : "+v"(acc[i]));
    return static_cast<double>(iterations) * 12 * 2 * sizeof(w);
}

// vpdpbusd widens as it adds: nothing is gained by adding before.
inline double peak_int8_summed_loop(int64_t iterations) { return peak_int8_loop(iterations); }
