// Sixteen lanes on AVX-512. Included inside an anonymous namespace, after simd_avx2.h: nothing here may have
// external linkage.

struct F32x16 {
    __m512 v;
};
struct I32x16 {
    __m512i v;
};
// Sixteen lanes of two int16 each.
struct I16x32 {
    __m512i v;
};

constexpr int kWideAccumulators = 24;  // that 32 registers hold beside what is added to them

inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// 0 where x < limit, else a: also where x is NaN.
inline F32x16 zero_where_below(F32x16 a, F32x16 x, F32x16 limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
inline I32x16 round_to_int(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// 2^n for n in [-126, 127].
inline F32x16 power_of_two(I32x16 n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
inline I32x16 add(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32x16 mul(I32x16 a, I32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I32x16 keep(I32x16 a, I32x16 mask) { return {_mm512_and_si512(a.v, mask.v)}; }
inline I32x16 drop(I32x16 a, I32x16 mask) { return {_mm512_andnot_si512(mask.v, a.v)}; }
inline I32x16 bits(I32x16 a, int from, int count) {
    const __m512i shifted = _mm512_srl_epi32(a.v, _mm_cvtsi32_si128(from));
    return {_mm512_and_si512(shifted, _mm512_set1_epi32((1 << count) - 1))};
}
inline void store(int32_t* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }
inline I32x16 dot2(I32x16 sum, I16x32 a, I16x32 b) { return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)}; }
// Saturated to int16, in order.
inline void store_narrow(int16_t* p, I32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(a.v));
}
// The largest lane; where one is NaN, any.
inline float max_lanes(F32x16 a) {
    return max_lanes(max(F32x8{_mm512_castps512_ps256(a.v)}, F32x8{_mm512_extractf32x8_ps(a.v, 1)}));
}
// total + lanes 0 to 7, then + lanes 8 to 15.
inline F32x8 add_halves(F32x8 total, F32x16 a) {
    return add(add(total, F32x8{_mm512_castps512_ps256(a.v)}), F32x8{_mm512_extractf32x8_ps(a.v, 1)});
}

struct Lanes16 {
    using Floats = F32x16;
    using Ints = I32x16;
    using Pairs = I16x32;
    static constexpr int kColumns = 16;
    static constexpr int kRegisters = kWideAccumulators;
    static Floats zeros() { return {_mm512_setzero_ps()}; }
    static Ints int_zeros() { return {_mm512_setzero_si512()}; }
    static Floats floats(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Ints ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
    static Floats halves(const Half* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    // Lanes 0 to 7 from a, 8 to 15 from b.
    static Floats halves(const Half* a, const Half* b) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
        return {_mm512_cvtph_ps(_mm256_inserti128_si256(
            _mm256_castsi128_si256(low), _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1))};
    }
    static Ints bytes(const int8_t* p) {
        return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
    static Pairs pairs(const int8_t* p) {
        return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static Pairs pairs(const int8_t* a, const int8_t* b) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
        return {_mm512_cvtepi8_epi16(_mm256_inserti128_si256(
            _mm256_castsi128_si256(low), _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1))};
    }
    static Pairs splat_pair(const int16_t* p) {
        int32_t both;
        __builtin_memcpy(&both, p, 4);
        return {_mm512_set1_epi32(both)};
    }
    static Floats splat(float x) { return {_mm512_set1_ps(x)}; }
    static Ints splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
};
