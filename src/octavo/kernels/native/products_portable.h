// Integer products in plain C++, the oracle of every other path. Included inside an anonymous namespace,
// after simd_portable.h.

constexpr int kRowsAtOnce = 4, kTilesAtOnce = 1;

// The unsigned code of value k of column c.
template <WeightType kType>
inline int32_t code_at(const uint8_t* group, int c, int k) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    const auto bits = [&](const uint8_t* plane, int count) {
        return plane[plane_byte(count, c, k)] >> plane_shift(count, k) & ((1 << count) - 1);
    };
    int32_t code = bits(group, kLayout.low_bits);
    if constexpr (kLayout.high_bits > 0)
        code |= bits(group + 32 * kLayout.low_bits, kLayout.high_bits) << kLayout.low_bits;
    return code;
}

// Lane c = the code of the wide code's weight in column c.
template <WeightType kType>
inline I32x8 wide_values(const uint8_t* group, const WideCode& wide) {
    I32x8 values;
    for (int c = 0; c < 8; ++c) values.v[c] = code_at<kType>(group, c, wide.at);
    return values;
}

inline I32x8 times_code(I32x8 v, const WideCode& wide) {
    for (int c = 0; c < 8; ++c) v.v[c] *= wide.code;
    return v;
}

// out[t][r] lane c = start[r] + sum over steps [kFirst, kLast) of four k each of code(c, k) * rows[r][k], for
// 8 columns of tile t.
template <WeightType kType, int kFirst, int kLast, int kRows, int kTiles>
inline void dot_codes(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&start)[kRows],
                      I32x8 (&out)[kTiles][kRows]) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    for (int t = 0; t < kTiles; ++t, group += kLayout.group_bytes()) {
        for (int c = 0; c < 8; ++c) {
            int32_t codes[kGroup];
            for (int k = 4 * kFirst; k < 4 * kLast; ++k) codes[k] = code_at<kType>(group, c, k);
            for (int r = 0; r < kRows; ++r) {
                int32_t sum = start[r];
                for (int k = 4 * kFirst; k < 4 * kLast; ++k) sum += codes[k] * rows[r][k];
                out[t][r].v[c] = sum;
            }
        }
    }
}

template <int kRows, int kTiles, int kTileBytes>
inline void dot_8bit(const uint8_t* codes, const int16_t* const (&rows)[kRows], I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t, codes += kTileBytes) {
        for (int r = 0; r < kRows; ++r) {
            for (int c = 0; c < 8; ++c) {
                int32_t sum = 0;
                for (int j = 0; j < 16; ++j) {
                    const int8_t* pair = reinterpret_cast<const int8_t*>(codes) + 16 * j + 2 * c;
                    sum += pair[0] * rows[r][2 * j] + pair[1] * rows[r][2 * j + 1];
                }
                out[t][r].v[c] = sum;
            }
        }
    }
}

inline double peak_int8_loop(int64_t iterations) {
    int32_t acc[64];
    for (int i = 0; i < 64; ++i) acc[i] = i;
    for (int64_t n = 0; n < iterations; ++n) {
        for (int i = 0; i < 64; ++i) acc[i] = acc[i] * 3 + i;
        asm volatile("" : : "r"(acc) : "memory");
    }
    return static_cast<double>(iterations) * 64 * 2;
}
