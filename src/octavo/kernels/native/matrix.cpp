#include "matrix.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

namespace octavo {

namespace {

#include "float_formats.h"

struct TypeFacts {
    const char* name;
    int group;              // values of one source block
    int source_bytes;       // of one source block
    int packed_code_bytes;  // of 8 columns x one group; 0: plain elements
    int packed_bytes;
};

constexpr TypeFacts kFacts[] = {
    {"F32", 1, 4, 0, 32},       {"F16", 1, 2, 0, 16},       {"BF16", 1, 2, 0, 16},
    {"Q4_0", 32, 18, 128, 144}, {"Q4_1", 32, 20, 128, 160}, {"Q8_0", 32, 34, 256, 272},
};

const TypeFacts& facts(WeightType type) { return kFacts[static_cast<int>(type)]; }

constexpr int64_t kChunkBytes = int64_t{32} << 20;
constexpr int64_t kMostFeatures = int64_t{1} << 30;  // sizes in bytes fit 63 bits, sizes in elements an int

float half_at(const uint8_t* p) {
    Half h;
    std::memcpy(&h, p, 2);
    return half_to_float(h);
}

}  // namespace

WeightStore::~WeightStore() {
    for (const Chunk& chunk : chunks_) munmap(chunk.data, chunk.size);
}

uint8_t* WeightStore::allocate(int64_t bytes) {
    std::lock_guard lock(mutex_);
    bytes = (bytes + 63) / 64 * 64;
    if (chunks_.empty() || chunks_.back().used + bytes > chunks_.back().size) {
        const int64_t size = std::max(kChunkBytes, bytes);
        void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
        madvise(data, size, MADV_HUGEPAGE);
        chunks_.push_back({static_cast<uint8_t*>(data), size, 0});
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
               int64_t out_features, int64_t in_features, ThreadPool& pool)
    : store_(std::move(store)),
      type_(weight_type_from_name(type)),
      out_features_(out_features),
      in_features_(in_features) {
    const TypeFacts& f = facts(type_);
    if (std::max(out_features, in_features) > kMostFeatures)
        throw std::invalid_argument("a matrix of " + std::to_string(out_features) + " x " +
                                    std::to_string(in_features) + " is larger than " +
                                    std::to_string(kMostFeatures) + " either way");
    if (out_features < 1 || in_features < 1 || in_features % f.group != 0)
        throw std::invalid_argument("a " + type + " matrix of " + std::to_string(out_features) + " x " +
                                    std::to_string(in_features) + " is not made of groups of " +
                                    std::to_string(f.group));
    const int64_t expected = out_features * (in_features / f.group) * f.source_bytes;
    if (size != expected)
        throw std::invalid_argument("a " + type + " matrix of " + std::to_string(out_features) + " x " +
                                    std::to_string(in_features) + " takes " + std::to_string(expected) +
                                    " bytes, not " + std::to_string(size));
    num_panels_ = (out_features + kPanelColumns - 1) / kPanelColumns;
    panel_bytes_ = in_features / f.group * f.packed_bytes * kPanelTiles;
    panels_ = store_->allocate(nbytes());

    std::atomic<int64_t> bad_row{-1};
    const int64_t chunk = std::max<int64_t>(1, num_panels_ / (8 * pool.num_threads()));
    ThreadPool::Session session(pool);
    pool.parallel_for(num_panels_, chunk, [&](int64_t begin, int64_t end, int) {
        for (int64_t panel = begin; panel < end; ++panel) {
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
    const int64_t groups = in_features_ / f.group;
    const int64_t stride = int64_t{kPanelTiles} * f.packed_bytes;  // from group to group
    for (int column = 0; column < kPanelColumns; ++column) {
        const int64_t row = panel * kPanelColumns + column;
        const int c = column % kTileColumns;
        uint8_t* out = panels_ + panel * panel_bytes_ + column / kTileColumns * f.packed_bytes;
        if (row >= out_features_) return;  // the store's memory is zero
        const uint8_t* source = data + row * groups * f.source_bytes;
        for (int64_t g = 0; g < groups; ++g, source += f.source_bytes) {
            uint8_t* group = out + g * stride;
            if (f.packed_code_bytes == 0) {
                std::memcpy(group + c * f.source_bytes, source, f.source_bytes);
                continue;
            }
            const bool has_minimum = type_ == WeightType::kQ4_1;
            if (!std::isfinite(half_at(source)) || (has_minimum && !std::isfinite(half_at(source + 2))))
                *bad_row = row;
            std::memcpy(group + f.packed_code_bytes + 2 * c, source, 2);
            if (has_minimum) std::memcpy(group + f.packed_code_bytes + 16 + 2 * c, source + 2, 2);
            const uint8_t* codes = source + (has_minimum ? 4 : 2);
            if (type_ == WeightType::kQ8_0) {
                for (int k = 0; k < kGroup; ++k) group[k / 2 * 16 + 2 * c + k % 2] = codes[k];
                continue;
            }
            const auto code = [&](int k) { return k < 16 ? codes[k] & 15 : codes[k - 16] >> 4; };
            for (int j = 0; j < 4; ++j)
                for (int i = 0; i < 4; ++i)
                    group[32 * j + 4 * c + i] =
                        static_cast<uint8_t>(code(8 * j + i) | code(8 * j + 4 + i) << 4);
        }
    }
}

void Matrix::dequantize_row(int64_t index, float* out) const {
    const TypeFacts& f = facts(type_);
    const int c = static_cast<int>(index % kTileColumns);
    const uint8_t* group = panels_ + index / kPanelColumns * panel_bytes_ +
                           index % kPanelColumns / kTileColumns * f.packed_bytes;
    const int64_t groups = in_features_ / f.group;
    for (int64_t g = 0; g < groups; ++g, group += int64_t{kPanelTiles} * f.packed_bytes) {
        float* to = out + g * f.group;
        switch (type_) {
            case WeightType::kF32:
                std::memcpy(to, group + 4 * c, 4);
                continue;
            case WeightType::kF16:
                *to = half_at(group + 2 * c);
                continue;
            case WeightType::kBF16: {
                BFloat b;
                std::memcpy(&b, group + 2 * c, 2);
                *to = bfloat_to_float(b);
                continue;
            }
            default:
                break;
        }
        const float scale = half_at(group + f.packed_code_bytes + 2 * c);
        if (type_ == WeightType::kQ8_0) {
            for (int k = 0; k < kGroup; ++k)
                to[k] = scale * static_cast<float>(static_cast<int8_t>(group[k / 2 * 16 + 2 * c + k % 2]));
            continue;
        }
        const float minimum =
            type_ == WeightType::kQ4_1 ? half_at(group + f.packed_code_bytes + 16 + 2 * c) : 0.0f;
        for (int k = 0; k < kGroup; ++k) {
            const uint8_t both = group[k / 8 * 32 + 4 * c + k % 4];
            const int code = k % 8 < 4 ? both & 15 : both >> 4;
            to[k] = type_ == WeightType::kQ4_1 ? scale * static_cast<float>(code) + minimum
                                               : scale * static_cast<float>(code - 8);
        }
    }
}

}  // namespace octavo
