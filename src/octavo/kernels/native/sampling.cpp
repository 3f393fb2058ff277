#include "sampling.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows are walked in blocks of this many logits. The largest logit of each block, found while looking for the
// peak, later tells which blocks can hold a candidate: the k-th largest of those maxima bounds the k-th
// logit.
constexpr size_t kBlock = 64;

// Weights, exp((logit - peak) / temperature), are integers in units of 2^-40: their sums are exact, so no
// order of adding, and no way of selecting candidates, can change a draw. A token further than kNegligible
// nats below the peak has weight 0 (probability < 2^-41 of the likeliest token's) and is never drawn.
constexpr int kWeightBits = 40;
constexpr float kNegligible = 28.4375f;  // > 41 ln 2 = 28.42

// The sum of all weights must fit 63 bits.
constexpr int64_t kMaxVocabSize = int64_t{1} << 22;

// Histogram of one row: bin b holds the tokens between b/16 and (b+1)/16 nats below the peak (after
// temperature).
constexpr float kBinsPerNat = 16.0f;
constexpr int32_t kNumBins = static_cast<int32_t>(kNegligible * kBinsPerNat);

// ------------------------------------------------------------------------------------------------
// polynomials

// exp(x) for x <= 0, the same bits on every machine. Relative error below 2e-7 for x >= -87; smaller x are
// taken as -87, which no weight can tell from zero. exp(0) is exactly 1.
//
// Cody and Waite's reduction x = k ln 2 + r, |r| <= 0.347 (the high part of ln 2 has 9 bits, so its product
// with k is exact), then the Taylor series to r^7, whose remainder is below 6e-9.
inline float exp_negative(float x) {
    constexpr float kLog2E = 1.44269504f;
    constexpr float kLn2High = 0.693359375f;
    constexpr float kLn2Low = -2.12194440e-4f;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer

    x = x > -87.0f ? x : -87.0f;
    const float shifted = x * kLog2E + kRound;
    const float k = shifted - kRound;
    const float r = (x - k * kLn2High) - k * kLn2Low;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
    return p * std::bit_cast<float>((exponent + 127) << 23);
}

// log(x) for normal positive x, the same bits on every machine. Absolute error below 1e-15 * max(1, |log x|).
//
// x = m 2^e with m in [0.707, 1.414), then log m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.172: eleven
// terms leave a remainder below 1e-18.
double log_positive(double x) {
    constexpr double kLn2 = 0.693147180559945309417;
    constexpr uint64_t kMantissa = (uint64_t{1} << 52) - 1;
    const uint64_t bits = std::bit_cast<uint64_t>(x);
    int exponent = static_cast<int>(bits >> 52) - 1023;
    double m = std::bit_cast<double>((bits & kMantissa) | (uint64_t{1023} << 52));
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double s2 = s * s;
    double series = 0.0;
    for (int term = 21; term >= 1; term -= 2) series = series * s2 + 1.0 / term;
    return exponent * kLn2 + 2.0 * s * series;
}

// Weights of one block: round(exp((x[i] - peak) * scale) * 2^40). -inf gives 0.
void block_weights(const float* x, float peak, float scale, uint64_t* weights) {
    // Adding 2^12 to a double leaves a mantissa that counts units of 2^-40: rounding without a conversion,
    // which SSE2 does not have for 64-bit integers.
    constexpr double kShift = static_cast<double>(uint64_t{1} << (52 - kWeightBits));
    constexpr uint64_t kShiftBits = std::bit_cast<uint64_t>(kShift);
    float e[kBlock];
    for (size_t i = 0; i < kBlock; ++i) e[i] = exp_negative((x[i] - peak) * scale);
    for (size_t i = 0; i < kBlock; ++i) {
        weights[i] = std::bit_cast<uint64_t>(static_cast<double>(e[i]) + kShift) - kShiftBits;
    }
}

uint64_t sum(const uint64_t* weights, size_t count) {
    return std::accumulate(weights, weights + count, uint64_t{0});
}

// ------------------------------------------------------------------------------------------------ random
// draws

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a
// block cipher used as a counter generator, so that a draw depends on its address only. Counter: {position
// low, position high, choice_index, 0}; key: the seed. Returns words 0 (low) and 1 (high).
uint64_t philox(uint64_t seed, uint64_t position, uint32_t choice_index) {
    std::array<uint32_t, 4> c = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                                 choice_index, 0};
    uint32_t key0 = static_cast<uint32_t>(seed);
    uint32_t key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
        const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
        c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(p1),
             static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(p0)};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return uint64_t{c[1]} << 32 | c[0];
}

// The integer floor(random / 2^64 * total), in [0, total). No outcome is off by more than 2^-64.
uint64_t scale_to(uint64_t random, uint64_t total) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(random) * total >> 64);
}

// ------------------------------------------------------------------------------------------------ order of
// tokens

// One integer that orders tokens by (logit, then lower id first): larger is better. Distinct for distinct
// ids.
uint64_t rank_key(float logit, int32_t token_id) {
    const uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 and +0 are the same logit
    const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(token_id));
}

int32_t token_of(uint64_t key) { return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key)); }

// The key of the last token of the smallest prefix, best first, whose weight reaches target. ranked: (key,
// weight), reordered. O(n): halves are selected, not sorted.
uint64_t boundary_key(std::vector<std::pair<uint64_t, uint64_t>>& ranked, uint64_t target) {
    auto first = ranked.begin();
    auto last = ranked.end();
    while (last - first > 32) {
        const auto middle = first + (last - first) / 2;
        std::nth_element(first, middle, last, std::greater<>());
        uint64_t mass = 0;
        for (auto it = first; it != middle; ++it) mass += it->second;
        if (mass >= target) {
            last = middle;
        } else {
            target -= mass;
            first = middle;
        }
    }
    std::sort(first, last, std::greater<>());
    while (first + 1 < last && first->second < target) {
        target -= first->second;
        ++first;
    }
    return first->first;
}

size_t num_blocks(size_t count) { return (count + kBlock - 1) / kBlock; }

// The largest logit of one block. Sets *unusable where the block holds NaN.
//
// Sixteen lanes, so that the compiler keeps them in vector registers; comparing neighbours pairwise halves
// the work of looking for NaN.
float block_maximum(const float* x, uint32_t* unusable) {
    constexpr size_t kLanes = 16;
    float top[kLanes];
    uint32_t nan[kLanes] = {};
    for (size_t j = 0; j < kLanes; ++j) top[j] = -kInfinity;
    for (size_t i = 0; i < kBlock; i += kLanes) {
        for (size_t j = 0; j < kLanes; ++j) {
            top[j] = x[i + j] > top[j] ? x[i + j] : top[j];
            nan[j] |= x[i + j] != x[i + j] ? 1u : 0u;
        }
    }
    for (size_t width = kLanes / 2; width > 0; width /= 2) {
        for (size_t j = 0; j < width; ++j) {
            top[j] = top[j] > top[j + width] ? top[j] : top[j + width];
            nan[j] |= nan[j + width];
        }
    }
    *unusable |= nan[0];
    return top[0];
}

}  // namespace

// ------------------------------------------------------------------------------------------------ rows

class Sampler::Row {
  public:
    Row(const float* logits, int32_t vocab_size)
        : logits_(logits),
          whole_(static_cast<size_t>(vocab_size) / kBlock),
          num_blocks_(octavo::num_blocks(static_cast<size_t>(vocab_size))) {
        const size_t rest = static_cast<size_t>(vocab_size) % kBlock;
        tail_.fill(-kInfinity);
        if (rest > 0) std::memcpy(tail_.data(), logits + whole_ * kBlock, rest * sizeof(float));
    }
    const float* block(size_t index) const {
        return index < whole_ ? logits_ + index * kBlock : tail_.data();
    }
    float logit(int32_t token_id) const { return logits_[token_id]; }
    size_t num_blocks() const { return num_blocks_; }

    // Fills maxima[num_blocks] and returns the largest logit, or NaN if the row cannot be used: it holds NaN
    // or +inf, or nothing but -inf.
    float scan(std::vector<float>& maxima) const {
        maxima.resize(num_blocks_);
        uint32_t unusable = 0;
        float peak = -kInfinity;
        for (size_t b = 0; b < num_blocks_; ++b) {
            const float top = block_maximum(block(b), &unusable);
            maxima[b] = top;
            peak = top > peak ? top : peak;
        }
        if (unusable || peak == kInfinity || peak == -kInfinity)
            return std::numeric_limits<float>::quiet_NaN();
        return peak;
    }

    // The lowest token id whose logit equals the peak.
    int32_t first_equal(const std::vector<float>& maxima, float peak) const {
        const size_t b = static_cast<size_t>(std::find(maxima.begin(), maxima.end(), peak) - maxima.begin());
        const float* x = block(b);
        return static_cast<int32_t>(b * kBlock + static_cast<size_t>(std::find(x, x + kBlock, peak) - x));
    }

  private:
    const float* logits_;
    size_t whole_;
    size_t num_blocks_;
    std::array<float, kBlock> tail_;
};

// ------------------------------------------------------------------------------------------------ parameters

namespace {

std::string number(double value) {
    std::string text = std::to_string(value);
    if (text.find('.') != std::string::npos && std::isfinite(value)) {
        text.erase(text.find_last_not_of('0') + 1);
        if (text.back() == '.') text.pop_back();
    }
    return text;
}

[[noreturn]] void refuse(const char* name, const std::string& range, const std::string& got) {
    throw std::invalid_argument(std::string(name) + " must be " + range + ", got " + got);
}

// NaN fails every comparison, so each check is written as what must hold.
void require(bool holds, const char* name, const std::string& range, double got) {
    if (!holds) refuse(name, range, number(got));
}

int32_t require_token(int64_t token_id, int32_t vocab_size, const char* name) {
    if (token_id < 0 || token_id >= vocab_size) {
        refuse(name, "token ids below the vocabulary's size of " + std::to_string(vocab_size),
               std::to_string(token_id));
    }
    return static_cast<int32_t>(token_id);
}

}  // namespace

Sampler::Sampler(int64_t vocab_size, const SamplerOptions& o) {
    if (vocab_size < 1 || vocab_size > kMaxVocabSize) {
        refuse("vocab_size", "between 1 and " + std::to_string(kMaxVocabSize), std::to_string(vocab_size));
    }
    vocab_size_ = static_cast<int32_t>(vocab_size);
    require(o.temperature >= 0 && o.temperature < kInfinity, "temperature", "finite and at least 0",
            o.temperature);
    require(o.top_p > 0 && o.top_p <= 1, "top_p", "above 0 and at most 1", o.top_p);
    require(o.min_p >= 0 && o.min_p <= 1, "min_p", "between 0 and 1", o.min_p);
    require(o.repetition_penalty >= 0.01 && o.repetition_penalty <= 100, "repetition_penalty",
            "between 0.01 and 100", o.repetition_penalty);
    require(std::abs(o.presence_penalty) <= 100, "presence_penalty", "between -100 and 100",
            o.presence_penalty);
    require(std::abs(o.frequency_penalty) <= 100, "frequency_penalty", "between -100 and 100",
            o.frequency_penalty);
    if (o.top_k < 0) refuse("top_k", "at least 0 (0: off)", std::to_string(o.top_k));
    if (o.choice_index < 0 || o.choice_index > 0x7fffffff) {
        refuse("choice_index", "between 0 and 2147483647", std::to_string(o.choice_index));
    }
    if (o.num_logprobs < -1 || o.num_logprobs > vocab_size) {
        refuse("num_logprobs", "between -1 (none) and the vocabulary's size of " + std::to_string(vocab_size),
               std::to_string(o.num_logprobs));
    }
    if (o.min_tokens < 0) refuse("min_tokens", "at least 0", std::to_string(o.min_tokens));
    for (const auto& [token_id, bias] : o.logit_bias) {
        const int32_t id = require_token(token_id, vocab_size_, "logit_bias keys");
        require(std::abs(bias) <= 1000, "logit_bias values", "between -1000 and 1000", bias);
        logit_bias_.emplace_back(id, static_cast<float>(bias));
    }
    for (const int64_t id : o.stop_token_ids) {
        stop_token_ids_.push_back(require_token(id, vocab_size_, "stop_token_ids"));
    }

    greedy_ = o.temperature == 0;
    // The bounds keep 0 * inf out of the weights: beyond them only exact ties of the peak survive, or
    // everything is equally likely, whatever the exact temperature.
    inverse_temperature_ = static_cast<float>(std::clamp(1.0 / o.temperature, 1e-30, 1e30));
    top_k_ = o.top_k < vocab_size ? static_cast<size_t>(o.top_k) : 0;
    top_p_ = o.top_p;
    min_p_ = o.min_p;
    repetition_penalty_ = static_cast<float>(o.repetition_penalty);
    presence_penalty_ = static_cast<float>(o.presence_penalty);
    frequency_penalty_ = static_cast<float>(o.frequency_penalty);
    seed_ = static_cast<uint64_t>(o.seed);
    choice_index_ = static_cast<uint32_t>(o.choice_index);
    num_logprobs_ = static_cast<int32_t>(o.num_logprobs);
    min_tokens_ = static_cast<uint64_t>(o.min_tokens);
}

// ------------------------------------------------------------------------------------------------ what was
// seen

void Sampler::observe_prompt(std::span<const int32_t> token_ids) {
    for (const int32_t id : token_ids) require_token(id, vocab_size_, "prompt token_ids");
    if (repetition_penalty_ == 1.0f) return;
    for (const int32_t id : token_ids) see(id, 0);
}

void Sampler::see(int32_t token_id, uint32_t output_count) {
    const auto [it, is_new] = seen_index_.try_emplace(token_id, seen_.size());
    if (is_new) seen_.push_back({token_id, 0});
    seen_[it->second].output_count += output_count;
}

bool Sampler::edits() const {
    return !seen_.empty() || !logit_bias_.empty() || (position_ < min_tokens_ && !stop_token_ids_.empty());
}

// Returns logits themselves, or an altered copy. O(distinct tokens seen) beside the copy.
const float* Sampler::edit(const float* logits) {
    if (!edits()) return logits;
    edited_.assign(logits, logits + vocab_size_);
    float* x = edited_.data();
    for (const auto& [id, bias] : logit_bias_) x[id] += bias;
    if (position_ < min_tokens_) {
        // NaN and +inf stay, to be found by the scan: a ban must not hide a broken row.
        for (const int32_t id : stop_token_ids_) x[id] = x[id] < kInfinity ? -kInfinity : x[id];
    }
    for (const auto& [id, count] : seen_) {
        // Keskar et al. 2019 (CTRL), section 4.1, with the sign taken into account.
        x[id] = x[id] > 0 ? x[id] / repetition_penalty_ : x[id] * repetition_penalty_;
        if (count > 0) {
            x[id] -= frequency_penalty_ * static_cast<float>(count);
            x[id] -= presence_penalty_;
        }
    }
    return x;
}

// ------------------------------------------------------------------------------------------------ candidates

// A logit that at least `count` tokens reach, found among block maxima; -inf if there are too few blocks to
// tell.
float Sampler::logit_floor_for(const std::vector<float>& maxima, size_t count) {
    if (count > maxima.size()) return -kInfinity;
    order_ = maxima;
    std::nth_element(order_.begin(), order_.begin() + static_cast<ptrdiff_t>(count) - 1, order_.end(),
                     std::greater<>());
    return order_[count - 1];
}

// Candidates become the tokens with logit >= logit_floor and (logit - peak) / temperature > argument_floor,
// with their weights. Blocks whose maximum fails are not read.
void Sampler::collect(const Row& row, float peak, float logit_floor, float argument_floor) {
    const float scale = inverse_temperature_;
    const auto passes = [=](float x) { return (x >= logit_floor) & ((x - peak) * scale > argument_floor); };
    size_t count = 0;
    for (size_t b = 0; b < row.num_blocks(); ++b) {
        if (!passes(maxima_[b])) continue;
        if (candidate_ids_.size() < count + kBlock) {
            const size_t size = std::max(count + kBlock, 2 * candidate_ids_.size());
            candidate_ids_.resize(size);
            candidate_logits_.resize(size);
            candidate_weights_.resize(size);
        }
        const float* x = row.block(b);
        for (size_t i = 0; i < kBlock; ++i) {
            candidate_ids_[count] = static_cast<int32_t>(b * kBlock + i);
            candidate_logits_[count] = x[i];
            count += passes(x[i]) ? 1 : 0;
        }
    }
    num_candidates_ = count;
    const size_t padded = num_blocks(count) * kBlock;
    candidate_ids_.resize(std::max(candidate_ids_.size(), padded));
    candidate_logits_.resize(candidate_ids_.size());
    candidate_weights_.resize(candidate_ids_.size());
    std::fill(candidate_logits_.begin() + static_cast<ptrdiff_t>(count),
              candidate_logits_.begin() + static_cast<ptrdiff_t>(padded), -kInfinity);
    for (size_t i = 0; i < padded; i += kBlock) {
        block_weights(&candidate_logits_[i], peak, scale, &candidate_weights_[i]);
    }
}

// Drops candidates whose key is below `key`; the order of ids stays.
void Sampler::keep_from(uint64_t key) {
    size_t kept = 0;
    for (size_t i = 0; i < num_candidates_; ++i) {
        candidate_ids_[kept] = candidate_ids_[i];
        candidate_logits_[kept] = candidate_logits_[i];
        candidate_weights_[kept] = candidate_weights_[i];
        kept += rank_key(candidate_logits_[i], candidate_ids_[i]) >= key ? 1 : 0;
    }
    num_candidates_ = kept;
}

// Keeps the `count` best candidates.
void Sampler::keep_best(size_t count) {
    if (num_candidates_ <= count) return;
    keys_.resize(num_candidates_);
    for (size_t i = 0; i < num_candidates_; ++i) {
        keys_[i] = rank_key(candidate_logits_[i], candidate_ids_[i]);
    }
    const auto cut = keys_.begin() + static_cast<ptrdiff_t>(count) - 1;
    std::nth_element(keys_.begin(), cut, keys_.end(), std::greater<>());
    keep_from(*cut);
}

// Keeps the smallest set of best candidates whose weight reaches top_p of total. Those above sure_argument
// are known to be in it, or to be short of it, together: only the others are ranked.
void Sampler::keep_nucleus(uint64_t total, float peak, float sure_argument) {
    uint64_t target = static_cast<uint64_t>(std::ceil(top_p_ * static_cast<double>(total)));
    target = std::clamp<uint64_t>(target, 1, total);
    ranked_.clear();
    for (size_t i = 0; i < num_candidates_; ++i) {
        if ((candidate_logits_[i] - peak) * inverse_temperature_ > sure_argument) {
            target -= candidate_weights_[i];
        } else {
            ranked_.emplace_back(rank_key(candidate_logits_[i], candidate_ids_[i]), candidate_weights_[i]);
        }
    }
    keep_from(boundary_key(ranked_, target));
}

// Applies min_p, top_k and top_p. Returns false when none is on: every token with a weight is a candidate,
// and the candidate arrays are not filled. Every rule keeps a best-first prefix, so a bound found early by
// any of them may be applied before the exact cuts.
bool Sampler::narrow(const Row& row, float peak) {
    const bool nucleus = top_p_ < 1.0;
    if (top_k_ == 0 && min_p_ == 0.0 && !nucleus) return false;

    float logit_floor = -kInfinity;
    float argument_floor = -kNegligible;
    float sure_argument = kInfinity;  // nobody is sure
    uint64_t total = 0;
    if (min_p_ > 0.0) {
        // The slack exceeds every rounding error; the exact cut is by weight, below.
        const double bound = min_p_ < 1e-13 ? -30.0 : log_positive(min_p_);
        argument_floor = std::max(argument_floor, static_cast<float>(bound) - 1e-3f);
    }
    const bool by_blocks = top_k_ > 0 && top_k_ <= maxima_.size();
    if (by_blocks) {
        logit_floor = logit_floor_for(maxima_, top_k_);
    } else if (top_k_ > 0 || (nucleus && min_p_ == 0.0)) {
        // One pass over the row finds the bin in which the k-th token, or the nucleus' last token, lies.
        std::array<uint64_t, kNumBins + 1> mass{};
        std::array<uint32_t, kNumBins + 1> count{};
        uint64_t weights[kBlock];
        int32_t bins[kBlock];
        for (size_t b = 0; b < row.num_blocks(); ++b) {
            const float* x = row.block(b);
            if (!((maxima_[b] - peak) * inverse_temperature_ > -kNegligible)) continue;
            block_weights(x, peak, inverse_temperature_, weights);
            for (size_t i = 0; i < kBlock; ++i) {
                const float depth = (peak - x[i]) * inverse_temperature_;
                bins[i] = static_cast<int32_t>((depth < kNegligible ? depth : kNegligible) * kBinsPerNat);
            }
            for (size_t i = 0; i < kBlock; ++i) {
                mass[static_cast<size_t>(bins[i])] += weights[i];
                count[static_cast<size_t>(bins[i])] += 1;
            }
        }
        total = sum(mass.data(), kNumBins);
        const double wanted = nucleus && top_k_ == 0 ? top_p_ * static_cast<double>(total) : kInfinity;
        uint64_t mass_so_far = 0;
        uint64_t count_so_far = 0;
        int32_t bin = -1;
        do {
            ++bin;
            mass_so_far += mass[static_cast<size_t>(bin)];
            count_so_far += count[static_cast<size_t>(bin)];
        } while (bin + 1 < kNumBins && static_cast<double>(mass_so_far) < wanted &&
                 (top_k_ == 0 || count_so_far < top_k_));
        argument_floor = std::max(argument_floor, -static_cast<float>(bin + 1) / kBinsPerNat);
        if (top_k_ == 0) sure_argument = -static_cast<float>(bin) / kBinsPerNat;
    }

    collect(row, peak, logit_floor, argument_floor);
    if (min_p_ > 0.0) {
        const double least = std::ceil(min_p_ * static_cast<double>(uint64_t{1} << kWeightBits));
        const uint64_t threshold = static_cast<uint64_t>(least);
        size_t kept = 0;
        for (size_t i = 0; i < num_candidates_; ++i) {
            candidate_ids_[kept] = candidate_ids_[i];
            candidate_logits_[kept] = candidate_logits_[i];
            candidate_weights_[kept] = candidate_weights_[i];
            kept += candidate_weights_[i] >= threshold ? 1 : 0;
        }
        num_candidates_ = kept;
    }
    if (top_k_ > 0) keep_best(top_k_);
    if (nucleus) {
        if (top_k_ > 0 || min_p_ > 0.0) total = sum(candidate_weights_.data(), num_candidates_);
        keep_nucleus(total, peak, sure_argument);
    }
    return true;
}

// ------------------------------------------------------------------------------------------------ the draw

// The token at which the running sum of weights, in id order, passes the draw.
int32_t Sampler::draw(const Row& row, float peak, bool narrowed) {
    const uint64_t random = philox(seed_, position_, choice_index_);
    if (narrowed) {
        uint64_t left = scale_to(random, sum(candidate_weights_.data(), num_candidates_));
        size_t i = 0;
        while (candidate_weights_[i] <= left) left -= candidate_weights_[i++];
        return candidate_ids_[i];
    }
    // No weight is stored: the block of the draw is computed once more.
    uint64_t weights[kBlock];
    masses_.assign(row.num_blocks(), 0);
    for (size_t b = 0; b < row.num_blocks(); ++b) {
        block_weights(row.block(b), peak, inverse_temperature_, weights);
        masses_[b] = sum(weights, kBlock);
    }
    uint64_t left = scale_to(random, sum(masses_.data(), masses_.size()));
    size_t b = 0;
    while (masses_[b] <= left) left -= masses_[b++];
    block_weights(row.block(b), peak, inverse_temperature_, weights);
    size_t i = 0;
    while (weights[i] <= left) left -= weights[i++];
    return static_cast<int32_t>(b * kBlock + i);
}

Sampled Sampler::sample(const float* logits) {
    Sampled sampled;
    const float* x = edit(logits);
    const Row row(x, vocab_size_);
    const float peak = row.scan(maxima_);
    if (peak == peak) {
        sampled.token_id = greedy_ ? row.first_equal(maxima_, peak) : draw(row, peak, narrow(row, peak));
        if (num_logprobs_ >= 0) report_logprobs(logits, x == logits ? &row : nullptr, peak, sampled);
        if (repetition_penalty_ != 1.0f || presence_penalty_ != 0.0f || frequency_penalty_ != 0.0f) {
            see(sampled.token_id, 1);
        }
    }
    ++position_;
    return sampled;
}

// Log-probabilities of the raw logits. scanned: their row if maxima_ already describes it, else null.
void Sampler::report_logprobs(const float* logits, const Row* scanned, float peak, Sampled& sampled) {
    const Row raw(logits, vocab_size_);
    const std::vector<float>& maxima = scanned ? maxima_ : raw_maxima_;
    if (!scanned) peak = raw.scan(raw_maxima_);
    uint64_t total = 0;
    uint64_t weights[kBlock];
    for (size_t b = 0; b < raw.num_blocks(); ++b) {
        block_weights(raw.block(b), peak, 1.0f, weights);
        total += sum(weights, kBlock);
    }
    constexpr double kUnit = 1.0 / static_cast<double>(uint64_t{1} << kWeightBits);
    const double log_sum = log_positive(static_cast<double>(total) * kUnit);
    const auto logprob = [&](int32_t id) {
        return static_cast<float>(static_cast<double>(logits[id]) - static_cast<double>(peak) - log_sum);
    };
    sampled.logprob = logprob(sampled.token_id);

    const size_t wanted = static_cast<size_t>(num_logprobs_);
    if (wanted == 0) return;
    const float floor = std::max(logit_floor_for(maxima, wanted), std::numeric_limits<float>::lowest());
    keys_.clear();
    for (size_t b = 0; b < raw.num_blocks(); ++b) {
        if (!(maxima[b] >= floor)) continue;
        const float* x = raw.block(b);
        for (size_t i = 0; i < kBlock; ++i) {
            if (x[i] >= floor) keys_.push_back(rank_key(x[i], static_cast<int32_t>(b * kBlock + i)));
        }
    }
    const size_t listed = std::min(wanted, keys_.size());
    std::partial_sort(keys_.begin(), keys_.begin() + static_cast<ptrdiff_t>(listed), keys_.end(),
                      std::greater<>());
    sampled.top_logprobs.reserve(listed);
    for (size_t i = 0; i < listed; ++i) {
        const int32_t id = token_of(keys_[i]);
        sampled.top_logprobs.emplace_back(id, logprob(id));
    }
}

Distribution Sampler::distribution(const float* logits) {
    Distribution result;
    const Row row(edit(logits), vocab_size_);
    const float peak = row.scan(maxima_);
    if (peak != peak) return result;
    if (greedy_) return {{row.first_equal(maxima_, peak)}, {1.0}};
    if (!narrow(row, peak)) collect(row, peak, -kInfinity, -kNegligible);
    const double total = static_cast<double>(sum(candidate_weights_.data(), num_candidates_));
    for (size_t i = 0; i < num_candidates_; ++i) {
        if (candidate_weights_[i] == 0) continue;
        result.token_ids.push_back(candidate_ids_[i]);
        result.probabilities.push_back(static_cast<double>(candidate_weights_[i]) / total);
    }
    return result;
}

// ------------------------------------------------------------------------------------------------ Python

namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TokenIds = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const float* checked(const Sampler& sampler, const Logits& logits) {
    if (logits.shape(0) != static_cast<size_t>(sampler.vocab_size())) {
        throw std::invalid_argument("logits must have the vocabulary's size of " +
                                    std::to_string(sampler.vocab_size()) + ", got " +
                                    std::to_string(logits.shape(0)));
    }
    return logits.data();
}

// Moves a vector into a numpy array that owns it.
template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T>&& values) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner);
}

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::class_<Sampled>(
        m, "Sampled",
        "One sampled token. token_id: -1 where the row's logits were not finite; logprob: nats, "
        "of the raw logits (0 when not asked for); top_logprobs: (token_id, logprob), most likely "
        "first.")
        .def_ro("token_id", &Sampled::token_id)
        .def_ro("logprob", &Sampled::logprob)
        .def_ro("top_logprobs", &Sampled::top_logprobs)
        .def("__repr__", [](const Sampled& s) {
            return "Sampled(token_id=" + std::to_string(s.token_id) +
                   ", logprob=" + std::to_string(s.logprob) +
                   ", top_logprobs=" + std::to_string(s.top_logprobs.size()) + ")";
        });

    nb::class_<Sampler>(m, "Sampler",
                        "Draws the tokens of one output stream from rows of logits. Parameters as in "
                        "octavo.SamplingParams; raises ValueError for one outside its range.")
        .def(
            "__init__",
            [](Sampler* self, int64_t vocab_size, double temperature, int64_t top_k, double top_p,
               double min_p, double repetition_penalty, double presence_penalty, double frequency_penalty,
               int64_t seed, int64_t choice_index, int64_t num_logprobs,
               const std::map<int64_t, double>& logit_bias, int64_t min_tokens,
               const std::vector<int64_t>& stop_token_ids) {
                SamplerOptions options;
                options.temperature = temperature;
                options.top_k = top_k;
                options.top_p = top_p;
                options.min_p = min_p;
                options.repetition_penalty = repetition_penalty;
                options.presence_penalty = presence_penalty;
                options.frequency_penalty = frequency_penalty;
                options.seed = seed;
                options.choice_index = choice_index;
                options.num_logprobs = num_logprobs;
                options.logit_bias.assign(logit_bias.begin(), logit_bias.end());
                options.min_tokens = min_tokens;
                options.stop_token_ids = stop_token_ids;
                new (self) Sampler(vocab_size, options);
            },
            nb::arg("vocab_size"), nb::kw_only(), nb::arg("temperature") = 1.0, nb::arg("top_k") = 0,
            nb::arg("top_p") = 1.0, nb::arg("min_p") = 0.0, nb::arg("repetition_penalty") = 1.0,
            nb::arg("presence_penalty") = 0.0, nb::arg("frequency_penalty") = 0.0, nb::arg("seed") = 0,
            nb::arg("choice_index") = 0, nb::arg("num_logprobs") = -1,
            nb::arg("logit_bias") = std::map<int64_t, double>(), nb::arg("min_tokens") = 0,
            nb::arg("stop_token_ids") = std::vector<int64_t>())
        .def_prop_ro("vocab_size", &Sampler::vocab_size)
        .def(
            "observe_prompt",
            [](Sampler& self, const TokenIds& token_ids) {
                self.observe_prompt({token_ids.data(), token_ids.shape(0)});
            },
            nb::arg("token_ids"),
            "token_ids: int32[n] of the prompt, counted by repetition_penalty. Raises ValueError for an id "
            "outside "
            "the vocabulary.")
        .def(
            "sample",
            [](Sampler& self, const Logits& logits) {
                const float* x = checked(self, logits);
                nb::gil_scoped_release release;
                return self.sample(x);
            },
            nb::arg("logits"),
            "logits: float32[vocab_size]. Draws the token of the next output position. Raises ValueError for "
            "another size.")
        .def(
            "distribution",
            [](Sampler& self, const Logits& logits) {
                Distribution d = self.distribution(checked(self, logits));
                return nb::make_tuple(to_numpy(std::move(d.token_ids)), to_numpy(std::move(d.probabilities)));
            },
            nb::arg("logits"),
            "What sample(logits) would draw from now: (token_ids int32[n] ascending, probabilities "
            "float64[n]). "
            "Changes no later sample.");

    m.def(
        "exp_negative",
        [](const Logits& x) {
            std::vector<float> y(x.shape(0));
            std::transform(x.data(), x.data() + x.shape(0), y.begin(), exp_negative);
            return to_numpy(std::move(y));
        },
        nb::arg("x"), "The exp that weights are made of, for x: float32[n] <= 0. Relative error below 2e-7.");
    m.def("log_positive", &log_positive, nb::arg("x"),
          "The log that log-probabilities are made of, for x: a normal positive float64.");
}

}  // namespace octavo
