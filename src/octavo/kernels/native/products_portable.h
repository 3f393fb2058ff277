// Integer products in plain C++, the oracle of every other path. Included inside an anonymous namespace,
// after simd_portable.h.

constexpr int kRowsAtOnce = 4, kTilesAtOnce = 1;

template <int kRows, int kTiles, int kTileBytes>
inline void dot_4bit(const uint8_t* codes, const int8_t* const (&rows)[kRows],
                     const WideCode* const (&wide)[kRows], I32x8 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t, codes += kTileBytes) {
        for (int r = 0; r < kRows; ++r) {
            for (int c = 0; c < 8; ++c) {
                int32_t sum = 0;
                for (int j = 0; j < 4; ++j) {
                    const uint8_t* both = codes + 32 * j + 4 * c;
                    for (int i = 0; i < 4; ++i) {
                        sum += (both[i] & 15) * rows[r][8 * j + i];
                        sum += (both[i] >> 4) * rows[r][8 * j + 4 + i];
                    }
                }
                uint32_t lane;
                __builtin_memcpy(&lane, codes + wide[r]->offset + 4 * c, 4);
                out[t][r].v[c] = sum + static_cast<int32_t>((lane >> wide[r]->shift) & 15u) * wide[r]->code;
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
