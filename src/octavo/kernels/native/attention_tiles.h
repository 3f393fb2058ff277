// Register tiles of attention: scores of some query vectors over positions, and their weighted sums of
// values. Included inside an anonymous namespace, after lanes.h.
//
// A tile is kQ query vectors (rows x heads of a group) by kN registers. What is stored is multiplied either
// as floats (f16, or f16 widened before), a chain of multiply-adds for each sum, or as pairs of int16 (int8
// codes, or codes widened before), which are exact. Which lanes a sum has, and how many tiles there are,
// changes no bit of it.

// Fetches pieces of memory a line at a time, in step with what a kernel consumes. Blocks of a sequence lie
// far apart, so no hardware prefetcher helps from one to the next; and a burst would only queue up.
class Fetch {
  public:
    Fetch() = default;

    // Then `count` pieces of `bytes`, one a block. Room for two such lists.
    void append(const PagedKV& kv, const int32_t* blocks, int count, const uint8_t* first, int64_t bytes) {
        (lists_[0].left == 0 ? lists_[0] : lists_[1]) = {blocks, count, first, bytes, kv.extent_bytes};
        bytes_ += count * bytes;
    }
    // As many bytes will be consumed: fetches more than one line for each line where it has more to fetch.
    void spread_over(int64_t bytes) {
        rate_ = bytes >= bytes_ ? 1 : bytes <= 0 ? 4 : static_cast<int>((bytes_ + bytes - 1) / bytes);
        if (rate_ > 4) rate_ = 4;
    }
    void consumed(int bytes) {
        for (owed_ += bytes * rate_; owed_ >= kLine; owed_ -= kLine) next();
    }
    void next() {
        if (line_ >= end_) {
            if (lists_[0].left == 0) {
                lists_[0] = lists_[1];
                lists_[1].left = 0;
                if (lists_[0].left == 0) return;
            }
            List& list = lists_[0];
            line_ = list.first + *list.blocks++ * list.stride;
            end_ = line_ + list.bytes;
            --list.left;
        }
        __builtin_prefetch(line_, 0, 2);
        line_ += kLine;
    }

  private:
    static constexpr int kLine = 64;
    struct List {
        const int32_t* blocks = nullptr;
        int left = 0;
        const uint8_t* first = nullptr;  // of block 0
        int64_t bytes = 0, stride = 0;
    };
    List lists_[2];
    const uint8_t* line_ = nullptr;
    const uint8_t* end_ = nullptr;
    int64_t bytes_ = 0;
    int owed_ = 0, rate_ = 1;
};

// What was widened before lies in the first-level cache.
struct NoFetch {
    void consumed(int) {}
};

struct FloatTerms {
    using Stored = Half;
    using Widened = float;
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
    using Widened = int16_t;
    using Factor = int16_t;
    using Total = int32_t;
    using Sum = Wide::Ints;
    using Term = Wide::Pairs;
    static constexpr int kStep = 2;
    static Sum zero() { return Wide::int_zeros(); }
    static Sum sum(const int32_t* p) { return Wide::ints(p); }
    static Term load(const int16_t* p) { return Wide::pairs(p); }
    static Term load(const int8_t* p) { return Wide::pairs(p); }
    static Term factor(const int16_t* p) { return Wide::splat_pair(p); }
    static Sum add_product(Sum sum, Term factor, Term term) { return dot2(sum, factor, term); }
    static Wide::Floats score(Sum sum) { return to_float(sum); }
};

// Where one register of stored keys begins: in one block, or with 16 lanes and blocks of 8 in two.
template <class Element>
struct OneBlock {
    const Element* at;
    template <class Terms>
    typename Terms::Term load(int64_t offset) const {
        return Terms::load(at + offset);
    }
};
#if defined(OCTAVO_SIXTEEN_LANES)
template <class Element>
struct TwoBlocks {
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

constexpr int kMostVectors = 4;                               // registers beside each other
constexpr int kMostQueries = Wide::kRegisters >= 24 ? 8 : 6;  // of one tile

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

// scores[i][lanes of vector p] for kQ query vectors and kN vectors of positions, dims in order.
template <class Terms, int kQ, int kN, class Keys, class Fetcher>
inline void score_tile(const typename Terms::Factor* const* q, const Keys (&keys)[kN], int64_t stride,
                       int head_dim, int bytes, float* scores, Fetcher& fetch) {
    typename Terms::Sum acc[kQ][kN];
    for (int i = 0; i < kQ; ++i)
        for (int n = 0; n < kN; ++n) acc[i][n] = Terms::zero();
    int64_t at = 0;
    for (int d = 0; d < head_dim; d += Terms::kStep, at += stride) {
        fetch.consumed(bytes);
        typename Terms::Term term[kN];
        for (int n = 0; n < kN; ++n) term[n] = keys[n].template load<Terms>(at);
        for (int i = 0; i < kQ; ++i) {
            const auto factor = Terms::factor(q[i] + d);
            for (int n = 0; n < kN; ++n) acc[i][n] = Terms::add_product(acc[i][n], factor, term[n]);
        }
    }
    for (int i = 0; i < kQ; ++i)
        for (int n = 0; n < kN; ++n)
            store(scores + i * kRunTokens + n * Wide::kColumns, Terms::score(acc[i][n]));
}

// Scores of `count` query vectors over vectors [first, last) of a run's positions, to scores[i][position].
// locate(n): where vector n's keys of dim 0 begin; `stride` elements on are those of the next step of dims.
template <class Terms, class Element, class Locate, class Fetcher>
inline void score_vectors(int count, const typename Terms::Factor* const* q, int first, int last,
                          int64_t stride, int head_dim, float* scores, Locate locate, Fetcher& fetch) {
    with_count<kMostQueries>(count, [&]<int kQ>() __attribute__((always_inline)) {
        constexpr int kMost = vectors_beside(kQ);
        in_equal_pieces(first, last, kMost, [&](int at, int beside) __attribute__((always_inline)) {
            with_count<kMost>(beside, [&]<int kN>() __attribute__((always_inline)) {
                decltype(locate(0)) keys[kN];
                for (int n = 0; n < kN; ++n) keys[n] = locate(at + n);
                constexpr int kBytes = kN * Wide::kColumns * Terms::kStep * static_cast<int>(sizeof(Element));
                score_tile<Terms, kQ, kN>(q, keys, stride, head_dim, kBytes, scores + at * Wide::kColumns,
                                          fetch);
            });
        });
    });
}

// o[i][kN registers of dims] += weight[i][j] * v[j][...] for positions j in [from, to), in order. locate(b):
// where the values of positions b * block ... begin.
template <class Terms, int kQ, int kN, class Locate, class Fetcher>
inline void value_tile(const typename Terms::Factor* weights, Locate locate, int block, int from, int to,
                       int head_dim, int dim, typename Terms::Total* o, Fetcher& fetch) {
    constexpr int kStep = Terms::kStep;
    typename Terms::Sum acc[kQ][kN];
    for (int i = 0; i < kQ; ++i)
        for (int n = 0; n < kN; ++n) acc[i][n] = Terms::sum(o + i * head_dim + n * Wide::kColumns);
    while (from < to) {
        const int in_block = from % block;
        const int end = to - from < block - in_block ? to : from + block - in_block;
        const auto* v = locate(from / block) + (static_cast<int64_t>(in_block) * head_dim + dim * kStep);
        for (; from < end; from += kStep, v += head_dim * kStep) {
            fetch.consumed(kN * Wide::kColumns * kStep * static_cast<int>(sizeof(*v)));
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
template <class Terms, class Locate, class Fetcher>
inline void value_vectors(int count, const typename Terms::Factor* weights, Locate locate, int block,
                          int from, int to, int head_dim, typename Terms::Total* o, Fetcher& fetch) {
    if (from >= to) return;
    with_count<kMostQueries>(count, [&]<int kQ>() __attribute__((always_inline)) {
        constexpr int kMost = vectors_beside(kQ);
        in_equal_pieces(0, head_dim / Wide::kColumns, kMost,
                        [&](int at, int beside) __attribute__((always_inline)) {
                            with_count<kMost>(beside, [&]<int kN>() __attribute__((always_inline)) {
                                const int dim = at * Wide::kColumns;
                                value_tile<Terms, kQ, kN>(weights, locate, block, from, to, head_dim, dim,
                                                          o + dim, fetch);
                            });
                        });
    });
}
