// Compares paths with the portable one, byte for byte and without Python: for processors that are only
// emulated here, where the extension itself is not built.
//
//   compare_paths NAME ...     prints what was compared; exit status 1 and the first difference if there is
//   one
//
// Two values that are no numbers count as equal: which of two NaN an operation hands on is the compiler's
// choice of operands.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu_features.h"
#include "kernel_table.h"
#include "matrix.h"
#include "thread_pool.h"

namespace octavo {
namespace {

#include "float_formats.h"

class Difference : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Vigna 2015, splitmix64.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    int below(int limit) { return static_cast<int>(next() % static_cast<uint64_t>(limit)); }
    float uniform() { return static_cast<float>(next() >> 40) * 0x1p-23f - 1.0f; }  // [-1, 1)
    float any_bits() { return bits_to_float(static_cast<uint32_t>(next())); }
    // A half below 2, subnormal ones too.
    uint16_t half() { return static_cast<uint16_t>(next() & 0xbfffu); }

  private:
    uint64_t state_;
};

bool same(float a, float b) { return float_to_bits(a) == float_to_bits(b) || (a != a && b != b); }
template <class Integer>
bool same(Integer a, Integer b) {
    return a == b;
}
bool same(Half a, Half b) {
    return a.bits == b.bits || ((a.bits & 0x7fffu) > 0x7c00u && (b.bits & 0x7fffu) > 0x7c00u);
}

std::string shown(float x) {
    char text[64];
    std::snprintf(text, sizeof text, "%.9g (%08x)", static_cast<double>(x), float_to_bits(x));
    return text;
}
std::string shown(Half h) { return "half of bits " + std::to_string(h.bits); }
template <class Integer>
std::string shown(Integer x) {
    return std::to_string(x);
}

// One path beside the portable one, and how many values of theirs were equal.
class Comparison {
  public:
    explicit Comparison(const KernelTable& path) : path_(path), portable_(portable_kernels()) {}

    // compute(kernels, out) fills `count` values for either path.
    template <class Value, class Compute>
    void run(const std::string& what, size_t count, Value before, Compute&& compute) {
        std::vector<Value> expected(count, before), found(count, before);
        compute(portable_, expected.data());
        compute(path_, found.data());
        for (size_t i = 0; i < count; ++i)
            if (!same(expected[i], found[i]))
                throw Difference(what + ", value " + std::to_string(i) + " of " + std::to_string(count) +
                                 ": portable " + shown(expected[i]) + ", " + path_.name + " " +
                                 shown(found[i]));
        values_ += static_cast<int64_t>(count);
    }
    int64_t values() const { return values_; }

  private:
    const KernelTable& path_;
    const KernelTable& portable_;
    int64_t values_ = 0;
};

// Rows as networks have them, and as nobody wants them.
enum class Kind { kOutliers, kTiny, kHuge, kEqual, kZeros, kNotFinite, kAnyBits, kCount };

std::vector<float> row_of(Kind kind, int n, Random& random) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) {
        v = random.uniform();
        if (kind == Kind::kOutliers && random.below(50) == 0) v *= 40.0f;
        if (kind == Kind::kTiny) v *= 1e-37f;
        if (kind == Kind::kHuge) v *= 1e34f;
        if (kind == Kind::kEqual) v = v < 0.0f ? -3.0f : 3.0f;
        if (kind == Kind::kZeros) v = v < 0.0f ? -0.0f : 0.0f;
        if (kind == Kind::kNotFinite && random.below(20) == 0) v = v < 0.0f ? NAN : INFINITY;
        if (kind == Kind::kAnyBits) v = random.any_bits();
    }
    return x;
}

struct Codes {
    explicit Codes(int rows, int k)
        : codes(static_cast<size_t>(rows) * k),
          codes16(codes.size()),
          wide(codes.size() / kGroup),
          scales(wide.size()),
          scaled_sums(wide.size()),
          scales16(wide.size()),
          sums(wide.size()) {}

    void quantize(const KernelTable& kernels, int row, const float* x, int k) {
        const size_t at = static_cast<size_t>(row) * k, group = at / kGroup;
        kernels.quantize_row8(x + at, k, codes.data() + at, wide.data() + group, scales.data() + group,
                              sums.data() + group, scaled_sums.data() + group);
        kernels.quantize_row16(x + at, k, codes16.data() + at, scales16.data() + group);
    }
    Activations view(const float* x, int k) const {
        return {x,
                k,
                codes.data(),
                wide.data(),
                scales.data(),
                sums.data(),
                scaled_sums.data(),
                codes16.data(),
                scales16.data()};
    }

    std::vector<int8_t> codes;
    std::vector<int16_t> codes16;
    std::vector<WideCode> wide;
    std::vector<float> scales, scaled_sums, scales16;
    std::vector<int32_t> sums;
};

void compare_quantising(Comparison& compare, Kind kind, Random& random) {
    constexpr int n = 96, groups = n / kGroup;
    const std::vector<float> x = row_of(kind, n, random);
    const std::string what = "rows of kind " + std::to_string(static_cast<int>(kind)) + ", ";
    const auto codes = [&](const KernelTable& kernels) {
        Codes result(1, n);
        result.quantize(kernels, 0, x.data(), n);
        return result;
    };
    compare.run<int8_t>(what + "8-bit codes", n, 99, [&](const KernelTable& kernels, int8_t* out) {
        std::memcpy(out, codes(kernels).codes.data(), n);
    });
    compare.run<int16_t>(what + "16-bit codes", n, 99, [&](const KernelTable& kernels, int16_t* out) {
        std::memcpy(out, codes(kernels).codes16.data(), 2 * n);
    });
    compare.run<uint8_t>(what + "wide codes", groups * sizeof(WideCode), 99,
                         [&](const KernelTable& kernels, uint8_t* out) {
                             std::memcpy(out, codes(kernels).wide.data(), groups * sizeof(WideCode));
                         });
    compare.run<int32_t>(what + "sums", groups, 99, [&](const KernelTable& kernels, int32_t* out) {
        std::memcpy(out, codes(kernels).sums.data(), 4 * groups);
    });
    compare.run<float>(what + "scales", 3 * groups, 99.0f, [&](const KernelTable& kernels, float* out) {
        const Codes all = codes(kernels);
        std::memcpy(out, all.scales.data(), 4 * groups);
        std::memcpy(out + groups, all.scaled_sums.data(), 4 * groups);
        std::memcpy(out + 2 * groups, all.scales16.data(), 4 * groups);
    });
}

void compare_row_kernels(Comparison& compare, Kind kind, int n, Random& random) {
    const std::string what =
        "rows of kind " + std::to_string(static_cast<int>(kind)) + " and width " + std::to_string(n) + ", ";
    const std::vector<float> x = row_of(kind, n, random), y = row_of(Kind::kOutliers, n, random);
    const size_t count = static_cast<size_t>(n);
    compare.run<float>(what + "norm", count, 0.0f, [&](const KernelTable& kernels, float* out) {
        kernels.rms_norm_row(x.data(), y.data(), n, 1e-5f, out);
    });
    compare.run<float>(what + "gate", count, 0.0f, [&](const KernelTable& kernels, float* out) {
        std::vector<float> gate = x;
        for (float& v : gate) v *= 30.0f;
        kernels.silu_mul_row(gate.data(), y.data(), n, out);
    });
    if (n % 16 != 0) return;
    compare.run<float>(what + "query for codes", count, 0.0f, [&](const KernelTable& kernels, float* out) {
        std::memcpy(out, x.data(), 4 * count);
        kernels.rotate_query(out, n);
    });
    const std::vector<float> angles = row_of(Kind::kOutliers, n, random);
    compare.run<float>(what + "rotation", count, 0.0f, [&](const KernelTable& kernels, float* out) {
        std::memcpy(out, x.data(), 4 * count);
        for (int head = 0; head < n; head += 16)
            kernels.rope_head(out + head, 16, 8, angles.data(), angles.data() + 8, 0.3f);
    });
}

// Halves as the arena gets them: anything at all, and what lies near the borders of rounding.
void compare_storing(Comparison& compare, Random& random) {
    constexpr int kHeads = 3, kDim = 16, kBlockSize = 8;
    constexpr size_t kHalves = 2 * kHeads * kDim * kBlockSize;
    PagedKV kv{nullptr, kHalves * 2, 0, kHeads, kDim, kBlockSize, KVType::kF16};
    for (int slot = 0; slot < 800; ++slot) {
        std::vector<float> k(kHeads * kDim), v(kHeads * kDim);
        for (float& x : k) x = random.any_bits();
        for (float& x : v) {
            const uint32_t bits =
                float_to_bits(half_to_float({static_cast<uint16_t>(random.next() & 0xfbffu)}));
            x = bits_to_float(bits + 0x1000u + static_cast<uint32_t>(random.below(3)) -
                              1u);  // half a step more
        }
        compare.run<Half>("stored keys and values", kHalves, {0}, [&](const KernelTable& kernels, Half* out) {
            PagedKV to = kv;
            to.arena = reinterpret_cast<uint8_t*>(out);
            for (int head = 0; head < kHeads; ++head) {
                kernels.store_key(to, 0, slot % kBlockSize, head, k.data() + head * kDim);
                kernels.store_value(to, 0, slot % kBlockSize, head, v.data() + head * kDim);
            }
        });
    }
}

// Codes and scales of rows of one kind, each to its slot of a block that is full of other bytes.
void compare_storing_codes(Comparison& compare, Kind kind, int head_dim, Random& random) {
    constexpr int kHeads = 2, kBlockSize = 8;
    const size_t codes = static_cast<size_t>(head_dim) * kBlockSize;
    const int64_t head_bytes = kv_head_bytes(KVType::kQ8, head_dim, kBlockSize);
    PagedKV kv{nullptr, 2 * kHeads * head_bytes, 0, kHeads, head_dim, kBlockSize, KVType::kQ8};
    const std::string what = "rows of kind " + std::to_string(static_cast<int>(kind)) + " and width " +
                             std::to_string(head_dim) + ", stored ";
    for (int i = 0; i < 2 * kBlockSize; ++i) {
        const std::vector<float> k = row_of(kind, kHeads * head_dim, random);
        const std::vector<float> v = row_of(kind, kHeads * head_dim, random);
        // part(head, codes and scales of a head's keys, or values).
        const auto stored = [&](const KernelTable& kernels, auto part) {
            std::vector<uint8_t> arena(static_cast<size_t>(kv.extent_bytes), 0x55);
            PagedKV to = kv;
            to.arena = arena.data();
            for (int head = 0; head < kHeads; ++head) {
                kernels.store_key(to, 0, i % kBlockSize, head, k.data() + head * head_dim);
                kernels.store_value(to, 0, i % kBlockSize, head, v.data() + head * head_dim);
            }
            for (int head = 0; head < 2 * kHeads; ++head) part(head, arena.data() + head * head_bytes);
        };
        compare.run<int8_t>(
            what + "codes", 2 * kHeads * codes, 0, [&](const KernelTable& kernels, int8_t* out) {
                stored(kernels,
                       [&](int head, const uint8_t* at) { std::memcpy(out + head * codes, at, codes); });
            });
        compare.run<float>(what + "scales", 2 * kHeads * kBlockSize, 0.0f,
                           [&](const KernelTable& kernels, float* out) {
                               stored(kernels, [&](int head, const uint8_t* at) {
                                   std::memcpy(out + head * kBlockSize, at + codes, 4 * kBlockSize);
                               });
                           });
    }
}

// A type's blocks in a file, and where their f16 scales stand.
struct FileBlock {
    const char* type;
    int values, bytes;
    std::vector<int> halves;
};

const FileBlock kFileBlocks[] = {
    {"F32", 1, 4, {}},         {"F16", 1, 2, {0}},         {"BF16", 1, 2, {}},
    {"Q4_0", 32, 18, {0}},     {"Q4_1", 32, 20, {0, 2}},   {"Q5_0", 32, 22, {0}},
    {"Q5_1", 32, 24, {0, 2}},  {"Q8_0", 32, 34, {0}},      {"Q2_K", 256, 84, {80, 82}},
    {"Q3_K", 256, 110, {108}}, {"Q4_K", 256, 144, {0, 2}}, {"Q5_K", 256, 176, {0, 2}},
    {"Q6_K", 256, 210, {208}}, {"IQ4_NL", 32, 18, {0}},    {"IQ4_XS", 256, 136, {0}},
};
static_assert(std::size(kFileBlocks) == static_cast<size_t>(WeightType::kCount));

std::vector<uint8_t> file_bytes(const FileBlock& block, int64_t blocks, Random& random) {
    std::vector<uint8_t> bytes(static_cast<size_t>(blocks) * block.bytes);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random.next());
    for (int64_t i = 0; i < blocks; ++i) {
        uint8_t* at = bytes.data() + i * block.bytes;
        for (int half : block.halves) {
            const uint16_t bits = random.half();
            std::memcpy(at + half, &bits, 2);
        }
        const float plain = random.uniform();
        if (block.halves.empty())
            std::memcpy(at, reinterpret_cast<const uint8_t*>(&plain) + 4 - block.bytes, block.bytes);
    }
    return bytes;
}

void compare_matmul(Comparison& compare, const FileBlock& block, int columns, int k, int most_rows, Kind kind,
                    ThreadPool& pool, Random& random) {
    const Matrix matrix(std::make_shared<WeightStore>(), block.type,
                        file_bytes(block, int64_t{columns} * k / block.values, random).data(),
                        int64_t{columns} * k / block.values * block.bytes, columns, k, pool);
    const FlushDenormals flush;
    const std::vector<float> x = row_of(kind, most_rows * k, random);
    const bool coded = matrix.activation_codes() != kNoCodes;
    // Up to 9, and 18: from 8 rows, or from 16, paths may unpack codes before.
    for (int rows = 1; rows <= most_rows; rows += rows < 9 ? 1 : 9) {
        const std::string what = std::string(block.type) + " " + std::to_string(columns) + " x " +
                                 std::to_string(k) + ", " + std::to_string(rows) + " rows of kind " +
                                 std::to_string(static_cast<int>(kind));
        const size_t count = static_cast<size_t>(rows) * columns;
        compare.run<float>(what, count, 0.25f, [&](const KernelTable& kernels, float* out) {
            Codes codes(rows, coded ? k : 0);
            if (coded)
                for (int row = 0; row < rows; ++row) codes.quantize(kernels, row, x.data(), k);
            kernels.matmul[static_cast<int>(matrix.type())](
                {matrix.panels(), matrix.panel_bytes(), k, columns, 0, matrix.num_panels(),
                 rows % 2 == 0 ? matrix.panels() : nullptr, codes.view(x.data(), k), rows, out, columns,
                 rows % 3 == 0});
        });
    }
}

struct AttentionCase {
    KVType type;
    int head_dim, group, block_size, first_position, rows;
    int window = 0;
    float soft_cap = 0.0f;
    bool bad_key = false;  // one that is no number

    std::string shown() const {
        return std::string(type == KVType::kQ8 ? "q8" : "f16") + " attention, heads of " +
               std::to_string(head_dim) + ", group of " + std::to_string(group) + ", blocks of " +
               std::to_string(block_size) + ", " + std::to_string(rows) + " rows from " +
               std::to_string(first_position) + (window > 0 ? ", window of " + std::to_string(window) : "") +
               (soft_cap > 0.0f ? ", soft cap of " + std::to_string(soft_cap) : "") +
               (bad_key ? ", a bad key" : "");
    }
};

// Keys and values of one of two KV heads of one sequence, its blocks scattered. What no row sees is
// unwritten, and unwritten bytes make no numbers.
class Sequence {
  public:
    Sequence(const AttentionCase& c, Random& random)
        : head_bytes_(kv_head_bytes(c.type, c.head_dim, c.block_size)),
          kv_{nullptr, 2 * kHeads * head_bytes_, 0, kHeads, c.head_dim, c.block_size, c.type},
          table_(static_cast<size_t>((c.first_position + c.rows + c.block_size - 1) / c.block_size)) {
        const int length = c.first_position + c.rows, blocks = static_cast<int>(table_.size());
        for (int i = 0; i < blocks; ++i) table_[i] = i;
        for (int i = blocks - 1; i > 0; --i) std::swap(table_[i], table_[random.below(i + 1)]);
        // One block more, which is nobody's.
        arena_.assign(static_cast<size_t>(kv_.extent_bytes) * (blocks + 1), 0xff);
        kv_.arena = arena_.data();
        const int first =
            c.window > 0 && c.first_position + 1 > c.window ? c.first_position + 1 - c.window : 0;
        for (int position = first; position < length; ++position) write(position, random);
        for (int i = 0; i < first / c.block_size; ++i) table_[i] = blocks;
        if (c.bad_key) {
            const int position = length / 2, slot = position % c.block_size;
            if (c.type == KVType::kQ8)
                put(keys(position) + head_bytes_ - 4 * (c.block_size - slot), NAN);
            else
                put(keys(position) + 2 * slot, uint16_t{0x7e00});
        }
    }
    Sequence(const Sequence&) = delete;

    static constexpr int kHeads = 2, kHead = 1;
    const PagedKV& kv() const { return kv_; }
    const int32_t* table() const { return table_.data(); }

  private:
    template <class Value>
    static void put(uint8_t* at, Value value) {
        std::memcpy(at, &value, sizeof value);
    }
    uint8_t* keys(int position) {
        return arena_.data() + table_[position / kv_.block_size] * kv_.extent_bytes + kHead * head_bytes_;
    }
    void write(int position, Random& random) {
        const int bs = kv_.block_size, hd = kv_.head_dim, slot = position % bs;
        uint8_t* k = keys(position);
        uint8_t* v = k + kHeads * head_bytes_;
        for (int d = 0; d < hd; ++d) {
            if (kv_.type == KVType::kQ8) {
                put(k + (d / 2 * bs + slot) * 2 + d % 2, static_cast<int8_t>(random.below(255) - 127));
                put(v + (slot / 2 * hd + d) * 2 + slot % 2, static_cast<int8_t>(random.below(255) - 127));
            } else {
                put(k + 2 * (d * bs + slot), random.half());
                put(v + 2 * (slot * hd + d), random.half());
            }
        }
        if (kv_.type == KVType::kQ8)
            for (uint8_t* at : {k, v}) put(at + hd * bs + 4 * slot, std::fabs(random.uniform()) / 64.0f);
    }

    int64_t head_bytes_;
    PagedKV kv_;
    std::vector<int32_t> table_;
    std::vector<uint8_t> arena_;
};

// What a task computes in, of exactly the size it asks for. Its bytes are others for every task.
class Scratch {
  public:
    explicit Scratch(int head_dim)
        : size_(static_cast<size_t>(attention_scratch_bytes(head_dim))),
          bytes_(static_cast<uint8_t*>(::operator new(size_, std::align_val_t{64}))) {}
    ~Scratch() { ::operator delete(bytes_, std::align_val_t{64}); }
    Scratch(const Scratch&) = delete;
    void* dirty() {
        std::memset(bytes_, ++count_ % 2 == 0 ? 0x3f : 0xff, size_);
        return bytes_;
    }

  private:
    size_t size_;
    uint8_t* bytes_;
    int count_ = 0;
};

void compare_attention(Comparison& compare, const AttentionCase& c, Random& random) {
    const Sequence sequence(c, random);
    const int width = c.group * c.head_dim, length = c.first_position + c.rows;
    const int first_run =
        c.window > 0 && c.first_position + 1 > c.window ? (c.first_position + 1 - c.window) / kRunTokens : 0;
    const int end_run = (length + kRunTokens - 1) / kRunTokens, runs = end_run - first_run;
    const std::vector<float> q = row_of(Kind::kOutliers, c.rows * width, random);
    Scratch scratch(c.head_dim);
    // Rows [row, row + count) over runs [begin, end), to `out` or as states.
    const auto attend = [&](const KernelTable& kernels, int row, int count, int begin, int end, float* out,
                            float* states) {
        std::vector<AttentionRow> rows;
        const int64_t state = static_cast<int64_t>(c.group) * (2 + c.head_dim);
        for (int i = row; i < row + count; ++i)
            rows.push_back({q.data() + i * width, c.first_position + i + 1, out ? out + i * width : nullptr,
                            states ? states + (i - row) * state : nullptr, sequence.table()});
        AttentionTask task{.kv = sequence.kv(),
                           .kv_head = Sequence::kHead,
                           .group = c.group,
                           .rows = rows.data(),
                           .num_rows = count,
                           .run_begin = begin,
                           .run_end = end,
                           .common = kRunTokens,
                           .window = c.window,
                           .soft_cap = c.soft_cap,
                           .scratch = scratch.dirty(),
                           .fetched = row % 2 != 0,
                           .next = nullptr};
        const AttentionTask next = task;
        if (row % 3 == 0) task.next = &next;
        kernels.attention(task);
    };
    const FlushDenormals flush;
    // Together on the path, each alone on the portable one: bytes do not depend on it.
    compare.run<float>(c.shown(), q.size(), 0.0f, [&](const KernelTable& kernels, float* out) {
        const int at_once = &kernels == &portable_kernels() ? 1 : c.rows;
        for (int row = 0; row < c.rows; row += at_once)
            attend(kernels, row, at_once, first_run, end_run, out, nullptr);
    });
    if (c.rows == 1) {
        const size_t size = static_cast<size_t>(width) + 2 * c.group;
        const auto compute_states = [&](const KernelTable& kernels, float* states) {
            for (int run = 0; run < runs; ++run)
                attend(kernels, 0, 1, first_run + run, first_run + run + 1, nullptr, states + run * size);
        };
        // Of scores of which one is no number the maximum may be any.
        if (!c.bad_key) compare.run<float>(c.shown() + ", states", runs * size, 0.0f, compute_states);
        compare.run<float>(c.shown() + ", folded", static_cast<size_t>(width), 0.0f,
                           [&](const KernelTable& kernels, float* out) {
                               std::vector<float> states(runs * size);
                               compute_states(kernels, states.data());
                               kernels.fold_states(states.data(), runs, c.group, c.head_dim, out);
                           });
        return;
    }
    // As rows of several sequences that have a whole run in common: all of them see it.
    if (c.first_position + 1 < kRunTokens || (c.window > 0 && c.window < length) || c.bad_key) return;
    const size_t all = static_cast<size_t>(c.rows) * c.group * (2 + c.head_dim);
    compare.run<float>(c.shown() + ", states of a common run", all, 0.0f,
                       [&](const KernelTable& kernels, float* states) {
                           const int at_once = &kernels == &portable_kernels() ? 1 : c.rows;
                           for (int row = 0; row < c.rows; row += at_once)
                               attend(kernels, row, at_once, 0, 1, nullptr, states + row * all / c.rows);
                       });
}

// What every kernel relies on: denormals count as zero for the life of the object, and only then.
void check_flush() {
    volatile float tiny = 1e-39f, small = 1e-30f;
    if (tiny * 1e10f == 0.0f) throw std::runtime_error("this process flushes denormals from the start");
    {
        const FlushDenormals flush;
        if (tiny * 1e10f != 0.0f) throw std::runtime_error("denormal operands are not flushed");
        if (small * 1e-10f != 0.0f) throw std::runtime_error("denormal results are not flushed");
    }
    if (tiny * 1e10f == 0.0f || small * 1e-10f == 0.0f)
        throw std::runtime_error("denormals are still flushed afterwards");
}

int64_t compare_all(const KernelTable& path) {
    Comparison compare(path);
    Random random(1);
    ThreadPool pool(1);
    {
        const FlushDenormals flush;
        for (int kind = 0; kind < static_cast<int>(Kind::kCount); ++kind) {
            for (int i = 0; i < 20; ++i) compare_quantising(compare, static_cast<Kind>(kind), random);
            for (int n = 1; n <= 64; ++n) compare_row_kernels(compare, static_cast<Kind>(kind), n, random);
            for (int n : {16, 48, 256}) compare_storing_codes(compare, static_cast<Kind>(kind), n, random);
        }
        compare_storing(compare, random);
    }
    for (const FileBlock& block : kFileBlocks) {
        const std::vector<int> sizes = block.values == 256 ? std::vector{256, 768} : std::vector{32, 96, 800};
        for (int k : sizes)
            for (int columns : {1, 8, 15, 33, 43})
                compare_matmul(compare, block, columns, k, 18, Kind::kOutliers, pool, random);
        for (Kind kind : {Kind::kTiny, Kind::kHuge, Kind::kEqual, Kind::kZeros, Kind::kNotFinite})
            compare_matmul(compare, block, 19, sizes[0], 5, kind, pool, random);
    }
    for (int k : {1, 3, 37})
        for (int i = 0; i < 3; ++i)
            compare_matmul(compare, kFileBlocks[i], 21, k, 9, Kind::kOutliers, pool, random);
    const std::pair<int, int> groups_and_rows[] = {{1, 1}, {1, 7}, {2, 3}, {3, 1},  {4, 2},  {5, 1}, {6, 8},
                                                   {7, 3}, {8, 1}, {9, 2}, {13, 1}, {3, 16}, {1, 48}};
    for (const KVType type : {KVType::kF16, KVType::kQ8})
        for (int head_dim : {16, 64, 80, 128, 256}) {
            for (const auto& [group, rows] : groups_and_rows) {
                if (head_dim > 128 && rows > 7) continue;  // seconds in an emulator
                const int block_size = std::vector{8, 16, 32, 256}[random.below(4)];
                for (int first : {0, 21, 250, 300}) {
                    const int window = std::vector{0, 0, 9, 100, 260}[random.below(5)];
                    const float soft_cap = std::vector{0.0f, 0.0f, 30.0f}[random.below(3)];
                    compare_attention(
                        compare, {type, head_dim, group, block_size, first, rows, window, soft_cap}, random);
                }
            }
            for (int block_size : {8, 16, 256})
                compare_attention(compare, {type, head_dim, 4, block_size, 600, 1}, random);
            for (int first : {20, 301})
                compare_attention(compare,
                                  {type, head_dim, 3, 32, first, 1, 0, head_dim == 64 ? 20.0f : 0.0f, true},
                                  random);
        }
    return compare.values();
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) {
    try {
        if (argc < 2) throw std::invalid_argument("name the paths to compare with the portable one");
        octavo::check_flush();
        for (int i = 1; i < argc; ++i) {
            const int64_t values = octavo::compare_all(octavo::select_kernels(argv[i]));
            std::printf("%s: %lld values as on the portable path\n", argv[i], static_cast<long long>(values));
        }
    } catch (const std::exception& fault) {
        std::fprintf(stderr, "compare_paths: %s\n", fault.what());
        return 1;
    }
    return 0;
}
