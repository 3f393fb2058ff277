// Integer products in plain C++, the oracle of every other path. Included inside an anonymous namespace,
// after simd_portable.h.

constexpr RegisterTiles register_tiles(WeightType) { return {.packed = {.rows = 4, .tiles = 1}}; }

// The unsigned code of value k of column c.
template <WeightType kType>
inline int32_t code_at(const uint8_t* group, int c, int k) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    const auto bits = [&](const uint8_t* plane, int count) {
        return plane[plane_byte(count, c, k)] >> plane_shift(count, k) & ((1 << count) - 1);
    };
    int32_t code = bits(group, kLayout.low_bits);
    if constexpr (kLayout.high_bits > 0)
        code |= bits(group + kLayout.high_plane(), kLayout.high_bits) << kLayout.low_bits;
    return code;
}

// Lane c = what the wide code meets in column c: the unsigned code, or the table's value.
template <class Ints, class Codes>
inline Ints wide_values(const uint8_t* group, const WideCode& wide) {
    I32x8 values;
    for (int c = 0; c < 8; ++c) {
        const int32_t code = code_at<Codes::kType>(group, c, wide.at);
        values.v[c] = weight_layout(Codes::kType).table ? kTableValues[code & 15] : code;
    }
    return values;
}

inline I32x8 times_code(I32x8 v, const WideCode& wide) {
    for (int c = 0; c < 8; ++c) v.v[c] *= wide.code;
    return v;
}

// out[t][r] lane c = start[r] + sum over steps [kFirst, kLast) of four k each of code(c, k) * rows[r][k], for
// 8 columns of tile t.
template <class Codes, int kFirst, int kLast, int kRows, int kTiles>
inline void dot_codes(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&start)[kRows],
                      I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t, group += Codes::kTileBytes) {
        for (int c = 0; c < 8; ++c) {
            int32_t codes[kGroup];
            for (int k = 4 * kFirst; k < 4 * kLast; ++k) codes[k] = code_at<Codes::kType>(group, c, k);
            for (int r = 0; r < kRows; ++r) {
                int32_t sum = start[r];
                for (int k = 4 * kFirst; k < 4 * kLast; ++k) sum += codes[k] * rows[r][k];
                out[t][r].v[c] = sum;
            }
        }
    }
}

// out[t][r] lane c = sum over a group of table value(c, k) * rows[r][k]. The last argument, sums of the row
// codes, serves paths with unsigned tables.
template <class Codes, int kRows, int kTiles>
inline void dot_table(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&)[kRows],
                      I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t, group += Codes::kTileBytes) {
        for (int c = 0; c < 8; ++c) {
            int32_t values[kGroup];
            for (int k = 0; k < kGroup; ++k) values[k] = kTableValues[code_at<Codes::kType>(group, c, k)];
            for (int r = 0; r < kRows; ++r) {
                int32_t sum = 0;
                for (int k = 0; k < kGroup; ++k) sum += values[k] * rows[r][k];
                out[t][r].v[c] = sum;
            }
        }
    }
}

template <class Codes, int kRows, int kTiles>
inline void dot_8bit(const uint8_t* codes, const int16_t* const (&rows)[kRows], I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t, codes += Codes::kTileBytes) {
        for (int r = 0; r < kRows; ++r) {
            for (int c = 0; c < 8; ++c) {
                int32_t sum = 0;
                for (int j = 0; j < 16; ++j) {
                    const int8_t* pair =
                        reinterpret_cast<const int8_t*>(codes) + kVectorBytes / 2 * j + 2 * c;
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

// Every product of this path is of 32 bits.
inline double peak_int8_summed_loop(int64_t iterations) { return peak_int8_loop(iterations); }
