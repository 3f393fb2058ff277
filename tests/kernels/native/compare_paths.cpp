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
    PagedKV kv{nullptr, kHalves * 2, 0, kHeads, kDim, kBlockSize};
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
                 codes.view(x.data(), k), rows, out, columns, rows % 3 == 0});
        });
    }
}

struct AttentionCase {
    int head_dim, group, block_size, first_position, rows;
    bool bad_key = false;  // one that is no number
};

void compare_attention(Comparison& compare, const AttentionCase& c, Random& random) {
    constexpr int kHeads = 2, kHead = 1;
    const int length = c.first_position + c.rows, blocks = (length + c.block_size - 1) / c.block_size;
    const int64_t head = int64_t{c.head_dim} * c.block_size, extent = 2 * kHeads * head;
    std::vector<int32_t> table(static_cast<size_t>(blocks));
    for (int i = 0; i < blocks; ++i) table[i] = i;
    for (int i = blocks - 1; i > 0; --i) std::swap(table[i], table[random.below(i + 1)]);
    std::vector<uint16_t> arena(static_cast<size_t>(extent) * blocks, 0xffffu);  // unwritten: no numbers
    for (int position = 0; position < length; ++position) {
        uint16_t* k = arena.data() + table[position / c.block_size] * extent + kHead * head;
        uint16_t* v = k + kHeads * head;
        const int slot = position % c.block_size;
        for (int d = 0; d < c.head_dim; ++d) {
            k[d * c.block_size + slot] = random.half();
            v[slot * c.head_dim + d] = random.half();
        }
    }
    if (c.bad_key)
        arena[table[length / 2 / c.block_size] * extent + kHead * head + length / 2 % c.block_size] = 0x7e00u;
    const int width = c.group * c.head_dim, runs = (length + kRunTokens - 1) / kRunTokens;
    std::vector<float> q = row_of(Kind::kOutliers, c.rows * width, random);
    std::vector<float> scratch(static_cast<size_t>(attention_scratch_floats(c.head_dim)));
    const AttentionTask task{
        .kv = {reinterpret_cast<uint8_t*>(arena.data()), 2 * extent, 0, kHeads, c.head_dim, c.block_size},
        .block_table = table.data(),
        .q = q.data(),
        .q_stride = width,
        .group = c.group,
        .kv_head = kHead,
        .first_position = c.first_position,
        .num_rows = c.rows,
        .run_begin = 0,
        .run_end = runs,
        .states = nullptr,
        .out = nullptr,
        .out_stride = width,
        .scratch = scratch.data()};
    const std::string what = "attention, heads of " + std::to_string(c.head_dim) + ", group of " +
                             std::to_string(c.group) + ", blocks of " + std::to_string(c.block_size) + ", " +
                             std::to_string(c.rows) + " rows from " + std::to_string(c.first_position) +
                             (c.bad_key ? ", a bad key" : "");
    const FlushDenormals flush;
    compare.run<float>(what, q.size(), 0.0f, [&](const KernelTable& kernels, float* out) {
        AttentionTask whole = task;
        whole.out = out;
        kernels.attention(whole);
    });
    if (c.rows > 1) return;
    const size_t size = static_cast<size_t>(c.group) * (2 + c.head_dim);
    const auto compute_states = [&](const KernelTable& kernels, float* states) {
        for (int run = 0; run < runs; ++run) {
            AttentionTask one = task;
            one.run_begin = run;
            one.run_end = run + 1;
            one.states = states + run * size;
            kernels.attention(one);
        }
    };
    // Of scores of which one is no number the maximum may be any.
    if (!c.bad_key) compare.run<float>(what + ", states", runs * size, 0.0f, compute_states);
    compare.run<float>(what + ", folded", static_cast<size_t>(width), 0.0f,
                       [&](const KernelTable& kernels, float* out) {
                           std::vector<float> states(runs * size);
                           compute_states(kernels, states.data());
                           kernels.fold_states(states.data(), runs, c.group, c.head_dim, out);
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
    for (int head_dim : {64, 80, 128}) {
        for (const auto& [group, rows] :
             {std::pair{1, 1}, {1, 7}, {2, 3}, {3, 1}, {4, 2}, {5, 1}, {6, 8}, {13, 1}, {3, 16}})
            for (int first : {0, 21, 250}) {
                const int block_size = 8 << random.below(4);
                compare_attention(compare, {head_dim, group, block_size, first, rows}, random);
            }
        compare_attention(compare, {head_dim, 4, 16, 600, 1}, random);
        for (int first : {20, 301}) compare_attention(compare, {head_dim, 3, 32, first, 1, true}, random);
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
