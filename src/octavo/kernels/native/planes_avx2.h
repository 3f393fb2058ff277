// Codes out of their planes (weight_layout.h), eight columns in a 256-bit register. Included inside an
// anonymous namespace, after simd_avx2.h.

inline __m256i broadcast4(const void* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

// Reads a group's unsigned codes in order of k, two steps of four k of 8 columns at a time, from step kFirst
// on. Planes of fewer than 4 bits stay in registers and are shifted along: shifts in a loop that stays a loop
// keep the sums in registers, where the unrolled one spilled them.
template <WeightType kType, int kFirst>
class CodeReader {
  public:
    void start(const uint8_t* group) {
        if constexpr (kLow == 4)
            next_ = group + 16 * kFirst;
        else
            low_ = load32(group + kFirst * kLow / 8 * 32);
        if constexpr (kHigh > 0) {
            high_ = load32(group + 32 * kLow + kFirst * kHigh / 8 * 32);
            if constexpr (kFirst * kHigh % 8 > 0) high_ = _mm256_srli_epi16(high_, kFirst * kHigh % 8);
        }
    }

    void next(__m256i& first, __m256i& second) {
        const __m256i low = _mm256_set1_epi8((1 << kLow) - 1);
        if constexpr (kLow == 4) {
            low_ = load32(next_);
            next_ += 32;
        }
        first = _mm256_and_si256(low_, low);
        second = _mm256_and_si256(_mm256_srli_epi16(low_, kLow), low);
        if constexpr (kLow < 4) low_ = _mm256_srli_epi16(low_, 2 * kLow);
        if constexpr (kHigh > 0) {
            const __m256i mask = _mm256_set1_epi8(static_cast<char>(((1 << kHigh) - 1) << kLow));
            first = _mm256_or_si256(first, _mm256_and_si256(_mm256_slli_epi16(high_, kLow), mask));
            second = _mm256_or_si256(second, _mm256_and_si256(_mm256_slli_epi16(high_, kLow - kHigh), mask));
            high_ = _mm256_srli_epi16(high_, 2 * kHigh);
        }
    }

  private:
    static constexpr int kLow = weight_layout(kType).low_bits, kHigh = weight_layout(kType).high_bits;

    static __m256i load32(const uint8_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }

    const uint8_t* next_;
    __m256i low_, high_;
};

// kTableValues in both halves.
inline __m256i table_values() {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kTableValues)));
}

// Lane c = what the wide code meets in column c: the unsigned code, or the table's value.
template <WeightType kType>
inline I32x8 wide_values(const uint8_t* group, const WideCode& wide) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    const auto lanes = [](const uint8_t* from, int shift, int bits) {
        return _mm256_and_si256(_mm256_srlv_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
                                                  _mm256_set1_epi32(shift)),
                                _mm256_set1_epi32((1 << bits) - 1));
    };
    const auto plane = [&](const uint8_t* from, int bits) {
        const unsigned at = wide.at;
        return lanes(from + plane_byte(bits, 0, at & ~3u),
                     static_cast<int>(at % 4 * 8 + plane_shift(bits, at)), bits);
    };
    __m256i code =
        kLayout.low_bits == 4 ? lanes(group + wide.offset, wide.shift, 4) : plane(group, kLayout.low_bits);
    if constexpr (kLayout.high_bits > 0)
        code = _mm256_or_si256(
            code,
            _mm256_slli_epi32(plane(group + 32 * kLayout.low_bits, kLayout.high_bits), kLayout.low_bits));
    if constexpr (kLayout.table)
        code = _mm256_srai_epi32(_mm256_slli_epi32(_mm256_shuffle_epi8(table_values(), code), 24), 24);
    return {code};
}

// Lanes of v, which fit 16 bits, times the wide code.
inline I32x8 times_code(I32x8 v, const WideCode& wide) {
    return {_mm256_madd_epi16(v.v, broadcast4(&wide.code))};  // upper halves: times 0
}
