// Attention straight from blocks. Included inside an anonymous namespace, after kernels_rows.h.
//
// A run is 256 positions from 0, 256, ...: |run 0|run 1|...|. Each run of each query row starts from nothing:
//   scores  s[j] = sum over d, in order, of q[d] * K[j][d]
//   m = max s;  p = exp(s - m);  l = eight sums of p by position mod 8, then one tree
//   o[d] = sum over positions, in order, of p[j] * V[j][d]
// and run states are folded left in position order. Whether a row comes alone (decode, f16 read in registers)
// or with others (prefill, a slice of 64 positions widened once for all), these chains are the same, and so
// are the bytes.

struct RunView {
    const PagedKV* kv;
    const int32_t* blocks;  // of this run
    int64_t k_offset, v_offset;
    const Half* k(int block) const { return reinterpret_cast<const Half*>(base(block) + k_offset); }
    const Half* v(int block) const { return reinterpret_cast<const Half*>(base(block) + v_offset); }
    const uint8_t* base(int block) const { return kv->arena + blocks[block] * kv->extent_bytes; }
};

// Which lines to fetch while a score tile is computed. Blocks of a sequence lie far apart, so no hardware
// prefetcher helps from one to the next. K comes from a little ahead, V from the same positions, which are
// read after the scores. The K of 8 positions and their V are head_dim x 16 bytes each; a tile walks through
// them in the same proportion.
struct NoFetch {
    void begin(int) {}
    void next(int) {}
};

struct FetchAhead {
    static constexpr int kAhead = 32;  // positions
    const RunView& view;
    int length;  // positions of the run
    int head_dim, block_size;
    int k_position = 0, v_position = 0;
    const uint8_t* k_line = nullptr;
    const uint8_t* v_line = nullptr;
    int k_left = 0, v_left = 0;  // bytes of the block

    void seek(int position, int64_t offset, const uint8_t** line, int* left) const {
        if (position >= length) position = 0;  // nothing is there: fetch what is at hand
        const int row_bytes = head_dim * 2;
        *line = view.base(position / block_size) + offset + position % block_size * row_bytes;
        *left = (block_size - position % block_size) * row_bytes;
    }
    void begin(int first_vector) {
        v_position = 8 * first_vector;
        k_position = v_position + kAhead;
        seek(k_position, view.k_offset, &k_line, &k_left);
        seek(v_position, view.v_offset, &v_line, &v_left);
    }
    void next(int bytes) {
        __builtin_prefetch(k_line, 0, 3);
        __builtin_prefetch(v_line, 0, 2);
        k_line += bytes;
        v_line += bytes;
        if ((k_left -= bytes) <= 0) {
            k_position = (k_position / block_size + 1) * block_size;
            seek(k_position, view.k_offset, &k_line, &k_left);
        }
        if ((v_left -= bytes) <= 0) {
            v_position = (v_position / block_size + 1) * block_size;
            seek(v_position, view.v_offset, &v_line, &v_left);
        }
    }
};

// How many vectors of positions, or of dims, have their sums in registers for each of `queries`.
constexpr int vectors_beside(int queries) {
    return 4 * queries <= kAccumulators ? 4 : 2 * queries <= kAccumulators ? 2 : 1;
}

// scores[i][p * 8 ...] for kQ query vectors and kP vectors of 8 positions, d in order.
template <int kQ, int kP, class Element, class Fetch>
inline void score_tile(const float* const* q, const Element* const* k, int k_stride, int head_dim,
                       float* scores, Fetch& fetch) {
    F32x8 acc[kQ][kP];
    for (int i = 0; i < kQ; ++i)
        for (int p = 0; p < kP; ++p) acc[i][p] = zero_f32();
    for (int d = 0; d < head_dim; ++d) {
        fetch.next(16 * kP);
        F32x8 kv[kP];
        for (int p = 0; p < kP; ++p) kv[p] = load(k[p] + static_cast<int64_t>(d) * k_stride);
        for (int i = 0; i < kQ; ++i) {
            const F32x8 qd = broadcast(q[i][d]);
            for (int p = 0; p < kP; ++p) acc[i][p] = fma(qd, kv[p], acc[i][p]);
        }
    }
    for (int i = 0; i < kQ; ++i)
        for (int p = 0; p < kP; ++p) store(scores + i * kRunTokens + 8 * p, acc[i][p]);
}

template <int kQ, class Element, class Locate, class Fetch>
inline void score_vectors(const float* const* q, int vectors, int k_stride, int head_dim, float* scores,
                          Locate locate, Fetch& fetch) {
    constexpr int kP = vectors_beside(kQ);
    const Element* k[4];
    int at = 0;
    for (; at + kP <= vectors; at += kP) {
        for (int p = 0; p < kP; ++p) k[p] = locate(at + p);
        fetch.begin(at);
        score_tile<kQ, kP, Element>(q, k, k_stride, head_dim, scores + 8 * at, fetch);
    }
    for (; at < vectors; ++at) {
        k[0] = locate(at);
        fetch.begin(at);
        score_tile<kQ, 1, Element>(q, k, k_stride, head_dim, scores + 8 * at, fetch);
    }
}

template <class Element, class Locate, class Fetch>
inline void score_group(int count, const float* const* q, int vectors, int k_stride, int head_dim,
                        float* scores, Locate locate, Fetch fetch) {
    switch (count) {
        case 1:
            return score_vectors<1, Element>(q, vectors, k_stride, head_dim, scores, locate, fetch);
        case 2:
            return score_vectors<2, Element>(q, vectors, k_stride, head_dim, scores, locate, fetch);
        case 3:
            return score_vectors<3, Element>(q, vectors, k_stride, head_dim, scores, locate, fetch);
        case 4:
            return score_vectors<4, Element>(q, vectors, k_stride, head_dim, scores, locate, fetch);
        case 5:
            return score_vectors<5, Element>(q, vectors, k_stride, head_dim, scores, locate, fetch);
        default:
            return score_vectors<6, Element>(q, vectors, k_stride, head_dim, scores, locate, fetch);
    }
}

// o[i][d ...] += p[i][j] * v[j][d ...] for j in order, kQ query vectors, kD vectors of 8 dims.
template <int kQ, int kD, class Element>
inline void value_tile(const float* p, const Element* v, int head_dim, int positions, float* o) {
    F32x8 acc[kQ][kD];
    for (int i = 0; i < kQ; ++i)
        for (int d = 0; d < kD; ++d) acc[i][d] = load(o + i * head_dim + 8 * d);
    for (int j = 0; j < positions; ++j) {
        F32x8 row[kD];
        for (int d = 0; d < kD; ++d) row[d] = load(v + static_cast<int64_t>(j) * head_dim + 8 * d);
        for (int i = 0; i < kQ; ++i) {
            const F32x8 weight = broadcast(p[i * kRunTokens + j]);
            for (int d = 0; d < kD; ++d) acc[i][d] = fma(weight, row[d], acc[i][d]);
        }
    }
    for (int i = 0; i < kQ; ++i)
        for (int d = 0; d < kD; ++d) store(o + i * head_dim + 8 * d, acc[i][d]);
}

template <int kQ, class Element>
inline void value_rows(const float* p, const Element* v, int head_dim, int positions, float* o) {
    constexpr int kD = vectors_beside(kQ);
    int d = 0;
    for (; d + 8 * kD <= head_dim; d += 8 * kD)
        value_tile<kQ, kD, Element>(p, v + d, head_dim, positions, o + d);
    for (; d < head_dim; d += 16) value_tile<kQ, 2, Element>(p, v + d, head_dim, positions, o + d);
}

template <class Element>
inline void value_group(int count, const float* p, const Element* v, int head_dim, int positions, float* o) {
    switch (count) {
        case 1:
            value_rows<1, Element>(p, v, head_dim, positions, o);
            break;
        case 2:
            value_rows<2, Element>(p, v, head_dim, positions, o);
            break;
        case 3:
            value_rows<3, Element>(p, v, head_dim, positions, o);
            break;
        case 4:
            value_rows<4, Element>(p, v, head_dim, positions, o);
            break;
        case 5:
            value_rows<5, Element>(p, v, head_dim, positions, o);
            break;
        default:
            value_rows<6, Element>(p, v, head_dim, positions, o);
            break;
    }
}

// o += p * v for query vectors whose rows end at different positions: together up to the shortest, then each
// alone, so that no row ever reads a value beyond its own end (0 x NaN is NaN).
template <class Element>
inline void value_ragged(int count, const float* p, const int* lengths, int from, const Element* v,
                         int head_dim, int positions, float* o) {
    int common = positions;
    for (int i = 0; i < count; ++i) {
        const int own = lengths[i] - from < positions ? lengths[i] - from : positions;
        common = own < common ? own : common;
    }
    if (common < 0) common = 0;
    if (common > 0) value_group<Element>(count, p, v, head_dim, common, o);
    for (int i = 0; i < count; ++i) {
        const int own = lengths[i] - from < positions ? lengths[i] - from : positions;
        if (own > common)
            value_group<Element>(1, p + i * kRunTokens + common, v + static_cast<int64_t>(common) * head_dim,
                                 head_dim, own - common, o + i * head_dim);
    }
}

// scores -> weights in place; returns the maximum, writes the sum.
inline float softmax_run(float* s, int length, float* sum) {
    const int vectors = (length + 7) / 8;
    for (int j = length; j < 8 * vectors; ++j) s[j] = -__builtin_inff();
    F32x8 largest = load(s);
    for (int i = 1; i < vectors; ++i) largest = max(load(s + 8 * i), largest);
    const float m = max_lanes(largest);
    const F32x8 shift = broadcast(m);
    F32x8 total = zero_f32();
    for (int i = 0; i < vectors; ++i) {
        const F32x8 p = exp_f32(sub(load(s + 8 * i), shift));
        store(s + 8 * i, p);
        total = add(total, p);
    }
    *sum = sum_lanes(total);
    return m;
}

// (m, l, o) <- (m, l, o) then (m2, l2, o2).
inline void fold_state(float* m, float* l, float* o, float m2, float l2, const float* o2, int head_dim) {
    const float top = *m > m2 ? *m : m2;
    float v[8] = {*m - top, m2 - top};
    store(v, exp_f32(load(v)));
    const F32x8 a = broadcast(v[0]);
    const F32x8 b = broadcast(v[1]);
    *l = __builtin_fmaf(l2, v[1], *l * v[0]);
    *m = top;
    for (int d = 0; d < head_dim; d += 8) store(o + d, fma(load(o2 + d), b, mul(load(o + d), a)));
}

inline void finish_row(float l, const float* o, int head_dim, float* out) {
    const F32x8 divisor = broadcast(l);
    for (int d = 0; d < head_dim; d += 8) store(out + d, div(load(o + d), divisor));
}

constexpr int kVectorsAtOnce = 6;
// From this many query vectors on, widening K and V once for all of them is cheaper than in registers each
// time.
constexpr int kWidenFrom = 13;

void attention(const AttentionTask& t) {
    const PagedKV& kv = t.kv;
    const int hd = kv.head_dim;
    const int bs = kv.block_size;
    const int vectors = t.num_rows * t.group;
    const int64_t head_bytes = static_cast<int64_t>(hd) * bs * 2;

    float* scores = t.scratch;                              // [48][256]
    float* run_o = scores + kMaxQueryVectors * kRunTokens;  // [48][head_dim]
    float* total_o = run_o + kMaxQueryVectors * hd;         // [48][head_dim]
    float* slice = total_o + kMaxQueryVectors * hd;         // [64][head_dim], or transposed
    float total_m[kMaxQueryVectors], total_l[kMaxQueryVectors], run_l[kMaxQueryVectors],
        run_m[kMaxQueryVectors];
    const float* q[kMaxQueryVectors];
    int lengths[kMaxQueryVectors];
    for (int i = 0; i < vectors; ++i)
        q[i] = t.q + static_cast<int64_t>(i / t.group) * t.q_stride + (i % t.group) * hd;

    for (int run = t.run_begin; run < t.run_end; ++run) {
        const int run_start = run * kRunTokens;
        int first = vectors;  // rows grow longer, so the rows that reach this run are a suffix
        for (int i = vectors - 1; i >= 0; --i) {
            const int length = t.first_position + i / t.group + 1 - run_start;
            lengths[i] = length < kRunTokens ? length : kRunTokens;
            if (length > 0) first = i;
        }
        if (first == vectors) break;
        const int active = vectors - first;
        const int longest = lengths[vectors - 1];
        const bool widen = active >= kWidenFrom;
        const RunView view{&kv, t.block_table + run_start / bs, kv.layer_offset + t.kv_head * head_bytes,
                           kv.layer_offset + (kv.num_kv_heads + t.kv_head) * head_bytes};

        if (widen) {
            for (int from = 0; from < longest; from += kSliceTokens) {
                const int tokens = longest - from < kSliceTokens ? longest - from : kSliceTokens;
                for (int b = 0; b * bs < tokens; ++b) {
                    const Half* k = view.k(from / bs + b);
                    for (int d = 0; d < hd; ++d)
                        for (int j = 0; j < bs; j += 8)
                            store(slice + d * kSliceTokens + b * bs + j, load(k + d * bs + j));
                }
                for (int i = first; i < vectors; i += kVectorsAtOnce) {
                    const int count = vectors - i < kVectorsAtOnce ? vectors - i : kVectorsAtOnce;
                    const int needed = lengths[i + count - 1] - from;
                    if (needed <= 0) continue;
                    score_group<float>(
                        count, q + i, ((needed < tokens ? needed : tokens) + 7) / 8, kSliceTokens, hd,
                        scores + i * kRunTokens + from, [&](int n) { return slice + 8 * n; }, NoFetch{});
                }
            }
        } else {
            const int per_block = bs / 8;
            for (int i = first; i < vectors; i += kVectorsAtOnce) {
                const int count = vectors - i < kVectorsAtOnce ? vectors - i : kVectorsAtOnce;
                const auto locate = [&](int n) { return view.k(n / per_block) + n % per_block * 8; };
                const int needed = (lengths[i + count - 1] + 7) / 8;
                float* to = scores + i * kRunTokens;
                if (i == first)
                    score_group<Half>(count, q + i, needed, bs, hd, to, locate,
                                      FetchAhead{view, longest, hd, bs});
                else  // the first group has fetched the run
                    score_group<Half>(count, q + i, needed, bs, hd, to, locate, NoFetch{});
            }
        }

        for (int i = first; i < vectors; ++i) {
            run_m[i] = softmax_run(scores + i * kRunTokens, lengths[i], &run_l[i]);
            for (int d = 0; d < hd; d += 8) store(run_o + i * hd + d, zero_f32());
        }

        const int step = widen ? kSliceTokens : bs;
        for (int from = 0; from < longest; from += step) {
            const int tokens = longest - from < step ? longest - from : step;
            if (widen) {
                for (int b = 0; b * bs < tokens; ++b) {
                    const Half* v = view.v(from / bs + b);
                    const int rows = tokens - b * bs < bs ? tokens - b * bs : bs;
                    for (int j = 0; j < rows * hd; j += 8) store(slice + b * bs * hd + j, load(v + j));
                }
            }
            for (int i = first; i < vectors; i += kVectorsAtOnce) {
                const int count = vectors - i < kVectorsAtOnce ? vectors - i : kVectorsAtOnce;
                const float* p = scores + i * kRunTokens + from;
                if (widen)
                    value_ragged<float>(count, p, lengths + i, from, slice, hd, tokens, run_o + i * hd);
                else
                    value_ragged<Half>(count, p, lengths + i, from, view.v(from / bs), hd, tokens,
                                       run_o + i * hd);
            }
        }

        if (t.states != nullptr) {
            float* state = t.states + static_cast<int64_t>(run - t.run_begin) * t.group * (2 + hd);
            for (int i = 0; i < t.group; ++i, state += 2 + hd) {
                state[0] = run_m[i];
                state[1] = run_l[i];
                for (int d = 0; d < hd; d += 8) store(state + 2 + d, load(run_o + i * hd + d));
            }
            continue;
        }
        for (int i = first; i < vectors; ++i) {
            if (run == 0) {
                total_m[i] = run_m[i];
                total_l[i] = run_l[i];
                for (int d = 0; d < hd; d += 8) store(total_o + i * hd + d, load(run_o + i * hd + d));
            } else {
                fold_state(&total_m[i], &total_l[i], total_o + i * hd, run_m[i], run_l[i], run_o + i * hd,
                           hd);
            }
        }
    }
    if (t.states != nullptr) return;
    for (int i = 0; i < vectors; ++i)
        finish_row(total_l[i], total_o + i * hd, hd,
                   t.out + static_cast<int64_t>(i / t.group) * t.out_stride + (i % t.group) * hd);
}

void fold_states(const float* states, int runs, int group, int head_dim, float* out) {
    const int64_t stride = static_cast<int64_t>(group) * (2 + head_dim);
    for (int i = 0; i < group; ++i) {
        const float* state = states + i * (2 + head_dim);
        float m = state[0], l = state[1];
        float* o = out + i * head_dim;
        for (int d = 0; d < head_dim; d += 8) store(o + d, load(state + 2 + d));
        for (int run = 1; run < runs; ++run) {
            state += stride;
            fold_state(&m, &l, o, state[0], state[1], state + 2, head_dim);
        }
        finish_row(l, o, head_dim, o);
    }
}
