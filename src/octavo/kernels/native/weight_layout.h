// How each type of quantised weights lies in packed memory, the one description that packing, dequantising
// and the kernels read. Included inside an anonymous namespace.
//
// A tile is 8 output columns, a panel 4 tiles. A panel is a sequence of superblocks of `groups` groups of 32
// values of k, all tiles beside each other so that memory is read as one stream:
//   | headers of tile 0, 1, 2, 3 | group 0: tile 0, 1, 2, 3 | group 1: tile 0, 1, 2, 3 | ...
//   header: | 8 x f16 scale | 8 x f16 minimum |                only where superblocks have 8 groups
//   group:  | low bits | high bits | scales and minima |
//           as the header's halves; where there is a header, bytes: sub-scales of the 8 columns (of both
//           halves of the group where there are two), then sub-minima likewise. A minimum that the file
//           subtracts is stored negated.
// A plane of B bits a code is B vectors of 32 bytes: byte 4c + i of a vector belongs to column c and k = 4s +
// i for 8 / B consecutive steps s, the first in the lowest bits.

struct WeightLayout {
    int low_bits = 0;      // bits of the first plane; 8: no plane but 16 pairs of int8 a column
    int high_bits = 0;     // bits of the second plane
    int offset = 0;        // value = code - offset, before scales
    bool table = false;    // value = kTableValues[code]
    bool minimum = false;  // value = scale * code + minimum
    int groups = 1;        // of 32 values in a superblock
    int sub_scales = 0;    // of a group, multiplied with the header's: 0, 1, or 2 (of 16 values each)
    bool nibbles = false;  // sub-scale and sub-minimum share a byte

    constexpr int code_bytes() const { return 32 * (low_bits + high_bits); }
    constexpr int sub_bytes() const { return 8 * sub_scales * (minimum && !nibbles ? 2 : 1); }
    // Of one tile.
    constexpr int group_bytes() const {
        return code_bytes() + (sub_scales ? sub_bytes() : minimum ? 32 : 16);
    }
    constexpr int header_bytes() const { return sub_scales == 0 ? 0 : minimum ? 32 : 16; }
    // Of one tile's superblock.
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
    return k / 4 * bits / 8 * 32 + 4 * c + k % 4;
}
constexpr unsigned plane_shift(unsigned bits, unsigned k) { return k / 4 * bits % 8; }

// What the codes of IQ4_NL and IQ4_XS stand for (ggml-common.h of llama.cpp).
constexpr int8_t kTableValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};

// The codes of a tile's group where they are packed.
template <WeightType type>
struct PackedCodes {
    static constexpr WeightType kType = type;
    static constexpr bool kUnpacked = false;
    static constexpr int kStride = weight_layout(type).group_bytes();  // from tile to tile
};

// The same unpacked for many rows: a byte each, those of four k of 8 columns in 32 bytes; int16 for 8-bit
// weights, two k in 32 bytes.
template <WeightType type>
struct UnpackedCodes {
    static constexpr WeightType kType = type;
    static constexpr bool kUnpacked = true;
    static constexpr int kStride = weight_layout(type).low_bits == 8 ? 512 : 256;
};

// What a path computes at once, chosen by measurement (docs/kernels.md).
struct RegisterTile {
    int rows, tiles;         // that share decoded codes, and broadcasts of activations
    int unpack_from = 0;     // rows from which the codes of a panel are unpacked before; 0: never
    int unpacked_tiles = 0;  // instead of `tiles`
};
