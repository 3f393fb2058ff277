// Codes out of their planes (weight_layout.h) where a register has four columns and a tile is two of them.
// Included inside an anonymous namespace by the products headers of such paths, which define `Bytes` (16 in a
// register), load16, store16, as_lanes, table_values_of and plane_codes before.

// Four k, those of step kStep, of columns 4 half to 4 half + 3: unsigned codes, or the table's values.
template <class Codes, int kStep>
inline Bytes codes_of_step(const uint8_t* group, int half) {
    if constexpr (Codes::kUnpacked) return load16(group + kVectorBytes * kStep + 16 * half);
    const Bytes codes = plane_codes<Codes::kType, kStep>(group, half);
    return weight_layout(Codes::kType).table ? table_values_of(codes) : codes;
}

template <WeightType kType, int kStep>
inline void unpack_steps(const uint8_t* packed, uint8_t* to) {
    if constexpr (kStep < 8) {
        for (int half = 0; half < 2; ++half)
            store16(to + kVectorBytes * kStep + 16 * half,
                    codes_of_step<PackedCodes<kType>, kStep>(packed, half));
        unpack_steps<kType, kStep + 1>(packed, to);
    }
}

// The codes of `groups` groups of a panel; not of 8-bit weights.
template <WeightType kType>
inline void unpack(const uint8_t* packed, int groups, uint8_t* to) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    for (int g = 0; g < groups;
         ++g, packed += kLayout.group_bytes(), to += UnpackedCodes<kType>::kGroupBytes) {
        if (g % kLayout.groups == 0) packed += kLayout.header_bytes();
        for (int t = 0; t < kPanelTiles; ++t) unpack_steps<kType, 0>(packed + 32 * t, to + 32 * t);
    }
}

// Lane c = what the wide code meets in column c: the unsigned code, or the table's value.
template <class Ints, class Codes>
inline Ints wide_values(const uint8_t* group, const WideCode& wide) {
    constexpr WeightLayout kLayout = weight_layout(Codes::kType);
    const unsigned at = wide.at;
    const auto lanes = [](const uint8_t* from, int shift, int count) {
        return bits(as_lanes(load16(from), load16(from + 16)), shift, count);
    };
    if constexpr (Codes::kUnpacked) {
        const I32x8 byte = lanes(group + at / 4 * kVectorBytes, wide.byte_shift, 8);
        return kLayout.table ? lowest_byte(byte) : byte;
    }
    const auto plane = [&](const uint8_t* from, int count) {
        return lanes(from + plane_byte(count, 0, at & ~3u),
                     static_cast<int>(at % 4 * 8 + plane_shift(count, at)), count);
    };
    I32x8 code = kLayout.low_bits == 4 ? lanes(group + wide.nibble_offset, wide.nibble_shift, 4)
                                       : plane(group, kLayout.low_bits);
    if constexpr (kLayout.high_bits > 0)
        code =
            add(code, shift_left<kLayout.low_bits>(plane(group + kLayout.high_plane(), kLayout.high_bits)));
    if constexpr (kLayout.table)
        code = lowest_byte(as_lanes(table_values_of(as_bytes(code.lo)), table_values_of(as_bytes(code.hi))));
    return code;
}
