// Row-wise kernels over eight lanes: quantisation, norm, rope, gated activation, KV store. Included inside an
// anonymous namespace, after a simd header.

// e^x for x <= 88, within 2 ulp; 0 below -87 (results there would be subnormal). Tails of rows use these
// lanes too, so that a position gets the same bytes wherever it stands. Range reduction by ln 2 in two parts,
// then a degree-6 polynomial (Cephes expf's minimax coefficients). NaN stays NaN, which the order of the
// operands of max and min decides: a score that is not a number must fail its request, not count as far away.
template <class Lanes>
inline typename Lanes::Floats exp_of(typename Lanes::Floats x) {
    const auto c = [](float value) { return Lanes::splat(value); };
    const auto floor = c(-87.0f);
    const auto clamped = min(c(88.0f), max(floor, x));
    const auto n = round_to_int(mul(clamped, c(1.44269504f)));
    const auto nf = to_float(n);
    auto r = fma(nf, c(-0.693359375f), clamped);
    r = fma(nf, c(2.12194440e-4f), r);
    auto p = c(1.9875691500e-4f);
    p = fma(p, r, c(1.3981999507e-3f));
    p = fma(p, r, c(8.3334519073e-3f));
    p = fma(p, r, c(4.1665795894e-2f));
    p = fma(p, r, c(1.6666665459e-1f));
    p = fma(p, r, c(5.0000001201e-1f));
    p = fma(p, mul(r, r), r);
    p = add(p, c(1.0f));
    return zero_where_below(mul(p, power_of_two(n)), x, floor);
}
inline F32x8 exp_f32(F32x8 x) { return exp_of<Lanes8>(x); }

// One fixed tree, so that a sum does not depend on the path.
inline float sum_lanes(F32x8 a) {
    float v[8];
    store(v, a);
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// The first `count` lanes of p, the others `fill`.
inline F32x8 load_first(const float* p, int count, float fill) {
    float v[8];
    for (int i = 0; i < 8; ++i) v[i] = i < count ? p[i] : fill;
    return load(v);
}

constexpr float kSmallestNormal = 1.17549435e-38f;

// A NaN if any of the group is NaN or infinite, else 0: added to a scale it keeps a broken row broken, so
// that its request fails and its neighbours' do not. There are no codes for such a group: it becomes zeros.
inline float take_broken(F32x8 (&v)[4]) {
    const F32x8 zero = zero_f32();
    if (all_zero(add(add(mul(v[0], zero), mul(v[1], zero)), add(mul(v[2], zero), mul(v[3], zero)))))
        return 0.0f;
    for (F32x8& lanes : v) lanes = zero;
    return __builtin_nanf("");
}

inline float largest_magnitude(const F32x8 (&v)[4]) {
    return max_lanes(max(max(abs(v[0]), abs(v[1])), max(abs(v[2]), abs(v[3]))));
}

void quantize_row8(const float* x, int n, int8_t* codes, WideCode* wide, float* scales, int32_t* sums,
                   float* scaled_sums) {
    for (int g = 0; g < n / kGroup; ++g) {
        F32x8 v[4];
        for (int i = 0; i < 4; ++i) v[i] = load(x + g * kGroup + 8 * i);
        const float nan_or_zero = take_broken(v);
        const float first = largest_magnitude(v);
        // The first of the largest: its value apart, 0 in its place.
        int at = 0;
        for (int i = 3; i >= 0; --i) {
            const int lane = first_lane_equal(abs(v[i]), first);
            at = lane < 8 ? 8 * i + lane : at;
        }
        for (int i = 0; i < 4; ++i) v[i] = without_lane(v[i], at - 8 * i);
        const float second = largest_magnitude(v);
        const float fine = second / 127.0f, coarse = first / 32767.0f;
        const float step = fine > coarse ? fine : coarse;
        const bool usable = step >= kSmallestNormal;
        const F32x8 inverse = broadcast(usable ? 1.0f / step : 0.0f);
        I32x8 rounded[4];
        for (int i = 0; i < 4; ++i) rounded[i] = round_to_int(mul(v[i], inverse));
        store_codes(codes + g * kGroup, rounded);
        int32_t largest[8];
        const float apart = nan_or_zero == 0.0f ? x[g * kGroup + at] : 0.0f;
        store(largest, round_to_int(mul(broadcast(apart), inverse)));
        const int32_t first_half =
            sum_lanes(add(rounded[0], rounded[1])) + (at < kGroup / 2 ? largest[0] : 0);
        const int32_t second_half =
            sum_lanes(add(rounded[2], rounded[3])) + (at < kGroup / 2 ? 0 : largest[0]);
        wide[g] = {.code = static_cast<int16_t>(largest[0]),
                   .zero = 0,
                   .nibble_shift = at % 4 * 8 + (at & 4),
                   .byte_shift = at % 4 * 8,
                   .in_second_half = at < kGroup / 2 ? 0 : -1,
                   .first_half_sum = first_half,
                   .nibble_offset = static_cast<uint16_t>(at / 8 * kVectorBytes),
                   .at = static_cast<uint16_t>(at)};
        sums[g] = first_half + second_half;
        scales[g] = (usable ? step : 0.0f) + nan_or_zero;
        scaled_sums[g] = scales[g] * static_cast<float>(sums[g]);
    }
}

void quantize_row16(const float* x, int n, int16_t* codes, float* scales) {
    for (int g = 0; g < n / kGroup; ++g) {
        F32x8 v[4];
        for (int i = 0; i < 4; ++i) v[i] = load(x + g * kGroup + 8 * i);
        const float nan_or_zero = take_broken(v);
        const float step = largest_magnitude(v) / 32767.0f;
        const bool usable = step >= kSmallestNormal;
        const F32x8 inverse = broadcast(usable ? 1.0f / step : 0.0f);
        I32x8 rounded[4];
        for (int i = 0; i < 4; ++i) rounded[i] = round_to_int(mul(v[i], inverse));
        store_codes(codes + g * kGroup, rounded);
        scales[g] = (usable ? step : 0.0f) + nan_or_zero;
    }
}

void rms_norm_row(const float* x, const float* weight, int n, float eps, float* out) {
    F32x8 squares = zero_f32();
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        const F32x8 v = load(x + i);
        squares = fma(v, v, squares);
    }
    if (i < n) {
        const F32x8 v = load_first(x + i, n - i, 0.0f);
        squares = fma(v, v, squares);
    }
    const float mean = sum_lanes(squares) / static_cast<float>(n);
    const float inverse = 1.0f / __builtin_sqrtf(mean + eps);
    const F32x8 factor = broadcast(inverse);
    for (i = 0; i + 8 <= n; i += 8) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
    for (; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

void silu_mul_row(const float* gate, const float* up, int n, float* out) {
    const F32x8 one = broadcast(1.0f);
    for (int i = 0; i < n; i += 8) {
        const int count = n - i < 8 ? n - i : 8;
        const F32x8 g = count == 8 ? load(gate + i) : load_first(gate + i, count, 0.0f);
        const F32x8 u = count == 8 ? load(up + i) : load_first(up + i, count, 0.0f);
        const F32x8 y = mul(div(g, add(one, exp_f32(sub(zero_f32(), g)))), u);
        if (count == 8) {
            store(out + i, y);
        } else {
            float v[8];
            store(v, y);
            for (int j = 0; j < count; ++j) out[i + j] = v[j];
        }
    }
}

void rope_head(float* x, int head_dim, int rope_dim, const float* cos, const float* sin, float scale) {
    for (int i = 0; i < rope_dim / 2; ++i) {
        const float a = x[2 * i];
        const float b = x[2 * i + 1];
        x[2 * i] = (a * cos[i] - b * sin[i]) * scale;
        x[2 * i + 1] = (a * sin[i] + b * cos[i]) * scale;
    }
    for (int i = rope_dim; i < head_dim; ++i) x[i] *= scale;
}

// Where a KV head's keys, or values, of a block begin.
inline uint8_t* key_block(const PagedKV& kv, int64_t block, int kv_head) {
    return kv.arena + block * kv.extent_bytes + kv.layer_offset +
           kv_head * kv_head_bytes(kv.type, kv.head_dim, kv.block_size);
}
inline uint8_t* value_block(const PagedKV& kv, int64_t block, int kv_head) {
    return key_block(kv, block, kv.num_kv_heads + kv_head);
}
inline float* block_scales(const PagedKV& kv, uint8_t* codes) {
    return reinterpret_cast<float*>(codes + static_cast<int64_t>(kv.head_dim) * kv.block_size);
}

// x [head_dim] -> nearest even codes; returns their scale.
inline float head_codes(const float* x, int head_dim, int16_t* codes, float largest_code) {
    F32x8 largest = zero_f32(), broken = zero_f32();
    for (int d = 0; d < head_dim; d += 8) {
        const F32x8 v = load(x + d);
        largest = max(abs(v), largest);
        broken = fma(v, zero_f32(), broken);
    }
    const float step = max_lanes(largest) / largest_code;
    const bool finite = all_zero(broken), usable = finite && step >= kSmallestNormal;
    const F32x8 inverse = broadcast(usable ? 1.0f / step : 0.0f);
    for (int d = 0; d < head_dim; d += 8)
        store_narrow(codes + d, usable ? round_to_int(mul(load(x + d), inverse)) : zero_i32());
    return usable ? step : finite ? 0.0f : __builtin_nanf("");
}

constexpr int kMostHeadDim = 256;

// Of the Hadamard matrix that heads are rotated with: the largest power of two that divides head_dim.
inline int rotation_size(int head_dim) { return head_dim & -head_dim; }

// x [head_dim], each block of n = rotation_size, times the matrix (Sylvester 1867): sums and differences at
// distances 1, 2, 4, ... Two rotated vectors have n times the dot product.
inline void rotate_head(float* x, int head_dim) {
    for (int half = 1; half < rotation_size(head_dim); half *= 2) {
        for (int block = 0; block < head_dim; block += 2 * half) {
            float* low = x + block;
            float* high = low + half;
            if (half < 8) {
                for (int i = 0; i < half; ++i) {
                    const float a = low[i], b = high[i];
                    low[i] = a + b;
                    high[i] = a - b;
                }
                continue;
            }
            for (int i = 0; i < half; i += 8) {
                const F32x8 a = load(low + i), b = load(high + i);
                store(low + i, add(a, b));
                store(high + i, sub(a, b));
            }
        }
    }
}

// Divided first, so that nothing overflows.
void rotate_query(float* q, int head_dim) {
    const F32x8 by = broadcast(1.0f / static_cast<float>(rotation_size(head_dim)));
    for (int d = 0; d < head_dim; d += 8) store(q + d, mul(load(q + d), by));
    rotate_head(q, head_dim);
}

void store_key(const PagedKV& kv, int64_t block, int slot, int kv_head, const float* key) {
    uint8_t* to = key_block(kv, block, kv_head);
    if (kv.type == KVType::kQ8) {
        int16_t codes[kMostHeadDim];
        float rotated[kMostHeadDim];
        __builtin_memcpy(rotated, key, sizeof(float) * kv.head_dim);
        rotate_head(rotated, kv.head_dim);
        block_scales(kv, to)[slot] = head_codes(rotated, kv.head_dim, codes, 127.0f);
        for (int d = 0; d < kv.head_dim; ++d)
            to[(d / 2 * kv.block_size + slot) * 2 + d % 2] = static_cast<uint8_t>(codes[d]);
        return;
    }
    Half* out = reinterpret_cast<Half*>(to) + slot;
    Half lanes[8];
    for (int d = 0; d < kv.head_dim; d += 8) {
        store(lanes, load(key + d));
        for (int i = 0; i < 8; ++i) out[(d + i) * kv.block_size] = lanes[i];
    }
}

void store_value(const PagedKV& kv, int64_t block, int slot, int kv_head, const float* value) {
    uint8_t* to = value_block(kv, block, kv_head);
    if (kv.type == KVType::kQ8) {
        int16_t codes[kMostHeadDim];
        block_scales(kv, to)[slot] = head_codes(value, kv.head_dim, codes, 127.0f);
        uint8_t* out = to + slot / 2 * 2 * kv.head_dim + slot % 2;
        for (int d = 0; d < kv.head_dim; ++d) out[2 * d] = static_cast<uint8_t>(codes[d]);
        return;
    }
    Half* out = reinterpret_cast<Half*>(to) + static_cast<int64_t>(slot) * kv.head_dim;
    for (int d = 0; d < kv.head_dim; d += 8) store(out + d, load(value + d));
}

double peak_fma(int64_t iterations) {
    F32x8 acc[kAccumulators];
    for (int i = 0; i < kAccumulators; ++i) acc[i] = broadcast(static_cast<float>(i));
    F32x8 a = broadcast(0.999f);
    for (int64_t n = 0; n < iterations; ++n)
        for (int i = 0; i < kAccumulators; ++i) acc[i] = fma(acc[i], a, a);
    float sum = 0;
    for (int i = 0; i < kAccumulators; ++i) sum += sum_lanes(acc[i]);
    asm volatile("" : : "r"(&sum) : "memory");
    return static_cast<double>(iterations) * kAccumulators * 8 * 2;
}

double peak_int8(int64_t iterations) { return peak_int8_loop(iterations); }

double peak_int8_summed(int64_t iterations) { return peak_int8_summed_loop(iterations); }

double read_bytes(const uint8_t* data, int64_t bytes) {
    F32x8 acc[8];
    for (int i = 0; i < 8; ++i) acc[i] = zero_f32();
    const float* p = reinterpret_cast<const float*>(data);
    for (int64_t i = 0; i + 64 <= bytes / 4; i += 64)
        for (int j = 0; j < 8; ++j) acc[j] = add(acc[j], load(p + i + 8 * j));
    float sum = 0;
    for (int i = 0; i < 8; ++i) sum += sum_lanes(acc[i]);
    return sum;
}
