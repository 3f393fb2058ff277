// Attention straight from blocks. Included inside an anonymous namespace, after kernels_rows.h and
// attention_tiles.h.
//
// A run is 256 positions from 0, 256, ...: |run 0|run 1|...|. Each run of each query row starts from nothing:
//   scores  s[j] = sum over d, in order, of q[d] * K[j][d]
//   m = max s;  p = exp(s - m);  l = eight sums of p by position mod 8, then one tree
//   o[d] = sum over positions, in order, of p[j] * V[j][d]
// and run states are folded left in position order. Whether a row comes alone (decode, stored numbers widened
// in registers) or with others (a slice of positions widened once for all), these chains are the same, and so
// are the bytes.
//
// KVType::kQ8: q becomes int16 codes with one scale, and so do the weights of a run, p[j] * scale of V[j].
// Both sums are integers, exact in any order: 256 dims, or positions, of |127 * 32,767| fit 32 bits.

inline Wide::Floats wide_splat(float x) { return Wide::splat(x); }

#if !defined(OCTAVO_SIXTEEN_LANES)
inline F32x8 add_halves(F32x8 total, F32x8 a) { return add(total, a); }
#endif

// Scratch of one task, in order; sizes for kMaxQueryVectors.
struct AttentionScratch {
    AttentionScratch(void* memory, int head_dim) {
        auto take = [at = static_cast<uint8_t*>(memory)](int64_t bytes) mutable {
            uint8_t* taken = at;
            at += (bytes + 63) / 64 * 64;
            return taken;
        };
        scores = reinterpret_cast<float*>(take(4 * kMaxQueryVectors * kRunTokens));
        run_o = reinterpret_cast<float*>(take(4 * kMaxQueryVectors * head_dim));
        total_o = reinterpret_cast<float*>(take(4 * kMaxQueryVectors * head_dim));
        slice = take(kSliceBytes);
        sums = reinterpret_cast<int32_t*>(take(4 * kMaxQueryVectors * head_dim));
        queries = reinterpret_cast<int16_t*>(take(2 * kMaxQueryVectors * head_dim));
        weights = reinterpret_cast<int16_t*>(take(2 * kMaxQueryVectors * kRunTokens));
        key_scales = reinterpret_cast<float*>(take(4 * kRunTokens));
        value_scales = reinterpret_cast<float*>(take(4 * kRunTokens));
    }
    float* scores;        // [48][256], then weights
    float* run_o;         // [48][head_dim]
    float* total_o;       // [48][head_dim]
    void* slice;          // keys [dim][position], or values [position][dim], widened
    int32_t* sums;        // [48][head_dim], run_o before it is scaled (kQ8)
    int16_t* queries;     // [48][head_dim] codes (kQ8)
    int16_t* weights;     // [48][256] codes (kQ8)
    float* key_scales;    // [256] of a run (kQ8)
    float* value_scales;  // [256] of a run (kQ8)
};

// Positions of a slice: a power of two, as many as fit.
template <class Widened>
constexpr int slice_tokens(int head_dim) {
    int tokens = 128;
    while (tokens > 16 && tokens * head_dim * static_cast<int>(sizeof(Widened)) > kSliceBytes) tokens /= 2;
    return tokens;
}

// One KV head of one run of a block table.
struct RunView {
    const PagedKV& kv;
    const int32_t* blocks;
    int first, last;  // positions of the run that some row sees

    const uint8_t* keys0;    // of block 0
    const uint8_t* values0;  // of block 0

    RunView(const PagedKV& paged, const int32_t* table, int kv_head, int run, int first_position,
            int last_position)
        : kv(paged),
          blocks(table + run * (kRunTokens / paged.block_size)),
          first(first_position),
          last(last_position),
          keys0(key_block(paged, 0, kv_head)),
          values0(value_block(paged, 0, kv_head)) {}
    const uint8_t* keys(int block) const { return keys0 + blocks[block] * kv.extent_bytes; }
    const uint8_t* values(int block) const { return values0 + blocks[block] * kv.extent_bytes; }
    int first_block() const { return first / kv.block_size; }
    int num_blocks() const { return (last - 1) / kv.block_size + 1 - first_block(); }
    int64_t piece_bytes() const { return kv_head_bytes(kv.type, kv.head_dim, kv.block_size); }
    int64_t bytes() const { return num_blocks() * piece_bytes(); }
    void fetch_keys(Fetch& fetch) const {
        fetch.append(kv, blocks + first_block(), num_blocks(), keys0, piece_bytes());
    }
    void fetch_values(Fetch& fetch) const {
        fetch.append(kv, blocks + first_block(), num_blocks(), values0, piece_bytes());
    }
};

// The query vectors of a task that see something of a run: [first, last), which of it each.
struct Active {
    int first, last;
    int low[kMaxQueryVectors], length[kMaxQueryVectors];  // positions [low, length) of the run
};

// Positions of a run that a row sees, none where low >= length. The last positions are its own.
inline void seen_of_run(const AttentionTask& t, const AttentionRow& row, int run, int* low, int* length) {
    const int start = run * kRunTokens;
    *length = row.length - start < kRunTokens ? row.length - start : kRunTokens;
    *low = t.window > 0 && row.length - t.window > start ? row.length - t.window - start : 0;
}

inline bool active_vectors(const AttentionTask& t, int run, Active& active) {
    active.first = active.last = 0;
    for (int r = 0; r < t.num_rows; ++r) {
        int low, length;
        seen_of_run(t, t.rows[r], run, &low, &length);
        if (low >= length) continue;
        if (active.first == active.last) active.first = r * t.group;
        active.last = (r + 1) * t.group;
        for (int i = r * t.group; i < active.last; ++i) {
            active.low[i] = low;
            active.length[i] = length;
        }
    }
    return active.first < active.last;
}

// Scores of one query vector -> weights in place, 0 outside [low, length) as far as registers reach; returns
// the maximum, writes the sum. Scores of codes are multiplied by the scales of keys and query first.
template <bool kScaled, bool kSoftCap>
inline float softmax_run(float* s, int low, int length, const float* key_scales, float query_scale,
                         float soft_cap, float* sum) {
    constexpr int kLanes = Wide::kColumns;
    const int begin = low / kLanes * kLanes, end = (length + kLanes - 1) / kLanes * kLanes;
    if constexpr (kScaled || kSoftCap) {
        const auto by = wide_splat(query_scale), one = wide_splat(1.0f), two = wide_splat(2.0f);
        const auto cap = wide_splat(soft_cap), twice_inverse = wide_splat(kSoftCap ? 2.0f / soft_cap : 0.0f);
        for (int j = begin; j < end; j += kLanes) {
            auto x = Wide::floats(s + j);
            if constexpr (kScaled) x = mul(mul(x, Wide::floats(key_scales + j)), by);
            // tanh(y) = 1 - 2 / (1 + e^2y)
            if constexpr (kSoftCap)
                x = mul(cap, sub(one, div(two, add(one, exp_of<Wide>(mul(x, twice_inverse))))));
            store(s + j, x);
        }
    }
    for (int j = begin; j < low; ++j) s[j] = -__builtin_inff();
    for (int j = length; j < end; ++j) s[j] = -__builtin_inff();
    auto largest = Wide::floats(s + begin);
    for (int j = begin + kLanes; j < end; j += kLanes) largest = max(Wide::floats(s + j), largest);
    const float m = max_lanes(largest);
    const auto shift = wide_splat(m);
    F32x8 total = zero_f32();
    for (int j = begin; j < end; j += kLanes) {
        const auto p = exp_of<Wide>(sub(Wide::floats(s + j), shift));
        store(s + j, p);
        total = add_halves(total, p);
    }
    *sum = sum_lanes(total);
    return m;
}

// p [low, length) of a run -> codes of p * value scale, 0 elsewhere in [from, to), both even; returns the
// scale of the codes. Position by position only what the row sees: scales of others may be anything.
inline float weight_codes(float* p, const float* value_scales, int low, int length, int from, int to,
                          int16_t* codes) {
    constexpr int kLanes = Wide::kColumns;
    const int begin = low / kLanes * kLanes, end = (length + kLanes - 1) / kLanes * kLanes;
    auto largest = Wide::zeros(), broken = Wide::zeros();
    for (int j = begin; j < end; j += kLanes) {
        if (j >= low && j + kLanes <= length) {
            store(p + j, mul(Wide::floats(p + j), Wide::floats(value_scales + j)));
        } else {
            for (int i = j; i < j + kLanes; ++i)
                p[i] = i >= low && i < length ? p[i] * value_scales[i] : 0.0f;
        }
        const auto w = Wide::floats(p + j);
        largest = max(w, largest);
        broken = fma(w, Wide::zeros(), broken);
    }
    float lanes[kLanes], nan_or_zero = 0.0f;
    store(lanes, broken);
    for (int i = 0; i < kLanes; ++i) nan_or_zero += lanes[i];
    const float step = max_lanes(largest) / 32767.0f;
    const bool usable = nan_or_zero == 0.0f && step >= kSmallestNormal;
    const auto inverse = wide_splat(usable ? 1.0f / step : 0.0f);
    for (int j = from; j < begin; ++j) codes[j] = 0;
    for (int j = begin; j < end; j += kLanes)
        if (usable)
            store_narrow(codes + j, round_to_int(mul(Wide::floats(p + j), inverse)));
        else
            for (int i = j; i < j + kLanes; ++i) codes[i] = 0;
    for (int j = end; j < to; ++j) codes[j] = 0;
    return (usable ? step : 0.0f) + nan_or_zero;
}

// The scales of a run's keys, or values, to scales[position].
inline void gather_scales(const RunView& run, bool values, float* scales) {
    const int bs = run.kv.block_size;
    const int64_t codes = static_cast<int64_t>(bs) * run.kv.head_dim;
    for (int b = run.first_block(); b < run.first_block() + run.num_blocks(); ++b)
        __builtin_memcpy(scales + b * bs, (values ? run.values(b) : run.keys(b)) + codes, sizeof(float) * bs);
}

// One register's lanes of stored numbers.
template <class Lanes>
inline void widen(const Half* from, float* to) {
    store(to, Lanes::halves(from));
}
template <class Lanes>
inline void widen(const int8_t* from, int16_t* to) {
    store(to, Lanes::pairs(from));
}

// Keys of positions [from, from + tokens) to slice [step of dims][width][kStep]. A slice lies in whole blocks
// or inside one.
template <class Terms, class Lanes>
inline void widen_keys(const RunView& run, int from, int tokens, int width, typename Terms::Widened* slice,
                       Fetch& fetch) {
    constexpr int kStep = Terms::kStep;
    const int bs = run.kv.block_size, steps = run.kv.head_dim / kStep;
    for (int at = 0; at < tokens; at += bs) {
        const int beside = tokens - at < bs ? tokens - at : bs;
        const auto* k =
            reinterpret_cast<const typename Terms::Stored*>(run.keys((from + at) / bs)) + from % bs * kStep;
        for (int d = 0; d < steps; ++d) {
            fetch.consumed(beside * kStep * static_cast<int>(sizeof(*k)));
            for (int j = 0; j < beside; j += Lanes::kColumns)
                widen<Lanes>(k + (d * bs + j) * kStep, slice + (d * width + at + j) * kStep);
        }
    }
}

// Values of positions [from, from + tokens), rounded to whole steps, to slice [step of
// positions][head_dim][kStep].
template <class Terms>
inline void widen_values(const RunView& run, int from, int tokens, typename Terms::Widened* slice,
                         Fetch& fetch) {
    const int bs = run.kv.block_size, hd = run.kv.head_dim;
    tokens = (tokens + Terms::kStep - 1) / Terms::kStep * Terms::kStep;
    for (int at = 0; at < tokens;) {
        const int in_block = (from + at) % bs,
                  rows = tokens - at < bs - in_block ? tokens - at : bs - in_block;
        const auto* v =
            reinterpret_cast<const typename Terms::Stored*>(run.values((from + at) / bs)) + in_block * hd;
        for (int j = 0; j < rows * hd; j += Wide::kColumns * Terms::kStep) {
            fetch.consumed(Wide::kColumns * Terms::kStep * static_cast<int>(sizeof(*v)));
            widen<Wide>(v + j, slice + at * hd + j);
        }
        at += rows;
    }
}

// Scores of the active vectors over what any of them sees: more positions than that get scores that mean
// nothing.
template <class Terms>
inline void score_run(const RunView& run, const Active& active, const typename Terms::Factor* const* q,
                      bool widened, AttentionScratch& scratch, Fetch& fetch) {
    using Stored = typename Terms::Stored;
    constexpr int kLanes = Wide::kColumns, kStep = Terms::kStep;
    const int bs = run.kv.block_size, hd = run.kv.head_dim;
    const auto vectors_to = [](int position) { return (position + kLanes - 1) / kLanes; };
    if (widened) {
        using Widened = typename Terms::Widened;
        Widened* slice = static_cast<Widened*>(scratch.slice);
        const int width = slice_tokens<Widened>(hd);
        for (int from = run.first / width * width; from < run.last; from += width) {
            const int end = run.last - from < width ? run.last : from + width;
            // What lies before the first position seen may be anybody's.
            const int begin = from < run.first ? run.first / bs * bs : from;
            const int at = begin > from ? begin - from : 0;
            if (bs >= kLanes)
                widen_keys<Terms, Wide>(run, from + at, end - from - at, width, slice + at * kStep, fetch);
            else
                widen_keys<Terms, Lanes8>(run, from + at, end - from - at, width, slice + at * kStep, fetch);
            NoFetch none;
            in_query_tiles(active.first, active.last, [&](int i, int count) __attribute__((always_inline)) {
                // Rows grow longer and their windows move on.
                const int low = active.low[i] > from ? active.low[i] - from : 0;
                const int length =
                    (active.length[i + count - 1] < end ? active.length[i + count - 1] : end) - from;
                if (low >= length) return;
                score_vectors<Terms, Widened>(
                    count, q + i, low / kLanes, vectors_to(length), static_cast<int64_t>(width) * kStep, hd,
                    scratch.scores + i * kRunTokens + from,
                    [&](int n) { return OneBlock<Widened>{slice + n * kLanes * kStep}; }, none);
            });
        }
        return;
    }
    in_query_tiles(active.first, active.last, [&](int i, int count) __attribute__((always_inline)) {
        const int first = active.low[i] / kLanes, last = vectors_to(active.length[i + count - 1]);
        float* scores = scratch.scores + i * kRunTokens;
        const int64_t stride = static_cast<int64_t>(bs) * kStep;
#if defined(OCTAVO_SIXTEEN_LANES)
        if (bs < kLanes) {
            const int low = run.first_block(), high = low + run.num_blocks() - 1;
            const auto keys = [&](int block) {
                const int there = block < low ? low : block > high ? high : block;
                return reinterpret_cast<const Stored*>(run.keys(there));
            };
            score_vectors<Terms, Stored>(
                count, q + i, first, last, stride, hd, scores,
                [&](int n) { return TwoBlocks<Stored>{keys(2 * n), keys(2 * n + 1)}; }, fetch);
            return;
        }
#endif
        const int per_block = bs / kLanes;
        score_vectors<Terms, Stored>(
            count, q + i, first, last, stride, hd, scores,
            [&](int n) {
                return OneBlock<Stored>{reinterpret_cast<const Stored*>(run.keys(n / per_block)) +
                                        n % per_block * kLanes * kStep};
            },
            fetch);
    });
}

// o [vector][head_dim] = weights times values. Floats beyond a row's own positions are never multiplied (0 x
// NaN is NaN): where rows of a tile see different positions, those that all see are computed together, and
// the others for each row alone, in order. Codes beyond them have weights of 0.
template <class Terms>
inline void value_run(const RunView& run, const Active& active, const typename Terms::Factor* weights,
                      bool widened, AttentionScratch& scratch, typename Terms::Total* o, Fetch& fetch) {
    constexpr bool kExact = Terms::kStep == 2;
    const int bs = run.kv.block_size, hd = run.kv.head_dim;
    // Positions [from, to) that lie at locate(position / block).
    const auto add_values = [&](auto locate, int block, int from, int to,
                                auto& fetcher) __attribute__((always_inline)) {
        in_query_tiles(active.first, active.last, [&](int first, int count) __attribute__((always_inline)) {
            const auto* w = weights + first * kRunTokens;
            auto* sums = o + first * hd;
            const auto within = [&](int position) {
                return position < from ? from : position > to ? to : position;
            };
            const int last = first + count - 1;
            if constexpr (kExact) {
                value_vectors<Terms>(count, w, locate, block, within(active.low[first]) / 2 * 2,
                                     within(active.length[last]), hd, sums, fetcher);
                return;
            }
            const int low = within(active.low[last]), high = within(active.length[first]);
            const bool together = low < high;
            const auto alone = [&](bool before) {
                for (int i = 0; i < count; ++i) {
                    const int begin = within(active.low[first + i]), end = within(active.length[first + i]);
                    const int stop = before && together ? low : end, start = before ? begin : high;
                    if (start < stop)
                        value_vectors<Terms>(1, w + i * kRunTokens, locate, block, start, stop, hd,
                                             sums + i * hd, fetcher);
                }
            };
            alone(true);
            if (!together) return;
            value_vectors<Terms>(count, w, locate, block, low, high, hd, sums, fetcher);
            alone(false);
        });
    };
    if (widened) {
        using Widened = typename Terms::Widened;
        Widened* slice = static_cast<Widened*>(scratch.slice);
        const int width = slice_tokens<Widened>(hd);
        for (int from = run.first / width * width; from < run.last; from += width) {
            const int end = run.last - from < width ? run.last : from + width;
            const int begin = from < run.first ? run.first / bs * bs : from;
            const int at = begin > from ? begin - from : 0;
            widen_values<Terms>(run, from + at, end - from - at, slice + at * hd, fetch);
            NoFetch none;
            add_values([&](int) { return slice; }, width, from, end, none);
        }
        return;
    }
    add_values([&](int block) { return reinterpret_cast<const typename Terms::Stored*>(run.values(block)); },
               bs, run.first, run.last, fetch);
}

inline void copy_row(const float* from, int head_dim, float* to) {
    for (int d = 0; d < head_dim; d += Wide::kColumns) store(to + d, Wide::floats(from + d));
}

// (m, l, o) <- (m, l, o) then (m2, l2, o2).
inline void fold_state(float* m, float* l, float* o, float m2, float l2, const float* o2, int head_dim) {
    const float top = *m > m2 ? *m : m2;
    float v[8] = {*m - top, m2 - top};
    store(v, exp_f32(load(v)));
    const auto a = wide_splat(v[0]), b = wide_splat(v[1]);
    *l = __builtin_fmaf(l2, v[1], *l * v[0]);
    *m = top;
    for (int d = 0; d < head_dim; d += Wide::kColumns)
        store(o + d, fma(Wide::floats(o2 + d), b, mul(Wide::floats(o + d), a)));
}

inline void finish_row(float l, const float* o, int head_dim, float* out) {
    const auto divisor = wide_splat(l);
    for (int d = 0; d < head_dim; d += Wide::kColumns) store(out + d, div(Wide::floats(o + d), divisor));
}

// From this many query vectors on, widening a slice of K or V once for all of them is cheaper than in
// registers for each tile.
constexpr int kWidenFrom = 13;
// The first keys of a task that nobody fetched: so many lines at once.
constexpr int kFirstLines = 32;

// The run that a thread reads after `run` of t: the next of t, else the first of t.next.
inline void fetch_keys_after(const AttentionTask& t, int run, Fetch& fetch) {
    const AttentionTask* task = &t;
    if (++run == t.run_end) {
        if ((task = t.next) == nullptr) return;
        run = task->run_begin;
    }
    int low, length, ignored;
    seen_of_run(*task, task->rows[0], run, &low, &ignored);
    seen_of_run(*task, task->rows[task->num_rows - 1], run, &ignored, &length);
    if (low < length) RunView(task->kv, task->block_table, task->kv_head, run, low, length).fetch_keys(fetch);
}

template <class Terms, bool kSoftCap>
void attend(const AttentionTask& t) {
    constexpr bool kCodes = Terms::kStep == 2;
    const int hd = t.kv.head_dim, vectors = t.num_rows * t.group;
    AttentionScratch scratch(t.scratch, hd);
    float total_m[kMaxQueryVectors], total_l[kMaxQueryVectors], run_m[kMaxQueryVectors],
        run_l[kMaxQueryVectors];
    [[maybe_unused]] float query_scale[kMaxQueryVectors], weight_scale[kMaxQueryVectors];
    bool begun[kMaxQueryVectors] = {};
    const typename Terms::Factor* q[kMaxQueryVectors];
    for (int i = 0; i < vectors; ++i) {
        const float* query = t.rows[i / t.group].q + i % t.group * hd;
        if constexpr (kCodes) {
            query_scale[i] = head_codes(query, hd, scratch.queries + i * hd, 32767.0f);
            q[i] = scratch.queries + i * hd;
        } else {
            q[i] = query;
        }
    }

    bool fetched = t.fetched;
    Active active;
    for (int run = t.run_begin; run < t.run_end; ++run) {
        if (!active_vectors(t, run, active)) continue;
        const RunView view(t.kv, t.block_table, t.kv_head, run, active.low[active.first],
                           active.length[active.last - 1]);
        const bool widened = active.last - active.first >= kWidenFrom;

        Fetch during_keys;
        if (!fetched) {
            view.fetch_keys(during_keys);
            for (int i = 0; i < kFirstLines; ++i) during_keys.next();
        }
        view.fetch_values(during_keys);
        during_keys.spread_over(view.bytes());
        score_run<Terms>(view, active, q, widened, scratch, during_keys);

        if constexpr (kCodes) {
            gather_scales(view, false, scratch.key_scales);
            gather_scales(view, true, scratch.value_scales);
        }
        for (int i = active.first; i < active.last; ++i) {
            float* s = scratch.scores + i * kRunTokens;
            run_m[i] = softmax_run<kCodes, kSoftCap>(s, active.low[i], active.length[i], scratch.key_scales,
                                                     kCodes ? query_scale[i] : 1.0f, t.soft_cap, &run_l[i]);
            if constexpr (kCodes) {
                weight_scale[i] =
                    weight_codes(s, scratch.value_scales, active.low[i], active.length[i], view.first / 2 * 2,
                                 (view.last + 1) / 2 * 2, scratch.weights + i * kRunTokens);
                for (int d = 0; d < hd; d += Wide::kColumns)
                    store(scratch.sums + i * hd + d, Wide::int_zeros());
            } else {
                for (int d = 0; d < hd; d += Wide::kColumns) store(scratch.run_o + i * hd + d, Wide::zeros());
            }
        }

        Fetch during_values;
        fetch_keys_after(t, run, during_values);
        during_values.spread_over(view.bytes());
        if constexpr (kCodes) {
            value_run<Terms>(view, active, scratch.weights, widened, scratch, scratch.sums, during_values);
            for (int i = active.first; i < active.last; ++i)
                for (int d = 0; d < hd; d += Wide::kColumns)
                    store(scratch.run_o + i * hd + d,
                          mul(to_float(Wide::ints(scratch.sums + i * hd + d)), wide_splat(weight_scale[i])));
        } else {
            value_run<Terms>(view, active, scratch.scores, widened, scratch, scratch.run_o, during_values);
        }
        fetched = true;

        for (int i = active.first; i < active.last; ++i) {
            const float* o = scratch.run_o + i * hd;
            float* total = scratch.total_o + i * hd;
            if (float* state = t.rows[i / t.group].state; state != nullptr) {
                state += i % t.group * (2 + hd);
                state[0] = run_m[i];
                state[1] = run_l[i];
                copy_row(o, hd, state + 2);
            } else if (!begun[i]) {
                begun[i] = true;
                total_m[i] = run_m[i];
                total_l[i] = run_l[i];
                copy_row(o, hd, total);
            } else {
                fold_state(&total_m[i], &total_l[i], total, run_m[i], run_l[i], o, hd);
            }
        }
    }
    for (int i = 0; i < vectors; ++i)
        if (begun[i])
            finish_row(total_l[i], scratch.total_o + i * hd, hd, t.rows[i / t.group].out + i % t.group * hd);
}

void attention(const AttentionTask& t) {
    if (t.kv.type == KVType::kQ8)
        return t.soft_cap > 0.0f ? attend<PairTerms, true>(t) : attend<PairTerms, false>(t);
    return t.soft_cap > 0.0f ? attend<FloatTerms, true>(t) : attend<FloatTerms, false>(t);
}

void fold_states(const float* states, int runs, int group, int head_dim, float* out) {
    const int64_t stride = static_cast<int64_t>(group) * (2 + head_dim);
    for (int i = 0; i < group; ++i) {
        const float* state = states + i * (2 + head_dim);
        float m = state[0], l = state[1];
        float* o = out + i * head_dim;
        copy_row(state + 2, head_dim, o);
        for (int run = 1; run < runs; ++run) {
            state += stride;
            fold_state(&m, &l, o, state[0], state[1], state + 2, head_dim);
        }
        finish_row(l, o, head_dim, o);
    }
}
