// The Python module: plain arrays in, logits out. It must not know more of a model than the calls that describe one.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "model.hpp"

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

}  // namespace
}  // namespace octavo

NB_MODULE(_native, module) {
    using namespace octavo;
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
            [](NativeModel& model, VectorArray norm, std::optional<WeightArray> weight) {
                nb::gil_scoped_release release;
                if (!weight) return model.set_head(values_of(norm), nullptr);
                const Matrix matrix = matrix_of(*weight);
                model.set_head(values_of(norm), &matrix);
            },
            "norm"_a, "weight"_a.none())
        .def("bind_cache", &bind_cache)
        .def("forward", &forward, nb::kw_only(), "token_ids"_a, "positions"_a, "slot_mapping"_a, "num_queries"_a,
             "block_tables"_a, "sampled_rows"_a, "logits"_a, "is_finite"_a)
        .def("read_bandwidth", &NativeModel::read_bandwidth, "num_bytes"_a, "num_rounds"_a,
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
