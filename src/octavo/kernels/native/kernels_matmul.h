// Matrix products of packed weights with rows of activations. Included inside an anonymous namespace.
//
// A tile is 8 output columns; a lane is a column, so nothing is summed across lanes. The layouts are in
// weight_layout.h; F32, F16 and BF16 have for each k the panel's 32 elements. Each output is one chain of
// multiply-adds in k order, the same for any number of rows.

// Fewer rows than a register tile has.
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

// The 8 columns' sub-scales, and sub-minima, of half `half` of a group, from the group's bytes after its
// codes.
template <WeightType kType>
inline I32x8 sub_scales(const uint8_t* scales, int half) {
    const I32x8 bytes = load(reinterpret_cast<const int8_t*>(scales) + 8 * half);
    return weight_layout(kType).nibbles ? bits(bytes, 0, 4) : bytes;
}
template <WeightType kType>
inline I32x8 sub_minima(const uint8_t* scales, int half) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    const int8_t* bytes = reinterpret_cast<const int8_t*>(scales) + 8 * half;
    return kLayout.nibbles ? bits(load(bytes), 4, 4) : load(bytes + 8 * kLayout.sub_scales);
}

// dot[j][r] lane c = sum over a group of value * row code, the wide code's product included; the codes of
// tile j at codes + j * Codes::kStride, its sub-scales at scales + j * group_bytes(). Two sub-scales of a
// group are multiplied in here, exactly: |sub-scale| <= 128, and half a group sums to less than 2^22.
template <class Codes, int kRows, int kTiles>
inline void dot_group(const uint8_t* codes, const uint8_t* scales, const int8_t* const (&rows)[kRows],
                      const WideCode* const (&wide)[kRows], const int32_t (&sums)[kRows],
                      I32x8 (&dot)[kTiles][kRows]) {
    constexpr WeightType kType = Codes::kType;
    constexpr WeightLayout kLayout = weight_layout(kType);
    int32_t start[kRows];
    if constexpr (kLayout.sub_scales == 2) {
        I32x8 half[kTiles][kRows];
        for (int r = 0; r < kRows; ++r) start[r] = -kLayout.offset * wide[r]->first_half_sum;
        dot_codes<Codes, 0, 4>(codes, rows, start, dot);
        for (int r = 0; r < kRows; ++r) start[r] = -kLayout.offset * (sums[r] - wide[r]->first_half_sum);
        dot_codes<Codes, 4, 8>(codes, rows, start, half);
        for (int j = 0; j < kTiles; ++j) {
            const uint8_t* tile_scales = scales + j * kLayout.group_bytes();
            const I32x8 first_scale = sub_scales<kType>(tile_scales, 0);
            const I32x8 second_scale = sub_scales<kType>(tile_scales, 1);
            for (int r = 0; r < kRows; ++r) {
                const I32x8 product =
                    times_code(wide_values<Codes>(codes + j * Codes::kStride, *wide[r]), *wide[r]);
                const I32x8 in_second = broadcast(wide[r]->in_second_half);
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
            for (int j = 0; j < kTiles; ++j)
                dot[j][r] =
                    add(dot[j][r],
                        times_code(wide_values<Codes>(codes + j * Codes::kStride, *wide[r]), *wide[r]));
    }
}

// Fetches what follows in memory, evenly over the steps of a loop that passes over one panel several times:
// in the later passes memory would rest, and in the next first one the loop would wait for it.
class FetchNext {
  public:
    FetchNext(const uint8_t* from, int64_t bytes, int64_t steps)
        : next_(from), end_(from + bytes), lines_(static_cast<int>((bytes / 64 + steps - 1) / steps)) {}
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
    const uint8_t* unpacked;  // [last - first][kPanelTiles][UnpackedCodes::kStride], or null
    int first, last;
    float* partial;  // [rows][kPanelColumns], the sums of the groups before; null in a whole panel
    FetchNext* fetch;
};

// kTiles neighbouring tiles of a panel for kRows rows: a broadcast of activations serves all tiles, decoded
// weights serve all rows.
template <class Codes, int kRows, int kTiles>
inline void quantized_tiles(const MatmulTask& t, const Stretch& stretch, int tile, int row, float* out,
                            int columns) {
    constexpr WeightType kType = Codes::kType;
    constexpr WeightLayout kLayout = weight_layout(kType);
    constexpr int kBytes = kLayout.group_bytes(), kHeaderBytes = kLayout.header_bytes();
    // Eight scales, and minima where the type has them.
    const auto load_halves = [](const uint8_t* halves, F32x8& scales, F32x8& minima) {
        scales = load(reinterpret_cast<const Half*>(halves));
        minima = kLayout.minimum ? load(reinterpret_cast<const Half*>(halves + 16)) : zero_f32();
    };
    const Activations& a = t.activations;
    const int groups = t.k / kGroup;
    float* partial = stretch.partial + row * kPanelColumns + tile * kTileColumns;
    F32x8 acc[kTiles][kRows];
    const auto sums_so_far = [&](int j, int r) { return partial + r * kPanelColumns + j * kTileColumns; };
    for (int j = 0; j < kTiles; ++j)
        for (int r = 0; r < kRows; ++r)
            acc[j][r] = Codes::kUnpacked && stretch.first > 0 ? load(sums_so_far(j, r)) : zero_f32();
    const uint8_t* group = stretch.packed + tile * kBytes;
    const uint8_t* unpacked = stretch.unpacked + tile * Codes::kStride;
    F32x8 scale[kTiles] = {}, minimum[kTiles] = {};  // of a group, or of a superblock
    for (int g = stretch.first; g < stretch.last; ++g, group += kPanelTiles * kBytes) {
        if constexpr (kHeaderBytes > 0) {
            if (g % kLayout.groups == 0) {
                const uint8_t* header = group + tile * (kHeaderBytes - kBytes);
                for (int j = 0; j < kTiles; ++j) load_halves(header + j * kHeaderBytes, scale[j], minimum[j]);
                group += kPanelTiles * kHeaderBytes;
            }
        }
        if constexpr (kRows > kFewRows) stretch.fetch->step();
        // 17 lines a group, read four tiles at a time, are no stream that the hardware recognises.
        if constexpr (kType == WeightType::kQ8_0 && kTiles == kPanelTiles && kRows > 1)
            if (t.rows <= register_tile(kType).rows)
                for (int b = 0; b < kPanelTiles * kBytes; b += 64)
                    __builtin_prefetch(group + 8192 + b, 0, 2);  // to the second-level cache
        const uint8_t* codes = group;
        if constexpr (Codes::kUnpacked) {
            codes = unpacked;
            unpacked += kPanelTiles * Codes::kStride;
        }
        I32x8 dot[kTiles][kRows];
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
            dot_group<Codes>(codes, group + kLayout.code_bytes(), rows, wide, sums, dot);
        }
        for (int j = 0; j < kTiles; ++j) {
            const uint8_t* scales = group + j * kBytes + kLayout.code_bytes();
            if constexpr (kHeaderBytes == 0) load_halves(scales, scale[j], minimum[j]);
            F32x8 s = scale[j], m = minimum[j];
            if constexpr (kLayout.sub_scales == 1) {
                s = mul(s, to_float(sub_scales<kType>(scales, 0)));
                if constexpr (kLayout.minimum) m = mul(m, to_float(sub_minima<kType>(scales, 0)));
            }
            for (int r = 0; r < kRows; ++r) {
                const int64_t at = static_cast<int64_t>(row + r) * groups + g;
                const float row_scale = kType == WeightType::kQ8_0 ? a.scales16[at] : a.scales[at];
                acc[j][r] = fma(to_float(dot[j][r]), mul(s, broadcast(row_scale)), acc[j][r]);
                if constexpr (kLayout.minimum && kLayout.sub_scales == 2) {
                    const int32_t first = a.wide[at].first_half_sum, second = a.sums[at] - first;
                    const I32x8 sum = add(mul(sub_minima<kType>(scales, 0), broadcast(first)),
                                          mul(sub_minima<kType>(scales, 1), broadcast(second)));
                    acc[j][r] = fma(to_float(sum), mul(m, broadcast(row_scale)), acc[j][r]);
                } else if constexpr (kLayout.minimum) {
                    acc[j][r] = fma(m, broadcast(a.scaled_sums[at]), acc[j][r]);
                }
            }
        }
    }
    const bool ends = !Codes::kUnpacked || stretch.last == groups;
    for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < kTiles; ++j)
            if (ends)
                write_columns(out + static_cast<int64_t>(r) * t.out_stride + j * kTileColumns,
                              columns - j * kTileColumns, t.accumulate, acc[j][r]);
            else
                store(sums_so_far(j, r), acc[j][r]);
}

// The same for weights that are floats: the rows stay unquantised.
template <class Element, int kRows, int kTiles>
inline void float_tiles(const MatmulTask& t, const uint8_t* panel, int tile, int row, float* out,
                        int columns) {
    F32x8 acc[kTiles][kRows];
    const float* x[kRows];
    for (int r = 0; r < kRows; ++r) {
        x[r] = t.activations.x + static_cast<int64_t>(row + r) * t.activations.x_stride;
        for (int j = 0; j < kTiles; ++j) acc[j][r] = zero_f32();
    }
    const Element* w = reinterpret_cast<const Element*>(panel) + tile * kTileColumns;
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

// What a kind of weights needs to be walked over: a kernel for any rows and tiles of a whole panel.
template <WeightType kType>
struct Quantized {
    static constexpr int kRows = register_tile(kType).rows, kTiles = register_tile(kType).tiles;
    template <int kR, int kT>
    static void run(const MatmulTask& t, const Stretch& whole, int tile, int row, float* out, int columns) {
        quantized_tiles<PackedCodes<kType>, kR, kT>(t, whole, tile, row, out, columns);
    }
};

// The same for a stretch of a panel whose codes are unpacked.
template <WeightType kType>
struct UnpackedStretch {
    static constexpr int kRows = register_tile(kType).rows, kTiles = register_tile(kType).unpacked_tiles;
    template <int kR, int kT>
    static void run(const MatmulTask& t, const Stretch& stretch, int tile, int row, float* out, int columns) {
        quantized_tiles<UnpackedCodes<kType>, kR, kT>(t, stretch, tile, row, out, columns);
    }
};

template <class Element>
struct Floats {
    static constexpr int kRows = 4;
    static constexpr int kTiles =
        kAccumulators < 8 ? 1 : 2;  // eight chains hide the latency of a multiply-add
    template <int kR, int kT>
    static void run(const MatmulTask& t, const uint8_t* panel, int tile, int row, float* out, int columns) {
        float_tiles<Element, kR, kT>(t, panel, tile, row, out, columns);
    }
};

// At most kR rows are left: all of them at once.
template <class Kernel, int kR, int kT, class Weights>
inline void last_rows(const MatmulTask& t, const Weights& weights, int tile, int row, float* out,
                      int columns) {
    if (t.rows - row == kR)
        Kernel::template run<kR, kT>(t, weights, tile, row, out, columns);
    else if constexpr (kR > 1)
        last_rows<Kernel, kR - 1, kT>(t, weights, tile, row, out, columns);
}

// All tiles of a panel, or of a stretch of it, for all rows.
template <class Kernel, class Weights>
inline void all_tiles(const MatmulTask& t, const Weights& weights, float* out, int columns) {
    constexpr int kRows = Kernel::kRows, kTiles = Kernel::kTiles;
    for (int tile = 0; tile < kPanelTiles && tile * kTileColumns < columns; tile += kTiles) {
        const int left = columns - tile * kTileColumns;
        float* to = out + tile * kTileColumns;
        int row = 0;
        for (; row + kRows <= t.rows; row += kRows, to += static_cast<int64_t>(kRows) * t.out_stride)
            Kernel::template run<kRows, kTiles>(t, weights, tile, row, to, left);
        last_rows<Kernel, kRows - 1, kTiles>(t, weights, tile, row, to, left);
    }
}

// One panel for all rows.
template <class Kernel, class Weights>
inline void whole_panel(const MatmulTask& t, const Weights& panel, int64_t n) {
    const int columns = static_cast<int>(t.columns - n * kPanelColumns);
    float* out = t.out + n * kPanelColumns;
    if (t.rows <= kFewRows)  // they wait for memory: all tiles in one pass
        last_rows<Kernel, kFewRows, kPanelTiles>(t, panel, 0, 0, out, columns);
    else
        all_tiles<Kernel>(t, panel, out, columns);
}

template <class Element>
void float_matmul(const MatmulTask& t) {
    for (int64_t n = t.panel_begin; n < t.panel_end; ++n)
        whole_panel<Floats<Element>>(t, t.panels + n * t.panel_bytes, n);
}

// What follows `bytes` of a panel in memory, while all_tiles passes over its groups. A single pass is a
// stream that the hardware fetches.
template <class Kernel>
inline FetchNext fetch_next(const uint8_t* panel, int64_t bytes, int rows, int groups) {
    const int passes = kPanelTiles / Kernel::kTiles * ((rows + Kernel::kRows - 1) / Kernel::kRows);
    return {panel + bytes, passes > 1 ? bytes : 0, static_cast<int64_t>(passes) * groups};
}

template <WeightType kType>
void packed_matmul(const MatmulTask& t) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    const int groups = t.k / kGroup;
    const int64_t bytes = groups / kLayout.groups * kPanelTiles * kLayout.packed_bytes();
    for (int64_t n = t.panel_begin; n < t.panel_end; ++n) {
        const uint8_t* panel = t.panels + n * t.panel_bytes;
        FetchNext fetch = fetch_next<Quantized<kType>>(panel, bytes, t.rows, groups);
        whole_panel<Quantized<kType>>(t, Stretch{panel, nullptr, 0, groups, nullptr, &fetch}, n);
    }
}

// A stretch of the panel is unpacked once, into 16 KB that stay in the first-level cache, and serves all
// rows.
template <WeightType kType>
void unpacking_matmul(const MatmulTask& all) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    constexpr int kGroupBytes = kPanelTiles * UnpackedCodes<kType>::kStride;
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
                const uint8_t* packed = t.panels + n * t.panel_bytes +
                                        first / kLayout.groups * kPanelTiles * kLayout.packed_bytes();
                const int64_t bytes = (last - first) / kLayout.groups * kPanelTiles * kLayout.packed_bytes();
                FetchNext fetch = fetch_next<UnpackedStretch<kType>>(packed, bytes, t.rows, last - first);
                unpack<kType>(packed, last - first, unpacked);
                all_tiles<UnpackedStretch<kType>>(t, Stretch{packed, unpacked, first, last, partial, &fetch},
                                                  t.out + n * kPanelColumns, columns);
            }
        }
    }
}

template <WeightType kType>
void quantized_matmul(const MatmulTask& t) {
    constexpr int kFrom = register_tile(kType).unpack_from;
    if constexpr (kFrom > 0)
        if (t.rows >= kFrom) return unpacking_matmul<kType>(t);
    packed_matmul<kType>(t);
}
