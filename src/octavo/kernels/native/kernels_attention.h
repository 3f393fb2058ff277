// Attention straight from blocks. Included inside an anonymous namespace, after kernels_rows.h and
// attention_tiles.h.
//
// A run is 256 positions from 0, 256, ...: |run 0|run 1|...|. Each run of each query row starts from nothing:
//   scores  s[j] = sum over d, in order, of q[d] * K[j][d]
//   m = max s;  p = exp(s - m);  l = eight sums of p by position mod 8, then one tree
//   o[d] = sum over positions, in order, of p[j] * V[j][d]
// and run states are folded left in position order. Whether a row comes alone or with others, these
// chains are the same, and so are the bytes.
//
// KVType::kQ8: q becomes int16 codes with one scale, and so do the weights of a run, p[j] * scale of V[j].
// Both sums are integers, exact in any order: 256 dims, or positions, of |127 * 32,767| fit 32 bits.

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
        slice = reinterpret_cast<float*>(take(kSliceBytes));
        sums = reinterpret_cast<int32_t*>(take(4 * kMaxQueryVectors * head_dim));
        queries = reinterpret_cast<int16_t*>(take(2 * kMaxQueryVectors * head_dim));
        weights = reinterpret_cast<int16_t*>(take(2 * kMaxQueryVectors * kRunTokens));
        key_scales = reinterpret_cast<float*>(take(4 * kRunTokens));
        value_scales = reinterpret_cast<float*>(take(4 * kRunTokens));
    }
    float* scores;        // [48][256], then weights
    float* run_o;         // [48][head_dim]
    float* total_o;       // [48][head_dim]
    float* slice;         // widened: keys [dim][position], or values [position][dim]
    int32_t* sums;        // [48][head_dim], run_o before it is scaled (kQ8)
    int16_t* queries;     // [48][head_dim] codes (kQ8)
    int16_t* weights;     // [48][256] codes (kQ8)
    float* key_scales;    // [256] of a run (kQ8)
    float* value_scales;  // [256] of a run (kQ8)
};

// One KV head of one run of a block table.
struct RunView {
    const PagedKV& kv;
    const int32_t* blocks;
    int first, last;         // positions of the run that some row sees
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
    int end_block() const { return (last - 1) / kv.block_size + 1; }
};

// What is read after a run's values: the keys of another, or nothing.
struct Following {
    const uint8_t* keys0 = nullptr;
    const int32_t* blocks = nullptr;
    int count = 0;
    int64_t extent_bytes = 0;
    int codes_bytes = 1;  // of a piece, without scales

    Following() = default;
    explicit Following(const RunView& run)
        : keys0(run.keys0),
          blocks(run.blocks + run.first_block()),
          count(run.end_block() - run.first_block()),
          extent_bytes(run.kv.extent_bytes),
          codes_bytes(run.kv.block_size * run.kv.head_dim * (run.kv.type == KVType::kF16 ? 2 : 1)) {}
    // Byte `at` of all pieces, one after the other; what is at hand where there are fewer.
    const uint8_t* keys(int64_t at, const uint8_t* at_hand) const {
        const int piece = static_cast<int>(at) / codes_bytes;
        return piece < count ? keys0 + blocks[piece] * extent_bytes + (at - int64_t{piece} * codes_bytes)
                             : at_hand;
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

// What is read together of a run. Part 0 is for all rows: all of it, or what they have in common; parts 1 to
// num_rows are the rest, of one row each, from its own blocks.
struct Part {
    RunView view;
    Active active;
    bool empty() const { return active.first == active.last; }
};

inline int num_parts(const AttentionTask& t) { return t.common < kRunTokens ? 1 + t.num_rows : 1; }

inline Part part_of_run(const AttentionTask& t, int run, const Active& all, int index) {
    Active seen;
    seen.first = index == 0 ? all.first : (index - 1) * t.group;
    seen.last = index == 0 ? all.last : index * t.group;
    int first = kRunTokens, last = 0;
    for (int i = seen.first; i < seen.last; ++i) {
        seen.low[i] = index == 0 ? all.low[i] : t.common;
        seen.length[i] = index == 0 && all.length[i] > t.common ? t.common : all.length[i];
        first = seen.low[i] < first ? seen.low[i] : first;
        last = seen.length[i] > last ? seen.length[i] : last;
    }
    if (first >= last) seen.last = seen.first;
    const RunView view(t.kv, t.rows[index == 0 ? 0 : index - 1].block_table, t.kv_head, run, first, last);
    return {view, seen};
}

// What a run's softmax of one query vector leaves beside the weights.
struct RunSums {
    float max, sum;
    float weight_scale;  // of the codes (kQ8)
};

// Scales of positions [at, at + lanes), 0 outside [low, length): what a row does not see may have any.
inline Wide::Floats seen_scales(const float* scales, int at, int low, int length) {
    constexpr int kLanes = Wide::kColumns;
    if (at >= low && at + kLanes <= length) return Wide::floats(scales + at);
    float seen[kLanes];
    for (int i = 0; i < kLanes; ++i) seen[i] = at + i >= low && at + i < length ? scales[at + i] : 0.0f;
    return Wide::floats(seen);
}

// Scores of one query vector -> weights in place, 0 outside [low, length) as far as registers reach.
// Codes: scores are first multiplied by the scales of keys and query, and weights then by those of values;
// they become codes, 0 elsewhere in [from, to).
template <bool kCodes, bool kSoftCap>
inline RunSums softmax_run(float* s, int low, int length, const AttentionScratch& scratch, float query_scale,
                           float soft_cap, int from, int to, int16_t* codes) {
    constexpr int kLanes = Wide::kColumns;
    const int begin = low / kLanes * kLanes, end = (length + kLanes - 1) / kLanes * kLanes;
    if constexpr (kCodes || kSoftCap) {
        const auto by = Wide::splat(query_scale), one = Wide::splat(1.0f), two = Wide::splat(2.0f);
        const auto cap = Wide::splat(soft_cap),
                   twice_inverse = Wide::splat(kSoftCap ? 2.0f / soft_cap : 0.0f);
        for (int j = begin; j < end; j += kLanes) {
            auto x = Wide::floats(s + j);
            if constexpr (kCodes) x = mul(mul(x, Wide::floats(scratch.key_scales + j)), by);
            // tanh(y) = 1 - 2 / (1 + e^2y)
            if constexpr (kSoftCap)
                x = mul(cap, sub(one, div(two, add(one, exp_of<Wide>(mul(x, twice_inverse))))));
            store(s + j, x);
        }
    }
    for (int j = begin; j < low; ++j) s[j] = -__builtin_inff();
    for (int j = length; j < end; ++j) s[j] = -__builtin_inff();
    auto largest = Wide::floats(s + begin), other = Wide::floats(s + end - kLanes);
    int j = begin + kLanes;
    for (; j + kLanes < end; j += 2 * kLanes) {
        largest = max(Wide::floats(s + j), largest);
        other = max(Wide::floats(s + j + kLanes), other);
    }
    if (j < end) largest = max(Wide::floats(s + j), largest);
    RunSums run;
    run.max = max_lanes(max(largest, other));

    const auto shift = Wide::splat(run.max);
    F32x8 total = zero_f32();
    auto broken = Wide::zeros();
    largest = Wide::zeros();
    const auto weigh = [&](int at, auto p) __attribute__((always_inline)) {
        total = add_halves(total, p);
        if constexpr (kCodes) {
            p = mul(p, seen_scales(scratch.value_scales, at, low, length));
            largest = max(p, largest);
            broken = fma(p, Wide::zeros(), broken);
        }
        store(s + at, p);
    };
    // Two at a time: each is one long chain.
    for (j = begin; j + kLanes < end; j += 2 * kLanes) {
        const auto p = exp_of<Wide>(sub(Wide::floats(s + j), shift));
        const auto q = exp_of<Wide>(sub(Wide::floats(s + j + kLanes), shift));
        weigh(j, p);
        weigh(j + kLanes, q);
    }
    if (j < end) weigh(j, exp_of<Wide>(sub(Wide::floats(s + j), shift)));
    run.sum = sum_lanes(total);
    if constexpr (!kCodes) return run;

    float lanes[kLanes], nan_or_zero = 0.0f;
    store(lanes, broken);
    for (float lane : lanes) nan_or_zero += lane;
    const float step = max_lanes(largest) / 32767.0f;
    const bool usable = nan_or_zero == 0.0f && step >= kSmallestNormal;
    const auto inverse = Wide::splat(usable ? 1.0f / step : 0.0f);
    for (j = from; j < begin; ++j) codes[j] = 0;
    if (usable)
        for (j = begin; j < end; j += kLanes)
            store_narrow(codes + j, round_to_int(mul(Wide::floats(s + j), inverse)));
    for (j = usable ? end : begin; j < to; ++j) codes[j] = 0;
    run.weight_scale = (usable ? step : 0.0f) + nan_or_zero;
    return run;
}

// The scales of a run's keys, or values, to scales[position].
inline void gather_scales(const RunView& run, bool values, float* scales) {
    const int bs = run.kv.block_size;
    const int64_t codes = static_cast<int64_t>(bs) * run.kv.head_dim;
    for (int b = run.first_block(); b < run.end_block(); ++b)
        __builtin_memcpy(scales + b * bs, (values ? run.values(b) : run.keys(b)) + codes, sizeof(float) * bs);
}

// Scores of the active vectors over what any of them sees: more positions than that get scores that mean
// nothing.
template <class Terms>
inline void score_run(const RunView& run, const Active& active, const typename Terms::Factor* const* q,
                      float* scores) {
    using Stored = typename Terms::Stored;
    constexpr int kLanes = Wide::kColumns, kStep = Terms::kStep;
    const int bs = run.kv.block_size, hd = run.kv.head_dim;
    const int64_t stride = static_cast<int64_t>(bs) * kStep;
    in_query_tiles(active.first, active.last, [&](int i, int count) __attribute__((always_inline)) {
        // Rows grow longer and their windows move on.
        const int first = active.low[i] / kLanes;
        const int last = (active.length[i + count - 1] + kLanes - 1) / kLanes;
        float* to = scores + i * kRunTokens;
#if defined(OCTAVO_SIXTEEN_LANES)
        if (bs < kLanes) {
            // Blocks before and after what is seen may be nobody's.
            const int low = run.first_block(), high = run.end_block() - 1;
            const auto there = [&](int block) { return block < low ? low : block > high ? high : block; };
            const auto keys = [&](int block) {
                return reinterpret_cast<const Stored*>(run.keys(there(block)));
            };
            score_vectors<Terms, true>(
                count, q + i, first, last, stride, hd, to,
                [&](int n) { return TwoBlocks<Stored>{keys(2 * n), keys(2 * n + 1)}; },
                [&](int n, int b) { return run.values(there(2 * n + b)); });
            return;
        }
#endif
        const int per_block = bs / kLanes;
        score_vectors<Terms, true>(
            count, q + i, first, last, stride, hd, to,
            [&](int n) {
                return OneBlock<Stored>{reinterpret_cast<const Stored*>(run.keys(n / per_block)) +
                                        n % per_block * kLanes * kStep};
            },
            [&](int n, int) {
                return run.values(n / per_block) +
                       n % per_block * kLanes * hd * static_cast<int>(sizeof(Stored));
            });
    });
}

// o [vector][head_dim] += weights times values of positions [from, to), which lie at locate(position /
// block). Floats beyond a row's own positions are never multiplied (0 x NaN is NaN): where rows of a tile see
// different positions, those that all see are computed together, and the others for each row alone, in order.
// Codes beyond them have weights of 0.
template <class Terms, bool kFetch, class Locate, class Ahead>
inline void add_values(const Active& active, const typename Terms::Factor* weights, Locate locate,
                       Ahead ahead, int block, int from, int to, int hd, typename Terms::Total* o) {
    in_query_tiles(active.first, active.last, [&](int first, int count) __attribute__((always_inline)) {
        const auto* w = weights + first * kRunTokens;
        auto* sums = o + first * hd;
        const auto within = [&](int position) {
            return position < from ? from : position > to ? to : position;
        };
        const int last = first + count - 1;
        if constexpr (Terms::kStep == 2) {
            value_vectors<Terms, kFetch>(count, w, locate, ahead, block, within(active.low[first]) / 2 * 2,
                                         within(active.length[last]), hd, sums);
        } else {
            const int low = within(active.low[last]), high = within(active.length[first]);
            const bool together = low < high;
            const auto alone = [&](bool before) {
                for (int i = 0; i < count; ++i) {
                    const int begin = within(active.low[first + i]), end = within(active.length[first + i]);
                    value_vectors<Terms, kFetch>(1, w + i * kRunTokens, locate, ahead, block,
                                                 before ? begin : high, before && together ? low : end, hd,
                                                 sums + i * hd);
                }
            };
            alone(true);
            if (!together) return;
            value_vectors<Terms, kFetch>(count, w, locate, ahead, block, low, high, hd, sums);
            alone(false);
        }
    });
}

template <class Terms>
inline void value_run(const RunView& run, const Following& following, const Active& active,
                      const typename Terms::Factor* weights, typename Terms::Total* o) {
    using Stored = typename Terms::Stored;
    const int bs = run.kv.block_size, hd = run.kv.head_dim;
    const int begin = run.first_block() * bs, positions = run.last - begin;
    add_values<Terms, true>(
        active, weights, [&](int block) { return reinterpret_cast<const Stored*>(run.values(block)); },
        [&](int position, int dim, int bytes) {
            const int64_t read = int64_t{positions} * dim * static_cast<int>(sizeof(Stored));
            return following.keys(read + int64_t{position - begin} * bytes, run.values(position / bs));
        },
        bs, run.first, run.last, hd, o);
}

#include "attention_slices.h"

inline void copy_row(const float* from, int head_dim, float* to) {
    for (int d = 0; d < head_dim; d += Wide::kColumns) store(to + d, Wide::floats(from + d));
}

// (m, l) [count] <- (m, l) then (m2, l2); what o and o2 are to be multiplied by goes to m2 and l2. Whole
// registers are read, `count` values of each written.
inline void fold_sums(int count, float* m, float* l, float* m2, float* l2) {
    constexpr int kLanes = Wide::kColumns;
    for (int i = 0; i < count; i += kLanes) {
        const auto first = Wide::floats(m + i), second = Wide::floats(m2 + i);
        const auto top = max(first, second);
        const auto a = exp_of<Wide>(sub(first, top)), b = exp_of<Wide>(sub(second, top));
        const auto sum = fma(Wide::floats(l2 + i), b, mul(Wide::floats(l + i), a));
        const auto write = [&](float* to, auto value) {
            float lanes[kLanes];
            store(lanes, value);
            for (int j = 0; j < kLanes && i + j < count; ++j) to[i + j] = lanes[j];
        };
        write(l, sum);
        write(m, top);
        write(m2, a);
        write(l2, b);
    }
}

// o <- o * by + o2 * by2.
inline void fold_row(float* o, float by, const float* o2, float by2, int head_dim) {
    const auto a = Wide::splat(by), b = Wide::splat(by2);
    for (int d = 0; d < head_dim; d += Wide::kColumns)
        store(o + d, fma(Wide::floats(o2 + d), b, mul(Wide::floats(o + d), a)));
}

inline void finish_row(float l, const float* o, int head_dim, float* out) {
    const auto divisor = Wide::splat(l);
    for (int d = 0; d < head_dim; d += Wide::kColumns) store(out + d, div(Wide::floats(o + d), divisor));
}

// The run that a thread reads after `run` of t: the next of t, else the first of t.next.
inline Following following_run(const AttentionTask& t, int run) {
    const AttentionTask* task = &t;
    if (++run == t.run_end) {
        if ((task = t.next) == nullptr) return {};
        run = task->run_begin;
    }
    int low, length, ignored;
    seen_of_run(*task, task->rows[0], run, &low, &ignored);
    seen_of_run(*task, task->rows[task->num_rows - 1], run, &ignored, &length);
    if (length > task->common) length = task->common;
    if (low >= length) return {};
    return Following(RunView(task->kv, task->rows[0].block_table, task->kv_head, run, low, length));
}

// Where it costs much to widen halves, slices of them are widened once for many query vectors.
inline bool widens_slices(const Active& active) {
    return kWidenHalvesFrom > 0 && active.last - active.first >= kWidenHalvesFrom;
}

// Of keys that nobody fetched, the first lines of every piece.
inline void fetch_first_keys(const RunView& run) {
    constexpr int kLines = 4;
    for (int b = run.first_block(); b < run.end_block(); ++b)
        for (int i = 0; i < kLines; ++i) fetch(run.keys(b) + i * kLine);
}

// The states of a task's one run, (m, l, o) of each query vector, to its rows.
inline void write_states(const AttentionTask& t, const float* m, const float* l, const float* o) {
    const int hd = t.kv.head_dim;
    for (int i = 0; i < t.num_rows * t.group; ++i) {
        float* state = t.rows[i / t.group].state + i % t.group * (2 + hd);
        state[0] = m[i];
        state[1] = l[i];
        copy_row(o + i * hd, hd, state + 2);
    }
}

template <class Terms, bool kSoftCap>
void attend(const AttentionTask& t) {
    constexpr bool kCodes = Terms::kStep == 2;
    const int hd = t.kv.head_dim, vectors = t.num_rows * t.group;
    AttentionScratch scratch(t.scratch, hd);
    constexpr int kRoom = kMaxQueryVectors + Wide::kColumns;
    float total_m[kRoom] = {}, total_l[kRoom] = {}, run_m[kRoom] = {}, run_l[kRoom] = {};
    [[maybe_unused]] float query_scale[kMaxQueryVectors], weight_scale[kMaxQueryVectors];
    int begins[kMaxQueryVectors];  // the first run that a row sees something of
    const typename Terms::Factor* q[kMaxQueryVectors];
    for (int i = 0; i < vectors; ++i) {
        const int first = first_run(t.rows[i / t.group].length, t.window);
        begins[i] = first > t.run_begin ? first : t.run_begin;
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
        const int first = active.low[active.first], parts = num_parts(t);
        int last = 0;
        for (int i = active.first; i < active.last; ++i)
            last = last > active.length[i] ? last : active.length[i];
        for (int i = fetched ? 1 : 0; i < parts; ++i) fetch_first_keys(part_of_run(t, run, active, i).view);
        fetched = true;
        for (int i = 0; i < parts; ++i) {
            const Part part = part_of_run(t, run, active, i);
            if (part.empty()) continue;
            if constexpr (kCodes)
                score_run<Terms>(part.view, part.active, q, scratch.scores);
            else if (widens_slices(part.active))
                score_slices(part.view, part.active, q, scratch);
            else
                score_run<Terms>(part.view, part.active, q, scratch.scores);
        }

        const auto gather = [&](int index) {
            const Part part = part_of_run(t, run, active, index);
            if (part.empty()) return;
            gather_scales(part.view, false, scratch.key_scales);
            gather_scales(part.view, true, scratch.value_scales);
        };
        if constexpr (kCodes) gather(0);
        for (int i = active.first; i < active.last; ++i) {
            if (kCodes && parts > 1 && i % t.group == 0) gather(1 + i / t.group);
            const RunSums sums = softmax_run<kCodes, kSoftCap>(
                scratch.scores + i * kRunTokens, active.low[i], active.length[i], scratch,
                kCodes ? query_scale[i] : 1.0f, t.soft_cap, first / 2 * 2, (last + 1) / 2 * 2,
                scratch.weights + i * kRunTokens);
            run_m[i] = sums.max;
            run_l[i] = sums.sum;
            if constexpr (kCodes) {
                weight_scale[i] = sums.weight_scale;
                for (int d = 0; d < hd; d += Wide::kColumns)
                    store(scratch.sums + i * hd + d, Wide::int_zeros());
            } else {
                for (int d = 0; d < hd; d += Wide::kColumns) store(scratch.run_o + i * hd + d, Wide::zeros());
            }
        }

        for (int i = 0; i < parts; ++i) {
            const Part part = part_of_run(t, run, active, i);
            if (part.empty()) continue;
            const Following following = i == 0 ? following_run(t, run) : Following();
            if constexpr (kCodes)
                value_run<Terms>(part.view, following, part.active, scratch.weights, scratch.sums);
            else if (widens_slices(part.active))
                value_slices(part.view, part.active, scratch);
            else
                value_run<Terms>(part.view, following, part.active, scratch.scores, scratch.run_o);
        }
        if constexpr (kCodes) {
            for (int i = active.first; i < active.last; ++i)
                for (int d = 0; d < hd; d += Wide::kColumns)
                    store(scratch.run_o + i * hd + d,
                          mul(to_float(Wide::ints(scratch.sums + i * hd + d)), Wide::splat(weight_scale[i])));
        }

        if (t.rows[0].state != nullptr) {
            write_states(t, run_m, run_l, scratch.run_o);
            return;
        }
        // Rows whose first run this is come after those that saw one before.
        int folded = active.first;
        while (folded < active.last && begins[folded] < run) ++folded;
        fold_sums(folded - active.first, total_m + active.first, total_l + active.first, run_m + active.first,
                  run_l + active.first);
        for (int i = active.first; i < folded; ++i)
            fold_row(scratch.total_o + i * hd, run_m[i], scratch.run_o + i * hd, run_l[i], hd);
        for (int i = folded; i < active.last; ++i) {
            total_m[i] = run_m[i];
            total_l[i] = run_l[i];
            copy_row(scratch.run_o + i * hd, hd, scratch.total_o + i * hd);
        }
    }
    for (int i = 0; i < vectors; ++i)
        finish_row(total_l[i], scratch.total_o + i * hd, hd, t.rows[i / t.group].out + i % t.group * hd);
}

void attention(const AttentionTask& t) {
    if (t.kv.type == KVType::kQ8)
        return t.soft_cap > 0.0f ? attend<PairTerms, true>(t) : attend<PairTerms, false>(t);
    return t.soft_cap > 0.0f ? attend<FloatTerms, true>(t) : attend<FloatTerms, false>(t);
}

void fold_states(const float* states, int runs, int group, int head_dim, float* out) {
    constexpr int kRoom = kMaxQueryVectors + Wide::kColumns;
    const int64_t stride = 2 + head_dim;
    float m[kRoom] = {}, l[kRoom] = {}, run_m[kRoom] = {}, run_l[kRoom] = {};
    for (int run = 0; run < runs; ++run, states += group * stride) {
        float* to_m = run == 0 ? m : run_m;
        float* to_l = run == 0 ? l : run_l;
        for (int i = 0; i < group; ++i) {
            to_m[i] = states[i * stride];
            to_l[i] = states[i * stride + 1];
            if (run == 0) copy_row(states + i * stride + 2, head_dim, out + i * head_dim);
        }
        if (run == 0) continue;
        fold_sums(group, m, l, run_m, run_l);
        for (int i = 0; i < group; ++i)
            fold_row(out + i * head_dim, run_m[i], states + i * stride + 2, run_l[i], head_dim);
    }
    for (int i = 0; i < group; ++i) finish_row(l[i], out + i * head_dim, head_dim, out + i * head_dim);
}
