#include "matrix.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>

namespace octavo {

namespace {

#include "float_formats.h"
#include "weight_layout.h"

struct TypeFacts {
    const char* name;
    int block;         // values of one source block; 1: plain elements
    int source_bytes;  // of one source block
};

constexpr TypeFacts kFacts[] = {
    {"F32", 1, 4},      {"F16", 1, 2},      {"BF16", 1, 2},     {"Q4_0", 32, 18},   {"Q4_1", 32, 20},
    {"Q5_0", 32, 22},   {"Q5_1", 32, 24},   {"Q8_0", 32, 34},   {"Q2_K", 256, 84},  {"Q3_K", 256, 110},
    {"Q4_K", 256, 144}, {"Q5_K", 256, 176}, {"Q6_K", 256, 210}, {"IQ4_NL", 32, 18}, {"IQ4_XS", 256, 136},
};
static_assert(std::size(kFacts) == static_cast<size_t>(WeightType::kCount));

const TypeFacts& facts(WeightType type) { return kFacts[static_cast<int>(type)]; }

// Of a panel's superblock, or of its elements of one k.
int packed_bytes(WeightType type) {
    const TypeFacts& f = facts(type);
    return f.block == 1 ? kPanelColumns * f.source_bytes : weight_layout(type).packed_bytes();
}

constexpr int64_t kMostFeatures = int64_t{1} << 30;  // sizes in bytes fit 63 bits, sizes in elements an int

Half raw_half(const uint8_t* p) {
    Half h;
    std::memcpy(&h, p, 2);
    return h;
}

float half_at(const uint8_t* p) { return half_to_float(raw_half(p)); }

// One block of a file, its codes in order of k.
struct SourceBlock {
    Half scale, minimum;
    int8_t sub_scales[16], sub_minima[16];  // in order of k
    uint8_t codes[256];
};

// 32 codes of 4 bits: k and k + 16 share a byte.
void read_nibbles(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = from[i] & 15;
        codes[16 + i] = from[i] >> 4;
    }
}

// Codes of which 32 bytes hold those of 32 consecutive k in bits [shift, shift + bits).
void read_32(const uint8_t* from, int shift, int bits, uint8_t* codes) {
    for (int k = 0; k < 32; ++k) codes[k] = from[k] >> shift & ((1 << bits) - 1);
}

// The same for bits that come above `low` others.
void add_high_bits(const uint8_t* from, int shift, int bits, int low, uint8_t* codes) {
    for (int k = 0; k < 32; ++k)
        codes[k] |= static_cast<uint8_t>((from[k] >> shift & ((1 << bits) - 1)) << low);
}

// Six bits each, scales and minima of eight groups in 12 bytes (Q4_K, Q5_K).
void read_scales_and_minima(const uint8_t* p, SourceBlock& block) {
    for (int g = 0; g < 4; ++g) {
        block.sub_scales[g] = p[g] & 63;
        block.sub_minima[g] = p[4 + g] & 63;
        block.sub_scales[4 + g] = static_cast<int8_t>((p[8 + g] & 15) | (p[g] >> 6) << 4);
        block.sub_minima[4 + g] = static_cast<int8_t>(p[8 + g] >> 4 | (p[4 + g] >> 6) << 4);
    }
}

// A scale that the file subtracts is added here.
Half negated(Half h) { return {static_cast<uint16_t>(h.bits ^ 0x8000u)}; }

void read_fifth_bits(const uint8_t* from, uint8_t* codes) {
    for (int k = 0; k < 32; ++k) codes[k] |= (from[k / 8] >> k % 8 & 1) << 4;
}

// Block layouts: ggml-common.h of llama.cpp.
void read_block(WeightType type, const uint8_t* p, SourceBlock& block) {
    block.scale = raw_half(p);
    switch (type) {
        case WeightType::kQ4_0:
            return read_nibbles(p + 2, block.codes);
        case WeightType::kQ4_1:
            block.minimum = raw_half(p + 2);
            return read_nibbles(p + 4, block.codes);
        case WeightType::kQ5_0:
            read_nibbles(p + 6, block.codes);
            return read_fifth_bits(p + 2, block.codes);
        case WeightType::kQ5_1:
            block.minimum = raw_half(p + 2);
            read_nibbles(p + 8, block.codes);
            return read_fifth_bits(p + 4, block.codes);
        case WeightType::kQ2_K:
            for (int i = 0; i < 16; ++i) {
                block.sub_scales[i] = p[i] & 15;
                block.sub_minima[i] = static_cast<int8_t>(p[i] >> 4);
            }
            for (int g = 0; g < 8; ++g) read_32(p + 16 + g / 4 * 32, g % 4 * 2, 2, block.codes + 32 * g);
            block.scale = raw_half(p + 80);
            block.minimum = negated(raw_half(p + 82));
            return;
        case WeightType::kQ3_K:
            for (int i = 0; i < 16; ++i) {
                const int low = p[96 + i % 8] >> i / 8 * 4 & 15, high = p[104 + i % 4] >> i / 4 * 2 & 3;
                block.sub_scales[i] = static_cast<int8_t>((low | high << 4) - 32);
            }
            for (int g = 0; g < 8; ++g) {
                read_32(p + 32 + g / 4 * 32, g % 4 * 2, 2, block.codes + 32 * g);
                add_high_bits(p, g, 1, 2, block.codes + 32 * g);
            }
            block.scale = raw_half(p + 108);
            return;
        case WeightType::kQ4_K:
        case WeightType::kQ5_K: {
            const bool fifth = type == WeightType::kQ5_K;
            block.minimum = negated(raw_half(p + 2));
            read_scales_and_minima(p + 4, block);
            const uint8_t* low = p + (fifth ? 48 : 16);
            for (int g = 0; g < 8; ++g) {
                read_32(low + g / 2 * 32, g % 2 * 4, 4, block.codes + 32 * g);
                if (fifth) add_high_bits(p + 16, g, 1, 4, block.codes + 32 * g);
            }
            return;
        }
        case WeightType::kQ6_K:
            for (int g = 0; g < 8; ++g) {
                const int half = g / 4;
                read_32(p + 64 * half + g % 2 * 32, g % 4 / 2 * 4, 4, block.codes + 32 * g);
                add_high_bits(p + 128 + 32 * half, g % 4 * 2, 2, 4, block.codes + 32 * g);
            }
            std::memcpy(block.sub_scales, p + 192, 16);
            block.scale = raw_half(p + 208);
            return;
        case WeightType::kIQ4_NL:
            return read_nibbles(p + 2, block.codes);
        case WeightType::kIQ4_XS:
            for (int g = 0; g < 8; ++g) {
                const int low = p[4 + g / 2] >> g % 2 * 4 & 15, high = p[2 + g / 4] >> g % 4 * 2 & 3;
                block.sub_scales[g] = static_cast<int8_t>((low | high << 4) - 32);
                read_nibbles(p + 8 + 16 * g, block.codes + 32 * g);
            }
            return;
        default:  // Q8_0
            std::memcpy(block.codes, p + 2, kGroup);
    }
}

// Bits [from, from + kBits) of 32 codes, to their places in a plane, four codes at a time.
template <int kBits>
void write_plane(const uint8_t* codes, int from, int column, uint8_t* plane) {
    constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x01010101u;
    for (unsigned vector = 0; vector < kBits; ++vector) {
        uint32_t lane = 0;
        for (unsigned step = 0; step < 8 / kBits; ++step) {
            const unsigned k = 4 * (vector * (8 / kBits) + step);
            uint32_t four;
            std::memcpy(&four, codes + k, 4);
            lane |= (four >> from & kMask) << plane_shift(kBits, k);
        }
        std::memcpy(plane + kVectorBytes * vector + 4 * column, &lane, 4);
    }
}

// The bytes after a group's codes.
void write_sub_scales(const WeightLayout& layout, const SourceBlock& block, int g, int column,
                      uint8_t* bytes) {
    const int n = layout.sub_scales;
    for (int half = 0; half < n; ++half) {
        const int8_t scale = block.sub_scales[g * n + half], minimum = block.sub_minima[g * n + half];
        bytes[kPanelColumns * half + column] =
            static_cast<uint8_t>(layout.nibbles ? scale | minimum << 4 : scale);
        if (layout.minimum && !layout.nibbles)
            bytes[kPanelColumns * (n + half) + column] = static_cast<uint8_t>(minimum);
    }
}

void write_codes(const WeightLayout& layout, const uint8_t* codes, int column, uint8_t* group) {
    if (layout.low_bits == 8) {
        for (int k = 0; k < kGroup; ++k) group[k / 2 * kVectorBytes / 2 + 2 * column + k % 2] = codes[k];
        return;
    }
    uint8_t* high = group + layout.high_plane();
    if (layout.low_bits == 4)
        write_plane<4>(codes, 0, column, group);
    else
        write_plane<2>(codes, 0, column, group);
    if (layout.high_bits == 1) write_plane<1>(codes, layout.low_bits, column, high);
    if (layout.high_bits == 2) write_plane<2>(codes, layout.low_bits, column, high);
}

// The value that scales multiply.
int value_at(const WeightLayout& layout, const uint8_t* group, int column, int k) {
    if (layout.low_bits == 8)
        return static_cast<int8_t>(group[k / 2 * kVectorBytes / 2 + 2 * column + k % 2]);
    const auto bits = [&](const uint8_t* plane, int count) {
        return plane[plane_byte(count, column, k)] >> plane_shift(count, k) & ((1 << count) - 1);
    };
    int code = bits(group, layout.low_bits);
    if (layout.high_bits > 0) code |= bits(group + layout.high_plane(), layout.high_bits) << layout.low_bits;
    return layout.table ? kTableValues[code] : code - layout.offset;
}

}  // namespace

WeightStore::~WeightStore() {
    for (const Chunk& chunk : chunks_) munmap(chunk.data, chunk.size);
}

uint8_t* WeightStore::allocate(int64_t bytes) {
    std::lock_guard lock(mutex_);
    bytes = (bytes + 63) / 64 * 64;
    if (chunks_.empty() || chunks_.back().used + bytes > chunks_.back().size) {
        const int64_t size = std::max(next_chunk_bytes_, bytes);
        void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
        madvise(data, size, MADV_HUGEPAGE);
        chunks_.push_back({static_cast<uint8_t*>(data), size, 0});
        next_chunk_bytes_ = kChunkBytes;
    }
    Chunk& chunk = chunks_.back();
    uint8_t* result = chunk.data + chunk.used;
    chunk.used += bytes;
    used_bytes_ += bytes;
    return result;
}

WeightType weight_type_from_name(const std::string& name) {
    std::string listed;
    for (int i = 0; i < static_cast<int>(WeightType::kCount); ++i) {
        if (name == kFacts[i].name) return static_cast<WeightType>(i);
        listed += (i ? ", " : "") + std::string(kFacts[i].name);
    }
    throw std::invalid_argument("weights of type " + name + " are not supported; supported: " + listed);
}

const char* weight_type_name(WeightType type) { return facts(type).name; }

Matrix::Matrix(std::shared_ptr<WeightStore> store, const std::string& type, const uint8_t* data, int64_t size,
               int64_t out_features, int64_t in_features, ThreadPool& pool, const HaveRead& have_read)
    : store_(std::move(store)),
      type_(weight_type_from_name(type)),
      out_features_(out_features),
      in_features_(in_features) {
    const TypeFacts& f = facts(type_);
    if (std::max(out_features, in_features) > kMostFeatures)
        throw std::invalid_argument("a matrix of " + std::to_string(out_features) + " x " +
                                    std::to_string(in_features) + " is larger than " +
                                    std::to_string(kMostFeatures) + " either way");
    if (out_features < 1 || in_features < 1 || in_features % f.block != 0)
        throw std::invalid_argument("a " + type + " matrix of " + std::to_string(out_features) + " x " +
                                    std::to_string(in_features) + " is not made of groups of " +
                                    std::to_string(f.block));
    const int64_t expected = out_features * (in_features / f.block) * f.source_bytes;
    if (size != expected)
        throw std::invalid_argument("a " + type + " matrix of " + std::to_string(out_features) + " x " +
                                    std::to_string(in_features) + " takes " + std::to_string(expected) +
                                    " bytes, not " + std::to_string(size));
    num_panels_ = (out_features + kPanelColumns - 1) / kPanelColumns;
    panel_bytes_ = in_features / f.block * packed_bytes(type_);
    panels_ = store_->allocate(nbytes());

    const int64_t source_panel_bytes = expected / out_features * kPanelColumns;
    const int64_t strip = std::max<int64_t>(1, kPackStripBytes / source_panel_bytes);
    for (int64_t begin = 0; begin < num_panels_; begin += strip) {
        const int64_t end = std::min(begin + strip, num_panels_);
        pack_panels(data, begin, end, pool);
        if (have_read) have_read(begin * source_panel_bytes, std::min(end * source_panel_bytes, size));
    }
}

void Matrix::pack_panels(const uint8_t* data, int64_t first, int64_t last, ThreadPool& pool) const {
    std::atomic<int64_t> bad_row{-1};
    const int64_t chunk = std::max<int64_t>(1, (last - first) / (8 * pool.num_threads()));
    ThreadPool::Session session(pool);
    pool.parallel_for(last - first, chunk, [&](int64_t begin, int64_t end, int) {
        for (int64_t panel = first + begin; panel < first + end; ++panel) {
            int64_t bad = -1;
            pack_panel(data, panel, &bad);
            if (bad >= 0) bad_row.store(bad, std::memory_order_relaxed);
        }
    });
    if (bad_row >= 0)
        throw std::invalid_argument("row " + std::to_string(bad_row) + " has a scale that is not finite");
}

void Matrix::pack_panel(const uint8_t* data, int64_t panel, int64_t* bad_row) const {
    const TypeFacts& f = facts(type_);
    const WeightLayout layout = weight_layout(type_);
    const int64_t blocks = in_features_ / f.block;
    const int bytes = packed_bytes(type_);
    for (int column = 0; column < kPanelColumns; ++column) {
        const int64_t row = panel * kPanelColumns + column;
        if (row >= out_features_) return;  // the store's memory is zero
        uint8_t* out = panels_ + panel * panel_bytes_;
        const uint8_t* source = data + row * blocks * f.source_bytes;
        SourceBlock block{};
        for (int64_t b = 0; b < blocks; ++b, source += f.source_bytes, out += bytes) {
            if (f.block == 1) {
                std::memcpy(out + column * f.source_bytes, source, f.source_bytes);
                continue;
            }
            read_block(type_, source, block);
            if (!std::isfinite(half_to_float(block.scale)) || !std::isfinite(half_to_float(block.minimum)))
                *bad_row = row;
            for (int g = 0; g < layout.groups; ++g) {
                uint8_t* group = out + layout.header_bytes() + g * layout.group_bytes();
                write_codes(layout, block.codes + g * kGroup, column, group);
                write_sub_scales(layout, block, g, column, group + layout.code_bytes());
            }
            uint8_t* halves = layout.header_bytes() > 0 ? out : out + layout.code_bytes();
            std::memcpy(halves + 2 * column, &block.scale, 2);
            if (layout.minimum) std::memcpy(halves + kHalvesBytes + 2 * column, &block.minimum, 2);
        }
    }
}

void Matrix::dequantize_row(int64_t index, float* out) const {
    const TypeFacts& f = facts(type_);
    const WeightLayout layout = weight_layout(type_);
    const int c = static_cast<int>(index % kPanelColumns);
    const uint8_t* at = panels_ + index / kPanelColumns * panel_bytes_;
    const int bytes = packed_bytes(type_);
    for (int64_t b = 0; b < in_features_ / f.block; ++b, out += f.block, at += bytes) {
        if (f.block == 1) {
            const uint8_t* element = at + c * f.source_bytes;
            BFloat bfloat;
            if (type_ == WeightType::kF32) {
                std::memcpy(out, element, 4);
            } else if (type_ == WeightType::kF16) {
                *out = half_at(element);
            } else {
                std::memcpy(&bfloat, element, 2);
                *out = bfloat_to_float(bfloat);
            }
            continue;
        }
        const uint8_t* group = at + layout.header_bytes();
        const uint8_t* halves = layout.header_bytes() > 0 ? at : group + layout.code_bytes();
        const float scale = half_at(halves + 2 * c);
        const float minimum = layout.minimum ? half_at(halves + kHalvesBytes + 2 * c) : 0.0f;
        float* to = out;
        for (int g = 0; g < layout.groups; ++g, group += layout.group_bytes(), to += kGroup) {
            const uint8_t* bytes = group + layout.code_bytes() + c;
            float s = scale, m = minimum;
            for (int k = 0; k < kGroup; ++k) {
                if (layout.sub_scales > 0 && k % (kGroup / layout.sub_scales) == 0) {
                    const int half = k * layout.sub_scales / kGroup;
                    const uint8_t sub = bytes[kPanelColumns * half];
                    s = scale * static_cast<float>(layout.nibbles ? sub & 15 : static_cast<int8_t>(sub));
                    if (layout.minimum)
                        m = minimum * static_cast<float>(
                                          layout.nibbles ? sub >> 4
                                                         : bytes[kPanelColumns * (layout.sub_scales + half)]);
                }
                to[k] = s * static_cast<float>(value_at(layout, group, c, k));
                if (layout.minimum) to[k] += m;
            }
        }
    }
}

}  // namespace octavo
