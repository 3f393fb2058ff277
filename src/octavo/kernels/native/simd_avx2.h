// Eight lanes on AVX2 + FMA + F16C. Included inside an anonymous namespace: nothing here may have external
// linkage.

struct F32x8 {
    __m256 v;
};
struct I32x8 {
    __m256i v;
};

// Eight lanes of two int16 each.
struct I16x16 {
    __m256i v;
};

constexpr int kAccumulators = 12;    // that 16 registers hold beside what is added to them
constexpr int kWidenHalvesFrom = 0;  // never: one instruction widens a register of them

inline F32x8 zero_f32() { return {_mm256_setzero_ps()}; }
inline F32x8 broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline F32x8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F32x8 a) { _mm256_storeu_ps(p, a.v); }
inline F32x8 load(const Half* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline F32x8 load(const BFloat* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
inline void store(Half* p, F32x8 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline F32x8 fma(F32x8 a, F32x8 b, F32x8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x8 add(F32x8 a, F32x8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F32x8 sub(F32x8 a, F32x8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F32x8 mul(F32x8 a, F32x8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F32x8 div(F32x8 a, F32x8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F32x8 max(F32x8 a, F32x8 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F32x8 min(F32x8 a, F32x8 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F32x8 abs(F32x8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
// 0 where x < limit, else a: also where x is NaN.
inline F32x8 zero_where_below(F32x8 a, F32x8 x, F32x8 limit) {
    return {_mm256_and_ps(a.v, _mm256_cmp_ps(x.v, limit.v, _CMP_NLT_UQ))};
}
inline I32x8 round_to_int(F32x8 a) { return {_mm256_cvtps_epi32(a.v)}; }
inline F32x8 to_float(I32x8 a) { return {_mm256_cvtepi32_ps(a.v)}; }
// 2^n for n in [-126, 127].
inline F32x8 power_of_two(I32x8 n) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.v, _mm256_set1_epi32(127)), 23))};
}
inline I32x8 zero_i32() { return {_mm256_setzero_si256()}; }
inline I32x8 broadcast(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline I32x8 add(I32x8 a, I32x8 b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline I32x8 sub(I32x8 a, I32x8 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline I32x8 mul(I32x8 a, I32x8 b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
// Bits of a where mask has them, and where it has none.
inline I32x8 keep(I32x8 a, I32x8 mask) { return {_mm256_and_si256(a.v, mask.v)}; }
inline I32x8 drop(I32x8 a, I32x8 mask) { return {_mm256_andnot_si256(mask.v, a.v)}; }
inline I32x8 load(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
inline I32x8 load(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline I16x16 load_pairs(const int8_t* p) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline I16x16 broadcast_pair(const int16_t* p) {
    int32_t both;
    __builtin_memcpy(&both, p, 4);
    return {_mm256_set1_epi32(both)};
}
// Bits [from, from + count) of each lane.
inline I32x8 bits(I32x8 a, int from, int count) {
    return {_mm256_and_si256(_mm256_srli_epi32(a.v, from), _mm256_set1_epi32((1 << count) - 1))};
}
inline void store(int32_t* p, I32x8 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }

// Saturated to int16, in order.
inline void store_narrow(int16_t* p, I32x8 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1)));
}

// The largest lane; where one is NaN, any.
inline float max_lanes(F32x8 a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
// No lane is anything but 0; one that is NaN is.
inline bool all_zero(F32x8 a) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a.v, _mm256_setzero_ps(), _CMP_NEQ_UQ)) == 0;
}
// The first lane of a that equals x, 8 if none does.
inline int first_lane_equal(F32x8 a, float x) {
    const int equal = _mm256_movemask_ps(_mm256_cmp_ps(a.v, _mm256_set1_ps(x), _CMP_EQ_OQ));
    return __builtin_ctz(equal | 256);
}
// a with 0 in that lane; a where there is no such lane.
inline F32x8 without_lane(F32x8 a, int lane) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(lanes, _mm256_set1_epi32(lane))), a.v)};
}
inline int32_t sum_lanes(I32x8 a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}
inline void store_codes(int16_t* p, const I32x8 (&v)[4]) {
    for (int i = 0; i < 2; ++i) {
        const __m256i pairs = _mm256_packs_epi32(v[2 * i].v, v[2 * i + 1].v);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16 * i), _mm256_permute4x64_epi64(pairs, 0xd8));
    }
}
inline void store_codes(int8_t* p, const I32x8 (&v)[4]) {
    const __m256i packed =
        _mm256_packs_epi16(_mm256_packs_epi32(v[0].v, v[1].v), _mm256_packs_epi32(v[2].v, v[3].v));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(packed, order));
}
