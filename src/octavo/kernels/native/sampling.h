// From one row of logits to one token.
//
// A Sampler belongs to one stream of output tokens. It owns its parameters, the tokens it has seen, its
// output position and all its scratch memory, so different Samplers may run in parallel threads; one Sampler
// may not.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

// Hidden, as nanobind declares its own namespace: this header does not need the rest of it.
namespace nanobind __attribute__((visibility("hidden"))) {
    class module_;
}

namespace octavo {

// The outcome for one row. Log-probabilities (nats) are the log-softmax of the raw logits, before bias,
// penalties and temperature, so that they do not depend on how the token was drawn.
struct Sampled {
    int32_t token_id = -1;  // -1: nothing can be drawn (NaN, +inf, or every token banned); the request fails.
    float logprob = 0.0f;   // of token_id; 0 when log-probabilities were not asked for.
    std::vector<std::pair<int32_t, float>>
        top_logprobs;  // most likely first; ties: lowest id first; finite only.
};

struct SamplerOptions {
    double temperature = 1.0;  // 0: greedy
    int64_t top_k = 0;         // 0: off
    double top_p = 1.0;        // 1: off
    double min_p = 0.0;        // 0: off
    double repetition_penalty = 1.0;
    double presence_penalty = 0.0;
    double frequency_penalty = 0.0;
    int64_t seed = 0;
    int64_t choice_index = 0;
    int64_t num_logprobs = -1;  // -1: none; 0: the sampled token's; n: also the n most likely
    std::vector<std::pair<int64_t, double>> logit_bias;  // at most one entry a token
    int64_t min_tokens = 0;  // output positions at which stop_token_ids cannot be drawn
    std::vector<int64_t> stop_token_ids;
};

// What a draw chooses from: token ids in ascending order and their probabilities, which sum to 1. Both are
// empty when nothing can be drawn.
struct Distribution {
    std::vector<int32_t> token_ids;
    std::vector<double> probabilities;
};

// Rows of logits are looked at in blocks of this many (the last one may be shorter).
constexpr size_t kLogitBlock = 64;

// The largest logit of each block, NaN where it holds one: maxima[ceil(count / kLogitBlock)] of `count`
// logits. The output head makes them while the logits are in cache, and few rows are walked again.
void block_maxima(const float* logits, size_t count, float* maxima);

class Sampler {
  public:
    // Throws std::invalid_argument, with the number and the permitted range, for any option outside its
    // range.
    Sampler(int64_t vocab_size, const SamplerOptions& options);

    // Tokens of the prompt, which count for the repetition penalty only. May be called more than once.
    // Throws std::invalid_argument for an id outside the vocabulary, and then observes none of them.
    void observe_prompt(std::span<const int32_t> token_ids);

    // Draws the next output token from logits: float32[vocab_size], remembers it, and moves on by one
    // position. The logits are altered meanwhile, and as they were afterwards. maxima: what block_maxima
    // makes of them.
    Sampled sample(float* logits, const float* maxima);

    // What sample(logits) would draw from at this position. Changes nothing that a later sample depends on.
    Distribution distribution(const float* logits);

    int32_t vocab_size() const { return vocab_size_; }

  private:
    // A row of logits seen as whole blocks: the last one is padded with -inf in a copy of its own.
    class Row;
    // A token that a penalty applies to.
    struct Seen {
        int32_t token_id;
        uint32_t output_count;  // 0: seen in the prompt only
    };

    // The last token, best first, that may be drawn: those with a larger logit may be, and of those with the
    // same logit the ids up to this one. top_k and top_p each move it up.
    struct Cut {
        float logit;
        int32_t token_id;
    };
    enum class Measure { kCount, kWeight };

    void see(int32_t token_id, uint32_t output_count);
    bool edits() const;
    void edit(float* logits);
    void restore(float* logits) const;
    void refresh_maxima(const Row& row);
    float peak() const;
    void cut(const Row& row, float peak);
    void cut_at(const Row& row, float peak, Measure measure);
    bool may_hold_survivors(size_t block, float peak) const;
    uint64_t weigh(const Row& row, size_t block, float peak, uint64_t* weights) const;
    int32_t draw(const Row& row, float peak);
    void report_logprobs(const float* logits, Sampled& sampled);

    int32_t vocab_size_;
    bool greedy_;
    float inverse_temperature_;
    size_t top_k_;
    double top_p_;
    float min_argument_;  // min_p as a bound of (logit - peak) / temperature
    float repetition_penalty_;
    float presence_penalty_;
    float frequency_penalty_;
    uint64_t seed_;
    uint32_t choice_index_;
    int32_t num_logprobs_;
    uint64_t min_tokens_;
    std::vector<std::pair<int32_t, float>> logit_bias_;
    std::vector<int32_t> stop_token_ids_;

    uint64_t position_ = 0;  // rows sampled so far
    std::vector<Seen> seen_;
    std::unordered_map<int32_t, size_t> seen_index_;

    // Scratch, kept from call to call.
    std::vector<std::pair<int32_t, float>> undo_;  // altered tokens and their raw logits, in order
    std::vector<float> maxima_;     // [num_blocks] largest logit of each block of the row that is drawn from
    std::vector<uint64_t> masses_;  // [num_blocks] weight of each block's survivors
    std::vector<float> scratch_;    // [num_blocks] for selection among maxima
    Cut cut_ = {};
    std::vector<uint64_t> keys_;
    std::vector<std::pair<uint64_t, uint64_t>> ranked_;  // (key, measure)
};

// Registers Sampler and Sampled, and the polynomials they rest on, with the extension module.
void bind_sampling(nanobind::module_& m);

}  // namespace octavo
