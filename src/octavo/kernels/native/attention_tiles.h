// Register tiles of attention: scores of some query vectors over positions, and their weighted sums of
// values. Included inside an anonymous namespace, after lanes.h.
//
// A tile is kQ query vectors (rows x heads of a group) by kN registers. What is stored is multiplied either
// as floats (f16, or f16 widened before), a chain of multiply-adds for each sum, or as pairs of int16 (int8
// codes, or codes widened before), which are exact. Which lanes a sum has, and how many tiles there are,
// changes no bit of it.

// Blocks of a sequence lie far apart, so no hardware prefetcher helps from one to the next. While the keys of
// some positions are read, their values are fetched, and while values are read, the keys that this thread
// reads next: half a run ahead, to the second-level cache, a line for each line that is read, one piece (a KV
// head's keys, or values, in a block) after the other.
constexpr int kLine = 64;
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

struct FloatTerms {
    using Stored = Half;
    using Factor = float;  // of queries, and of weights
    using Total = float;
    using Sum = Wide::Floats;
    using Term = Wide::Floats;
    static constexpr int kStep = 1;  // dims of a score's step, positions of a value's
    static Sum zero() { return Wide::zeros(); }
    static Sum sum(const float* p) { return Wide::floats(p); }
    static Term load(const float* p) { return Wide::floats(p); }
    static Term load(const Half* p) { return Wide::halves(p); }
    static Term factor(const float* p) { return Wide::splat(*p); }
    static Sum add_product(Sum sum, Term factor, Term term) { return fma(factor, term, sum); }
    static Wide::Floats score(Sum sum) { return sum; }
};

struct PairTerms {
    using Stored = int8_t;
    using Factor = int16_t;
    using Total = int32_t;
    using Sum = Wide::Ints;
    using Term = Wide::Pairs;
    static constexpr int kStep = 2;
    static Sum zero() { return Wide::int_zeros(); }
    static Sum sum(const int32_t* p) { return Wide::ints(p); }
    static Term load(const int8_t* p) { return Wide::pairs(p); }
    static Term factor(const int16_t* p) { return Wide::splat_pair(p); }
    static Sum add_product(Sum sum, Term factor, Term term) { return dot2(sum, factor, term); }
    static Wide::Floats score(Sum sum) { return to_float(sum); }
};

// Where one register of stored keys begins: in one block, or with 16 lanes and blocks of 8 in two.
template <class Element>
struct OneBlock {
    static constexpr int kBlocks = 1;
    const Element* at;
    template <class Terms>
    typename Terms::Term load(int64_t offset) const {
        return Terms::load(at + offset);
    }
};
#if defined(OCTAVO_SIXTEEN_LANES)
template <class Element>
struct TwoBlocks {
    static constexpr int kBlocks = 2;
    const Element* low;
    const Element* high;
    template <class Terms>
    typename Terms::Term load(int64_t offset) const {
        if constexpr (Terms::kStep == 1)
            return Lanes16::halves(low + offset, high + offset);
        else
            return Lanes16::pairs(low + offset, high + offset);
    }
};
#endif

constexpr int kMostVectors = 4;  // registers beside each other
constexpr int kMostQueries = 6;  // of one tile

constexpr int vectors_beside(int queries) {
    const int fit = Wide::kRegisters / queries;
    return fit < 1 ? 1 : fit < kMostVectors ? fit : kMostVectors;
}

// Calls body.template operator()<n>() for `count` = n in 1 ... kMost.
template <int kMost, class Body>
inline void with_count(int count, Body&& body) {
    if constexpr (kMost > 1) {
        if (count < kMost) return with_count<kMost - 1>(count, body);
    }
    body.template operator()<kMost>();
}

// Cuts [first, last) into as few pieces of at most `most` as possible, nearly equal ones.
template <class Body>
inline void in_equal_pieces(int first, int last, int most, Body&& body) {
    int pieces = (last - first + most - 1) / most;
    for (; pieces > 0; --pieces) {
        const int count = (last - first + pieces - 1) / pieces;
        body(first, count);
        first += count;
    }
}

// Query vectors [first, last) in tiles: one where that is possible, else such as leave most registers to what
// they share.
template <class Body>
inline void in_query_tiles(int first, int last, Body&& body) {
    in_equal_pieces(first, last, last - first <= kMostQueries ? kMostQueries : 6, body);
}

// scores[i][lanes of vector n] for kQ query vectors and kN vectors of positions, dims in order. kFetch:
// meanwhile as many lines as are read, in equal shares from each of `ahead`.
template <class Terms, int kQ, int kN, bool kFetch, class Keys>
inline void score_tile(const typename Terms::Factor* const* q, const Keys (&keys)[kN], int64_t stride,
                       int head_dim, const uint8_t* const (&ahead)[kN * Keys::kBlocks], float* scores) {
    constexpr int kDims = 2 * Terms::kStep, kParts = kN * Keys::kBlocks;  // kDims of a vector are a line
    typename Terms::Sum acc[kQ][kN];
    for (int i = 0; i < kQ; ++i)
        for (int n = 0; n < kN; ++n) acc[i][n] = Terms::zero();
    int64_t at = 0;
    const auto add_step = [&](int d) __attribute__((always_inline)) {
        typename Terms::Term term[kN];
        for (int n = 0; n < kN; ++n) term[n] = keys[n].template load<Terms>(at);
        at += stride;
        for (int i = 0; i < kQ; ++i) {
            const auto factor = Terms::factor(q[i] + d);
            for (int n = 0; n < kN; ++n) acc[i][n] = Terms::add_product(acc[i][n], factor, term[n]);
        }
    };
    const uint8_t* line = ahead[0];
    [[maybe_unused]] const int share = (head_dim / kDims + kParts - 1) / kParts;
    [[maybe_unused]] int part = 0, left = share;
    for (int d = 0; d < head_dim; d += kDims) {
        if constexpr (kFetch) {
            for (int n = 0; n < kN; ++n) fetch(line + n * kLine);
            line += kN * kLine;
            if (kParts > 1 && --left == 0 && part + 1 < kParts) {
                left = share;
                line = ahead[++part];
            }
        }
        add_step(d);
        add_step(d + Terms::kStep);
    }
    for (int i = 0; i < kQ; ++i)
        for (int n = 0; n < kN; ++n)
            store(scores + i * kRunTokens + n * Wide::kColumns, Terms::score(acc[i][n]));
}

// Scores of `count` query vectors over vectors [first, last) of a run's positions, to scores[i][position].
// locate(n): where vector n's keys of dim 0 begin; `stride` elements on are those of the next step of dims.
// ahead(n, b): what to fetch meanwhile for block b of its Keys.
template <class Terms, bool kFetch, class Locate, class Ahead>
inline void score_vectors(int count, const typename Terms::Factor* const* q, int first, int last,
                          int64_t stride, int head_dim, float* scores, Locate locate, Ahead ahead) {
    with_count<kMostQueries>(count, [&]<int kQ>() __attribute__((always_inline)) {
        constexpr int kMost = vectors_beside(kQ);
        in_equal_pieces(first, last, kMost, [&](int at, int beside) __attribute__((always_inline)) {
            with_count<kMost>(beside, [&]<int kN>() __attribute__((always_inline)) {
                using Keys = decltype(locate(0));
                Keys keys[kN];
                const uint8_t* lines[kN * Keys::kBlocks];
                for (int n = 0; n < kN; ++n) {
                    keys[n] = locate(at + n);
                    for (int b = 0; b < Keys::kBlocks; ++b) lines[n * Keys::kBlocks + b] = ahead(at + n, b);
                }
                score_tile<Terms, kQ, kN, kFetch>(q, keys, stride, head_dim, lines,
                                                  scores + at * Wide::kColumns);
            });
        });
    });
}

// o[i][kN registers of dims] += weight[i][j] * v[j][...] for positions j in [from, to), in order. locate(b):
// the values of positions b * block ... kFetch: meanwhile as many lines as are read; ahead(position, dim,
// bytes): those for a block's first position and first dim, of which each position reads so many bytes.
template <class Terms, int kQ, int kN, bool kFetch, class Locate, class Ahead>
inline void value_tile(const typename Terms::Factor* weights, Locate locate, Ahead ahead, int block, int from,
                       int to, int head_dim, int dim, typename Terms::Total* o) {
    constexpr int kStep = Terms::kStep;
    typename Terms::Sum acc[kQ][kN];
    for (int i = 0; i < kQ; ++i)
        for (int n = 0; n < kN; ++n) acc[i][n] = Terms::sum(o + i * head_dim + n * Wide::kColumns);
    while (from < to) {
        const int in_block = from % block;
        const int end = to - from < block - in_block ? to : from + block - in_block;
        const auto* v = locate(from / block) + (static_cast<int64_t>(in_block) * head_dim + dim * kStep);
        constexpr int kBytes = kN * Wide::kColumns * kStep * static_cast<int>(sizeof(*v));  // of a step
        [[maybe_unused]] const uint8_t* line = ahead(from, dim, kBytes / kStep);
        for (; from < end; from += kStep, v += head_dim * kStep) {
            if constexpr (kFetch) {
                for (int b = 0; b < kBytes; b += kLine) fetch(line + b);
                line += kBytes;
            }
            typename Terms::Term term[kN];
            for (int n = 0; n < kN; ++n) term[n] = Terms::load(v + n * Wide::kColumns * kStep);
            for (int i = 0; i < kQ; ++i) {
                const auto factor = Terms::factor(weights + i * kRunTokens + from);
                for (int n = 0; n < kN; ++n) acc[i][n] = Terms::add_product(acc[i][n], factor, term[n]);
            }
        }
    }
    for (int i = 0; i < kQ; ++i)
        for (int n = 0; n < kN; ++n) store(o + i * head_dim + n * Wide::kColumns, acc[i][n]);
}

// o[i] += sum over positions [from, to) of weights[i][position] * v, for `count` query vectors.
template <class Terms, bool kFetch, class Locate, class Ahead>
inline void value_vectors(int count, const typename Terms::Factor* weights, Locate locate, Ahead ahead,
                          int block, int from, int to, int head_dim, typename Terms::Total* o) {
    if (from >= to) return;
    with_count<kMostQueries>(count, [&]<int kQ>() __attribute__((always_inline)) {
        constexpr int kMost = vectors_beside(kQ);
        in_equal_pieces(0, head_dim / Wide::kColumns, kMost,
                        [&](int at, int beside) __attribute__((always_inline)) {
                            with_count<kMost>(beside, [&]<int kN>() __attribute__((always_inline)) {
                                const int dim = at * Wide::kColumns;
                                value_tile<Terms, kQ, kN, kFetch>(weights, locate, ahead, block, from, to,
                                                                  head_dim, dim, o + dim);
                            });
                        });
    });
}
