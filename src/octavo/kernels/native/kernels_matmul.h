// Matrix products of packed weights with rows of activations. Included inside an anonymous namespace.
//
// A lane is an output column, so nothing is summed across lanes. The layouts are in
// weight_layout.h; F32, F16 and BF16 have for each k the panel's 32 elements. Each output is one chain of
// multiply-adds in k order, the same for any number of rows.

// So few rows wait for memory: one pass over a panel.
constexpr int kFewRows = 3;

// The first `count` columns of a tile, which may be fewer than it has, or none, or more.
inline void write_columns(float* out, int count, bool accumulate, F32x8 value) {
    if (count >= kTileColumns) {
        store(out, accumulate ? add(load(out), value) : value);
        return;
    }
    float v[8];
    store(v, value);
    for (int c = 0; c < count; ++c) out[c] = accumulate ? out[c] + v[c] : v[c];
}

// A tile's sub-scales, and sub-minima, of half `half` of a group, from where its own begin.
template <class Lanes, WeightType kType>
inline typename Lanes::Ints sub_scales(const uint8_t* scales, int half) {
    const auto bytes = Lanes::bytes(reinterpret_cast<const int8_t*>(scales) + kPanelColumns * half);
    return weight_layout(kType).nibbles ? bits(bytes, 0, 4) : bytes;
}
template <class Lanes, WeightType kType>
inline typename Lanes::Ints sub_minima(const uint8_t* scales, int half) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    const int8_t* bytes = reinterpret_cast<const int8_t*>(scales) + kPanelColumns * half;
    return kLayout.nibbles ? bits(Lanes::bytes(bytes), 4, 4)
                           : Lanes::bytes(bytes + kPanelColumns * kLayout.sub_scales);
}

// dot[j][r] lane c = sum over a group of value * row code, the wide code's product included; `codes` and
// `scales` are where those of the first tile begin. Two sub-scales of a group are multiplied in here,
// exactly: |sub-scale| <= 128, and half a group sums to less than 2^22.
template <class Lanes, class Codes, int kRows, int kTiles>
inline void dot_group(const uint8_t* codes, const uint8_t* scales, const int8_t* const (&rows)[kRows],
                      const WideCode* const (&wide)[kRows], const int32_t (&sums)[kRows],
                      typename Lanes::Ints (&dot)[kTiles][kRows]) {
    constexpr WeightType kType = Codes::kType;
    constexpr WeightLayout kLayout = weight_layout(kType);
    using Ints = typename Lanes::Ints;
    const auto wide_product = [&](int j, int r) __attribute__((always_inline)) {
        const uint8_t* tile = codes + j * (Lanes::kColumns / kTileColumns) * Codes::kTileBytes;
        return times_code(wide_values<Ints, Codes>(tile, *wide[r]), *wide[r]);
    };
    int32_t start[kRows];
    if constexpr (kLayout.sub_scales == 2) {
        Ints half[kTiles][kRows];
        for (int r = 0; r < kRows; ++r) start[r] = -kLayout.offset * wide[r]->first_half_sum;
        dot_codes<Codes, 0, 4>(codes, rows, start, dot);
        for (int r = 0; r < kRows; ++r) start[r] = -kLayout.offset * (sums[r] - wide[r]->first_half_sum);
        dot_codes<Codes, 4, 8>(codes, rows, start, half);
        for (int j = 0; j < kTiles; ++j) {
            const Ints first_scale = sub_scales<Lanes, kType>(scales + j * Lanes::kColumns, 0);
            const Ints second_scale = sub_scales<Lanes, kType>(scales + j * Lanes::kColumns, 1);
            for (int r = 0; r < kRows; ++r) {
                const Ints product = wide_product(j, r);
                const Ints in_second = Lanes::splat(wide[r]->in_second_half);
                dot[j][r] = add(mul(add(dot[j][r], drop(product, in_second)), first_scale),
                                mul(add(half[j][r], keep(product, in_second)), second_scale));
            }
        }
    } else {
        if constexpr (kLayout.table) {
            for (int r = 0; r < kRows; ++r) start[r] = sums[r] - wide[r]->code;
            dot_table<Codes>(codes, rows, start, dot);
        } else {
            for (int r = 0; r < kRows; ++r) start[r] = -kLayout.offset * sums[r];
            dot_codes<Codes, 0, 8>(codes, rows, start, dot);
        }
        for (int r = 0; r < kRows; ++r)
            for (int j = 0; j < kTiles; ++j) dot[j][r] = add(dot[j][r], wide_product(j, r));
    }
}

// Fetches what follows in memory, evenly over the steps of a loop that passes over one panel several times:
// in the later passes memory would rest, and in the next first one the loop would wait for it.
class FetchNext {
  public:
    FetchNext(const uint8_t* from, int64_t bytes, int64_t steps)
        : next_(from),
          end_(from + bytes),
          lines_(bytes == 0 ? 0 : static_cast<int>((bytes / 64 + steps - 1) / steps)) {}
    void step() {
        for (int i = 0; i < lines_ && next_ < end_; ++i, next_ += 64) __builtin_prefetch(next_);
    }

  private:
    const uint8_t* next_;
    const uint8_t* end_;
    int lines_;
};

// Groups [first, last) of a panel.
struct Stretch {
    const uint8_t* packed;    // where group `first`, or the header before it, begins
    const uint8_t* unpacked;  // [last - first][UnpackedCodes::kGroupBytes], or null
    int first, last;
    float* partial;    // [rows][kPanelColumns], the sums of the groups before; null in a whole panel
    FetchNext* fetch;  // null for few rows
};

// kTiles neighbouring tiles of a panel for kRows rows: a broadcast of activations serves all tiles, decoded
// weights serve all rows. column: the first of them in the panel.
template <class Lanes, class Codes, int kRows, int kTiles>
inline void quantized_tiles(const MatmulTask& t, const Stretch& stretch, int column, int row, float* out,
                            int columns) {
    constexpr WeightType kType = Codes::kType;
    constexpr WeightLayout kLayout = weight_layout(kType);
    constexpr int kBytes = kLayout.group_bytes(), kHeaderBytes = kLayout.header_bytes();
    using Floats = typename Lanes::Floats;
    // A tile's scales, and minima where the type has them.
    const auto load_halves = [&](const uint8_t* halves, int j, Floats& scales, Floats& minima) {
        const Half* from = reinterpret_cast<const Half*>(halves) + column + j * Lanes::kColumns;
        scales = Lanes::halves(from);
        minima = kLayout.minimum ? Lanes::halves(from + kPanelColumns) : Lanes::zeros();
    };
    const Activations& a = t.activations;
    const int groups = t.k / kGroup;
    Floats acc[kTiles][kRows];
    const auto sums_so_far = [&](int j, int r) {
        return stretch.partial + (row + r) * kPanelColumns + column + j * Lanes::kColumns;
    };
    for (int j = 0; j < kTiles; ++j)
        for (int r = 0; r < kRows; ++r)
            acc[j][r] =
                Codes::kUnpacked && stretch.first > 0 ? Lanes::floats(sums_so_far(j, r)) : Lanes::zeros();
    const uint8_t* group = stretch.packed;
    const uint8_t* unpacked = stretch.unpacked;
    Floats scale[kTiles] = {}, minimum[kTiles] = {};  // of a group, or of a superblock
    for (int g = stretch.first; g < stretch.last; ++g, group += kBytes) {
        if constexpr (kHeaderBytes > 0) {
            if (g % kLayout.groups == 0) {
                for (int j = 0; j < kTiles; ++j) load_halves(group, j, scale[j], minimum[j]);
                group += kHeaderBytes;
            }
        }
        if (stretch.fetch != nullptr) stretch.fetch->step();
        // 17 lines a group, read four tiles at a time, are no stream that the hardware recognises.
        if constexpr (kType == WeightType::kQ8_0 && kTiles * Lanes::kColumns == kPanelColumns && kRows > 1)
            if (t.rows <= register_tiles(kType).packed.rows)
                for (int b = 0; b < kBytes; b += 64)
                    __builtin_prefetch(group + 8192 + b, 0, 2);  // to the second-level cache
        const uint8_t* codes = group + column / kTileColumns * Codes::kTileBytes;
        if constexpr (Codes::kUnpacked) {
            codes = unpacked + column / kTileColumns * Codes::kTileBytes;
            unpacked += Codes::kGroupBytes;
        }
        const uint8_t* scales = group + kLayout.code_bytes();
        typename Lanes::Ints dot[kTiles][kRows];
        if constexpr (kType == WeightType::kQ8_0) {
            const int16_t* rows[kRows];
            for (int r = 0; r < kRows; ++r)
                rows[r] = a.codes16 + static_cast<int64_t>(row + r) * t.k + g * kGroup;
            dot_8bit<Codes>(codes, rows, dot);
        } else {
            const int8_t* rows[kRows];
            const WideCode* wide[kRows];
            int32_t sums[kRows];
            for (int r = 0; r < kRows; ++r) {
                const int64_t at = static_cast<int64_t>(row + r) * groups + g;
                rows[r] = a.codes + static_cast<int64_t>(row + r) * t.k + g * kGroup;
                wide[r] = a.wide + at;
                sums[r] = a.sums[at];
            }
            dot_group<Lanes, Codes>(codes, scales + column, rows, wide, sums, dot);
        }
        for (int j = 0; j < kTiles; ++j) {
            const uint8_t* subs = scales + column + j * Lanes::kColumns;
            if constexpr (kHeaderBytes == 0) load_halves(scales, j, scale[j], minimum[j]);
            Floats s = scale[j], m = minimum[j];
            if constexpr (kLayout.sub_scales == 1) {
                s = mul(s, to_float(sub_scales<Lanes, kType>(subs, 0)));
                if constexpr (kLayout.minimum) m = mul(m, to_float(sub_minima<Lanes, kType>(subs, 0)));
            }
            for (int r = 0; r < kRows; ++r) {
                const int64_t at = static_cast<int64_t>(row + r) * groups + g;
                const float row_scale = kType == WeightType::kQ8_0 ? a.scales16[at] : a.scales[at];
                acc[j][r] = fma(to_float(dot[j][r]), mul(s, Lanes::splat(row_scale)), acc[j][r]);
                if constexpr (kLayout.minimum && kLayout.sub_scales == 2) {
                    const int32_t first = a.wide[at].first_half_sum, second = a.sums[at] - first;
                    const auto sum = add(mul(sub_minima<Lanes, kType>(subs, 0), Lanes::splat(first)),
                                         mul(sub_minima<Lanes, kType>(subs, 1), Lanes::splat(second)));
                    acc[j][r] = fma(to_float(sum), mul(m, Lanes::splat(row_scale)), acc[j][r]);
                } else if constexpr (kLayout.minimum) {
                    acc[j][r] = fma(m, Lanes::splat(a.scaled_sums[at]), acc[j][r]);
                }
            }
        }
    }
    const bool ends = !Codes::kUnpacked || stretch.last == groups;
    for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < kTiles; ++j)
            if (ends)
                write_columns(out + static_cast<int64_t>(r) * t.out_stride + j * Lanes::kColumns,
                              columns - j * Lanes::kColumns, t.accumulate, acc[j][r]);
            else
                store(sums_so_far(j, r), acc[j][r]);
}

// The same for weights that are floats: the rows stay unquantised.
template <class Element, int kRows, int kTiles>
inline void float_tiles(const MatmulTask& t, const uint8_t* panel, int column, int row, float* out,
                        int columns) {
    F32x8 acc[kTiles][kRows];
    const float* x[kRows];
    for (int r = 0; r < kRows; ++r) {
        x[r] = t.activations.x + static_cast<int64_t>(row + r) * t.activations.x_stride;
        for (int j = 0; j < kTiles; ++j) acc[j][r] = zero_f32();
    }
    const Element* w = reinterpret_cast<const Element*>(panel) + column;
    for (int k = 0; k < t.k; ++k, w += kPanelColumns) {
        for (int j = 0; j < kTiles; ++j) {
            const F32x8 v = load(w + j * kTileColumns);
            for (int r = 0; r < kRows; ++r) acc[j][r] = fma(broadcast(x[r][k]), v, acc[j][r]);
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < kTiles; ++j)
            write_columns(out + static_cast<int64_t>(r) * t.out_stride + j * kTileColumns,
                          columns - j * kTileColumns, t.accumulate, acc[j][r]);
}

// What a kind of weights needs to be walked over: a kernel for any rows and columns of a whole panel.
template <class L, WeightType kType>
struct Quantized {
    using Lanes = L;
    static constexpr int kRows = register_tiles(kType).packed.rows,
                         kTiles = register_tiles(kType).packed.tiles;
    template <int kR, int kT>
    __attribute__((noinline)) static void run(const MatmulTask& t, const Stretch& whole, int column, int row,
                                              float* out, int columns) {
        quantized_tiles<Lanes, PackedCodes<kType>, kR, kT>(t, whole, column, row, out, columns);
    }
};

// The same for a stretch of a panel whose codes are unpacked.
template <class L, WeightType kType>
struct UnpackedStretch {
    using Lanes = L;
    static constexpr int kRows = register_tiles(kType).unpacked.rows,
                         kTiles = register_tiles(kType).unpacked.tiles;
    template <int kR, int kT>
    static void run(const MatmulTask& t, const Stretch& stretch, int column, int row, float* out,
                    int columns) {
        quantized_tiles<Lanes, UnpackedCodes<kType>, kR, kT>(t, stretch, column, row, out, columns);
    }
};

template <int kLanes>
using LanesOf = std::conditional_t<kLanes == 16, Lanes16, Lanes8>;

template <class Element>
struct FloatWeights {
    using Lanes = Lanes8;
    static constexpr int kRows = 4;
    static constexpr int kTiles =
        kAccumulators < 8 ? 1 : 2;  // eight chains hide the latency of a multiply-add
    template <int kR, int kT>
    static void run(const MatmulTask& t, const uint8_t* panel, int column, int row, float* out, int columns) {
        float_tiles<Element, kR, kT>(t, panel, column, row, out, columns);
    }
};

// At most kR rows are left: all of them at once.
template <class Kernel, int kR, int kT, class Weights>
inline void last_rows(const MatmulTask& t, const Weights& weights, int column, int row, float* out,
                      int columns) {
    if (t.rows - row == kR)
        Kernel::template run<kR, kT>(t, weights, column, row, out, columns);
    else if constexpr (kR > 1)
        last_rows<Kernel, kR - 1, kT>(t, weights, column, row, out, columns);
}

// All tiles of a panel, or of a stretch of it, for all rows.
template <class Kernel, class Weights>
inline void all_tiles(const MatmulTask& t, const Weights& weights, float* out, int columns) {
    constexpr int kRows = Kernel::kRows, kTiles = Kernel::kTiles;
    for (int column = 0; column < kPanelColumns && column < columns;
         column += kTiles * Kernel::Lanes::kColumns) {
        float* to = out + column;
        int row = 0;
        for (; row + kRows <= t.rows; row += kRows, to += static_cast<int64_t>(kRows) * t.out_stride)
            Kernel::template run<kRows, kTiles>(t, weights, column, row, to, columns - column);
        last_rows<Kernel, kRows - 1, kTiles>(t, weights, column, row, to, columns - column);
    }
}

// One panel for all rows; few of them have a kernel of eight lanes.
template <class Few, class Kernel, class Weights>
inline void whole_panel(const MatmulTask& t, const Weights& panel, int64_t n) {
    const int columns = static_cast<int>(t.columns - n * kPanelColumns);
    float* out = t.out + n * kPanelColumns;
    if (t.rows <= kFewRows)  // they wait for memory: all tiles in one pass
        last_rows<Few, kFewRows, kPanelTiles>(t, panel, 0, 0, out, columns);
    else
        all_tiles<Kernel>(t, panel, out, columns);
}

template <class Element>
void float_matmul(const MatmulTask& t) {
    using Kernel = FloatWeights<Element>;
    for (int64_t n = t.panel_begin; n < t.panel_end; ++n)
        whole_panel<Kernel, Kernel>(t, t.panels + n * t.panel_bytes, n);
}

// As many bytes from `from` on, null for nothing, as a panel or stretch of `groups` has, in all_tiles' passes
// over it. A single pass is a stream that the hardware fetches.
template <class Kernel>
inline FetchNext fetch_next(const uint8_t* from, int64_t bytes, int rows, int groups) {
    const int passes = kPanelColumns / (Kernel::kTiles * Kernel::Lanes::kColumns) *
                       ((rows + Kernel::kRows - 1) / Kernel::kRows);
    return {from, passes > 1 && from != nullptr ? bytes : 0, static_cast<int64_t>(passes) * groups};
}

template <WeightType kType>
void packed_matmul(const MatmulTask& t) {
    using Kernel = Quantized<LanesOf<register_tiles(kType).packed.lanes>, kType>;
    constexpr WeightLayout kLayout = weight_layout(kType);
    const int groups = t.k / kGroup;
    const int64_t bytes = int64_t{groups} / kLayout.groups * kLayout.packed_bytes();
    for (int64_t n = t.panel_begin; n < t.panel_end; ++n) {
        const uint8_t* panel = t.panels + n * t.panel_bytes;
        FetchNext fetch =
            fetch_next<Kernel>(n + 1 == t.panel_end ? t.follows : panel + bytes, bytes, t.rows, groups);
        FetchNext* fetched = t.rows <= kFewRows ? nullptr : &fetch;
        whole_panel<Quantized<Lanes8, kType>, Kernel>(t, Stretch{panel, nullptr, 0, groups, nullptr, fetched},
                                                      n);
    }
}

// A stretch of the panel is unpacked once, into 16 KB that stay in the first-level cache, and serves all
// rows.
template <WeightType kType>
void unpacking_matmul(const MatmulTask& all) {
    using Kernel = UnpackedStretch<LanesOf<register_tiles(kType).unpacked.lanes>, kType>;
    constexpr WeightLayout kLayout = weight_layout(kType);
    constexpr int kGroupBytes = UnpackedCodes<kType>::kGroupBytes;
    constexpr int kMost = 16384 / kGroupBytes;  // groups of a stretch
    constexpr int kMostRows = 256;
    alignas(64) uint8_t unpacked[kMost * kGroupBytes];
    alignas(64) float partial[kMostRows * kPanelColumns];
    // Stretches of about equal length, of whole superblocks.
    const int groups = all.k / kGroup;
    const int stretches = (groups + kMost - 1) / kMost;
    const int length = (groups / kLayout.groups + stretches - 1) / stretches * kLayout.groups;
    for (int first_row = 0; first_row < all.rows; first_row += kMostRows) {
        MatmulTask t = all;
        t.rows = all.rows - first_row < kMostRows ? all.rows - first_row : kMostRows;
        t.activations = rows_from(all.activations, first_row, all.k);
        t.out += static_cast<int64_t>(first_row) * t.out_stride;
        for (int64_t n = t.panel_begin; n < t.panel_end; ++n) {
            const int columns = static_cast<int>(t.columns - n * kPanelColumns);
            for (int first = 0; first < groups; first += length) {
                const int last = first + length < groups ? first + length : groups;
                const uint8_t* packed =
                    t.panels + n * t.panel_bytes + int64_t{first} / kLayout.groups * kLayout.packed_bytes();
                const int64_t bytes = int64_t{last - first} / kLayout.groups * kLayout.packed_bytes();
                FetchNext fetch =
                    fetch_next<Kernel>(last == groups && n + 1 == t.panel_end ? t.follows : packed + bytes,
                                       bytes, t.rows, last - first);
                unpack<kType>(packed, last - first, unpacked);
                all_tiles<Kernel>(t, Stretch{packed, unpacked, first, last, partial, &fetch},
                                  t.out + n * kPanelColumns, columns);
            }
        }
    }
}

template <WeightType kType>
void quantized_matmul(const MatmulTask& t) {
    constexpr int kFrom = register_tiles(kType).unpack_from;
    if constexpr (kFrom > 0)
        if (t.rows >= kFrom) return unpacking_matmul<kType>(t);
    packed_matmul<kType>(t);
}
