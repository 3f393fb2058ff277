// How each type of quantised weights lies in packed memory, the one description that packing, dequantising
// and the kernels read. Included inside an anonymous namespace.
//
// A panel is 32 output columns (4 tiles of 8), a sequence of superblocks of `groups` groups of 32 values of
// k:
//   | header | group 0 | group 1 | ...
//   header: | 32 x f16 scale | 32 x f16 minimum |              only where superblocks have 8 groups
//   group:  | low bits | high bits | scales and minima |
//           as the header; where there is a header, bytes: sub-scales of the 32 columns (of both halves of
//           the group where there are two), then sub-minima likewise. A minimum that the file subtracts is
//           stored negated.
// A plane of B bits a code is B vectors of 128 bytes: byte 4c + i of a vector belongs to column c and k = 4s
// + i for 8 / B consecutive steps s, the first in the lowest bits. However many columns a register has, all
// of a panel are read in the order of memory.

constexpr int kVectorBytes = 4 * kPanelColumns;
constexpr int kHalvesBytes = 2 * kPanelColumns;  // scales, or minima, of the columns

struct WeightLayout {
    int low_bits = 0;      // bits of the first plane; 8: no plane but 16 times a pair of int8 a column
    int high_bits = 0;     // bits of the second plane
    int offset = 0;        // value = code - offset, before scales
    bool table = false;    // value = kTableValues[code]
    bool minimum = false;  // value = scale * code + minimum
    int groups = 1;        // of 32 values in a superblock
    int sub_scales = 0;    // of a group, multiplied with the header's: 0, 1, or 2 (of 16 values each)
    bool nibbles = false;  // sub-scale and sub-minimum share a byte

    // Where the plane of the high bits begins.
    constexpr int high_plane() const { return kVectorBytes * low_bits; }
    constexpr int code_bytes() const { return kVectorBytes * (low_bits + high_bits); }
    constexpr int sub_bytes() const { return kPanelColumns * sub_scales * (minimum && !nibbles ? 2 : 1); }
    constexpr int group_bytes() const {
        return code_bytes() + (sub_scales ? sub_bytes() : minimum ? 2 * kHalvesBytes : kHalvesBytes);
    }
    constexpr int header_bytes() const {
        return sub_scales == 0 ? 0 : minimum ? 2 * kHalvesBytes : kHalvesBytes;
    }
    // Of a superblock.
    constexpr int packed_bytes() const { return header_bytes() + groups * group_bytes(); }
    // The largest magnitude that dot_codes multiplies.
    constexpr int largest_factor() const { return table ? 127 : (1 << (low_bits + high_bits)) - 1; }
};

constexpr WeightLayout weight_layout(WeightType type) {
    switch (type) {
        case WeightType::kQ4_0:
            return {.low_bits = 4, .offset = 8};
        case WeightType::kQ4_1:
            return {.low_bits = 4, .minimum = true};
        case WeightType::kQ5_0:
            return {.low_bits = 4, .high_bits = 1, .offset = 16};
        case WeightType::kQ5_1:
            return {.low_bits = 4, .high_bits = 1, .minimum = true};
        case WeightType::kQ8_0:
            return {.low_bits = 8};
        case WeightType::kQ2_K:
            return {.low_bits = 2, .minimum = true, .groups = 8, .sub_scales = 2, .nibbles = true};
        case WeightType::kQ3_K:
            return {.low_bits = 2, .high_bits = 1, .offset = 4, .groups = 8, .sub_scales = 2};
        case WeightType::kQ4_K:
            return {.low_bits = 4, .minimum = true, .groups = 8, .sub_scales = 1};
        case WeightType::kQ5_K:
            return {.low_bits = 4, .high_bits = 1, .minimum = true, .groups = 8, .sub_scales = 1};
        case WeightType::kQ6_K:
            return {.low_bits = 4, .high_bits = 2, .offset = 32, .groups = 8, .sub_scales = 2};
        case WeightType::kIQ4_NL:
            return {.low_bits = 4, .table = true};
        case WeightType::kIQ4_XS:
            return {.low_bits = 4, .table = true, .groups = 8, .sub_scales = 1};
        default:
            return {};
    }
}

// Where the bits of value `k` of column c stand in a plane of `bits`: a byte and a shift. Unsigned, so
// that divisions are shifts.
constexpr unsigned plane_byte(unsigned bits, unsigned c, unsigned k) {
    return k / 4 * bits / 8 * kVectorBytes + 4 * c + k % 4;
}
constexpr unsigned plane_shift(unsigned bits, unsigned k) { return k / 4 * bits % 8; }

// What the codes of IQ4_NL and IQ4_XS stand for (ggml-common.h of llama.cpp).
constexpr int8_t kTableValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};

// The codes of a group where they are packed.
template <WeightType type>
struct PackedCodes {
    static constexpr WeightType kType = type;
    static constexpr bool kUnpacked = false;
    static constexpr int kTileBytes = weight_layout(type).low_bits == 8 ? 16 : 32;  // from tile to tile
};

// The same unpacked for many rows: a byte each, vectors of four k; int16 for 8-bit weights, of two k.
template <WeightType type>
struct UnpackedCodes {
    static constexpr WeightType kType = type;
    static constexpr bool kUnpacked = true;
    static constexpr int kTileBytes = 32;
    static constexpr int kGroupBytes = kVectorBytes * (weight_layout(type).low_bits == 8 ? 16 : 8);
};

// What a path computes at once: rows that share decoded codes, tiles that share broadcasts of activations,
// and the columns of a tile.
struct RegisterTile {
    int rows, tiles, lanes = 8;
};

// Chosen by measurement (docs/kernels.md).
struct RegisterTiles {
    RegisterTile packed;
    int unpack_from = 0;  // rows from which the codes of a panel are unpacked before; 0: never
    RegisterTile unpacked = packed;
};
