// Integer products on AArch64 with sdot, four columns a register. Codes are below 128, so that they are
// signed bytes as they are. Included inside an anonymous namespace, after simd_neon.h.

constexpr RegisterTiles register_tiles(WeightType type) {
    const WeightLayout layout = weight_layout(type);
    const bool decoded = layout.table || layout.high_bits > 0;  // by more than a mask
    return {.packed = {.rows = 4, .tiles = 1}, .unpack_from = decoded ? 8 : 0};
}

using Bytes = int8x16_t;
inline Bytes load16(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
inline void store16(uint8_t* p, Bytes a) { vst1q_u8(p, vreinterpretq_u8_s8(a)); }
inline I32x8 as_lanes(Bytes lo, Bytes hi) { return {vreinterpretq_s32_s8(lo), vreinterpretq_s32_s8(hi)}; }
inline Bytes as_bytes(int32x4_t lanes) { return vreinterpretq_s8_s32(lanes); }
inline Bytes table_values_of(Bytes codes) {
    return vqtbl1q_s8(vld1q_s8(kTableValues), vreinterpretq_u8_s8(codes));
}

// The codes of step kStep, four k of columns 4 half to 4 half + 3.
template <WeightType kType, int kStep>
inline Bytes plane_codes(const uint8_t* group, int half) {
    constexpr int kLow = weight_layout(kType).low_bits, kHigh = weight_layout(kType).high_bits;
    constexpr int kLowShift = plane_shift(kLow, 4 * kStep);
    uint8x16_t codes = vld1q_u8(group + plane_byte(kLow, 0, 4 * kStep) + 16 * half);
    if constexpr (kLowShift > 0) codes = vshrq_n_u8(codes, kLowShift);
    if constexpr (kLowShift + kLow < 8) codes = vandq_u8(codes, vdupq_n_u8((1 << kLow) - 1));
    if constexpr (kHigh > 0) {
        constexpr int kLeft = kLow - static_cast<int>(plane_shift(kHigh, 4 * kStep));
        uint8x16_t high =
            vld1q_u8(group + weight_layout(kType).high_plane() + plane_byte(kHigh, 0, 4 * kStep) + 16 * half);
        if constexpr (kLeft > 0) high = vshlq_n_u8(high, kLeft);
        if constexpr (kLeft < 0) high = vshrq_n_u8(high, -kLeft);
        codes = vorrq_u8(codes, vandq_u8(high, vdupq_n_u8(((1 << kHigh) - 1) << kLow)));
    }
    return vreinterpretq_s8_u8(codes);
}

#include "planes_halves.h"

// out + products of four columns' bytes with the four bytes of lane kLane of `row`, a lane each.
template <int kLane>
inline I32x8 dot4(I32x8 out, int8x16_t lo, int8x16_t hi, int8x16_t row) {
    return {vdotq_laneq_s32(out.lo, lo, row, kLane), vdotq_laneq_s32(out.hi, hi, row, kLane)};
}

template <class Codes, int kStep, int kLast, int kRows>
inline void add_codes(const uint8_t* group, const int8_t* const (&rows)[kRows], I32x8 (&out)[kRows]) {
    if constexpr (kStep < kLast) {
        const Bytes lo = codes_of_step<Codes, kStep>(group, 0), hi = codes_of_step<Codes, kStep>(group, 1);
        for (int r = 0; r < kRows; ++r)
            out[r] = dot4<kStep % 4>(out[r], lo, hi, vld1q_s8(rows[r] + kStep / 4 * 16));
        add_codes<Codes, kStep + 1, kLast>(group, rows, out);
    }
}

// out[t][r] lane c = start[r] + sum over steps [kFirst, kLast) of four k each of code(c, k) * rows[r][k], for
// 8 columns of tile t.
template <class Codes, int kFirst, int kLast, int kRows, int kTiles>
inline void dot_codes(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&start)[kRows],
                      I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t, group += Codes::kTileBytes) {
        for (int r = 0; r < kRows; ++r) out[t][r] = broadcast(start[r]);
        add_codes<Codes, kFirst, kLast>(group, rows, out[t]);
    }
}

// out[t][r] lane c = sum over a group of table value(c, k) * rows[r][k]. The last argument, sums of the row
// codes, serves paths with unsigned tables.
template <class Codes, int kRows, int kTiles>
inline void dot_table(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&)[kRows],
                      I32x8 (&out)[kTiles][kRows]) {
    const int32_t start[kRows] = {};
    dot_codes<Codes, 0, 8>(group, rows, start, out);
}

// Lanes of v times the wide code.
inline I32x8 times_code(I32x8 v, const WideCode& wide) { return mul(v, broadcast(int32_t{wide.code})); }

// 16 codes of a row, each 256 * high + low + 128, high and low signed bytes.
struct CodeBytes {
    int8x16_t high, low;
};
inline CodeBytes code_bytes(const int16_t* row) {
    const int8x16_t first = vreinterpretq_s8_s16(vld1q_s16(row));
    const int8x16_t second = vreinterpretq_s8_s16(vld1q_s16(row + 8));
    return {vuzp2q_s8(first, second), veorq_s8(vuzp1q_s8(first, second), vdupq_n_s8(-128))};
}

// Four k, from pairs 2 kStep and 2 kStep + 1 on. `sums` are the columns' own, for the 128 of a row code.
template <int kStep, int kRows>
inline void add_bytes(const uint8_t* codes, const CodeBytes (&rows)[kRows], I32x8 (&high)[kRows],
                      I32x8 (&low)[kRows], I32x8& sums) {
    if constexpr (kStep < 4) {
        const int16x8_t first = vreinterpretq_s16_u8(vld1q_u8(codes + kVectorBytes * kStep));
        const int16x8_t second =
            vreinterpretq_s16_u8(vld1q_u8(codes + kVectorBytes * kStep + kVectorBytes / 2));
        const int8x16_t left = vreinterpretq_s8_s16(vzip1q_s16(first, second));
        const int8x16_t right = vreinterpretq_s8_s16(vzip2q_s16(first, second));
        const int8x16_t ones = vdupq_n_s8(1);
        sums = {vdotq_s32(sums.lo, left, ones), vdotq_s32(sums.hi, right, ones)};
        for (int r = 0; r < kRows; ++r) {
            high[r] = dot4<kStep>(high[r], left, right, rows[r].high);
            low[r] = dot4<kStep>(low[r], left, right, rows[r].low);
        }
        add_bytes<kStep + 1>(codes, rows, high, low, sums);
    }
}

// out[t][r] lane c = sum over 32 k of codes(c, k) * rows[r][k], pairs of k. sdot
// multiplies bytes: those of a row's codes are multiplied apart, and their sums put together.
template <class Codes, int kRows, int kTiles>
inline void dot_8bit(const uint8_t* codes, const int16_t* const (&rows)[kRows], I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t, codes += Codes::kTileBytes) {
        I32x8 high[kRows], low[kRows], sums = zero_i32();
        for (int r = 0; r < kRows; ++r) high[r] = low[r] = zero_i32();
        for (int half = 0; half < 2; ++half) {
            CodeBytes bytes[kRows];
            for (int r = 0; r < kRows; ++r) bytes[r] = code_bytes(rows[r] + 16 * half);
            add_bytes<0>(codes + 4 * kVectorBytes * half, bytes, high, low, sums);
        }
        for (int r = 0; r < kRows; ++r) {
            const I32x8 rest = add(low[r], shift_left<7>(sums));
            out[t][r] = add(rest, shift_left<8>(high[r]));
        }
    }
}

inline double peak_int8_loop(int64_t iterations) {
    I32x8 acc[12];
    for (int i = 0; i < 12; ++i) acc[i] = broadcast(i);
    int8x16_t w = vdupq_n_s8(3);
    for (int64_t n = 0; n < iterations; ++n) {
        asm volatile("" : "+w"(w));
        for (int i = 0; i < 12; ++i) acc[i] = {vdotq_s32(acc[i].lo, w, w), vdotq_s32(acc[i].hi, w, w)};
    }
    for (int i = 0; i < 12; ++i) asm volatile("" : "+w"(acc[i].lo), "+w"(acc[i].hi));
    return static_cast<double>(iterations) * 12 * 64;
}

// sdot widens as it adds: nothing is gained by adding before.
inline double peak_int8_summed_loop(int64_t iterations) { return peak_int8_loop(iterations); }
