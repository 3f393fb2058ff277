#include "sampling.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>

#include "sampling_arithmetic.h"

namespace nb = nanobind;

namespace octavo {
namespace {

// The peak of a row that nothing can be drawn from.
constexpr float kUnusable = std::numeric_limits<float>::quiet_NaN();

// The sum of all weights must fit 63 bits.
constexpr int64_t kMaxVocabSize = int64_t{1} << 22;

// Histogram of a row: bin b holds the tokens between b/16 and (b+1)/16 nats (after temperature) below the
// peak.
constexpr float kBinsPerNat = 16.0f;
constexpr int32_t kNumBins = static_cast<int32_t>(kNegligible * kBinsPerNat);

// One integer that orders tokens by logit, equals by lower id first: larger is better.
uint64_t rank_key(float logit, int32_t token_id) {
    const uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 and +0 are the same logit
    const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(token_id));
}

int32_t token_of(uint64_t key) { return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key)); }

// The key of the last token of the smallest prefix, best first, whose measure reaches target.
// ranked: (key, measure), reordered. O(n): halves are selected, not sorted.
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

// The bin of each logit of one block; those too deep to have a weight fall into the last, kNumBins.
void depth_bins(const float* x, float peak, float scale, int32_t* bins) {
    for (size_t i = 0; i < kBlock; i += kLanes) {
        const Floats depth = (peak - load(x + i)) * scale;
        const Floats bounded = depth < kNegligible ? depth : splat(kNegligible);
        const Ints bin = __builtin_convertvector(bounded * kBinsPerNat, Ints);
        std::memcpy(bins + i, &bin, sizeof(bin));
    }
}

size_t num_blocks(size_t count) { return (count + kBlock - 1) / kBlock; }

// The largest logit of a whole block, NaN if it holds one.
float maximum_or_nan(const float* block) {
    Ints nan = {};
    const float top = block_maximum(block, &nan);
    return (nan[0] | nan[1] | nan[2] | nan[3]) != 0 ? kUnusable : top;
}

// A logit that at least `count` tokens reach: the count-th largest block maximum, or -inf with fewer blocks.
float logit_reached_by(size_t count, const std::vector<float>& maxima, std::vector<float>& scratch) {
    if (count > maxima.size()) return -kInfinity;
    scratch = maxima;
    std::nth_element(scratch.begin(), scratch.begin() + static_cast<ptrdiff_t>(count) - 1, scratch.end(),
                     std::greater<>());
    return scratch[count - 1];
}

}  // namespace

// ---- rows

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

    float maximum(size_t index) const { return maximum_or_nan(block(index)); }

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

void block_maxima(const float* logits, size_t count, float* maxima) {
    const size_t whole = count / kBlock, rest = count % kBlock;
    for (size_t b = 0; b < whole; ++b) maxima[b] = maximum_or_nan(logits + b * kBlock);
    if (rest == 0) return;
    std::array<float, kBlock> tail;
    tail.fill(-kInfinity);
    std::memcpy(tail.data(), logits + whole * kBlock, rest * sizeof(float));
    maxima[whole] = maximum_or_nan(tail.data());
}

// ---- parameters

namespace {

// The shortest text that reads back as the same number.
std::string number(double value) {
    char text[32];
    return {text, std::to_chars(text, text + sizeof(text), value).ptr};
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
    min_argument_ = o.min_p > 1e-13 ? static_cast<float>(log_positive(o.min_p)) : -kInfinity;
    repetition_penalty_ = static_cast<float>(o.repetition_penalty);
    presence_penalty_ = static_cast<float>(o.presence_penalty);
    frequency_penalty_ = static_cast<float>(o.frequency_penalty);
    seed_ = static_cast<uint64_t>(o.seed);
    choice_index_ = static_cast<uint32_t>(o.choice_index);
    num_logprobs_ = static_cast<int32_t>(o.num_logprobs);
    min_tokens_ = static_cast<uint64_t>(o.min_tokens);
}

// ---- what was seen

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

// Alters the logits of single tokens where they stand, and keeps what they were. O(distinct tokens seen).
void Sampler::edit(float* x) {
    undo_.clear();
    if (!edits()) return;
    const auto keep = [&](int32_t id) { undo_.emplace_back(id, x[id]); };
    for (const auto& [id, bias] : logit_bias_) {
        keep(id);
        x[id] += bias;
    }
    if (position_ < min_tokens_) {
        // NaN and +inf stay, to be found among the maxima: a ban must not hide a broken row.
        for (const int32_t id : stop_token_ids_) {
            keep(id);
            x[id] = x[id] < kInfinity ? -kInfinity : x[id];
        }
    }
    for (const auto& [id, count] : seen_) {
        keep(id);
        // Keskar et al. 2019 (CTRL), section 4.1, with the sign taken into account.
        x[id] = x[id] > 0 ? x[id] / repetition_penalty_ : x[id] * repetition_penalty_;
        if (count > 0) {
            x[id] -= frequency_penalty_ * static_cast<float>(count);
            x[id] -= presence_penalty_;
        }
    }
}

// The logits as they were. A token that was altered twice gets its first value last.
void Sampler::restore(float* x) const {
    for (auto it = undo_.rbegin(); it != undo_.rend(); ++it) x[it->first] = it->second;
}

// Brings the maxima of the blocks that hold altered tokens up to date.
void Sampler::refresh_maxima(const Row& row) {
    if (undo_.size() >= row.num_blocks()) {
        for (size_t b = 0; b < row.num_blocks(); ++b) maxima_[b] = row.maximum(b);
        return;
    }
    for (const auto& [id, was] : undo_) {
        const size_t block = static_cast<size_t>(id) / kBlock;
        maxima_[block] = row.maximum(block);
    }
}

// The largest logit, or NaN if the row cannot be used: it holds NaN or +inf, or nothing but -inf.
float Sampler::peak() const {
    float peak = -kInfinity;
    bool nan = false;
    for (const float top : maxima_) {
        nan |= top != top;
        peak = top > peak ? top : peak;
    }
    return nan || peak == kInfinity || peak == -kInfinity ? kUnusable : peak;
}

// ---- who may be drawn

bool Sampler::may_hold_survivors(size_t block, float peak) const {
    const float argument = (maxima_[block] - peak) * inverse_temperature_;
    return maxima_[block] >= cut_.logit && argument >= min_argument_ && argument > -kNegligible;
}

// Weights of one block, 0 for tokens that min_p or the cut exclude. Returns their sum.
uint64_t Sampler::weigh(const Row& row, size_t block, float peak, uint64_t* weights) const {
    // Among equals of the cut, ids up to the cut's stay: all of them in earlier blocks, none in later ones.
    const size_t cut_block = static_cast<size_t>(cut_.token_id) / kBlock;
    const Bound bound = {cut_.logit, block <= cut_block, min_argument_};
    uint64_t total = block_weights(row.block(block), peak, inverse_temperature_, bound, weights);
    if (block == cut_block) {
        const float* x = row.block(block);
        for (size_t i = static_cast<size_t>(cut_.token_id) % kBlock + 1; i < kBlock; ++i) {
            if (x[i] > cut_.logit) continue;
            total -= weights[i];
            weights[i] = 0;
        }
    }
    return total;
}

// Moves the cut up to the last token of the smallest prefix, best first, whose measure reaches the target:
// top_k tokens, or top_p of the weight that survives until now.
//
// A histogram by depth below the peak finds the bin of that token; only that bin is ranked. Bins are
// intervals of a monotone function of the logit, so they never contradict the order.
void Sampler::cut_at(const Row& row, float peak, Measure measure) {
    std::array<uint64_t, kNumBins + 1> histogram{};
    uint64_t weights[kBlock];
    int32_t bins[kBlock];
    for (size_t b = 0; b < row.num_blocks(); ++b) {
        if (!may_hold_survivors(b, peak)) continue;
        weigh(row, b, peak, weights);
        depth_bins(row.block(b), peak, inverse_temperature_, bins);
        for (size_t i = 0; i < kBlock; ++i) {
            histogram[static_cast<size_t>(bins[i])] +=
                measure == Measure::kWeight ? weights[i] : weights[i] != 0;
        }
    }
    const uint64_t total = std::accumulate(histogram.begin(), histogram.end(), uint64_t{0});
    uint64_t target = top_k_;
    if (measure == Measure::kWeight) {
        target = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(top_p_ * static_cast<double>(total))));
    }
    if (target >= total) return;
    int32_t bin = 0;
    while (histogram[static_cast<size_t>(bin)] < target) target -= histogram[static_cast<size_t>(bin++)];

    ranked_.clear();
    for (size_t b = 0; b < row.num_blocks(); ++b) {
        if (!may_hold_survivors(b, peak)) continue;
        const float* x = row.block(b);
        depth_bins(x, peak, inverse_temperature_, bins);
        if (std::find(bins, bins + kBlock, bin) == bins + kBlock) continue;
        weigh(row, b, peak, weights);
        for (size_t i = 0; i < kBlock; ++i) {
            if (bins[i] != bin || weights[i] == 0) continue;
            ranked_.emplace_back(rank_key(x[i], static_cast<int32_t>(b * kBlock + i)),
                                 measure == Measure::kWeight ? weights[i] : 1);
        }
    }
    const int32_t last = token_of(boundary_key(ranked_, target));
    cut_ = {row.logit(last), last};
}

// Applies top_k, then top_p to what it leaves (min_p is in every weight). Each keeps a prefix of the tokens,
// best first, so one token describes the outcome.
void Sampler::cut(const Row& row, float peak) {
    cut_ = {-kInfinity, vocab_size_ - 1};
    if (top_k_ > 0) {
        // A first, coarse cut leaves few blocks to look at.
        cut_.logit = logit_reached_by(top_k_, maxima_, scratch_);
        cut_at(row, peak, Measure::kCount);
    }
    if (top_p_ < 1.0) cut_at(row, peak, Measure::kWeight);
}

// ---- the draw

// The token at which the running sum of weights, in id order, passes the random number.
int32_t Sampler::draw(const Row& row, float peak) {
    uint64_t weights[kBlock];
    masses_.assign(row.num_blocks(), 0);
    uint64_t total = 0;
    for (size_t b = 0; b < row.num_blocks(); ++b) {
        if (may_hold_survivors(b, peak)) total += masses_[b] = weigh(row, b, peak, weights);
    }
    uint64_t left = scale_to(philox(seed_, position_, choice_index_), total);
    size_t b = 0;
    while (masses_[b] <= left) left -= masses_[b++];
    // Weights are not stored: those of the one block are computed once more.
    weigh(row, b, peak, weights);
    size_t i = 0;
    while (weights[i] <= left) left -= weights[i++];
    return static_cast<int32_t>(b * kBlock + i);
}

Sampled Sampler::sample(float* logits, const float* maxima) {
    Sampled sampled;
    maxima_.assign(maxima, maxima + num_blocks(static_cast<size_t>(vocab_size_)));
    edit(logits);
    {
        const Row row(logits, vocab_size_);
        refresh_maxima(row);
        const float top = peak();
        if (top == top) {
            if (greedy_) {
                sampled.token_id = row.first_equal(maxima_, top);
            } else {
                cut(row, top);
                sampled.token_id = draw(row, top);
            }
        }
    }
    restore(logits);
    if (sampled.token_id >= 0) {
        if (num_logprobs_ >= 0) report_logprobs(logits, sampled);
        if (repetition_penalty_ != 1.0f || presence_penalty_ != 0.0f || frequency_penalty_ != 0.0f)
            see(sampled.token_id, 1);
    }
    ++position_;
    return sampled;
}

// Log-probabilities of the raw logits.
void Sampler::report_logprobs(const float* logits, Sampled& sampled) {
    const Row row(logits, vocab_size_);
    refresh_maxima(row);
    const float peak = this->peak();
    uint64_t total = 0;
    uint64_t weights[kBlock];
    for (size_t b = 0; b < row.num_blocks(); ++b) {
        total += block_weights(row.block(b), peak, 1.0f, Bound(), weights);
    }
    const double log_sum = log_positive(static_cast<double>(total) / static_cast<double>(kOne));
    const auto logprob = [&](int32_t id) {
        return static_cast<float>(static_cast<double>(logits[id]) - static_cast<double>(peak) - log_sum);
    };
    sampled.logprob = logprob(sampled.token_id);

    const size_t wanted = static_cast<size_t>(num_logprobs_);
    if (wanted == 0) return;
    const float reached = logit_reached_by(wanted, maxima_, scratch_);
    const float floor = std::max(reached, std::numeric_limits<float>::lowest());  // -inf is never listed
    keys_.clear();
    for (size_t b = 0; b < row.num_blocks(); ++b) {
        if (maxima_[b] < floor) continue;
        const float* x = row.block(b);
        for (size_t i = 0; i < kBlock; ++i) {
            if (x[i] >= floor) keys_.push_back(rank_key(x[i], static_cast<int32_t>(b * kBlock + i)));
        }
    }
    const auto end = keys_.begin() + static_cast<ptrdiff_t>(std::min(wanted, keys_.size()));
    std::partial_sort(keys_.begin(), end, keys_.end(), std::greater<>());
    for (auto key = keys_.begin(); key != end; ++key) {
        const int32_t id = token_of(*key);
        sampled.top_logprobs.emplace_back(id, logprob(id));
    }
}

Distribution Sampler::distribution(const float* logits) {
    Distribution result;
    std::vector<float> edited(logits, logits + vocab_size_);
    edit(edited.data());
    maxima_.resize(num_blocks(edited.size()));
    block_maxima(edited.data(), edited.size(), maxima_.data());
    const Row row(edited.data(), vocab_size_);
    const float peak = this->peak();
    if (peak != peak) return result;
    if (greedy_) return {{row.first_equal(maxima_, peak)}, {1.0}};
    cut(row, peak);
    uint64_t weights[kBlock];
    uint64_t total = 0;
    for (size_t b = 0; b < row.num_blocks(); ++b) {
        if (!may_hold_survivors(b, peak)) continue;
        total += weigh(row, b, peak, weights);
        for (size_t i = 0; i < kBlock; ++i) {
            if (weights[i] == 0) continue;
            result.token_ids.push_back(static_cast<int32_t>(b * kBlock + i));
            result.probabilities.push_back(static_cast<double>(weights[i]));
        }
    }
    for (double& probability : result.probabilities) probability /= static_cast<double>(total);
    return result;
}

// ---- Python

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
                const std::span<const int32_t> ids(token_ids.data(), token_ids.shape(0));
                nb::gil_scoped_release release;
                self.observe_prompt(ids);
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
                std::vector<float> row(x, x + self.vocab_size());
                std::vector<float> maxima(num_blocks(row.size()));
                block_maxima(row.data(), row.size(), maxima.data());
                return self.sample(row.data(), maxima.data());
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
            for (size_t i = 0; i < y.size(); ++i) y[i] = exp_negative(splat(x.data()[i]))[0];
            return to_numpy(std::move(y));
        },
        nb::arg("x"), "The exp that weights are made of, for x: float32[n] <= 0. Relative error below 2e-7.");
    m.def("log_positive", &log_positive, nb::arg("x"),
          "The log that log-probabilities are made of, for x: a normal positive float64.");
}

}  // namespace octavo
