#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>

namespace octavo {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr int kTokensPerWord = 32;
constexpr uint32_t kCoarseDomain = 0, kFineDomain = 1;
// Up to so many tokens it is faster to compute the noise of each than to look for those that can win.
constexpr int kMaxListed = 256;
// So few weights are sorted rather than divided further.
constexpr int kMaxSorted = 96;
constexpr int kMaxDivisions = 64;
// How many tokens may be looked at first for top_p, and from which score on.
constexpr int kMaxLikely = 8192;
constexpr float kLikelyScore = -9.0f, kLikelyWeight = 1.24e-4f;  // e^-9 is 1.2341e-4.
// What is drawn is at most this much less likely to win than its bound says: covers all rounding of the bound.
constexpr double kMargin = 1.01;

const RowKernels& row_kernels_named(const std::string& name) {
    for (const RowKernels* kernels : supported_row_kernels())
        if (name.empty() || name == kernels->name) return *kernels;
    throw std::invalid_argument("This processor has no row kernels named " + name + ".");
}

}  // namespace

std::vector<const RowKernels*> supported_row_kernels() {
    std::vector<const RowKernels*> kernels;
#if defined(OCTAVO_X86)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16"))
        kernels.push_back(&avx512_row_kernels());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels.push_back(&avx2_row_kernels());
#endif
    kernels.push_back(&portable_row_kernels());
    return kernels;
}

namespace {

// The natural logarithm of a value above 0: the operations of exact_math.py.
double log_of(double value) {
    int exponent;
    double mantissa = std::frexp(value, &exponent);
    if (mantissa < 0.7071067811865476) {
        mantissa *= 2.0;
        exponent -= 1;
    }
    const double ratio = (mantissa - 1.0) / (mantissa + 1.0), square = ratio * ratio;
    constexpr int kTerms = 12;
    double series = 1.0 / (2 * kTerms - 1);
    for (int term = kTerms - 2; term >= 0; --term) series = series * square + 1.0 / (2 * term + 1);
    return exponent * 0.6931471805599453 + (ratio + ratio) * series;
}

double noise_of(uint64_t coarse, uint32_t fine) {
    const double uniform = ((double)((coarse << 32) + fine) + 0.5) * 0x1p-40;
    return -log_of(-log_of(uniform));
}

uint64_t coarse_byte(const RandomWords& words, int block, int id) {
    const int offset = id % kTokensPerBlock;
    return words.words[block][offset / 4] >> (offset % 4 * 8) & 0xff;
}

float score_of(float logit, Scale scale) { return (logit - scale.greatest) * scale.inverse_temperature; }

// Whether only tokens with the greatest coarse byte can win: for others 1 - u is above 1 / 256.
bool needs_greatest_byte(const float* maxima, int num_chunks, Scale scale, float factor) {
    const float score = score_of(*std::max_element(maxima, maxima + num_chunks), scale);
    return std::exp((double)score) * factor * kMargin < 1.0 / 256.0;
}

// The mass that top_p keeps of a total.
int64_t share_of(int64_t total, double top_p) {
    const double share = std::ceil(top_p * (double)total);
    return share < (double)total ? (int64_t)share : total;
}

// Leaves of a list what reaches both thresholds; returns how many those are.
int keep(Thresholds least, const float* weights, int count, int* ids, float* scores) {
    int num_kept = 0;
    for (int i = 0; i < count; ++i)
        if (scores[i] >= least.score && weights[i] >= least.weight) {
            ids[num_kept] = ids[i];
            scores[num_kept++] = scores[i];
        }
    return num_kept;
}

// The best noisy score so far; of equals the lowest id.
struct Winner {
    double noisy = -std::numeric_limits<double>::infinity();
    int64_t id = -1;

    bool offer(double other, int64_t other_id) {
        if (!(other > noisy || (other == noisy && other_id < id))) return false;
        noisy = other;
        id = other_id;
        return true;
    }
};

}  // namespace

// The memory of one thread; buffers have room for a vector that is written beyond the last value.
struct Sampler::Thread {
    explicit Thread(int vocab_size, int num_chunks)
        : maxima((size_t)num_chunks),
          sorted_maxima((size_t)num_chunks),
          edited((size_t)vocab_size),
          weights((size_t)vocab_size + 16),
          scores((size_t)vocab_size + kChunk),
          ids((size_t)vocab_size + kChunk),
          counts((size_t)vocab_size) {
        for (auto& buffer : divided) buffer.resize((size_t)vocab_size + 16);
    }

    std::vector<float> maxima, sorted_maxima, edited, weights, scores;
    std::vector<float> divided[3];
    std::vector<int> ids, touched;
    std::vector<int32_t> counts;  // of tokens in a history: 0 unseen, else one more than the times in the output
};

Sampler::Sampler(int vocab_size, int num_threads, Pool* pool, const std::string& kernels)
    : kernels_(row_kernels_named(kernels)), vocab_size_(vocab_size), num_chunks_((vocab_size + kChunk - 1) / kChunk), pool_(pool) {
    if (vocab_size < 1 || num_threads < 1) throw std::invalid_argument("There must be a vocabulary and a thread.");
    if (!pool_) {
        own_pool_ = std::make_unique<Pool>(num_threads);
        pool_ = own_pool_.get();
    }
    for (int thread = 0; thread < pool_->num_threads(); ++thread)
        threads_.push_back(std::make_unique<Thread>(vocab_size_, num_chunks_));
}

Sampler::~Sampler() = default;

template <class Work>
void Sampler::for_each_row(int64_t num_rows, const Work& work) {
    if (num_rows == 1) return work(*threads_[0], 0);
    pool_->run([&](int thread) {
        for (int64_t row; (row = pool_->next_number()) < num_rows;) work(*threads_[(size_t)thread], row);
    });
}

void Sampler::sample(const float* logits, int64_t num_rows, const RowSettings* settings, const Measured* measured,
                     int64_t* token_ids, uint8_t* statuses) {
    for_each_row(num_rows, [&](Thread& thread, int64_t row) {
        statuses[row] =
            sample_row(thread, logits + row * vocab_size_, settings[row], measured[row], token_ids + row);
    });
}

void Sampler::measure(const float* logits, int64_t num_rows, const int64_t* token_ids, const Measured* measured,
                      uint8_t* is_finite) {
    for_each_row(num_rows, [&](Thread& thread, int64_t row) {
        const float* values = logits + row * vocab_size_;
        is_finite[row] = kernels_.scan(values, vocab_size_, thread.maxima.data());
        if (is_finite[row]) measure_row(thread, values, token_ids[row], measured[row]);
    });
}

uint8_t Sampler::sample_row(Thread& thread, const float* logits, const RowSettings& row, const Measured& measured,
                            int64_t* token_id) const {
    if (!kernels_.scan(logits, vocab_size_, thread.maxima.data())) return kNotNumbers;
    const float* values = logits;
    if (row.edits) {
        if (!edit(thread, logits, *row.edits)) return kNotNumbers;
        values = thread.edited.data();
        kernels_.scan(values, vocab_size_, thread.maxima.data());
    }
    const auto best_chunk = std::max_element(thread.maxima.begin(), thread.maxima.end());
    const float greatest = *best_chunk;
    if (greatest == kLowest) return kNoTokenLeft;
    int best_id = (int)(best_chunk - thread.maxima.begin()) * kChunk;
    while (values[best_id] != greatest) ++best_id;
    *token_id = row.inverse_temperature == 0.0f
                    ? best_id
                    : draw(thread, values, row, {greatest, row.inverse_temperature}, best_id);
    if (measured.num_alternatives >= 0) {
        if (row.edits) kernels_.scan(logits, vocab_size_, thread.maxima.data());
        measure_row(thread, logits, *token_id, measured);
    }
    return kSampled;
}

// ---- Edits -----------------------------------------------------------------------------------------------------------

// Writes the edited row into the thread's memory; returns whether no value has become infinite or no number.
bool Sampler::edit(Thread& thread, const float* logits, const Edits& edits) const {
    float* to = thread.edited.data();
    std::memcpy(to, logits, (size_t)vocab_size_ * sizeof(float));
    const int num_words = (vocab_size_ + kTokensPerWord - 1) / kTokensPerWord;
    for (int64_t mask = 0; mask < edits.num_masks; ++mask)
        for (int word = 0; word < num_words; ++word) {
            const uint32_t bits = (uint32_t)edits.masks[mask * num_words + word];
            if (bits == 0xffffffffu) continue;
            const int first = word * kTokensPerWord, count = std::min(kTokensPerWord, vocab_size_ - first);
            for (int i = 0; i < count; ++i)
                if (!(bits >> i & 1)) to[first + i] = kLowest;
        }
    for (int64_t i = 0; i < edits.num_banned; ++i) to[edits.banned_ids[i]] = kLowest;
    bool is_valid = true;
    const auto put = [&](int64_t id, float value) {
        to[id] = value;
        is_valid = is_valid && value < std::numeric_limits<float>::infinity();
    };
    for (int64_t i = 0; i < edits.num_biases; ++i) put(edits.bias_ids[i], to[edits.bias_ids[i]] + edits.biases[i]);
    thread.touched.clear();
    for (int64_t i = 0; i < edits.history_length; ++i) {
        const int32_t id = edits.history[i];
        if (!thread.counts[(size_t)id]) {
            thread.counts[(size_t)id] = 1;
            thread.touched.push_back(id);
        }
        thread.counts[(size_t)id] += i >= edits.num_prompt_tokens;
    }
    const float repetition = (float)edits.repetition;
    for (const int id : thread.touched) {
        float value = to[id];
        if (edits.repetition != 1.0) value = value > 0.0f ? value / repetition : value * repetition;
        const int32_t count = thread.counts[(size_t)id] - 1;
        if (count && (edits.presence != 0.0 || edits.frequency != 0.0))
            value = value - (float)(edits.presence + edits.frequency * count);
        put(id, value);
        thread.counts[(size_t)id] = 0;
    }
    return is_valid;
}

// ---- Filters ---------------------------------------------------------------------------------------------------------

// Returns the least weight that top_p keeps: the first place, from the greatest weight down, at which the masses reach
// their share of `total`. Weights are divided at a value between the bounds of where it must be, and the half that
// holds it again.
float Sampler::least_weight(Thread& thread, const float* weights, int count, int64_t total, double top_p) const {
    int64_t needed = share_of(total, top_p);
    float *set = nullptr, *upper = thread.divided[0].data(), *lower = thread.divided[1].data(),
          *spare = thread.divided[2].data();
    float low = 0.0f, high = 1.0f;
    for (int division = 0; division < kMaxDivisions && count > kMaxSorted; ++division) {
        // Of a flat distribution the border is near the mean.
        const float pivot = !division  ? (float)((double)total * 0x1p-41 / count)
                            : low > 0.0f ? std::sqrt(low * high)
                                         : high / 4.0f;
        int64_t upper_mass;
        const int num_upper = kernels_.divide(set ? set : weights, count, pivot, upper, lower, &upper_mass);
        float* const old_set = set ? set : spare;
        if (upper_mass >= needed) {
            set = upper;
            count = num_upper;
            low = pivot;
            upper = old_set;
        } else {
            set = lower;
            count -= num_upper;
            needed -= upper_mass;
            high = pivot;
            lower = old_set;
        }
    }
    if (!set) {
        std::memcpy(spare, weights, (size_t)count * sizeof(float));
        set = spare;
    }
    std::sort(set, set + count, std::greater<float>());
    for (int i = 0; i < count; ++i) {
        needed -= (int64_t)(set[i] * 0x1p40f);
        if (needed <= 0) return set[i];
    }
    return set[count - 1];  // Not reached: the masses add up to `total`.
}

// Collects all scores of at least `least` that can be among the k greatest, and returns the k-th greatest of all.
float Sampler::kth_score(Thread& thread, const float* logits, Scale scale, float least, int64_t k,
                         int* num_found) const {
    float bound = kLowest;
    if (k <= num_chunks_) {
        // As many chunks have a greatest value of at least the k-th greatest of these.
        auto& maxima = thread.sorted_maxima;
        maxima = thread.maxima;
        std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
        bound = score_of(maxima[(size_t)k - 1], scale);
    }
    bound = std::max(bound, least);
    *num_found = kernels_.collect(logits, vocab_size_, thread.maxima.data(), scale, bound, vocab_size_,
                                  thread.ids.data(), thread.scores.data());
    if (*num_found < k) return least;  // Fewer reach `least`.
    float* const ranked = thread.weights.data();
    std::memcpy(ranked, thread.scores.data(), (size_t)*num_found * sizeof(float));
    std::nth_element(ranked, ranked + (k - 1), ranked + *num_found, std::greater<float>());
    return ranked[k - 1];
}

int64_t Sampler::draw(Thread& thread, const float* logits, const RowSettings& row, Scale scale, int best_id) const {
    Thresholds least = {row.least_score, 0.0f};
    int* const ids = thread.ids.data();
    float *const scores = thread.scores.data(), *const weights = thread.weights.data();
    const bool has_top_k = row.top_k < vocab_size_, has_top_p = row.top_p < 1.0;
    if (!has_top_k && !has_top_p && least.score == kLowest)
        return draw_from_all(thread, logits, row, scale, least, best_id);
    int num_listed;
    if (has_top_k) {
        least.score = std::max(least.score, kth_score(thread, logits, scale, least.score, row.top_k, &num_listed));
        if (has_top_p) {
            const int64_t total = kernels_.weigh(scores, num_listed, nullptr, {0.0f, 1.0f}, least.score, weights);
            least.weight = least_weight(thread, weights, num_listed, total, row.top_p);
        } else {
            std::fill(weights, weights + num_listed, 1.0f);
        }
        num_listed = keep(least, weights, num_listed, ids, scores);
    } else if (has_top_p) {
        const float* const maxima = thread.maxima.data();
        const int64_t total = kernels_.weigh(logits, vocab_size_, maxima, scale, least.score, nullptr);
        // Mostly a few hundred or thousand tokens have the mass that is to be kept.
        const float likely = std::max(least.score, kLikelyScore);
        num_listed = kernels_.collect(logits, vocab_size_, maxima, scale, likely, kMaxLikely, ids, scores);
        if (num_listed <= kMaxLikely &&
            kernels_.weigh(scores, num_listed, nullptr, {0.0f, 1.0f}, likely, weights) >= share_of(total, row.top_p))
            least.weight = least_weight(thread, weights, num_listed, total, row.top_p);
        // A token that is not listed must not weigh as much: near the border rounding could make it so.
        if (likely == least.score ? least.weight > 0.0f : least.weight > kLikelyWeight) {
            num_listed = keep(least, weights, num_listed, ids, scores);
        } else {
            kernels_.weigh(logits, vocab_size_, nullptr, scale, least.score, weights);
            least.weight = least_weight(thread, weights, vocab_size_, total, row.top_p);
            num_listed =
                kernels_.collect(weights, vocab_size_, nullptr, {0.0f, 1.0f}, least.weight, kMaxListed, ids, scores);
            for (int i = 0; i < std::min(num_listed, kMaxListed); ++i) scores[i] = score_of(logits[ids[i]], scale);
        }
    } else {
        num_listed = kernels_.collect(logits, vocab_size_, thread.maxima.data(), scale, least.score, kMaxListed, ids, scores);
    }
    if (num_listed <= kMaxListed) return draw_from(row, ids, scores, num_listed);
    return draw_from_all(thread, logits, row, scale, least, best_id);
}

// ---- Draws -----------------------------------------------------------------------------------------------------------

int64_t Sampler::draw_from(const RowSettings& row, const int* ids, const float* scores, int count) const {
    Winner winner;
    for (int first = 0; first < count; first += kBlocks) {
        const int end = std::min(count - first, kBlocks);
        uint32_t blocks[kBlocks] = {}, tokens[kBlocks] = {};
        for (int i = 0; i < end; ++i) {
            tokens[i] = (uint32_t)ids[first + i];
            blocks[i] = tokens[i] / kTokensPerBlock;
        }
        RandomWords coarse, fine;
        kernels_.random_words(row.key, blocks, kCoarseDomain, &coarse);
        kernels_.random_words(row.key, tokens, kFineDomain, &fine);
        for (int i = 0; i < end; ++i) {
            const double noise = noise_of(coarse_byte(coarse, i, ids[first + i]), fine.words[i][0]);
            winner.offer((double)scores[first + i] + noise, ids[first + i]);
        }
    }
    return winner.id;
}

// A token's noise is at most -log(1 - u), so it can only win if 1 - u <= e^(score - bound), where the bound is the best
// noisy score so far. The coarse byte alone leaves few for which that may hold, and the fine word very few.
int64_t Sampler::draw_from_all(Thread& thread, const float* logits, const RowSettings& row, Scale scale,
                               Thresholds least, int best_id) const {
    Winner winner;
    const float best_score = 0.0f;
    float factor = 0.0f;
    const auto raise_bound = [&] { factor = (float)(std::exp(-winner.noisy) * kMargin); };
    const auto consider = [&](const int* ids, int count) {
        for (int first = 0; first < count; first += kBlocks) {
            const int end = std::min(count - first, kBlocks);
            uint32_t blocks[kBlocks] = {}, tokens[kBlocks] = {};
            for (int i = 0; i < end; ++i) {
                tokens[i] = (uint32_t)ids[first + i];
                blocks[i] = tokens[i] / kTokensPerBlock;
            }
            RandomWords coarse, fine;
            kernels_.random_words(row.key, blocks, kCoarseDomain, &coarse);
            kernels_.random_words(row.key, tokens, kFineDomain, &fine);
            for (int i = 0; i < end; ++i) {
                const int id = ids[first + i];
                const uint64_t byte = coarse_byte(coarse, i, id);
                const uint64_t uniform = (byte << 32) + fine.words[i][0];
                const float score = score_of(logits[id], scale);
                const double gap = (double)(0xffffffffffu - uniform) * 0x1p-40;
                if (gap > std::exp((double)score) * (double)factor) continue;
                if (winner.offer((double)score + noise_of(byte, fine.words[i][0]), id)) raise_bound();
            }
        }
    };
    {
        const uint32_t block[kBlocks] = {(uint32_t)best_id / kTokensPerBlock}, token[kBlocks] = {(uint32_t)best_id};
        RandomWords coarse, fine;
        kernels_.random_words(row.key, block, kCoarseDomain, &coarse);
        kernels_.random_words(row.key, token, kFineDomain, &fine);
        winner.offer((double)best_score + noise_of(coarse_byte(coarse, 0, best_id), fine.words[0][0]), best_id);
        raise_bound();
    }
    constexpr int kAtOnce = kBlocks * kTokensPerBlock;
    const bool keeps_all = least.score == kLowest && least.weight == 0.0f;
    int* const pending = thread.ids.data();
    int num_pending = 0;
    for (int first = 0; first < vocab_size_; first += kAtOnce) {
        uint32_t blocks[kBlocks];
        for (int i = 0; i < kBlocks; ++i) blocks[i] = (uint32_t)(first / kTokensPerBlock + i);
        RandomWords words;
        kernels_.random_words(row.key, blocks, kCoarseDomain, &words);
        // Processors that this is compiled for store the lowest byte of a word first.
        const auto* coarse_bytes = reinterpret_cast<const uint8_t*>(words.words);
        const int count = std::min(vocab_size_ - first, kAtOnce);
        if (needs_greatest_byte(thread.maxima.data() + first / kChunk, (count + kChunk - 1) / kChunk, scale, factor)) {
            const uint8_t *byte = coarse_bytes, *const end = coarse_bytes + count;
            while ((byte = static_cast<const uint8_t*>(std::memchr(byte, 255, (size_t)(end - byte))))) {
                const int id = first + (int)(byte - coarse_bytes);
                if (keeps_all)
                    pending[num_pending++] = id;
                else
                    num_pending += kernels_.sift(logits, id, 1, scale, least, factor, byte, pending + num_pending);
                if (++byte == end) break;
            }
        } else {
            num_pending += kernels_.sift(logits, first, count, scale, least, factor, coarse_bytes, pending + num_pending);
        }
        if (num_pending < kBlocks) continue;
        consider(pending, num_pending);
        num_pending = 0;
    }
    consider(pending, num_pending);
    return winner.id;
}

// ---- Log-probabilities -----------------------------------------------------------------------------------------------

void Sampler::measure_row(Thread& thread, const float* logits, int64_t token_id, const Measured& measured) const {
    const float* const maxima = thread.maxima.data();
    const float greatest = *std::max_element(maxima, maxima + num_chunks_);
    const int64_t total = kernels_.weigh(logits, vocab_size_, maxima, {greatest, 1.0f}, kLowest, nullptr);
    const double log_mass = log_of((double)total * 0x1p-40);
    const auto logprob_of = [&](int64_t id) { return (float)((double)(logits[id] - greatest) - log_mass); };
    *measured.logprob = logprob_of(token_id);
    *measured.rank = 1 + kernels_.count_greater(logits, vocab_size_, logits[token_id]);
    const int64_t count = std::min<int64_t>(measured.num_alternatives, vocab_size_);
    if (!count) return;
    int num_found;
    kth_score(thread, logits, {0.0f, 1.0f}, kLowest, count, &num_found);
    int* const ids = thread.ids.data();
    std::partial_sort(ids, ids + count, ids + num_found, [&](int a, int b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    });
    for (int64_t i = 0; i < count; ++i) {
        measured.alternative_ids[i] = ids[i];
        measured.alternative_logprobs[i] = logprob_of(ids[i]);
    }
}

}  // namespace octavo
