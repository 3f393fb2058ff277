// Weights, repacked at load into column panels (layouts in weight_layout.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "thread_pool.h"

namespace octavo {

// Memory for all weights of one model: large anonymous chunks that may use huge pages, filled front to back.
class WeightStore {
  public:
    // expected_bytes: of all that will be allocated, 0 where nobody knows. They come in one chunk, so that at
    // most one huge page is resident and not used.
    explicit WeightStore(int64_t expected_bytes = 0)
        : next_chunk_bytes_(std::max(expected_bytes, kChunkBytes)) {}
    ~WeightStore();
    WeightStore(const WeightStore&) = delete;
    WeightStore& operator=(const WeightStore&) = delete;

    // 64-byte aligned, zeroed. Throws std::bad_alloc.
    uint8_t* allocate(int64_t bytes);
    int64_t used_bytes() const { return used_bytes_; }

  private:
    struct Chunk {
        uint8_t* data;
        int64_t size, used;
    };
    static constexpr int64_t kChunkBytes = int64_t{32} << 20;

    std::vector<Chunk> chunks_;
    int64_t next_chunk_bytes_;
    int64_t used_bytes_ = 0;
    std::mutex mutex_;
};

// Of the source, packed between two calls of Matrix::HaveRead: enough panels for many threads, and little
// beside a model.
constexpr int64_t kPackStripBytes = int64_t{16} << 20;

// Throws std::invalid_argument naming the types there are.
WeightType weight_type_from_name(const std::string& name);
const char* weight_type_name(WeightType type);

class Matrix {
  public:
    // Bytes [begin, end) of the source have been packed and are not read again.
    using HaveRead = std::function<void(int64_t begin, int64_t end)>;

    // data: a GGUF tensor [out_features][in_features] of `type`, row after row, packed by all threads of the
    // pool; have_read, if any, is called by the calling thread after each strip, in order. Throws
    // std::invalid_argument for sizes that disagree, for in_features that is no multiple of 32 where codes
    // come in groups of 32, and for scales that are not finite.
    Matrix(std::shared_ptr<WeightStore> store, const std::string& type, const uint8_t* data, int64_t size,
           int64_t out_features, int64_t in_features, ThreadPool& pool, const HaveRead& have_read = {});

    WeightType type() const { return type_; }
    int64_t out_features() const { return out_features_; }
    int64_t in_features() const { return in_features_; }
    int64_t nbytes() const { return panel_bytes_ * num_panels_; }
    int64_t num_panels() const { return num_panels_; }
    int64_t panel_bytes() const { return panel_bytes_; }
    const uint8_t* panels() const { return panels_; }
    // The codes of its rows of activations that a product reads.
    ActivationCodes activation_codes() const {
        if (type_ == WeightType::kQ8_0) return kCodes16;
        return type_ >= WeightType::kQ4_0 ? kCodes8 : kNoCodes;
    }

    // Row `index` of the original matrix as float[in_features], equal to the reference dequantiser's bits.
    void dequantize_row(int64_t index, float* out) const;

  private:
    void pack_panels(const uint8_t* data, int64_t first, int64_t last, ThreadPool& pool) const;
    void pack_panel(const uint8_t* data, int64_t panel, int64_t* bad_row) const;

    std::shared_ptr<WeightStore> store_;
    WeightType type_;
    int64_t out_features_, in_features_, num_panels_, panel_bytes_;
    uint8_t* panels_;
};

}  // namespace octavo
