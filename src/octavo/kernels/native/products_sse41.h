// Integer products on SSE4.1, four columns a register. Included inside an anonymous namespace, after
// simd_sse41.h.

constexpr RegisterTiles register_tiles(WeightType type) {
    const WeightLayout layout = weight_layout(type);
    const bool decoded = layout.table || layout.high_bits > 0;  // by more than a mask
    return {.packed = {.rows = 4, .tiles = 1}, .unpack_from = decoded ? 8 : 0};
}

using Bytes = __m128i;
inline Bytes load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store16(uint8_t* p, Bytes a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a); }
inline I32x8 as_lanes(Bytes lo, Bytes hi) { return {lo, hi}; }
inline Bytes as_bytes(__m128i lanes) { return lanes; }
inline Bytes table_values_of(Bytes codes) { return _mm_shuffle_epi8(load16(kTableValues), codes); }

// Sums that stay in registers: GCC regroups integer additions of an unrolled loop, computes all products
// first and spills them (152 times a group of four rows).
inline void add_in_place(__m128i& sum, __m128i x) {
    sum = _mm_add_epi32(sum, x);
    asm("" : "+x"(sum));
}
inline void add_in_place16(__m128i& sum, __m128i x) {
    sum = _mm_add_epi16(sum, x);
    asm("" : "+x"(sum));
}

// Bytes of 16-bit lanes moved to the left by kBy bits, or to the right by -kBy; the caller masks what comes
// from neighbours.
template <int kBy>
inline __m128i moved(__m128i bytes) {
    if constexpr (kBy > 0)
        return _mm_slli_epi16(bytes, kBy);
    else if constexpr (kBy < 0)
        return _mm_srli_epi16(bytes, -kBy);
    else
        return bytes;
}

// The unsigned codes of step kStep, four k of columns 4 half to 4 half + 3.
template <WeightType kType, int kStep>
inline Bytes plane_codes(const uint8_t* group, int half) {
    constexpr int kLow = weight_layout(kType).low_bits, kHigh = weight_layout(kType).high_bits;
    const uint8_t* low = group + plane_byte(kLow, 0, 4 * kStep) + 16 * half;
    __m128i codes = _mm_and_si128(moved<-static_cast<int>(plane_shift(kLow, 4 * kStep))>(load16(low)),
                                  _mm_set1_epi8((1 << kLow) - 1));
    if constexpr (kHigh > 0) {
        const uint8_t* high =
            group + weight_layout(kType).high_plane() + plane_byte(kHigh, 0, 4 * kStep) + 16 * half;
        codes = _mm_or_si128(
            codes, _mm_and_si128(moved<kLow - static_cast<int>(plane_shift(kHigh, 4 * kStep))>(load16(high)),
                                 _mm_set1_epi8(static_cast<char>(((1 << kHigh) - 1) << kLow))));
    }
    return codes;
}

#include "planes_halves.h"

// The four activation codes of step kStep in every lane.
template <int kStep>
inline __m128i activations_of_step(const int8_t* row) {
    return _mm_shuffle_epi32(load16(row + kStep / 4 * 16), kStep % 4 * 0x55);
}

// Adds steps [kStep, kLast) to sums of 16 bits.
template <class Codes, int kStep, int kLast, int kRows>
[[gnu::always_inline]] inline void add_steps(const uint8_t* group, const int8_t* const (&rows)[kRows],
                                             __m128i (&sum)[kRows][2]) {
    if constexpr (kStep < kLast) {
        const __m128i lo = codes_of_step<Codes, kStep>(group, 0), hi = codes_of_step<Codes, kStep>(group, 1);
        for (int r = 0; r < kRows; ++r) {
            const __m128i a = activations_of_step<kStep>(rows[r]);
            add_in_place16(sum[r][0], _mm_maddubs_epi16(lo, a));
            add_in_place16(sum[r][1], _mm_maddubs_epi16(hi, a));
        }
        add_steps<Codes, kStep + 1, kLast>(group, rows, sum);
    }
}

// Adds steps [kFirst, kLast) to out: as many are added in 16 bits first as the largest code allows.
template <class Codes, int kFirst, int kLast, int kRows>
[[gnu::always_inline]] inline void add_codes(const uint8_t* group, const int8_t* const (&rows)[kRows],
                                             I32x8 (&out)[kRows]) {
    constexpr int kMost = 32767 / (2 * 127 * weight_layout(Codes::kType).largest_factor());
    constexpr int kNext = kLast - kFirst > kMost ? kFirst + kMost : kLast;
    const __m128i ones = _mm_set1_epi16(1);
    __m128i sum[kRows][2] = {};
    add_steps<Codes, kFirst, kNext>(group, rows, sum);
    for (int r = 0; r < kRows; ++r)
        out[r] = add(out[r], {_mm_madd_epi16(sum[r][0], ones), _mm_madd_epi16(sum[r][1], ones)});
    if constexpr (kNext < kLast) add_codes<Codes, kNext, kLast>(group, rows, out);
}

// out[t][r] lane c = start[r] + sum over steps [kFirst, kLast) of four k each of code(c, k) * rows[r][k], for
// 8 columns of tile t; |row code| <= 127. One tile after another: 16 registers hold the sums of one.
template <class Codes, int kFirst, int kLast, int kRows, int kTiles>
inline void dot_codes(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&start)[kRows],
                      I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t, group += Codes::kTileBytes) {
        for (int r = 0; r < kRows; ++r) out[t][r] = broadcast(start[r]);
        add_codes<Codes, kFirst, kLast>(group, rows, out[t]);
    }
}

// Lanes of v, which fit 16 bits, times the wide code.
inline I32x8 times_code(I32x8 v, const WideCode& wide) {
    int32_t pair;  // the code and 0, which meets the upper halves
    __builtin_memcpy(&pair, &wide, 4);
    return {_mm_madd_epi16(v.lo, _mm_set1_epi32(pair)), _mm_madd_epi16(v.hi, _mm_set1_epi32(pair))};
}

template <class Codes, int kStep, int kRows>
[[gnu::always_inline]] inline void add_table_steps(const uint8_t* group, const int8_t* const (&rows)[kRows],
                                                   I32x8 (&out)[kRows]) {
    if constexpr (kStep < 8) {
        const __m128i ones = _mm_set1_epi16(1);
        const __m128i lo = codes_of_step<Codes, kStep>(group, 0);
        const __m128i hi = codes_of_step<Codes, kStep>(group, 1);
        const __m128i lo_size = _mm_abs_epi8(lo), hi_size = _mm_abs_epi8(hi);
        for (int r = 0; r < kRows; ++r) {
            const __m128i a = activations_of_step<kStep>(rows[r]);
            add_in_place(out[r].lo, _mm_madd_epi16(_mm_maddubs_epi16(lo_size, _mm_sign_epi8(a, lo)), ones));
            add_in_place(out[r].hi, _mm_madd_epi16(_mm_maddubs_epi16(hi_size, _mm_sign_epi8(a, hi)), ones));
        }
        add_table_steps<Codes, kStep + 1>(group, rows, out);
    }
}

// out[t][r] lane c = sum over a group of table value(c, k) * rows[r][k]. Each pair may fill 16 bits (2 * 127
// * 127), so each is widened. The last argument, sums of the row codes, serves paths with unsigned tables.
template <class Codes, int kRows, int kTiles>
inline void dot_table(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&)[kRows],
                      I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t, group += Codes::kTileBytes) {
        I32x8 sum[kRows];
        for (int r = 0; r < kRows; ++r) sum[r] = zero_i32();
        add_table_steps<Codes, 0>(group, rows, sum);
        for (int r = 0; r < kRows; ++r) out[t][r] = sum[r];
    }
}

template <int kPair, int kRows>
[[gnu::always_inline]] inline void add_pairs(const uint8_t* codes, const int16_t* const (&rows)[kRows],
                                             I32x8 (&out)[kRows]) {
    if constexpr (kPair < 16) {
        const __m128i bytes = load16(codes + kVectorBytes / 2 * kPair);
        const __m128i lo = _mm_cvtepi8_epi16(bytes), hi = _mm_cvtepi8_epi16(_mm_srli_si128(bytes, 8));
        for (int r = 0; r < kRows; ++r) {
            const __m128i a = _mm_shuffle_epi32(load16(rows[r] + kPair / 4 * 8), kPair % 4 * 0x55);
            add_in_place(out[r].lo, _mm_madd_epi16(lo, a));
            add_in_place(out[r].hi, _mm_madd_epi16(hi, a));
        }
        add_pairs<kPair + 1>(codes, rows, out);
    }
}

// out[t][r] lane c = sum over 32 k of codes(c, k) * rows[r][k], pairs of k.
template <class Codes, int kRows, int kTiles>
inline void dot_8bit(const uint8_t* codes, const int16_t* const (&rows)[kRows], I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t, codes += Codes::kTileBytes) {
        I32x8 sum[kRows];
        for (int r = 0; r < kRows; ++r) sum[r] = zero_i32();
        add_pairs<0>(codes, rows, sum);
        for (int r = 0; r < kRows; ++r) out[t][r] = sum[r];
    }
}

inline double peak_int8_loop(int64_t iterations) {
    __m128i acc[8];
    for (int i = 0; i < 8; ++i) acc[i] = _mm_set1_epi32(i);
    __m128i w = _mm_set1_epi8(3);
    const __m128i ones = _mm_set1_epi16(1);
    for (int64_t n = 0; n < iterations; ++n) {
        asm volatile("" : "+x"(w));
        for (int i = 0; i < 8; ++i)
            acc[i] = _mm_add_epi32(acc[i], _mm_madd_epi16(_mm_maddubs_epi16(w, acc[i]), ones));
    }
    for (int i = 0; i < 8; ++i) asm volatile("" : "+x"(acc[i]));
    return static_cast<double>(iterations) * 8 * 32;
}

// Eight products of 4-bit codes are added in 16 bits before one instruction widens them, as in add_codes.
inline double peak_int8_summed_loop(int64_t iterations) {
    __m128i acc[4], w[4];
    for (int i = 0; i < 4; ++i) acc[i] = w[i] = _mm_set1_epi8(static_cast<char>(i + 1));
    __m128i a = _mm_set1_epi8(3);
    const __m128i ones = _mm_set1_epi16(1);
    for (int64_t n = 0; n < iterations; ++n) {
        __m128i sum[4] = {};
        for (int step = 0; step < 8; ++step) {
            asm volatile("" : "+x"(a));
            for (int i = 0; i < 4; ++i) add_in_place16(sum[i], _mm_maddubs_epi16(w[i], a));
        }
        for (int i = 0; i < 4; ++i) acc[i] = _mm_add_epi32(acc[i], _mm_madd_epi16(sum[i], ones));
    }
    for (int i = 0; i < 4; ++i) asm volatile("" : "+x"(acc[i]));
    return static_cast<double>(iterations) * 4 * 8 * 32;
}
