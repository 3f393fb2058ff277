// Integer products on AVX2. Included inside an anonymous namespace, after simd_avx2.h.

constexpr int kTableOffset = 0;
#include "planes_avx2.h"

constexpr RegisterTiles register_tiles(WeightType type) {
    const WeightLayout layout = weight_layout(type);
    if (layout.low_bits == 8) return {.packed = {4, 2}, .unpack_from = 8, .unpacked = {2, 4}};
    if (layout.table) return {.packed = {4, 2}, .unpack_from = 16};
    if (layout.high_bits > 0)
        return {.packed = {4, 2}, .unpack_from = 8, .unpacked = {2, layout.sub_scales == 2 ? 4 : 2}};
    return {.packed = {4, layout.low_bits == 4 ? 4 : 2}};
}

// out[t][r] lane c = start[r] + sum over steps [kFirst, kLast) of four k each of code(c, k) * rows[r][k], for
// 8 columns of tile t. |row code| <= 127: as many pairs are added in 16 bits as the largest code allows.
template <class Codes, int kFirst, int kLast, int kRows, int kTiles>
inline void dot_codes(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&start)[kRows],
                      I32x8 (&out)[kTiles][kRows]) {
    constexpr int kMost = 32767 / (2 * 127 * weight_layout(Codes::kType).largest_factor()) / 2 * 2;
    constexpr int kSteps = kMost < kLast - kFirst ? kMost : kLast - kFirst;  // added in 16 bits
    static_assert((kLast - kFirst) % kSteps == 0);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[kTiles][kRows] = {};
    CodeReader<Codes, kFirst> codes[kTiles];
    for (int t = 0; t < kTiles; ++t) codes[t].start(group + t * Codes::kTileBytes);
    for (int r = 0; r < kRows; ++r)
        for (int t = 0; t < kTiles; ++t) out[t][r] = broadcast(start[r]);
    for (int chunk = kFirst; chunk < kLast; chunk += kSteps) {
        int step = chunk;
        do {
            __m256i first[kTiles], second[kTiles];
            for (int t = 0; t < kTiles; ++t) codes[t].next(first[t], second[t]);
            for (int r = 0; r < kRows; ++r) {
                const __m256i a = broadcast4(rows[r] + 4 * step), b = broadcast4(rows[r] + 4 * step + 4);
                for (int t = 0; t < kTiles; ++t) {
                    const __m256i pair = _mm256_add_epi16(_mm256_maddubs_epi16(first[t], a),
                                                          _mm256_maddubs_epi16(second[t], b));
                    sum[t][r] = step == chunk ? pair : _mm256_add_epi16(sum[t][r], pair);
                }
            }
        } while ((step += 2) < chunk + kSteps);
        for (int r = 0; r < kRows; ++r) {
            for (int t = 0; t < kTiles; ++t) {
                const __m256i wide = _mm256_madd_epi16(sum[t][r], ones);
                out[t][r].v = _mm256_add_epi32(out[t][r].v, wide);
            }
        }
    }
}

// out[t][r] lane c = sum over a group of table value(c, k) * rows[r][k]. Each pair may fill 16 bits (2 * 127
// * 127), so each is widened. The last argument, sums of the row codes, serves paths with unsigned tables.
template <class Codes, int kRows, int kTiles>
inline void dot_table(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&)[kRows],
                      I32x8 (&out)[kTiles][kRows]) {
    const __m256i ones = _mm256_set1_epi16(1);
    CodeReader<Codes, 0> codes[kTiles];
    for (int t = 0; t < kTiles; ++t) codes[t].start(group + t * Codes::kTileBytes);
    for (int r = 0; r < kRows; ++r)
        for (int t = 0; t < kTiles; ++t) out[t][r] = zero_i32();
    for (int step = 0; step < 8; step += 2) {
        __m256i values[2][kTiles];
        for (int t = 0; t < kTiles; ++t) codes[t].next(values[0][t], values[1][t]);
        for (int i = 0; i < 2; ++i) {
            for (int r = 0; r < kRows; ++r) {
                const __m256i a = broadcast4(rows[r] + 4 * (step + i));
                for (int t = 0; t < kTiles; ++t) {
                    const __m256i pair = _mm256_maddubs_epi16(_mm256_abs_epi8(values[i][t]),
                                                              _mm256_sign_epi8(a, values[i][t]));
                    out[t][r].v = _mm256_add_epi32(out[t][r].v, _mm256_madd_epi16(pair, ones));
                }
            }
        }
    }
}

// sum + a . b in pairs of 16 bits.
inline __m256i dot2(__m256i sum, __m256i a, __m256i b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
inline I32x8 dot2(I32x8 sum, I16x16 a, I16x16 b) { return {dot2(sum.v, a.v, b.v)}; }

#include "products_pairs.h"

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

// Eight products of 4-bit codes are added in 16 bits before one instruction widens them, as in dot_codes.
inline double peak_int8_summed_loop(int64_t iterations) {
    __m256i acc[4], w[4];
    for (int i = 0; i < 4; ++i) acc[i] = w[i] = _mm256_set1_epi8(static_cast<char>(i + 1));
    __m256i a = _mm256_set1_epi8(3);
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t n = 0; n < iterations; ++n) {
        __m256i sum[4] = {};
        for (int step = 0; step < 8; ++step) {
            asm volatile("" : "+x"(a));
            for (int i = 0; i < 4; ++i) {
                const __m256i pair = _mm256_maddubs_epi16(w[i], a);
                sum[i] = step == 0 ? pair : _mm256_add_epi16(sum[i], pair);
                asm volatile("" : "+x"(sum[i]));  // else GCC 12 adds in another order and spills
            }
        }
        for (int i = 0; i < 4; ++i) acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(sum[i], ones));
    }
    for (int i = 0; i < 4; ++i) asm volatile("" : "+x"(acc[i]));
    return static_cast<double>(iterations) * 4 * 8 * 64;
}
