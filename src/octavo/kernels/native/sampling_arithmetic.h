// The arithmetic under the Sampler: blocks of logits, their weights, and random numbers.
//
// Everything here gives the same bits on every machine: no libm, no fused multiply-adds, no sums of floats.
// Vectors are written out, 16 bytes at a time (every baseline instruction set has them): left to itself the
// compiler keeps the clamp of exp and the maximum scalar, because comparisons may trap.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "sampling.h"

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows are walked in blocks of this many logits. The largest logit of each block tells which blocks can hold
// a candidate: the k-th largest of those maxima bounds the k-th logit.
constexpr size_t kBlock = kLogitBlock;

// Weights, exp((logit - peak) / temperature), are integers in units of 2^-40: their sums are exact, so no
// order of adding, and no way of selecting candidates, can change a draw. A token further than kNegligible
// nats below the peak has weight 0 (probability < 2^-41 of the likeliest token's) and is never drawn.
constexpr int kWeightBits = 40;
constexpr uint64_t kOne = uint64_t{1} << kWeightBits;
constexpr float kNegligible = 28.4375f;  // > 41 ln 2 = 28.42

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
constexpr size_t kLanes = 4;

inline Floats load(const float* x) {
    Floats v;
    std::memcpy(&v, x, sizeof(v));
    return v;
}

inline Floats splat(float x) { return Floats{x, x, x, x}; }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// exp(x) for x <= 0. Relative error below 2e-7 for x >= -87; smaller x are taken as -87, whose weight is 0
// all the same. exp(0) is exactly 1.
//
// Cody and Waite's reduction x = k ln 2 + r, |r| <= 0.347 (the high part of ln 2 has 9 bits, so its product
// with k is exact), then the Taylor series to r^7, whose remainder is below 6e-9.
inline Floats exp_negative(Floats x) {
    constexpr float kLog2E = 1.44269504f;
    constexpr float kLn2High = 0.693359375f;
    constexpr float kLn2Low = -2.12194440e-4f;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer

    x = larger(x, splat(-87.0f));
    const Floats shifted = x * kLog2E + kRound;
    const Floats k = shifted - kRound;
    const Floats r = (x - k * kLn2High) - k * kLn2Low;
    Floats p = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Ints exponent = std::bit_cast<Ints>(shifted) - std::bit_cast<int32_t>(kRound);
    return p * std::bit_cast<Floats>((exponent + 127) << 23);
}

// log(x) for normal positive x. Absolute error below 1e-15 * max(1, |log x|).
//
// x = m 2^e with m in [0.707, 1.414), then log m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.172: eleven
// terms leave a remainder below 1e-18.
inline double log_positive(double x) {
    constexpr double kLn2 = 0.693147180559945309417;
    constexpr uint64_t kMantissa = (uint64_t{1} << 52) - 1;
    const uint64_t bits = std::bit_cast<uint64_t>(x);
    int exponent = static_cast<int>(bits >> 52) - 1023;
    double m = std::bit_cast<double>((bits & kMantissa) | (uint64_t{1023} << 52));
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double s2 = s * s;
    double series = 0.0;
    for (int term = 21; term >= 1; term -= 2) series = series * s2 + 1.0 / term;
    return exponent * kLn2 + 2.0 * s * series;
}

// Which tokens keep their weight: logits above `logit` (and equal to it, with equals), and exponents of at
// least `argument`.
struct Bound {
    float logit = -kInfinity;
    bool equals = true;
    float argument = -kInfinity;
};

// Weights of one block: round(exp((x[i] - peak) * scale) * 2^40), or 0 outside the bound; -inf gives 0.
// Returns their sum.
inline uint64_t block_weights(const float* x, float peak, float scale, const Bound& bound,
                              uint64_t* weights) {
    // Adding 2^12 to a double leaves a mantissa that counts units of 2^-40: rounding without a conversion,
    // which SSE2 does not have for 64-bit integers.
    constexpr double kShift = static_cast<double>(uint64_t{1} << (52 - kWeightBits));
    constexpr uint64_t kShiftBits = std::bit_cast<uint64_t>(kShift);
    const int32_t equals = bound.equals ? -1 : 0;
    float e[kBlock];
    for (size_t i = 0; i < kBlock; i += kLanes) {
        const Floats logits = load(x + i);
        const Floats argument = (logits - peak) * scale;
        const Ints kept =
            ((logits > bound.logit) | ((logits == bound.logit) & equals)) & (argument >= bound.argument);
        const Ints bits = std::bit_cast<Ints>(exp_negative(argument)) & kept;
        std::memcpy(e + i, &bits, sizeof(bits));
    }
    uint64_t sum = 0;
    for (size_t i = 0; i < kBlock; ++i) {
        weights[i] = std::bit_cast<uint64_t>(static_cast<double>(e[i]) + kShift) - kShiftBits;
        sum += weights[i];
    }
    return sum;
}

// The largest logit of one block. Lanes of *nan become non-zero where the block holds NaN.
inline float block_maximum(const float* x, Ints* nan) {
    Floats top[4] = {load(x), load(x + 4), load(x + 8), load(x + 12)};
    Ints bad[4] = {top[0] != top[0], top[1] != top[1], top[2] != top[2], top[3] != top[3]};
    for (size_t i = 16; i < kBlock; i += 16) {
        for (size_t j = 0; j < 4; ++j) {
            const Floats v = load(x + i + j * kLanes);
            top[j] = larger(v, top[j]);
            bad[j] |= v != v;
        }
    }
    *nan |= (bad[0] | bad[1]) | (bad[2] | bad[3]);
    const Floats best = larger(larger(top[0], top[1]), larger(top[2], top[3]));
    const float low = best[0] > best[1] ? best[0] : best[1];
    const float high = best[2] > best[3] ? best[2] : best[3];
    return low > high ? low : high;
}

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a
// block cipher used as a counter generator, so that a draw depends on its address only. Counter: {position
// low, position high, choice_index, 0}; key: the seed. Returns words 0 (low) and 1 (high).
inline uint64_t philox(uint64_t seed, uint64_t position, uint32_t choice_index) {
    std::array<uint32_t, 4> c = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                                 choice_index, 0};
    uint32_t key0 = static_cast<uint32_t>(seed);
    uint32_t key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
        const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
        c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(p1),
             static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(p0)};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return uint64_t{c[1]} << 32 | c[0];
}

// floor(random / 2^64 * total), in [0, total). No outcome is off by more than 2^-64.
inline uint64_t scale_to(uint64_t random, uint64_t total) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(random) * total >> 64);
}

}  // namespace
}  // namespace octavo
