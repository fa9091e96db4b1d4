// The Python module: plain arrays in, logits out. It must not know more of a model than the calls that describe one.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "model.hpp"
#include "sampler.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <class T, int NUM_DIMENSIONS>
using Array = nb::ndarray<T, nb::ndim<NUM_DIMENSIONS>, nb::c_contig, nb::device::cpu>;

using WeightArray = Array<const uint16_t, 2>;
using VectorArray = Array<const float, 1>;
using Integers = Array<const int64_t, 1>;

Matrix matrix_of(const WeightArray& array) {
    return {array.data(), (int64_t)array.shape(0), (int64_t)array.shape(1)};
}

Values values_of(const VectorArray& array) { return {array.data(), (int64_t)array.shape(0)}; }

using OptionalVector = std::optional<VectorArray>;

Values values_of(const OptionalVector& array) { return array ? values_of(*array) : Values{nullptr, 0}; }

void require_length(size_t actual, size_t expected, const char* message) {
    if (actual != expected) throw std::invalid_argument(message);
}

ValueType type_named(const std::string& quantization) {
    if (quantization == "int8") return ValueType::kInt8;
    if (quantization == "none") return ValueType::kBfloat16;
    throw std::invalid_argument("There is no quantization named " + quantization + ".");
}

void bind_cache(NativeModel& model, const std::vector<Array<uint16_t, 2>>& layers) {
    const Shape& shape = model.shape();
    const size_t block_values = (size_t)shape.block_size * 2 * shape.num_kv_heads * shape.head_dim;
    std::vector<bf16*> pointers;
    for (const auto& layer : layers) {
        require_length(layer.shape(1), block_values, "A block of the cache has another size than the model's.");
        require_length(layer.shape(0), layers[0].shape(0), "The layers of the cache differ in their blocks.");
        pointers.push_back(layer.data());
    }
    model.bind_cache(pointers, layers.empty() ? 0 : (int64_t)layers[0].shape(0));
}

void forward(NativeModel& model, Integers token_ids, Integers positions, Integers slot_mapping,
             Integers num_queries, Array<const int32_t, 2> block_tables, Integers sampled_rows,
             Array<float, 2> logits, Array<uint8_t, 1> is_finite) {
    const size_t num_tokens = token_ids.shape(0);
    require_length(positions.shape(0), num_tokens, "There must be a position for each token.");
    require_length(slot_mapping.shape(0), num_tokens, "There must be a slot for each token.");
    require_length(is_finite.shape(0), num_tokens, "There must be a verdict for each token.");
    require_length(block_tables.shape(0), num_queries.shape(0), "There must be a block table for each sequence.");
    require_length(logits.shape(0), sampled_rows.shape(0), "There must be logits for each row to sample.");
    require_length(logits.shape(1), (size_t)model.shape().vocab_size, "Logits must be as wide as the vocabulary.");
    const StepArrays arrays = {(int64_t)num_tokens,
                               token_ids.data(),
                               positions.data(),
                               slot_mapping.data(),
                               (int64_t)num_queries.shape(0),
                               num_queries.data(),
                               block_tables.data(),
                               (int64_t)block_tables.shape(1),
                               (int64_t)sampled_rows.shape(0),
                               sampled_rows.data(),
                               logits.data(),
                               is_finite.data()};
    nb::gil_scoped_release release;
    model.run(arrays);
}

void head(NativeModel& model, Integers rows, Array<float, 2> logits) {
    require_length(logits.shape(0), rows.shape(0), "There must be logits for each row.");
    require_length(logits.shape(1), (size_t)model.shape().vocab_size, "Logits must be as wide as the vocabulary.");
    nb::gil_scoped_release release;
    model.run_head(rows.data(), (int64_t)rows.shape(0), logits.data());
}

// An entry for each edited row; what belongs to a row lies after what belongs to those before it.
struct EditArrays {
    Integers rows, mask_counts, ban_counts, bias_counts, history_counts, num_prompt_tokens;
    Array<const int32_t, 2> masks;
    Integers banned_ids, bias_ids;
    Array<const float, 1> biases;
    Array<const double, 2> penalties;  // repetition, presence, frequency
    Array<const int32_t, 1> history;
};

template <class T>
void require_ids(const Array<T, 1>& ids, int vocab_size) {
    for (size_t i = 0; i < ids.shape(0); ++i)
        if (ids.data()[i] < 0 || ids.data()[i] >= vocab_size)
            throw std::invalid_argument("A token id is not in the vocabulary.");
}

// Gives each row its part of the arrays.
std::vector<Edits> edits_of(const EditArrays& arrays, int vocab_size) {
    const size_t num_rows = arrays.rows.shape(0);
    for (const Integers* counts : {&arrays.mask_counts, &arrays.ban_counts, &arrays.bias_counts,
                                   &arrays.history_counts, &arrays.num_prompt_tokens})
        require_length(counts->shape(0), num_rows, "There must be a count for each edited row.");
    require_length(arrays.penalties.shape(0), num_rows, "There must be penalties for each edited row.");
    require_length(arrays.penalties.shape(1), 3, "There are three penalties.");
    require_length(arrays.masks.shape(1), (size_t)(vocab_size + 31) / 32, "A mask has another size than the vocabulary.");
    require_length(arrays.biases.shape(0), arrays.bias_ids.shape(0), "There must be a bias for each token.");
    require_ids(arrays.banned_ids, vocab_size);
    require_ids(arrays.bias_ids, vocab_size);
    require_ids(arrays.history, vocab_size);
    std::vector<Edits> edits;
    size_t mask = 0, ban = 0, bias = 0, seen = 0;
    for (size_t i = 0; i < num_rows; ++i) {
        const double* penalties = arrays.penalties.data() + 3 * i;
        edits.push_back({arrays.masks.data() + mask * arrays.masks.shape(1), arrays.mask_counts.data()[i],
                         arrays.banned_ids.data() + ban, arrays.ban_counts.data()[i],
                         arrays.bias_ids.data() + bias, arrays.biases.data() + bias, arrays.bias_counts.data()[i],
                         penalties[0], penalties[1], penalties[2],
                         arrays.history.data() + seen, arrays.history_counts.data()[i],
                         arrays.num_prompt_tokens.data()[i]});
        mask += (size_t)arrays.mask_counts.data()[i];
        ban += (size_t)arrays.ban_counts.data()[i];
        bias += (size_t)arrays.bias_counts.data()[i];
        seen += (size_t)arrays.history_counts.data()[i];
    }
    require_length(arrays.masks.shape(0), mask, "The masks are not as many as the rows have.");
    require_length(arrays.banned_ids.shape(0), ban, "The bans are not as many as the rows have.");
    require_length(arrays.bias_ids.shape(0), bias, "The biases are not as many as the rows have.");
    require_length(arrays.history.shape(0), seen, "The histories are not as long as the rows have them.");
    return edits;
}

struct MeasuredArrays {
    Integers num_alternatives;
    Array<float, 1> logprobs;
    Array<int64_t, 1> ranks;
    Array<int64_t, 2> alternative_ids;
    Array<float, 2> alternative_logprobs;
};

// Where the log-probabilities of each row go.
std::vector<Measured> measured_of(const MeasuredArrays& arrays, size_t num_rows) {
    for (size_t length : {arrays.num_alternatives.shape(0), arrays.logprobs.shape(0), arrays.ranks.shape(0),
                          arrays.alternative_ids.shape(0), arrays.alternative_logprobs.shape(0)})
        require_length(length, num_rows, "There must be room for the log-probabilities of each row.");
    const size_t width = arrays.alternative_ids.shape(1);
    require_length(arrays.alternative_logprobs.shape(1), width, "Alternatives need ids and log-probabilities.");
    std::vector<Measured> measured;
    for (size_t row = 0; row < num_rows; ++row) {
        const int64_t count = arrays.num_alternatives.data()[row];
        if (count > (int64_t)width) throw std::invalid_argument("There is no room for so many alternatives.");
        measured.push_back({count, arrays.logprobs.data() + row, arrays.ranks.data() + row,
                            arrays.alternative_ids.data() + row * width,
                            arrays.alternative_logprobs.data() + row * width});
    }
    return measured;
}

using Logits = Array<const float, 2>;

void sample(Sampler& sampler, Logits logits, Array<const float, 1> inverse_temperatures, Integers top_k,
            Array<const double, 1> top_p, Array<const float, 1> least_scores, Array<const uint32_t, 2> draw_keys,
            const EditArrays& edit_arrays, const MeasuredArrays& measured_arrays, Array<int64_t, 1> token_ids,
            Array<uint8_t, 1> statuses) {
    const size_t num_rows = logits.shape(0);
    require_length(logits.shape(1), (size_t)sampler.vocab_size(), "Logits must be as wide as the vocabulary.");
    for (size_t length : {inverse_temperatures.shape(0), top_k.shape(0), top_p.shape(0), least_scores.shape(0),
                          draw_keys.shape(0), token_ids.shape(0), statuses.shape(0)})
        require_length(length, num_rows, "There must be an entry for each row.");
    require_length(draw_keys.shape(1), 4, "The key of a draw has four words.");
    const std::vector<Edits> edits = edits_of(edit_arrays, sampler.vocab_size());
    const std::vector<Measured> measured = measured_of(measured_arrays, num_rows);
    std::vector<RowSettings> settings;
    for (size_t row = 0; row < num_rows; ++row) {
        const uint32_t* key = draw_keys.data() + 4 * row;
        if (top_k.data()[row] < 1) throw std::invalid_argument("At least one token must be kept.");
        settings.push_back({inverse_temperatures.data()[row], top_k.data()[row], top_p.data()[row],
                            least_scores.data()[row], {key[0], key[1], key[2], key[3]}, nullptr});
    }
    for (size_t i = 0; i < edits.size(); ++i) {
        const int64_t row = edit_arrays.rows.data()[i];
        if (row < 0 || row >= (int64_t)num_rows) throw std::invalid_argument("An edited row is not there.");
        settings[(size_t)row].edits = &edits[i];
    }
    nb::gil_scoped_release release;
    sampler.sample(logits.data(), (int64_t)num_rows, settings.data(), measured.data(), token_ids.data(),
                   statuses.data());
}

void measure(Sampler& sampler, Logits logits, Integers token_ids, const MeasuredArrays& measured_arrays,
             Array<uint8_t, 1> is_finite) {
    const size_t num_rows = logits.shape(0);
    require_length(logits.shape(1), (size_t)sampler.vocab_size(), "Logits must be as wide as the vocabulary.");
    require_length(token_ids.shape(0), num_rows, "There must be a token for each row.");
    require_length(is_finite.shape(0), num_rows, "There must be a verdict for each row.");
    require_ids(token_ids, sampler.vocab_size());
    const std::vector<Measured> measured = measured_of(measured_arrays, num_rows);
    nb::gil_scoped_release release;
    sampler.measure(logits.data(), (int64_t)num_rows, token_ids.data(), measured.data(), is_finite.data());
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, module) {
    using namespace octavo;
    // A worker's model lives until the process ends, when Python frees modules in no order: what is left then is no leak.
    nb::set_leak_warnings(false);
    module.def("supported_kernels", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : supported_kernels()) names.emplace_back(kernels->name);
        return names;
    });
    nb::enum_<Activation>(module, "Activation")
        .value("SILU", Activation::kSilu)
        .value("GELU_TANH", Activation::kGeluTanh);
    module.def(
        "multiply_rows",
        [](WeightArray weight, WeightArray rows, Array<float, 2> to, int num_threads, const std::string& kernels,
           const std::string& quantization) {
            require_length(to.shape(0), rows.shape(0), "There must be a result for each row.");
            require_length(to.shape(1), weight.shape(0), "A result must be as wide as the weight.");
            nb::gil_scoped_release release;
            multiply_rows(type_named(quantization), matrix_of(weight), matrix_of(rows), to.data(), num_threads, kernels);
        },
        nb::kw_only(), "weight"_a, "rows"_a, "to"_a, "num_threads"_a, "kernels"_a, "quantization"_a);
    module.def("supported_row_kernels", [] {
        std::vector<std::string> names;
        for (const RowKernels* kernels : supported_row_kernels()) names.emplace_back(kernels->name);
        return names;
    });
    nb::class_<EditArrays>(module, "EditArrays")
        .def(
            "__init__",
            [](EditArrays* self, Integers rows, Array<const int32_t, 2> masks, Integers mask_counts,
               Integers banned_ids, Integers ban_counts, Integers bias_ids, Array<const float, 1> biases,
               Integers bias_counts, Array<const double, 2> penalties, Array<const int32_t, 1> history,
               Integers history_counts, Integers num_prompt_tokens) {
                new (self) EditArrays{rows,  mask_counts, ban_counts, bias_counts, history_counts, num_prompt_tokens,
                                      masks, banned_ids,  bias_ids,   biases,      penalties,      history};
            },
            nb::kw_only(), "rows"_a, "masks"_a, "mask_counts"_a, "banned_ids"_a, "ban_counts"_a, "bias_ids"_a,
            "biases"_a, "bias_counts"_a, "penalties"_a, "history"_a, "history_counts"_a, "num_prompt_tokens"_a);
    nb::class_<MeasuredArrays>(module, "MeasuredArrays")
        .def(
            "__init__",
            [](MeasuredArrays* self, Integers num_alternatives, Array<float, 1> logprobs, Array<int64_t, 1> ranks,
               Array<int64_t, 2> alternative_ids, Array<float, 2> alternative_logprobs) {
                new (self) MeasuredArrays{num_alternatives, logprobs, ranks, alternative_ids, alternative_logprobs};
            },
            nb::kw_only(), "num_alternatives"_a, "logprobs"_a, "ranks"_a, "alternative_ids"_a,
            "alternative_logprobs"_a);
    nb::class_<Sampler>(module, "NativeSampler")
        .def(
            "__init__",
            [](Sampler* self, int vocab_size, int num_threads, NativeModel* model, const std::string& kernels) {
                new (self) Sampler(vocab_size, num_threads, model ? &model->pool() : nullptr, kernels);
            },
            nb::kw_only(), "vocab_size"_a, "num_threads"_a, "model"_a.none(), "kernels"_a, nb::keep_alive<1, 4>())
        .def("sample", &sample, nb::kw_only(), "logits"_a, "inverse_temperatures"_a, "top_k"_a, "top_p"_a,
             "least_scores"_a, "draw_keys"_a, "edits"_a, "measured"_a, "token_ids"_a, "statuses"_a)
        .def("measure", &measure, nb::kw_only(), "logits"_a, "token_ids"_a, "measured"_a, "is_finite"_a);
    nb::class_<Collective>(module, "NativeCollective")
        .def(
            "__init__",
            [](Collective* self, Array<uint8_t, 1> memory, int rank, int num_ranks, size_t parts_offset,
               size_t part_bytes, double timeout_seconds) {
                if (memory.shape(0) < parts_offset + 2 * (size_t)num_ranks * part_bytes)
                    throw std::invalid_argument("The memory is too small for the parts of all ranks.");
                new (self) Collective(reinterpret_cast<char*>(memory.data()), rank, num_ranks, parts_offset, part_bytes,
                                      timeout_seconds);
            },
            nb::kw_only(), "memory"_a, "rank"_a, "num_ranks"_a, "parts_offset"_a, "part_bytes"_a, "timeout_seconds"_a,
            nb::keep_alive<1, 2>())
        .def_prop_ro("is_broken", &Collective::is_broken)
        .def_prop_ro("wait_seconds", &Collective::wait_seconds);
    nb::class_<NativeModel>(module, "NativeModel")
        .def(
            "__init__",
            [](NativeModel* self, int hidden_size, int num_heads, int num_kv_heads, int head_dim, int vocab_size,
               int block_size, float rms_norm_eps, Array<const float, 2> frequencies, VectorArray amplitudes,
               int num_threads, const std::string& kernels, const std::string& quantization) {
                const Shape shape = {hidden_size, 0,          num_heads,  num_kv_heads,
                                     head_dim,    vocab_size, block_size, rms_norm_eps};
                const Rotations rotations = {{frequencies.data(), (int64_t)frequencies.size()}, values_of(amplitudes)};
                new (self) NativeModel(shape, type_named(quantization), rotations, num_threads, kernels);
            },
            nb::kw_only(), "hidden_size"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "vocab_size"_a,
            "block_size"_a, "rms_norm_eps"_a, "frequencies"_a, "amplitudes"_a, "num_threads"_a, "kernels"_a,
            "quantization"_a)
        .def(
            "set_embedding",
            [](NativeModel& model, WeightArray weight, float scale) {
                nb::gil_scoped_release release;
                model.set_embedding(matrix_of(weight), scale);
            },
            "weight"_a, "scale"_a)
        .def(
            "add_attention",
            [](NativeModel& model, VectorArray norm, WeightArray query, WeightArray key, WeightArray value,
               WeightArray output, OptionalVector query_bias, OptionalVector key_bias, OptionalVector value_bias,
               OptionalVector output_bias, OptionalVector query_norm, OptionalVector key_norm,
               OptionalVector norm_after, int rotation, int window, float softmax_scale) {
                const AttentionDetails details = {values_of(query_bias), values_of(key_bias),  values_of(value_bias),
                                                  values_of(output_bias), values_of(query_norm), values_of(key_norm),
                                                  values_of(norm_after),  rotation,              window,
                                                  softmax_scale};
                nb::gil_scoped_release release;
                model.add_attention(values_of(norm), matrix_of(query), matrix_of(key), matrix_of(value),
                                    matrix_of(output), details);
            },
            nb::kw_only(), "norm"_a, "query"_a, "key"_a, "value"_a, "output"_a, "query_bias"_a.none(),
            "key_bias"_a.none(), "value_bias"_a.none(), "output_bias"_a.none(), "query_norm"_a.none(),
            "key_norm"_a.none(), "norm_after"_a.none(), "rotation"_a, "window"_a, "softmax_scale"_a)
        .def(
            "add_feed_forward",
            [](NativeModel& model, VectorArray norm, WeightArray gate, WeightArray up, WeightArray down,
               Activation activation, OptionalVector norm_after) {
                nb::gil_scoped_release release;
                model.add_feed_forward(values_of(norm), matrix_of(gate), matrix_of(up), matrix_of(down), activation,
                                       values_of(norm_after));
            },
            nb::kw_only(), "norm"_a, "gate"_a, "up"_a, "down"_a, "activation"_a, "norm_after"_a.none())
        .def(
            "set_head",
            [](NativeModel& model, VectorArray norm, std::optional<WeightArray> weight, int64_t first, int64_t count) {
                nb::gil_scoped_release release;
                if (!weight) return model.set_head(values_of(norm), nullptr, first, count);
                const Matrix matrix = matrix_of(*weight);
                model.set_head(values_of(norm), &matrix, first, count);
            },
            "norm"_a, "weight"_a.none(), "first"_a, "count"_a)
        .def("join", &NativeModel::join, "collective"_a, nb::keep_alive<1, 2>())
        .def("bind_cache", &bind_cache)
        .def("forward", &forward, nb::kw_only(), "token_ids"_a, "positions"_a, "slot_mapping"_a, "num_queries"_a,
             "block_tables"_a, "sampled_rows"_a, "logits"_a, "is_finite"_a)
        .def("head", &head, nb::kw_only(), "rows"_a, "logits"_a)
        .def("read_bandwidth", &NativeModel::read_bandwidth, "num_bytes"_a, "num_rounds"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("weight_bandwidth", &NativeModel::weight_bandwidth, "max_bytes"_a, "num_rounds"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def(
            "multiply_rate",
            [](NativeModel& model, int num_rounds, const std::string& quantization) {
                nb::gil_scoped_release release;
                return model.multiply_rate(type_named(quantization), num_rounds);
            },
            "num_rounds"_a, "quantization"_a = "none")
        .def_prop_ro("weight_bytes", &NativeModel::weight_bytes)
        .def_prop_ro("kernels", &NativeModel::kernels);
}
