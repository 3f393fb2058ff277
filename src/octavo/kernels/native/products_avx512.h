// Integer products with vpdpbusd, 512 bits wide: sixteen columns a register, for many rows. Codes are read
// packed where they are plain 4 bits or 8, else unpacked. Included inside an anonymous namespace, after
// simd_avx512.h and products_vnni.h.

// The first `count` columns of a tile, which may be fewer than it has, or none, or more.
inline void write_columns(float* out, int count, bool accumulate, F32x16 value) {
    const __mmask16 mask = count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
    if (accumulate) value.v = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), value.v);
    _mm512_mask_storeu_ps(out, mask, value.v);
}

inline __m512i broadcast4_512(const void* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

// Steps kStep and kStep + 1 of a group: unsigned codes, or the table's values plus kTableOffset.
template <class Codes>
inline void two_steps(const uint8_t* group, int step, __m512i& first, __m512i& second) {
    if constexpr (Codes::kUnpacked) {
        first = _mm512_loadu_si512(group + step * kVectorBytes);
        second = _mm512_loadu_si512(group + (step + 1) * kVectorBytes);
    } else {
        static_assert(weight_layout(Codes::kType).low_bits == 4 &&
                      weight_layout(Codes::kType).high_bits == 0);
        const __m512i low = _mm512_set1_epi8(15), both = _mm512_loadu_si512(group + step / 2 * kVectorBytes);
        first = _mm512_and_si512(both, low);
        second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        if constexpr (weight_layout(Codes::kType).table) {
            const __m512i table = _mm512_broadcast_i32x4(_mm256_castsi256_si128(table_values()));
            first = _mm512_shuffle_epi8(table, first);
            second = _mm512_shuffle_epi8(table, second);
        }
    }
}

template <class Codes, int kFirst, int kLast, int kRows, int kTiles>
inline void dot_codes(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&start)[kRows],
                      I32x16 (&out)[kTiles][kRows]) {
    for (int r = 0; r < kRows; ++r)
        for (int t = 0; t < kTiles; ++t) out[t][r].v = _mm512_set1_epi32(start[r]);
    for (int step = kFirst; step < kLast; step += 2) {
        __m512i first[kTiles], second[kTiles];
        for (int t = 0; t < kTiles; ++t) two_steps<Codes>(group + 64 * t, step, first[t], second[t]);
        for (int r = 0; r < kRows; ++r) {
            const __m512i a = broadcast4_512(rows[r] + 4 * step), b = broadcast4_512(rows[r] + 4 * step + 4);
            for (int t = 0; t < kTiles; ++t)
                out[t][r].v =
                    _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(out[t][r].v, first[t], a), second[t], b);
        }
    }
}

template <class Codes, int kRows, int kTiles>
inline void dot_table(const uint8_t* group, const int8_t* const (&rows)[kRows], const int32_t (&sums)[kRows],
                      I32x16 (&out)[kTiles][kRows]) {
    int32_t start[kRows];
    for (int r = 0; r < kRows; ++r) start[r] = -kTableOffset * sums[r];
    dot_codes<Codes, 0, 8>(group, rows, start, out);
}

template <class Codes, int kRows, int kTiles>
inline void dot_8bit(const uint8_t* codes, const int16_t* const (&rows)[kRows],
                     I32x16 (&out)[kTiles][kRows]) {
    for (int t = 0; t < kTiles; ++t)
        for (int r = 0; r < kRows; ++r) out[t][r].v = _mm512_setzero_si512();
    for (int j = 0; j < 16; ++j) {
        __m512i w[kTiles];
        for (int t = 0; t < kTiles; ++t)
            w[t] = _mm512_cvtepi8_epi16(load32(codes + 32 * t + j * kVectorBytes / 2));
        for (int r = 0; r < kRows; ++r) {
            const __m512i a = broadcast4_512(rows[r] + 2 * j);
            for (int t = 0; t < kTiles; ++t) out[t][r].v = _mm512_dpwssd_epi32(out[t][r].v, w[t], a);
        }
    }
}

template <class Ints, class Codes>
    requires std::is_same_v<Ints, I32x16>
inline I32x16 wide_values(const uint8_t* group, const WideCode& wide) {
    constexpr WeightLayout kLayout = weight_layout(Codes::kType);
    const auto lanes = [](const uint8_t* from, int shift, int count) {
        return _mm512_and_si512(_mm512_srlv_epi32(_mm512_loadu_si512(from), _mm512_set1_epi32(shift)),
                                _mm512_set1_epi32((1 << count) - 1));
    };
    __m512i code = Codes::kUnpacked ? lanes(group + wide.at / 4u * kVectorBytes, wide.byte_shift, 8)
                                    : lanes(group + wide.nibble_offset, wide.nibble_shift, 4);
    if constexpr (kLayout.table && !Codes::kUnpacked) {
        const __m512i table = _mm512_broadcast_i32x4(_mm256_castsi256_si128(table_values()));
        code = _mm512_and_si512(_mm512_shuffle_epi8(table, code), _mm512_set1_epi32(255));
    }
    if constexpr (kLayout.table) code = _mm512_sub_epi32(code, _mm512_set1_epi32(kTableOffset));
    return {code};
}

inline I32x16 times_code(I32x16 v, const WideCode& wide) {
    return {_mm512_madd_epi16(v.v, broadcast4_512(&wide))};
}
