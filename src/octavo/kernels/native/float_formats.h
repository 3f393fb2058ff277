// f16 and bf16 as storage, and their conversions without instructions for them. Included inside an anonymous
// namespace.

struct Half {
    uint16_t bits;
};
struct BFloat {
    uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

// Exact. Subnormal halves become normal floats also under denormals-are-zero, as F16C does.
inline float half_to_float(Half h) {
    const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
    const uint32_t exponent = (h.bits >> 10) & 31u;
    uint32_t mantissa = h.bits & 1023u;
    if (exponent == 31)
        return bits_to_float(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
    if (exponent != 0) return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
    if (mantissa == 0) return bits_to_float(sign);
    uint32_t shifted = 113;
    while (!(mantissa & 1024u)) {
        mantissa <<= 1;
        --shifted;
    }
    return bits_to_float(sign | (shifted << 23) | ((mantissa & 1023u) << 13));
}

// Nearest even; results below the normal halves stay subnormal: F16C ignores flush-to-zero when it stores.
inline Half float_to_half(float x) {
    const uint32_t bits = float_to_bits(x);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) {
        const uint32_t payload = magnitude > 0x7f800000u ? (0x200u | ((magnitude >> 13) & 1023u)) : 0u;
        return {static_cast<uint16_t>(sign | 0x7c00u | payload)};
    }
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 65,536 or more
    if (magnitude >= 0x38800000u) {                                                // a normal half
        const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
        return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
    }
    if (magnitude < 0x33000000u) return {sign};  // below half of the smallest subnormal
    const uint32_t exponent = magnitude >> 23;
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126 - exponent;  // 14 ... 24
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1);
    const uint32_t half = 1u << (shift - 1);
    const uint32_t up = rest > half || (rest == half && (kept & 1u));
    return {static_cast<uint16_t>(sign | (kept + up))};
}

inline float bfloat_to_float(BFloat b) { return bits_to_float(static_cast<uint32_t>(b.bits) << 16); }
