// Eight lanes on SSE4.1 as two registers, lanes 0 to 3 and 4 to 7. There is no fused multiply-add: `fma`
// rounds twice, so results differ from the other paths' within the bounds that tests/kernels states. Included
// inside an anonymous namespace: nothing here may have external linkage.

struct F32x8 {
    __m128 lo, hi;
};
struct I32x8 {
    __m128i lo, hi;
};

// Eight lanes of two int16 each.
struct I16x16 {
    __m128i lo, hi;
};

constexpr int kAccumulators = 6;  // of eight lanes, that 16 registers hold beside what is added to them
// From this many query vectors on, halves are widened once for all of them: each takes a dozen instructions.
constexpr int kWidenHalvesFrom = 13;

inline F32x8 zero_f32() { return {_mm_setzero_ps(), _mm_setzero_ps()}; }
inline F32x8 broadcast(float x) { return {_mm_set1_ps(x), _mm_set1_ps(x)}; }
inline F32x8 load(const float* p) { return {_mm_loadu_ps(p), _mm_loadu_ps(p + 4)}; }
inline void store(float* p, F32x8 a) {
    _mm_storeu_ps(p, a.lo);
    _mm_storeu_ps(p + 4, a.hi);
}

// A half from its sign, exponent and mantissa where float has them: bits 31 and 27 to 13.
inline __m128 widened_half(__m128i bits) {
    const __m128i magnitude = _mm_and_si128(bits, _mm_set1_epi32(0x0fffe000));
    const __m128i large = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x0f7fffff));  // infinite or no number
    const __m128i exponent =
        _mm_add_epi32(_mm_set1_epi32(0x38000000), _mm_and_si128(large, _mm_set1_epi32(0x38000000)));
    const __m128i normal = _mm_add_epi32(magnitude, exponent);
    // Through an integer: as a float this would be a denormal, which counts as zero.
    const __m128 subnormal = _mm_mul_ps(_mm_cvtepi32_ps(magnitude), _mm_set1_ps(0x1p-37f));
    const __m128i small = _mm_cmplt_epi32(magnitude, _mm_set1_epi32(0x00800000));
    const __m128 value = _mm_blendv_ps(_mm_castsi128_ps(normal), subnormal, _mm_castsi128_ps(small));
    return _mm_or_ps(value, _mm_castsi128_ps(_mm_andnot_si128(_mm_set1_epi32(0x7fffffff), bits)));
}
[[gnu::always_inline]] inline F32x8 load(const Half* p) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), zero = _mm_setzero_si128();
    const __m128i kept = _mm_set1_epi32(static_cast<int>(0x8fffe000));
    const __m128i lo = _mm_and_si128(_mm_srai_epi32(_mm_unpacklo_epi16(zero, halves), 3), kept);
    const __m128i hi = _mm_and_si128(_mm_srai_epi32(_mm_unpackhi_epi16(zero, halves), 3), kept);
    // Twice the magnitude, so that normal halves become the negative numbers and those up to 0x6fff.
    const __m128i ordered = _mm_add_epi16(_mm_add_epi16(halves, halves), _mm_set1_epi16(0x7800));
    if (__builtin_expect(_mm_movemask_epi8(_mm_cmpgt_epi16(ordered, _mm_set1_epi16(0x6fff))), 0))
        return {widened_half(lo), widened_half(hi)};
    const __m128i exponent = _mm_set1_epi32(0x38000000);  // float's is 112 more
    return {_mm_castsi128_ps(_mm_add_epi32(lo, exponent)), _mm_castsi128_ps(_mm_add_epi32(hi, exponent))};
}
inline F32x8 load(const BFloat* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), zero = _mm_setzero_si128();
    return {_mm_castsi128_ps(_mm_unpacklo_epi16(zero, bits)),
            _mm_castsi128_ps(_mm_unpackhi_epi16(zero, bits))};
}

// The nearest half in the lower 16 bits, as float_to_half.
inline __m128i narrowed_half(__m128 x) {
    const __m128i bits = _mm_castps_si128(x);
    const __m128i magnitude = _mm_and_si128(bits, _mm_set1_epi32(0x7fffffff));
    const __m128i odd = _mm_and_si128(_mm_srli_epi32(magnitude, 13), _mm_set1_epi32(1));
    const __m128i rounded = _mm_add_epi32(_mm_add_epi32(magnitude, _mm_set1_epi32(0xfff - 0x38000000)), odd);
    // A half's last subnormal bit is the last bit of a float in [0.5, 1): the addition rounds to it.
    const __m128 half = _mm_set1_ps(0.5f);
    const __m128i subnormal = _mm_sub_epi32(_mm_castps_si128(_mm_add_ps(_mm_castsi128_ps(magnitude), half)),
                                            _mm_castps_si128(half));
    const __m128i small = _mm_cmplt_epi32(magnitude, _mm_set1_epi32(0x38800000));
    const __m128i infinite = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x477fefff));
    const __m128i no_number = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7f800000));
    __m128i result = _mm_blendv_epi8(_mm_srli_epi32(rounded, 13), subnormal, small);
    result = _mm_blendv_epi8(result, _mm_set1_epi32(0x7c00), infinite);
    result = _mm_or_si128(result, _mm_and_si128(no_number, _mm_set1_epi32(0x200)));
    return _mm_or_si128(result, _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(0x8000)));
}
inline void store(Half* p, F32x8 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi32(narrowed_half(a.lo), narrowed_half(a.hi)));
}

inline F32x8 add(F32x8 a, F32x8 b) { return {_mm_add_ps(a.lo, b.lo), _mm_add_ps(a.hi, b.hi)}; }
inline F32x8 sub(F32x8 a, F32x8 b) { return {_mm_sub_ps(a.lo, b.lo), _mm_sub_ps(a.hi, b.hi)}; }
inline F32x8 mul(F32x8 a, F32x8 b) { return {_mm_mul_ps(a.lo, b.lo), _mm_mul_ps(a.hi, b.hi)}; }
inline F32x8 div(F32x8 a, F32x8 b) { return {_mm_div_ps(a.lo, b.lo), _mm_div_ps(a.hi, b.hi)}; }
inline F32x8 fma(F32x8 a, F32x8 b, F32x8 c) { return add(mul(a, b), c); }
inline F32x8 max(F32x8 a, F32x8 b) { return {_mm_max_ps(a.lo, b.lo), _mm_max_ps(a.hi, b.hi)}; }
inline F32x8 min(F32x8 a, F32x8 b) { return {_mm_min_ps(a.lo, b.lo), _mm_min_ps(a.hi, b.hi)}; }
inline F32x8 abs(F32x8 a) {
    const __m128 sign = _mm_set1_ps(-0.0f);
    return {_mm_andnot_ps(sign, a.lo), _mm_andnot_ps(sign, a.hi)};
}
// 0 where x < limit, else a: also where x is NaN.
inline F32x8 zero_where_below(F32x8 a, F32x8 x, F32x8 limit) {
    return {_mm_and_ps(a.lo, _mm_cmpnlt_ps(x.lo, limit.lo)), _mm_and_ps(a.hi, _mm_cmpnlt_ps(x.hi, limit.hi))};
}
inline I32x8 round_to_int(F32x8 a) { return {_mm_cvtps_epi32(a.lo), _mm_cvtps_epi32(a.hi)}; }
inline F32x8 to_float(I32x8 a) { return {_mm_cvtepi32_ps(a.lo), _mm_cvtepi32_ps(a.hi)}; }

inline I32x8 zero_i32() { return {_mm_setzero_si128(), _mm_setzero_si128()}; }
inline I32x8 broadcast(int32_t x) { return {_mm_set1_epi32(x), _mm_set1_epi32(x)}; }
inline I32x8 add(I32x8 a, I32x8 b) { return {_mm_add_epi32(a.lo, b.lo), _mm_add_epi32(a.hi, b.hi)}; }
inline I32x8 sub(I32x8 a, I32x8 b) { return {_mm_sub_epi32(a.lo, b.lo), _mm_sub_epi32(a.hi, b.hi)}; }
inline I32x8 mul(I32x8 a, I32x8 b) { return {_mm_mullo_epi32(a.lo, b.lo), _mm_mullo_epi32(a.hi, b.hi)}; }
// Bits of a where mask has them, and where it has none.
inline I32x8 keep(I32x8 a, I32x8 mask) {
    return {_mm_and_si128(a.lo, mask.lo), _mm_and_si128(a.hi, mask.hi)};
}
inline I32x8 drop(I32x8 a, I32x8 mask) {
    return {_mm_andnot_si128(mask.lo, a.lo), _mm_andnot_si128(mask.hi, a.hi)};
}
template <int kBy>
inline I32x8 shift_left(I32x8 a) {
    return {_mm_slli_epi32(a.lo, kBy), _mm_slli_epi32(a.hi, kBy)};
}
// Of each lane, as a signed number.
inline I32x8 lowest_byte(I32x8 a) {
    const I32x8 high = shift_left<24>(a);
    return {_mm_srai_epi32(high.lo, 24), _mm_srai_epi32(high.hi, 24)};
}
// 2^n for n in [-126, 127].
inline F32x8 power_of_two(I32x8 n) {
    const I32x8 bits = shift_left<23>(add(n, broadcast(127)));
    return {_mm_castsi128_ps(bits.lo), _mm_castsi128_ps(bits.hi)};
}
inline I32x8 load(const int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm_cvtepi8_epi32(bytes), _mm_cvtepi8_epi32(_mm_srli_si128(bytes, 4))};
}
inline I32x8 load(const int32_t* p) {
    return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)),
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 4))};
}
inline I16x16 load_pairs(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm_cvtepi8_epi16(bytes), _mm_cvtepi8_epi16(_mm_srli_si128(bytes, 8))};
}
inline I16x16 broadcast_pair(const int16_t* p) {
    int32_t both;
    __builtin_memcpy(&both, p, 4);
    return {_mm_set1_epi32(both), _mm_set1_epi32(both)};
}
inline I32x8 dot2(I32x8 sum, I16x16 a, I16x16 b) {
    return add(sum, {_mm_madd_epi16(a.lo, b.lo), _mm_madd_epi16(a.hi, b.hi)});
}
// Bits [from, from + count) of each lane.
inline I32x8 bits(I32x8 a, int from, int count) {
    const __m128i mask = _mm_set1_epi32((1 << count) - 1), shift = _mm_cvtsi32_si128(from);
    return {_mm_and_si128(_mm_srl_epi32(a.lo, shift), mask), _mm_and_si128(_mm_srl_epi32(a.hi, shift), mask)};
}
inline void store(int32_t* p, I32x8 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a.lo);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 4), a.hi);
}

// Saturated to int16, in order.
inline void store_narrow(int16_t* p, I32x8 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(a.lo, a.hi));
}

// The largest lane; where one is NaN, any.
inline float max_lanes(F32x8 a) {
    __m128 m = _mm_max_ps(a.lo, a.hi);
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
// No lane is anything but 0; one that is NaN is.
inline bool all_zero(F32x8 a) {
    const __m128 zero = _mm_setzero_ps();
    return _mm_movemask_ps(_mm_or_ps(_mm_cmpneq_ps(a.lo, zero), _mm_cmpneq_ps(a.hi, zero))) == 0;
}
// The first lane of a that equals x, 8 if none does.
inline int first_lane_equal(F32x8 a, float x) {
    const __m128 wanted = _mm_set1_ps(x);
    const int lo = _mm_movemask_ps(_mm_cmpeq_ps(a.lo, wanted)),
              hi = _mm_movemask_ps(_mm_cmpeq_ps(a.hi, wanted));
    return __builtin_ctz(lo | hi << 4 | 256);
}
// a with 0 in that lane; a where there is no such lane.
inline F32x8 without_lane(F32x8 a, int lane) {
    const __m128i wanted = _mm_set1_epi32(lane);
    const __m128i lo = _mm_cmpeq_epi32(_mm_setr_epi32(0, 1, 2, 3), wanted),
                  hi = _mm_cmpeq_epi32(_mm_setr_epi32(4, 5, 6, 7), wanted);
    return {_mm_andnot_ps(_mm_castsi128_ps(lo), a.lo), _mm_andnot_ps(_mm_castsi128_ps(hi), a.hi)};
}
inline int32_t sum_lanes(I32x8 a) {
    __m128i s = _mm_add_epi32(a.lo, a.hi);
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}
inline void store_codes(int16_t* p, const I32x8 (&v)[4]) {
    for (int i = 0; i < 4; ++i)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8 * i), _mm_packs_epi32(v[i].lo, v[i].hi));
}
inline void store_codes(int8_t* p, const I32x8 (&v)[4]) {
    for (int i = 0; i < 2; ++i)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16 * i),
                         _mm_packs_epi16(_mm_packs_epi32(v[2 * i].lo, v[2 * i].hi),
                                         _mm_packs_epi32(v[2 * i + 1].lo, v[2 * i + 1].hi)));
}
