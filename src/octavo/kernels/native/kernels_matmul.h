// Matrix products of packed weights with rows of activations. Included inside an anonymous namespace.
//
// A tile is 8 output columns; a lane is a column, so nothing is summed across lanes. The layouts are in
// weight_layout.h; F32, F16 and BF16 have for each k the panel's 32 elements. Each output is one chain of
// multiply-adds in k order, the same for any number of rows.

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

// dot[j][r] lane c = sum over a group of value * row code, the wide code's product included. Two sub-scales
// of a group are multiplied in here, exactly: |sub-scale| <= 128, and half a group sums to less than 2^22.
template <WeightType kType, int kRows, int kTiles>
inline void dot_group(const uint8_t* group, const int8_t* const (&rows)[kRows],
                      const WideCode* const (&wide)[kRows], const int32_t (&sums)[kRows],
                      I32x8 (&dot)[kTiles][kRows]) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    constexpr int kBytes = kLayout.group_bytes();
    int32_t start[kRows];
    if constexpr (kLayout.sub_scales == 2) {
        I32x8 half[kTiles][kRows];
        for (int r = 0; r < kRows; ++r) start[r] = -kLayout.offset * wide[r]->first_half_sum;
        dot_codes<kType, 0, 4>(group, rows, start, dot);
        for (int j = 0; j < kTiles; ++j)
            for (int r = 0; r < kRows; ++r)
                dot[j][r] = mul(dot[j][r], sub_scales<kType>(group + j * kBytes + kLayout.code_bytes(), 0));
        for (int r = 0; r < kRows; ++r) start[r] = -kLayout.offset * (sums[r] - wide[r]->first_half_sum);
        dot_codes<kType, 4, 8>(group, rows, start, half);
        for (int j = 0; j < kTiles; ++j) {
            const uint8_t* tile = group + j * kBytes;
            const I32x8 scale = sub_scales<kType>(tile + kLayout.code_bytes(), 1);
            for (int r = 0; r < kRows; ++r) {
                const I32x8 product = times_code(wide_values<kType>(tile, *wide[r]), *wide[r]);
                dot[j][r] =
                    add(add(dot[j][r], mul(half[j][r], scale)),
                        mul(product, sub_scales<kType>(tile + kLayout.code_bytes(), wide[r]->at / 16u)));
            }
        }
    } else {
        if constexpr (kLayout.table) {
            for (int r = 0; r < kRows; ++r) start[r] = sums[r] - wide[r]->code;
            dot_table<kType>(group, rows, start, dot);
        } else {
            for (int r = 0; r < kRows; ++r) start[r] = -kLayout.offset * sums[r];
            dot_codes<kType, 0, 8>(group, rows, start, dot);
        }
        for (int r = 0; r < kRows; ++r)
            for (int j = 0; j < kTiles; ++j)
                dot[j][r] =
                    add(dot[j][r], times_code(wide_values<kType>(group + j * kBytes, *wide[r]), *wide[r]));
    }
}

// kTiles neighbouring tiles of a panel for kRows rows: a broadcast of activations serves all tiles, decoded
// weights serve all rows.
template <WeightType kType, int kRows, int kTiles>
inline void quantized_tiles(const MatmulTask& t, const uint8_t* panel, int tile, int row, float* out,
                            int columns) {
    constexpr WeightLayout kLayout = weight_layout(kType);
    constexpr int kBytes = kLayout.group_bytes(), kHeaderBytes = kLayout.header_bytes();
    const Activations& a = t.activations;
    const int groups = t.k / kGroup;
    F32x8 acc[kTiles][kRows];
    for (int j = 0; j < kTiles; ++j)
        for (int r = 0; r < kRows; ++r) acc[j][r] = zero_f32();
    const uint8_t* group = panel + tile * kBytes;
    const uint8_t* header = nullptr;
    for (int g = 0; g < groups; ++g, group += kPanelTiles * kBytes) {
        if constexpr (kHeaderBytes > 0) {
            if (g % kLayout.groups == 0) {
                header = group + tile * (kHeaderBytes - kBytes);
                group += kPanelTiles * kHeaderBytes;
            }
        }
        if constexpr (kTiles < kPanelTiles) {
            // The panel is walked once for each part of it, which no hardware prefetcher follows: fetch the
            // same part of the next panel meanwhile.
            if (row == 0)
                for (int b = 0; b < kTiles * kBytes; b += 64) __builtin_prefetch(group + t.panel_bytes + b);
        }
        I32x8 dot[kTiles][kRows];
        if constexpr (kType == WeightType::kQ8_0) {
            const int16_t* rows[kRows];
            for (int r = 0; r < kRows; ++r)
                rows[r] = a.codes16 + static_cast<int64_t>(row + r) * t.k + g * kGroup;
            dot_8bit<kRows, kTiles, kBytes>(group, rows, dot);
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
            dot_group<kType>(group, rows, wide, sums, dot);
        }
        for (int j = 0; j < kTiles; ++j) {
            const uint8_t* scales = group + j * kBytes + kLayout.code_bytes();
            const uint8_t* halves = kHeaderBytes > 0 ? header + j * kHeaderBytes : scales;
            F32x8 scale = load(reinterpret_cast<const Half*>(halves));
            F32x8 minimum = zero_f32();
            if constexpr (kLayout.minimum) minimum = load(reinterpret_cast<const Half*>(halves + 16));
            if constexpr (kLayout.sub_scales == 1) {
                scale = mul(scale, to_float(sub_scales<kType>(scales, 0)));
                if constexpr (kLayout.minimum) minimum = mul(minimum, to_float(sub_minima<kType>(scales, 0)));
            }
            for (int r = 0; r < kRows; ++r) {
                const int64_t at = static_cast<int64_t>(row + r) * groups + g;
                const float row_scale = kType == WeightType::kQ8_0 ? a.scales16[at] : a.scales[at];
                acc[j][r] = fma(to_float(dot[j][r]), mul(scale, broadcast(row_scale)), acc[j][r]);
                if constexpr (kLayout.minimum && kLayout.sub_scales == 2) {
                    const int32_t first = a.wide[at].first_half_sum, second = a.sums[at] - first;
                    const I32x8 sum = add(mul(sub_minima<kType>(scales, 0), broadcast(first)),
                                          mul(sub_minima<kType>(scales, 1), broadcast(second)));
                    acc[j][r] = fma(to_float(sum), mul(minimum, broadcast(row_scale)), acc[j][r]);
                } else if constexpr (kLayout.minimum) {
                    acc[j][r] = fma(minimum, broadcast(a.scaled_sums[at]), acc[j][r]);
                }
            }
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < kTiles; ++j)
            write_columns(out + static_cast<int64_t>(r) * t.out_stride + j * kTileColumns,
                          columns - j * kTileColumns, t.accumulate, acc[j][r]);
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

// What a kind of weights needs to be walked over: a kernel for any rows and tiles.
template <WeightType kType>
struct Quantized {
    static constexpr int kRows = kRowsAtOnce, kTiles = kTilesAtOnce;
    template <int kR, int kT>
    static void run(const MatmulTask& t, const uint8_t* panel, int tile, int row, float* out, int columns) {
        quantized_tiles<kType, kR, kT>(t, panel, tile, row, out, columns);
    }
};

template <class Element>
struct Floats {
    static constexpr int kRows = 4, kTiles = 2;  // eight chains hide the latency of a multiply-add
    template <int kR, int kT>
    static void run(const MatmulTask& t, const uint8_t* panel, int tile, int row, float* out, int columns) {
        float_tiles<Element, kR, kT>(t, panel, tile, row, out, columns);
    }
};

// At most kR rows are left: all of them at once.
template <class Weights, int kR, int kT>
inline void last_rows(const MatmulTask& t, const uint8_t* panel, int tile, int row, float* out, int columns) {
    if (t.rows - row == kR)
        Weights::template run<kR, kT>(t, panel, tile, row, out, columns);
    else if constexpr (kR > 1)
        last_rows<Weights, kR - 1, kT>(t, panel, tile, row, out, columns);
}

template <class Weights>
void matmul(const MatmulTask& t) {
    constexpr int kRows = Weights::kRows, kTiles = Weights::kTiles;
    for (int64_t n = t.panel_begin; n < t.panel_end; ++n) {
        const uint8_t* panel = t.panels + n * t.panel_bytes;
        const int columns = static_cast<int>(t.columns - n * kPanelColumns);
        float* out = t.out + n * kPanelColumns;
        if (t.rows < kRows) {  // few rows wait for memory: the whole panel in one pass
            last_rows<Weights, kRows - 1, kPanelTiles>(t, panel, 0, 0, out, columns);
            continue;
        }
        for (int tile = 0; tile < kPanelTiles && tile * kTileColumns < columns; tile += kTiles) {
            const int left = columns - tile * kTileColumns;
            float* to = out + tile * kTileColumns;
            int row = 0;
            for (; row + kRows <= t.rows; row += kRows, to += static_cast<int64_t>(kRows) * t.out_stride)
                Weights::template run<kRows, kTiles>(t, panel, tile, row, to, left);
            last_rows<Weights, kRows - 1, kTiles>(t, panel, tile, row, to, left);
        }
    }
}
