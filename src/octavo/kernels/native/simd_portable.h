// Eight lanes in plain C++, the oracle of every other path. Included inside an anonymous namespace.

struct F32x8 {
    float v[8];
};
struct I32x8 {
    int32_t v[8];
};

// Eight lanes of two int16 each.
struct I16x16 {
    int16_t v[16];
};

constexpr int kAccumulators = 12;    // as the paths with registers for eight lanes
constexpr int kWidenHalvesFrom = 0;  // never

#define OCTAVO_LANES(expression)                           \
    do {                                                   \
        for (int i = 0; i < 8; ++i) r.v[i] = (expression); \
        return r;                                          \
    } while (0)

inline F32x8 broadcast(float x) {
    F32x8 r;
    OCTAVO_LANES(x);
}
inline F32x8 zero_f32() { return broadcast(0.0f); }
inline F32x8 load(const float* p) {
    F32x8 r;
    OCTAVO_LANES(p[i]);
}
inline void store(float* p, F32x8 a) {
    for (int i = 0; i < 8; ++i) p[i] = a.v[i];
}
inline F32x8 load(const Half* p) {
    F32x8 r;
    OCTAVO_LANES(half_to_float(p[i]));
}
inline F32x8 load(const BFloat* p) {
    F32x8 r;
    OCTAVO_LANES(bfloat_to_float(p[i]));
}
inline void store(Half* p, F32x8 a) {
    for (int i = 0; i < 8; ++i) p[i] = float_to_half(a.v[i]);
}
inline F32x8 fma(F32x8 a, F32x8 b, F32x8 c) {
    F32x8 r;
    OCTAVO_LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i]));
}
inline F32x8 add(F32x8 a, F32x8 b) {
    F32x8 r;
    OCTAVO_LANES(a.v[i] + b.v[i]);
}
inline F32x8 sub(F32x8 a, F32x8 b) {
    F32x8 r;
    OCTAVO_LANES(a.v[i] - b.v[i]);
}
inline F32x8 mul(F32x8 a, F32x8 b) {
    F32x8 r;
    OCTAVO_LANES(a.v[i] * b.v[i]);
}
inline F32x8 div(F32x8 a, F32x8 b) {
    F32x8 r;
    OCTAVO_LANES(a.v[i] / b.v[i]);
}
// The second operand where the two do not compare, as the x86 instructions do.
inline F32x8 max(F32x8 a, F32x8 b) {
    F32x8 r;
    OCTAVO_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
inline F32x8 min(F32x8 a, F32x8 b) {
    F32x8 r;
    OCTAVO_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}
inline F32x8 abs(F32x8 a) {
    F32x8 r;
    OCTAVO_LANES(__builtin_fabsf(a.v[i]));
}
inline F32x8 zero_where_below(F32x8 a, F32x8 x, F32x8 limit) {
    F32x8 r;
    OCTAVO_LANES(x.v[i] < limit.v[i] ? 0.0f : a.v[i]);
}
// Nearest even, and the most negative integer where there is none, as cvtps2dq.
inline I32x8 round_to_int(F32x8 a) {
    I32x8 r;
    OCTAVO_LANES(a.v[i] >= -2147483648.0f && a.v[i] < 2147483648.0f
                     ? static_cast<int32_t>(__builtin_lrintf(a.v[i]))
                     : INT32_MIN);
}
inline F32x8 to_float(I32x8 a) {
    F32x8 r;
    OCTAVO_LANES(static_cast<float>(a.v[i]));
}
inline F32x8 power_of_two(I32x8 n) {
    F32x8 r;
    OCTAVO_LANES(bits_to_float(static_cast<uint32_t>(n.v[i] + 127) << 23));
}
inline I32x8 broadcast(int32_t x) {
    I32x8 r;
    OCTAVO_LANES(x);
}
inline I32x8 zero_i32() { return broadcast(0); }
inline I32x8 add(I32x8 a, I32x8 b) {
    I32x8 r;
    OCTAVO_LANES(a.v[i] + b.v[i]);
}
inline I32x8 sub(I32x8 a, I32x8 b) {
    I32x8 r;
    OCTAVO_LANES(a.v[i] - b.v[i]);
}
inline I32x8 mul(I32x8 a, I32x8 b) {
    I32x8 r;
    OCTAVO_LANES(a.v[i] * b.v[i]);
}
// Bits of a where mask has them, and where it has none.
inline I32x8 keep(I32x8 a, I32x8 mask) {
    I32x8 r;
    OCTAVO_LANES(a.v[i] & mask.v[i]);
}
inline I32x8 drop(I32x8 a, I32x8 mask) {
    I32x8 r;
    OCTAVO_LANES(a.v[i] & ~mask.v[i]);
}
inline I32x8 load(const int8_t* p) {
    I32x8 r;
    OCTAVO_LANES(p[i]);
}
inline I32x8 load(const int32_t* p) {
    I32x8 r;
    OCTAVO_LANES(p[i]);
}
inline I32x8 dot2(I32x8 sum, I16x16 a, I16x16 b) {
    I32x8 r;
    OCTAVO_LANES(sum.v[i] + a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1]);
}
// Bits [from, from + count) of each lane.
inline I32x8 bits(I32x8 a, int from, int count) {
    I32x8 r;
    OCTAVO_LANES(a.v[i] >> from & ((1 << count) - 1));
}
inline void store(int32_t* p, I32x8 a) {
    for (int i = 0; i < 8; ++i) p[i] = a.v[i];
}

inline F32x8 without_lane(F32x8 a, int lane) {
    F32x8 r;
    OCTAVO_LANES(i == lane ? 0.0f : a.v[i]);
}

#undef OCTAVO_LANES

inline I16x16 load_pairs(const int8_t* p) {
    I16x16 r;
    for (int i = 0; i < 16; ++i) r.v[i] = p[i];
    return r;
}
inline I16x16 broadcast_pair(const int16_t* p) {
    I16x16 r;
    for (int i = 0; i < 16; ++i) r.v[i] = p[i % 2];
    return r;
}
// Saturated to int16, in order.
inline void store_narrow(int16_t* p, I32x8 a) {
    for (int i = 0; i < 8; ++i)
        p[i] = static_cast<int16_t>(a.v[i] > 32767 ? 32767 : a.v[i] < -32768 ? -32768 : a.v[i]);
}

// The largest lane; where one is NaN, any.
inline float max_lanes(F32x8 a) {
    float m = a.v[0];
    for (int i = 1; i < 8; ++i) m = a.v[i] > m ? a.v[i] : m;
    return m;
}
// No lane is anything but 0; one that is NaN is.
inline bool all_zero(F32x8 a) {
    bool zero = true;
    for (int i = 0; i < 8; ++i) zero &= a.v[i] == 0.0f;
    return zero;
}
inline int first_lane_equal(F32x8 a, float x) {
    int lane = 0;
    while (lane < 8 && a.v[lane] != x) ++lane;
    return lane;
}
inline int32_t sum_lanes(I32x8 a) {
    int32_t sum = 0;
    for (int i = 0; i < 8; ++i) sum += a.v[i];
    return sum;
}
template <class Code>
inline void store_codes(Code* p, const I32x8 (&v)[4]) {
    for (int i = 0; i < kGroup; ++i) p[i] = static_cast<Code>(v[i / 8].v[i % 8]);
}
