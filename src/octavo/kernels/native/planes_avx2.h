// Codes out of their planes (weight_layout.h), eight columns in a 256-bit register. Included inside an
// anonymous namespace by the products headers of the AVX2 family, after kTableOffset: what they add to a
// table's values to unpack them, 0 or 128.

inline __m256i load32(const void* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256i broadcast4(const void* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

// kTableValues in both halves, plus kTableOffset.
inline __m256i table_values() {
    return _mm256_add_epi8(
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kTableValues))),
        _mm256_set1_epi8(static_cast<char>(kTableOffset)));
}

// Reads a group's codes in order of k, two steps of four k of 8 columns at a time, from step kFirst on:
// unsigned, or the table's values plus kTableOffset. Planes of fewer than 4 bits stay in registers and are
// shifted along: shifts in a loop that stays a loop keep the sums in registers, where the unrolled one
// spilled them.
template <class Codes, int kFirst>
class CodeReader {
  public:
    void start(const uint8_t* group) {
        if constexpr (kLow == 4)
            next_ = group + kFirst / 2 * kVectorBytes;
        else
            low_ = load32(group + kFirst * kLow / 8 * kVectorBytes);
        if constexpr (kHigh > 0) {
            high_ = load32(group + kLayout.high_plane() + kFirst * kHigh / 8 * kVectorBytes);
            if constexpr (kFirst * kHigh % 8 > 0) high_ = _mm256_srli_epi16(high_, kFirst * kHigh % 8);
        }
    }

    void next(__m256i& first, __m256i& second) {
        const __m256i low = _mm256_set1_epi8((1 << kLow) - 1);
        if constexpr (kLow == 4) {
            low_ = load32(next_);
            next_ += kVectorBytes;
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
        if constexpr (kTable) {
            first = _mm256_shuffle_epi8(table_values(), first);
            second = _mm256_shuffle_epi8(table_values(), second);
        }
    }

  private:
    static constexpr WeightLayout kLayout = weight_layout(Codes::kType);
    static constexpr int kLow = kLayout.low_bits, kHigh = kLayout.high_bits;
    static constexpr bool kTable = kLayout.table;

    const uint8_t* next_;
    __m256i low_, high_;
};

template <WeightType kType, int kFirst>
class CodeReader<UnpackedCodes<kType>, kFirst> {
  public:
    void start(const uint8_t* group) { next_ = group + kFirst * kVectorBytes; }

    void next(__m256i& first, __m256i& second) {
        first = load32(next_);
        second = load32(next_ + kVectorBytes);
        next_ += 2 * kVectorBytes;
    }

  private:
    const uint8_t* next_;
};

// Four steps of a group, one tile.
template <WeightType kType, int kFirst>
inline void unpack_half(const uint8_t* packed, uint8_t* to) {
    CodeReader<PackedCodes<kType>, kFirst> codes;
    codes.start(packed);
    for (int step = kFirst; step < kFirst + 4; step += 2) {
        __m256i first, second;
        codes.next(first, second);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + step * kVectorBytes), first);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + (step + 1) * kVectorBytes), second);
    }
}

// The codes of `groups` groups of a panel.
template <WeightType kType>
inline void unpack(const uint8_t* packed, int groups, uint8_t* to) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    for (int g = 0; g < groups;
         ++g, packed += kLayout.group_bytes(), to += UnpackedCodes<kType>::kGroupBytes) {
        if (g % kLayout.groups == 0) packed += kLayout.header_bytes();
        if constexpr (kLayout.low_bits == 8) {
            for (int i = 0; i < kGroup * kPanelColumns; i += 16) {
                const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i));
                _mm256_store_si256(reinterpret_cast<__m256i*>(to + 2 * i), _mm256_cvtepi8_epi16(bytes));
            }
        } else {
            for (int t = 0; t < kPanelTiles; ++t) {
                unpack_half<kType, 0>(packed + 32 * t, to + 32 * t);
                unpack_half<kType, 4>(packed + 32 * t, to + 32 * t);
            }
        }
    }
}

// Lane c = what the wide code meets in column c: the unsigned code, or the table's value.
template <class Ints, class Codes>
inline Ints wide_values(const uint8_t* group, const WideCode& wide) {
    constexpr WeightLayout kLayout = weight_layout(Codes::kType);
    const auto lanes = [](const uint8_t* from, int shift, int bits) {
        return _mm256_and_si256(_mm256_srlv_epi32(load32(from), _mm256_set1_epi32(shift)),
                                _mm256_set1_epi32((1 << bits) - 1));
    };
    const unsigned at = wide.at;
    if constexpr (Codes::kUnpacked) {
        const __m256i byte = lanes(group + at / 4 * kVectorBytes, wide.byte_shift, 8);
        if constexpr (!kLayout.table) return {byte};
        if constexpr (kTableOffset != 0) return {_mm256_sub_epi32(byte, _mm256_set1_epi32(kTableOffset))};
        return {_mm256_srai_epi32(_mm256_slli_epi32(byte, 24), 24)};
    }
    const auto plane = [&](const uint8_t* from, int bits) {
        return lanes(from + plane_byte(bits, 0, at & ~3u),
                     static_cast<int>(at % 4 * 8 + plane_shift(bits, at)), bits);
    };
    __m256i code = kLayout.low_bits == 4 ? lanes(group + wide.nibble_offset, wide.nibble_shift, 4)
                                         : plane(group, kLayout.low_bits);
    if constexpr (kLayout.high_bits > 0)
        code = _mm256_or_si256(code, _mm256_slli_epi32(plane(group + kLayout.high_plane(), kLayout.high_bits),
                                                       kLayout.low_bits));
    if constexpr (kLayout.table) {
        const __m256i value = _mm256_shuffle_epi8(table_values(), code);
        if constexpr (kTableOffset != 0)
            return {_mm256_sub_epi32(_mm256_and_si256(value, _mm256_set1_epi32(255)),
                                     _mm256_set1_epi32(kTableOffset))};
        return {_mm256_srai_epi32(_mm256_slli_epi32(value, 24), 24)};
    }
    return {code};
}

// Lanes of v, which fit 16 bits, times the wide code.
inline I32x8 times_code(I32x8 v, const WideCode& wide) {
    return {_mm256_madd_epi16(v.v, broadcast4(&wide))};  // upper halves: times 0
}
