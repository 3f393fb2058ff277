// Attention over f16 where a processor has no instruction that widens it: slices of keys, and of values, are
// widened once for many query vectors. The chains are those of score_run and value_run. Included inside an
// anonymous namespace, by kernels_attention.h.

// Positions of a slice of widened halves: a power of two, as many as fit.
inline int slice_tokens(int head_dim) {
    int tokens = 64;
    while (tokens > 16 && tokens * head_dim * static_cast<int>(sizeof(float)) > kSliceBytes) tokens /= 2;
    return tokens;
}

// body(from, to, first): slices [from, to) of what is seen of a run; positions before `first` may be
// nobody's.
template <class Body>
inline void in_slices(const RunView& run, int width, Body&& body) {
    for (int from = run.first / width * width; from < run.last; from += width) {
        const int first = run.first_block() * run.kv.block_size;
        body(from, run.last - from < width ? run.last : from + width, first > from ? first : from);
    }
}

inline void score_slices(const RunView& run, const Active& active, const float* const* q,
                         AttentionScratch& scratch) {
    const int bs = run.kv.block_size, hd = run.kv.head_dim, width = slice_tokens(hd);
    float* slice = scratch.slice;
    in_slices(run, width, [&](int from, int to, int first) {
        // A slice lies in whole blocks or inside one.
        for (int at = first; at < to; at += bs) {
            const int beside = to - at < bs ? to - at : bs;
            const auto* k = reinterpret_cast<const Half*>(run.keys(at / bs)) + at % bs;
            for (int d = 0; d < hd; ++d)
                for (int j = 0; j < beside; j += 8)
                    store(slice + d * width + at - from + j, load(k + d * bs + j));
        }
        in_query_tiles(active.first, active.last, [&](int i, int count) {
            const int end = active.length[i + count - 1] < to ? active.length[i + count - 1] : to;
            const int low = active.low[i] > from ? active.low[i] : from;
            if (low >= end) return;
            constexpr int kLanes = Wide::kColumns;
            score_vectors<FloatTerms, false>(
                count, q + i, (low - from) / kLanes, (end - from + kLanes - 1) / kLanes, width, hd,
                scratch.scores + i * kRunTokens + from,
                [&](int n) { return OneBlock<float>{slice + n * kLanes}; },
                [](int, int) { return static_cast<const uint8_t*>(nullptr); });
        });
    });
}

inline void value_slices(const RunView& run, const Active& active, AttentionScratch& scratch) {
    const int bs = run.kv.block_size, hd = run.kv.head_dim, width = slice_tokens(hd);
    in_slices(run, width, [&](int from, int to, int first) {
        for (int at = first; at < to; ++at) {
            const auto* v = reinterpret_cast<const Half*>(run.values(at / bs)) + at % bs * hd;
            float* widened = scratch.slice + (at - from) * hd;
            for (int d = 0; d < hd; d += 8) store(widened + d, load(v + d));
        }
        add_values<FloatTerms, false>(
            active, scratch.scores, [&](int) { return static_cast<const float*>(scratch.slice); },
            [](int, int, int) { return static_cast<const uint8_t*>(nullptr); }, width, from, to, hd,
            scratch.run_o);
    });
}
