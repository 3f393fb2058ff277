// Matrix products of packed weights with rows of activations. Included inside an anonymous namespace.
//
// A tile is 8 output columns; a lane is a column, so nothing is summed across lanes. Per 32 values of k:
//   Q4_0  | 128 B codes | 8 x f16 scale |                 value = scale * (code - 8)
//   Q4_1  | 128 B codes | 8 x f16 scale | 8 x f16 minimum | value = scale * code + minimum
//   Q8_0  | 256 B codes | 8 x f16 scale |                 value = scale * code
// Each output is one chain of multiply-adds in k order, the same for any number of rows. Up to four rows
// share a tile's decoded codes.

template <WeightType kType>
struct GroupLayout;
template <>
struct GroupLayout<WeightType::kQ4_0> {
    static constexpr int kCodeBytes = 128, kBytes = 144;
    static constexpr bool kHasMinimum = false;
};
template <>
struct GroupLayout<WeightType::kQ4_1> {
    static constexpr int kCodeBytes = 128, kBytes = 160;
    static constexpr bool kHasMinimum = true;
};
template <>
struct GroupLayout<WeightType::kQ8_0> {
    static constexpr int kCodeBytes = 256, kBytes = 272;
    static constexpr bool kHasMinimum = false;
};

inline void write_columns(float* out, int count, bool accumulate, F32x8 value) {
    if (count == kTileColumns) {
        store(out, accumulate ? add(load(out), value) : value);
        return;
    }
    float v[8];
    store(v, value);
    for (int c = 0; c < count; ++c) out[c] = accumulate ? out[c] + v[c] : v[c];
}

template <WeightType kType, int kRows>
inline void quantized_tile(const MatmulTask& t, const uint8_t* tile, int row, float* out, int columns) {
    using Layout = GroupLayout<kType>;
    const Activations& a = t.activations;
    const int groups = t.k / kGroup;
    F32x8 acc[kRows];
    for (int r = 0; r < kRows; ++r) acc[r] = zero_f32();
    for (int g = 0; g < groups; ++g) {
        const uint8_t* group = tile + static_cast<int64_t>(g) * Layout::kBytes;
        I32x8 dot[kRows];
        if constexpr (kType == WeightType::kQ8_0) {
            const int16_t* rows[kRows];
            for (int r = 0; r < kRows; ++r)
                rows[r] = a.codes16 + static_cast<int64_t>(row + r) * t.k + g * kGroup;
            dot_8bit<kRows>(group, rows, dot);
        } else {
            const int8_t* rows[kRows];
            for (int r = 0; r < kRows; ++r)
                rows[r] = a.codes + static_cast<int64_t>(row + r) * t.k + g * kGroup;
            const WideCode* wide[kRows];
            for (int r = 0; r < kRows; ++r) wide[r] = a.wide + static_cast<int64_t>(row + r) * groups + g;
            dot_4bit<kRows>(group, rows, wide, dot);
        }
        const F32x8 scale = load(reinterpret_cast<const Half*>(group + Layout::kCodeBytes));
        F32x8 minimum = zero_f32();
        if constexpr (Layout::kHasMinimum)
            minimum = load(reinterpret_cast<const Half*>(group + Layout::kCodeBytes + 16));
        for (int r = 0; r < kRows; ++r) {
            const int64_t at = static_cast<int64_t>(row + r) * groups + g;
            if constexpr (kType == WeightType::kQ4_0) dot[r] = sub(dot[r], broadcast(8 * a.sums[at]));
            const float row_scale = kType == WeightType::kQ8_0 ? a.scales16[at] : a.scales[at];
            acc[r] = fma(to_float(dot[r]), mul(scale, broadcast(row_scale)), acc[r]);
            if constexpr (Layout::kHasMinimum) acc[r] = fma(minimum, broadcast(a.scaled_sums[at]), acc[r]);
        }
    }
    for (int r = 0; r < kRows; ++r)
        write_columns(out + static_cast<int64_t>(r) * t.out_stride, columns, t.accumulate, acc[r]);
}

// Weights that are floats: the rows stay unquantised. kTiles tiles at once keep enough chains in flight.
template <class Element, int kRows, int kTiles>
inline void float_tiles(const MatmulTask& t, const uint8_t* tile, int row, float* out, int columns) {
    F32x8 acc[kRows][kTiles];
    const float* x[kRows];
    const Element* w[kTiles];
    for (int r = 0; r < kRows; ++r) {
        x[r] = t.activations.x + static_cast<int64_t>(row + r) * t.activations.x_stride;
        for (int j = 0; j < kTiles; ++j) acc[r][j] = zero_f32();
    }
    for (int j = 0; j < kTiles; ++j) w[j] = reinterpret_cast<const Element*>(tile + j * t.tile_bytes);
    for (int k = 0; k < t.k; ++k) {
        F32x8 v[kTiles];
        for (int j = 0; j < kTiles; ++j) v[j] = load(w[j] + static_cast<int64_t>(k) * kTileColumns);
        for (int r = 0; r < kRows; ++r) {
            const F32x8 xk = broadcast(x[r][k]);
            for (int j = 0; j < kTiles; ++j) acc[r][j] = fma(xk, v[j], acc[r][j]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int j = 0; j < kTiles; ++j) {
            const int left = columns - j * kTileColumns;
            write_columns(out + static_cast<int64_t>(r) * t.out_stride + j * kTileColumns,
                          left < kTileColumns ? left : kTileColumns, t.accumulate, acc[r][j]);
        }
    }
}

inline int columns_of(const MatmulTask& t, int64_t tile) {
    const int64_t left = t.columns - tile * kTileColumns;
    return static_cast<int>(left < kTileColumns ? left : kTileColumns);
}

// Fewer than kRows + 1 rows are left: all of them at once.
template <WeightType kType, int kRows>
inline void last_rows(const MatmulTask& t, const uint8_t* tile, int row, float* out, int columns) {
    if (t.rows - row == kRows)
        quantized_tile<kType, kRows>(t, tile, row, out, columns);
    else if constexpr (kRows > 1)
        last_rows<kType, kRows - 1>(t, tile, row, out, columns);
}

template <WeightType kType>
void quantized_matmul(const MatmulTask& t) {
    for (int64_t n = t.tile_begin; n < t.tile_end; ++n) {
        const uint8_t* tile = t.tiles + n * t.tile_bytes;
        const int columns = columns_of(t, n);
        float* out = t.out + n * kTileColumns;
        int row = 0;
        for (; row + kRowsAtOnce <= t.rows; row += kRowsAtOnce)
            quantized_tile<kType, kRowsAtOnce>(t, tile, row, out + static_cast<int64_t>(row) * t.out_stride,
                                               columns);
        last_rows<kType, kRowsAtOnce - 1>(t, tile, row, out + static_cast<int64_t>(row) * t.out_stride,
                                          columns);
    }
}

template <class Element, int kTiles>
inline void float_rows(const MatmulTask& t, int64_t n) {
    const uint8_t* tile = t.tiles + n * t.tile_bytes;
    int64_t left = t.columns - n * kTileColumns;
    if (left > kTiles * kTileColumns) left = kTiles * kTileColumns;
    float* out = t.out + n * kTileColumns;
    int row = 0;
    for (; row + 4 <= t.rows; row += 4)
        float_tiles<Element, 4, kTiles>(t, tile, row, out + static_cast<int64_t>(row) * t.out_stride,
                                        static_cast<int>(left));
    for (; row < t.rows; ++row)
        float_tiles<Element, 1, kTiles>(t, tile, row, out + static_cast<int64_t>(row) * t.out_stride,
                                        static_cast<int>(left));
}

template <class Element>
void float_matmul(const MatmulTask& t) {
    int64_t n = t.tile_begin;
    for (; n + 2 <= t.tile_end; n += 2) float_rows<Element, 2>(t, n);
    if (n < t.tile_end) float_rows<Element, 1>(t, n);
}
