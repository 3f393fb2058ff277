// Eight lanes on AArch64 as two registers, lanes 0 to 3 and 4 to 7. Included inside an anonymous namespace:
// nothing here may have external linkage.

struct F32x8 {
    float32x4_t lo, hi;
};
struct I32x8 {
    int32x4_t lo, hi;
};

// Eight lanes of two int16 each.
struct I16x16 {
    int16x8_t lo, hi;
};

constexpr int kAccumulators = 12;    // of eight lanes, that 32 registers hold beside what is added to them
constexpr int kWidenHalvesFrom = 0;  // never: one instruction widens a register of them

inline F32x8 zero_f32() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
inline F32x8 broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F32x8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, F32x8 a) {
    vst1q_f32(p, a.lo);
    vst1q_f32(p + 4, a.hi);
}
// Conversions between halves and floats keep subnormal halves: FPCR.FZ is about floats only, and they do not
// ask FPCR.FZ16. As integers in memory, so that the compiler sees the type that others read and write.
inline F32x8 load(const Half* p) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(&p->bits));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
inline F32x8 load(const BFloat* p) {
    const uint16x8_t bits = vld1q_u16(&p->bits);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16))};
}
inline void store(Half* p, F32x8 a) {
    vst1q_u16(&p->bits, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.lo), a.hi)));
}
inline F32x8 fma(F32x8 a, F32x8 b, F32x8 c) {
    return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)};
}
inline F32x8 add(F32x8 a, F32x8 b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
inline F32x8 sub(F32x8 a, F32x8 b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
inline F32x8 mul(F32x8 a, F32x8 b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
inline F32x8 div(F32x8 a, F32x8 b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
// The second operand where the two do not compare, which fmax and fmin do not give.
inline F32x8 max(F32x8 a, F32x8 b) {
    return {vbslq_f32(vcgtq_f32(a.lo, b.lo), a.lo, b.lo), vbslq_f32(vcgtq_f32(a.hi, b.hi), a.hi, b.hi)};
}
inline F32x8 min(F32x8 a, F32x8 b) {
    return {vbslq_f32(vcltq_f32(a.lo, b.lo), a.lo, b.lo), vbslq_f32(vcltq_f32(a.hi, b.hi), a.hi, b.hi)};
}
inline F32x8 abs(F32x8 a) { return {vabsq_f32(a.lo), vabsq_f32(a.hi)}; }
// 0 where x < limit, else a: also where x is NaN.
inline F32x8 zero_where_below(F32x8 a, F32x8 x, F32x8 limit) {
    const auto kept = [](float32x4_t v, uint32x4_t below) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), below));
    };
    return {kept(a.lo, vcltq_f32(x.lo, limit.lo)), kept(a.hi, vcltq_f32(x.hi, limit.hi))};
}
// Nearest even, and the most negative integer where there is none: fcvtns alone saturates and gives 0 for
// NaN.
inline I32x8 round_to_int(F32x8 a) {
    const auto rounded = [](float32x4_t v) {
        return vbslq_s32(vcaltq_f32(v, vdupq_n_f32(2147483648.0f)), vcvtnq_s32_f32(v),
                         vdupq_n_s32(INT32_MIN));
    };
    return {rounded(a.lo), rounded(a.hi)};
}
inline F32x8 to_float(I32x8 a) { return {vcvtq_f32_s32(a.lo), vcvtq_f32_s32(a.hi)}; }

inline I32x8 zero_i32() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
inline I32x8 broadcast(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline I32x8 add(I32x8 a, I32x8 b) { return {vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)}; }
inline I32x8 sub(I32x8 a, I32x8 b) { return {vsubq_s32(a.lo, b.lo), vsubq_s32(a.hi, b.hi)}; }
inline I32x8 mul(I32x8 a, I32x8 b) { return {vmulq_s32(a.lo, b.lo), vmulq_s32(a.hi, b.hi)}; }
// Bits of a where mask has them, and where it has none.
inline I32x8 keep(I32x8 a, I32x8 mask) { return {vandq_s32(a.lo, mask.lo), vandq_s32(a.hi, mask.hi)}; }
inline I32x8 drop(I32x8 a, I32x8 mask) { return {vbicq_s32(a.lo, mask.lo), vbicq_s32(a.hi, mask.hi)}; }
template <int kBy>
inline I32x8 shift_left(I32x8 a) {
    return {vshlq_n_s32(a.lo, kBy), vshlq_n_s32(a.hi, kBy)};
}
// Of each lane, as a signed number.
inline I32x8 lowest_byte(I32x8 a) {
    const I32x8 high = shift_left<24>(a);
    return {vshrq_n_s32(high.lo, 24), vshrq_n_s32(high.hi, 24)};
}
// 2^n for n in [-126, 127].
inline F32x8 power_of_two(I32x8 n) {
    const I32x8 bits = shift_left<23>(add(n, broadcast(127)));
    return {vreinterpretq_f32_s32(bits.lo), vreinterpretq_f32_s32(bits.hi)};
}
inline I32x8 load(const int8_t* p) {
    const int16x8_t wide = vmovl_s8(vld1_s8(p));
    return {vmovl_s16(vget_low_s16(wide)), vmovl_high_s16(wide)};
}
inline I32x8 load(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4)}; }
inline I16x16 load_pairs(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    return {vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)};
}
inline I16x16 broadcast_pair(const int16_t* p) {
    int32_t both;
    __builtin_memcpy(&both, p, 4);
    const int16x8_t pairs = vreinterpretq_s16_s32(vdupq_n_s32(both));
    return {pairs, pairs};
}
inline I32x8 dot2(I32x8 sum, I16x16 a, I16x16 b) {
    const auto products = [](int16x8_t x, int16x8_t y) {
        return vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
    };
    return {vaddq_s32(sum.lo, products(a.lo, b.lo)), vaddq_s32(sum.hi, products(a.hi, b.hi))};
}
// Bits [from, from + count) of each lane.
inline I32x8 bits(I32x8 a, int from, int count) {
    const int32x4_t mask = vdupq_n_s32((1 << count) - 1), shift = vdupq_n_s32(-from);
    return {vandq_s32(vshlq_s32(a.lo, shift), mask), vandq_s32(vshlq_s32(a.hi, shift), mask)};
}
inline void store(int32_t* p, I32x8 a) {
    vst1q_s32(p, a.lo);
    vst1q_s32(p + 4, a.hi);
}

// Saturated to int16, in order.
inline void store_narrow(int16_t* p, I32x8 a) { vst1q_s16(p, vqmovn_high_s32(vqmovn_s32(a.lo), a.hi)); }

// The largest lane; where one is NaN, any.
inline float max_lanes(F32x8 a) { return vmaxvq_f32(vmaxq_f32(a.lo, a.hi)); }
// No lane is anything but 0; one that is NaN is.
inline bool all_zero(F32x8 a) { return vminvq_u32(vandq_u32(vceqzq_f32(a.lo), vceqzq_f32(a.hi))) != 0; }
// The first lane of a that equals x, 8 if none does.
inline int first_lane_equal(F32x8 a, float x) {
    const uint32x4_t lo = vceqq_f32(a.lo, vdupq_n_f32(x)), hi = vceqq_f32(a.hi, vdupq_n_f32(x));
    // A byte for each lane, 0 or 255.
    const uint8x8_t equal = vmovn_u16(vcombine_u16(vmovn_u32(lo), vmovn_u32(hi)));
    const uint64_t lanes = vget_lane_u64(vreinterpret_u64_u8(equal), 0);
    return lanes == 0 ? 8 : __builtin_ctzll(lanes) / 8;
}
// a with 0 in that lane; a where there is no such lane.
inline F32x8 without_lane(F32x8 a, int lane) {
    const uint32x4_t first = {0, 1, 2, 3}, wanted = vdupq_n_u32(static_cast<uint32_t>(lane));
    const auto kept = [&](float32x4_t v, uint32x4_t lanes) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vceqq_u32(lanes, wanted)));
    };
    return {kept(a.lo, first), kept(a.hi, vaddq_u32(first, vdupq_n_u32(4)))};
}
inline int32_t sum_lanes(I32x8 a) { return vaddvq_s32(vaddq_s32(a.lo, a.hi)); }
inline void store_codes(int16_t* p, const I32x8 (&v)[4]) {
    for (int i = 0; i < 4; ++i) vst1q_s16(p + 8 * i, vqmovn_high_s32(vqmovn_s32(v[i].lo), v[i].hi));
}
inline void store_codes(int8_t* p, const I32x8 (&v)[4]) {
    for (int i = 0; i < 2; ++i) {
        const int16x8_t first = vqmovn_high_s32(vqmovn_s32(v[2 * i].lo), v[2 * i].hi);
        const int16x8_t second = vqmovn_high_s32(vqmovn_s32(v[2 * i + 1].lo), v[2 * i + 1].hi);
        vst1q_s8(p + 16 * i, vqmovn_high_s16(vqmovn_s16(first), second));
    }
}
