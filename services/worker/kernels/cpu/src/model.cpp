#include "model.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void require(bool is_true, const char* message) {
    if (!is_true) throw std::invalid_argument(message);
}

void require_shape(const Matrix& matrix, int64_t num_rows, int64_t num_columns, const char* message) {
    require(matrix.num_rows == num_rows && matrix.num_columns == num_columns, message);
}

const bf16* row_or_null(const Matrix& matrix, int64_t row) {
    return row < matrix.num_rows ? matrix.data + row * matrix.num_columns : nullptr;
}

// Appends rows in their order, as whole panels.
void append_in_order(Columns& columns, const Matrix& matrix) {
    for (int64_t row = 0; row < rounded_up(matrix.num_rows, kPanelColumns); ++row)
        columns.push_back(row_or_null(matrix, row));
}

// Appends heads so that the two values that are rotated together lie in the two vectors of one panel.
void append_rotated(Columns& columns, const Matrix& matrix, int head_dim) {
    const int half_panel = kPanelColumns / 2, half = head_dim / 2;
    for (int64_t head = 0; head < matrix.num_rows; head += head_dim)
        for (int first = 0; first < half; first += half_panel)
            for (int64_t row : {head + first, head + half + first})
                for (int i = 0; i < half_panel; ++i) columns.push_back(row_or_null(matrix, row + i));
}

// Appends panels of sixteen gates and the sixteen ups that they open.
void append_gated(Columns& columns, const Matrix& gate, const Matrix& up) {
    const int half_panel = kPanelColumns / 2;
    for (int64_t first = 0; first < rounded_up(gate.num_rows, kPanelColumns); first += half_panel)
        for (const Matrix* matrix : {&gate, &up})
            for (int i = 0; i < half_panel; ++i) columns.push_back(row_or_null(*matrix, first + i));
}

size_t bytes_of(const Panels& panels) { return (size_t)panels.num_panels * (size_t)panels.panel_bytes; }

// Puts the biases of heads in the order of append_rotated.
float* rotate_bias(float* to, Values bias, int head_dim) {
    const int half_panel = kPanelColumns / 2, half = head_dim / 2;
    for (int64_t head = 0; head < bias.count; head += head_dim)
        for (int first = 0; first < half; first += half_panel)
            for (int part : {first, half + first})
                to = std::copy_n(bias.data + head + part, half_panel, to);
    return to;
}

// What a thread needs for attention or to round a row of an int8 weight's inputs; its own inputs come after it.
size_t inputs_offset(const Shape& shape, int64_t max_inputs) {
    const size_t rows = (size_t)kTileTokens * (size_t)(shape.num_heads / shape.num_kv_heads);
    const size_t chunk = (size_t)kChunkTiles * kTileTokens;
    const size_t attention = (size_t)kScoreSlack * sizeof(float) +
                             kRowsTogether * chunk * (sizeof(float) + 2 * sizeof(bf16)) +
                             rows * ((size_t)shape.head_dim * (sizeof(float) + sizeof(bf16)) + 3 * sizeof(float));
    return (size_t)rounded_up(std::max((int64_t)attention, max_inputs * (int64_t)sizeof(float)), 4096);
}

size_t scratch_bytes(const Shape& shape, int64_t max_inputs) {
    const size_t row = (size_t)shape.hidden_stride * sizeof(bf16) + (size_t)max_inputs + kQuantizedRowEnd;
    return inputs_offset(shape, max_inputs) + (size_t)rounded_up((int64_t)(kMaxRowsAtOnce * row), 4096);
}

#if defined(OCTAVO_X86)
bool has_avx512_products() {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

// Tiles are large, so that Linux gives them only to processes that ask (arch_prctl, ARCH_REQ_XCOMP_PERM).
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    static const bool may_use = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                                __builtin_cpu_supports("amx-int8") &&
                                syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return may_use;
#else
    return false;
#endif
}
#endif

const Kernels& kernels_named(const std::string& name) {
    for (const Kernels* kernels : supported_kernels())
        if (name.empty() || name == kernels->name) return *kernels;
    throw std::invalid_argument("This processor has no kernels named " + name + ".");
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> kernels;
#if defined(OCTAVO_X86)
    if (has_avx512_products() && may_use_tiles()) kernels.push_back(&amx_kernels());
    if (has_avx512_products()) kernels.push_back(&avx512_kernels());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels.push_back(&avx2_kernels());
#endif
    kernels.push_back(&portable_kernels());
    return kernels;
}

void multiply_rows(ValueType type, const Matrix& weight, const Matrix& rows, float* to, int num_threads,
                   const std::string& kernels) {
    require(rows.num_columns == weight.num_columns, "The rows have another number of inputs than the weight.");
    require(num_threads > 0, "Rows need a thread.");
    Columns columns;
    append_in_order(columns, weight);
    Arena memory;
    const Panels panels = pack_weight(type, columns, weight.num_columns, num_threads, memory);
    const int64_t stride = rounded_up(rows.num_columns, kPanelColumns), num_inputs = padded_inputs(panels);
    const int64_t num_rows = rounded_up(rows.num_rows, kMaxRowsAtOnce);
    Buffer inputs((size_t)(num_rows * stride) * sizeof(bf16));
    for (int64_t row = 0; row < rows.num_rows; ++row)
        std::copy_n(rows.data + row * rows.num_columns, rows.num_columns, inputs.as<bf16>() + row * stride);
    Buffer arranged((size_t)(num_rows * stride) * sizeof(bf16));
    Buffer quantized((size_t)(num_rows * (num_inputs + kQuantizedRowEnd)));
    const size_t rotated_bytes = (size_t)rounded_up(num_inputs * (int64_t)sizeof(float), kAlignment);
    const size_t own_bytes = (size_t)kMaxRowsAtOnce * (size_t)(num_inputs + kQuantizedRowEnd);
    const size_t scratch_stride = (size_t)rounded_up((int64_t)(rotated_bytes + own_bytes), 4096);
    Buffer scratch(scratch_stride * (size_t)num_threads);
    Workspace workspace{};
    workspace.normed = arranged.as<bf16>();
    workspace.quantized = quantized.as<char>();
    workspace.scratch = scratch.as<char>();
    workspace.scratch_stride = scratch_stride;
    workspace.inputs_offset = rotated_bytes;
    Batch batch{};
    batch.num_tokens = (int)rows.num_rows;
    Pool pool(num_threads);
    pool.reserve_items((size_t)(rows.num_rows * panels.num_panels));
    const Step step = {nullptr, &batch, &workspace, &pool};
    pool.run([&](int thread) {
        kernels_named(kernels).multiply_rows(step, thread, panels, inputs.as<bf16>(), (int)stride, to,
                                             (int)weight.num_rows);
    });
}

NativeModel::NativeModel(const Shape& shape, ValueType type, const Rotations& rotations, int num_threads,
                         const std::string& kernels)
    : kernels_(kernels_named(kernels)), type_(type), num_threads_(num_threads) {
    require(shape.hidden_size > 0 && shape.vocab_size > 0, "A model has a hidden size and a vocabulary.");
    require(shape.num_kv_heads > 0 && shape.num_heads > 0 && shape.num_heads % shape.num_kv_heads == 0,
            "Query heads must share KV heads evenly.");
    require(shape.head_dim > 0 && shape.head_dim % kPanelColumns == 0, "The head size must be a multiple of 32.");
    require(shape.block_size > 0 && shape.block_size % kTileTokens == 0,
            "The block size must be a multiple of 16.");
    require(num_threads > 0, "A model needs a thread.");
    model_.shape = shape;
    model_.shape.hidden_stride = (int)rounded_up(shape.hidden_size, kPanelColumns);
    model_.num_rotations = (int)rotations.amplitudes.count;
    require(model_.num_rotations > 0, "A model has a kind of rotation.");
    const int64_t num_frequencies = (int64_t)model_.num_rotations * shape.head_dim / 2;
    model_.frequencies = keep(rotations.frequencies, num_frequencies, num_frequencies);
    model_.amplitudes = keep(rotations.amplitudes, model_.num_rotations, model_.num_rotations);
}

Panels NativeModel::pack(const Columns& columns, int64_t num_inputs) {
    const Panels panels = pack_weight(type_, columns, num_inputs, num_threads_, weights_);
    weight_bytes_ += (size_t)panels.num_panels * panels.panel_bytes;
    max_inputs_ = std::max(max_inputs_, padded_inputs(panels));
    return panels;
}

const float* NativeModel::keep(Values values, int64_t count, int64_t padded) {
    require(values.count == count, "A vector has another length than the model's shape says.");
    weight_bytes_ += (size_t)padded * sizeof(float);
    float* kept = static_cast<float*>(weights_.allocate((size_t)padded * sizeof(float)));
    std::copy(values.data, values.data + count, kept);
    return kept;
}

const float* NativeModel::keep_optional(Values values, int64_t count, int64_t padded) {
    return values.data ? keep(values, count, padded) : nullptr;
}

const float* NativeModel::keep_first_bias(const AttentionDetails& details) {
    const Values query = details.query_bias, key = details.key_bias, value = details.value_bias;
    require(!query.data == !key.data && !key.data == !value.data,
            "Queries, keys and values have a bias together or not at all.");
    if (!query.data) return nullptr;
    const Shape& shape = model_.shape;
    const int64_t kv_size = (int64_t)shape.num_kv_heads * shape.head_dim;
    require(query.count == (int64_t)shape.num_heads * shape.head_dim && key.count == kv_size && value.count == kv_size,
            "A bias has another length than the model's shape says.");
    std::vector<float> packed((size_t)(query.count + 2 * kv_size));
    float* to = rotate_bias(packed.data(), query, shape.head_dim);
    to = rotate_bias(to, key, shape.head_dim);
    std::copy_n(value.data, kv_size, to);
    return keep({packed.data(), (int64_t)packed.size()}, (int64_t)packed.size(), (int64_t)packed.size());
}

void NativeModel::set_embedding(Matrix weight, float scale) {
    const Shape& shape = model_.shape;
    require_shape(weight, shape.vocab_size, shape.hidden_size, "The embedding has another shape than the model.");
    Columns columns;
    append_in_order(columns, weight);
    model_.embedding = pack(columns, shape.hidden_size);
    model_.embedding_scale = scale;
}

void NativeModel::add_attention(Values norm, Matrix query, Matrix key, Matrix value, Matrix output,
                                const AttentionDetails& details) {
    const Shape& shape = model_.shape;
    const int64_t query_size = (int64_t)shape.num_heads * shape.head_dim;
    const int64_t kv_size = (int64_t)shape.num_kv_heads * shape.head_dim;
    require_shape(query, query_size, shape.hidden_size, "The query weight has another shape than the model.");
    require_shape(key, kv_size, shape.hidden_size, "The key weight has another shape than the model.");
    require_shape(value, kv_size, shape.hidden_size, "The value weight has another shape than the model.");
    require_shape(output, shape.hidden_size, query_size, "The output weight has another shape than the model.");
    require(details.rotation >= 0 && details.rotation < model_.num_rotations, "The model has no such rotation.");
    require(details.window >= 0, "A window holds a token or more, or is 0 for all tokens.");
    require(!details.query_norm.data == !details.key_norm.data, "Queries and keys are normed together or not at all.");
    Operation operation{};
    operation.kind = OperationKind::kAttention;
    operation.first_bias = keep_first_bias(details);
    operation.second_bias = keep_optional(details.output_bias, shape.hidden_size, shape.hidden_stride);
    operation.query_norm = keep_optional(details.query_norm, shape.head_dim, shape.head_dim);
    operation.key_norm = keep_optional(details.key_norm, shape.head_dim, shape.head_dim);
    operation.norm_after = keep_optional(details.norm_after, shape.hidden_size, shape.hidden_stride);
    operation.rotation = details.rotation;
    operation.window = details.window;
    operation.softmax_scale = details.softmax_scale;
    has_head_norms_ |= operation.query_norm != nullptr;
    has_norms_after_ |= operation.norm_after != nullptr;
    operation.norm = keep(norm, shape.hidden_size, shape.hidden_stride);
    Columns heads, outputs;
    append_rotated(heads, query, shape.head_dim);
    append_rotated(heads, key, shape.head_dim);
    append_in_order(heads, value);
    operation.first = pack(heads, shape.hidden_size);
    append_in_order(outputs, output);
    operation.second = pack(outputs, query_size);
    add(operation);
}

void NativeModel::add_feed_forward(Values norm, Matrix gate, Matrix up, Matrix down, Activation activation,
                                   Values norm_after) {
    const Shape& shape = model_.shape;
    const int64_t inner = gate.num_rows;
    require_shape(gate, inner, shape.hidden_size, "The gate weight has another shape than the model.");
    require_shape(up, inner, shape.hidden_size, "The up weight has another shape than the gate.");
    require_shape(down, shape.hidden_size, inner, "The down weight has another shape than the gate.");
    Operation operation{};
    operation.kind = OperationKind::kFeedForward;
    operation.activation = activation;
    operation.norm_after = keep_optional(norm_after, shape.hidden_size, shape.hidden_stride);
    has_norms_after_ |= operation.norm_after != nullptr;
    operation.norm = keep(norm, shape.hidden_size, shape.hidden_stride);
    Columns gated, outputs;
    append_gated(gated, gate, up);
    operation.first = pack(gated, shape.hidden_size);
    append_in_order(outputs, down);
    operation.second = pack(outputs, inner);
    max_inner_ = std::max(max_inner_, (int)rounded_up(inner, kPanelColumns));
    add(operation);
}

void NativeModel::add(const Operation& operation) {
    max_panels_of_operations_ = std::max({max_panels_of_operations_, operation.first.num_panels, operation.second.num_panels});
    operations_.push_back(operation);
}

void NativeModel::set_head(Values norm, const Matrix* weight, int64_t first, int64_t count) {
    const Shape& shape = model_.shape;
    require(first >= 0 && count > 0 && first + count <= shape.vocab_size, "The head's rows are not in the vocabulary.");
    model_.head_first = (int)first;
    model_.head_count = (int)count;
    model_.final_norm = keep(norm, shape.hidden_size, shape.hidden_stride);
    if (weight) {
        require_shape(*weight, count, shape.hidden_size, "The head has another shape than the model.");
        Columns columns;
        append_in_order(columns, *weight);
        model_.head = pack(columns, shape.hidden_size);
    } else {
        require(first % kPanelColumns == 0, "A part of a tied head begins with a panel.");
        model_.head = model_.embedding;
        model_.head.data += first / kPanelColumns * model_.head.panel_bytes;
        model_.head.num_panels = (int)(rounded_up(count, kPanelColumns) / kPanelColumns);
    }
}

void NativeModel::bind_cache(const std::vector<bf16*>& layers, int64_t num_blocks) {
    size_t index = 0;
    for (Operation& operation : operations_)
        if (operation.kind == OperationKind::kAttention) {
            require(index < layers.size(), "The cache has fewer layers than the model.");
            require((uintptr_t)layers[index] % kAlignment == 0, "A layer of the cache is not aligned.");
            operation.cache = layers[index++];
        }
    require(index == layers.size(), "The cache has more layers than the model.");
    num_blocks_ = num_blocks;
}

void NativeModel::join(Collective* collective) { collective_ = collective; }

void NativeModel::check_step(const StepArrays& arrays) const {
    require(model_.embedding.data && model_.head.data, "The model has no embedding or no head yet.");
    require(num_blocks_ > 0, "The model has no cache yet.");
    const Shape& shape = model_.shape;
    const auto all_within = [](const auto* values, int64_t count, int64_t limit) {
        return std::all_of(values, values + count, [=](auto value) { return value >= 0 && value < limit; });
    };
    require(all_within(arrays.token_ids, arrays.num_tokens, shape.vocab_size), "A token id is not in the vocabulary.");
    require(all_within(arrays.slot_mapping, arrays.num_tokens, num_blocks_ * shape.block_size),
            "A slot is not in the cache.");
    require(all_within(arrays.positions, arrays.num_tokens, arrays.max_blocks * shape.block_size),
            "A position is beyond the block tables.");
    require(all_within(arrays.block_tables, arrays.num_sequences * arrays.max_blocks, num_blocks_),
            "A block is not in the cache.");
    require(all_within(arrays.sampled_rows, arrays.num_sampled_rows, arrays.num_tokens),
            "A row to sample is not in the batch.");
    const size_t row_bytes = (size_t)shape.hidden_stride * sizeof(float);
    require(!collective_ || (size_t)arrays.num_tokens * row_bytes <= collective_->part_bytes(),
            "The ranks share too little memory for so many tokens.");
    require(arrays.num_sampled_rows <= arrays.num_tokens, "More rows are to be sampled than there are.");
    int64_t num_queries = 0;
    for (int64_t i = 0; i < arrays.num_sequences; ++i) {
        require(arrays.num_queries[i] >= 0, "A sequence has a negative number of tokens.");
        num_queries += arrays.num_queries[i];
    }
    require(num_queries == arrays.num_tokens, "The sequences have another number of tokens than the batch.");
}

void NativeModel::make_tiles(const StepArrays& arrays) {
    tiles_.clear();
    int64_t row = 0;
    for (int64_t sequence = 0; sequence < arrays.num_sequences; ++sequence) {
        const int64_t end = row + arrays.num_queries[sequence];
        while (row < end) {
            const int64_t position = arrays.positions[row];
            const int64_t count = std::min(end - row, kTileTokens - position % kTileTokens);
            require(arrays.positions[row + count - 1] == position + count - 1,
                    "The tokens of a sequence must have consecutive positions.");
            tiles_.push_back({(int)sequence, (int)row, (int)count, (int)position});
            row += count;
        }
    }
    // The longest contexts first, so that no thread begins one when the others are done.
    std::stable_sort(tiles_.begin(), tiles_.end(), [](const QueryTile& a, const QueryTile& b) {
        return a.first_position / kTileTokens * a.num_queries > b.first_position / kTileTokens * b.num_queries;
    });
    // Each thread's share begins with long ones, too.
    std::vector<QueryTile> sorted;
    sorted.swap(tiles_);
    for (size_t first = 0; first < (size_t)num_threads_; ++first)
        for (size_t i = first; i < sorted.size(); i += (size_t)num_threads_) tiles_.push_back(sorted[i]);
}

void NativeModel::reserve(int64_t num_tokens, int64_t num_sampled_rows) {
    const Shape& shape = model_.shape;
    // No item is smaller than a row with a panel, a row or a tile of queries with a KV head.
    const int64_t num_items = std::max(num_sampled_rows * model_.head.num_panels,
                                       num_tokens * std::max<int64_t>(max_panels_of_operations_, shape.num_kv_heads));
    pool().reserve_items((size_t)num_items);
    // Tiles of rows are read whole.
    const auto rows = (size_t)rounded_up(num_tokens, kMaxRowsAtOnce);
    if (rows > workspace_rows_) lay_out_workspace(rows);
}

void NativeModel::lay_out_workspace(size_t rows) {
    const Shape& shape = model_.shape;
    const size_t row_values = (size_t)shape.hidden_stride, head_dim = (size_t)shape.head_dim;
    const size_t head_values = (size_t)shape.num_heads * head_dim, scratch_stride = scratch_bytes(shape, max_inputs_);
    size_t num_bytes = 0;
    const auto piece_of = [&](size_t size) {
        const size_t first = num_bytes;
        num_bytes += (size_t)rounded_up((int64_t)size, kAlignment) + kGapBytes;
        return first;
    };
    const size_t hidden = piece_of(rows * row_values * sizeof(float));
    const size_t normed = piece_of(rows * row_values * sizeof(bf16));
    const size_t queries = piece_of(rows * head_values * sizeof(bf16));
    const size_t attended = piece_of(rows * head_values * sizeof(bf16));
    const size_t inner = piece_of(rows * (size_t)max_inner_ * sizeof(bf16));
    const size_t quantized =
        piece_of(type_ == ValueType::kInt8 ? rows * (size_t)(max_inputs_ + kQuantizedRowEnd) : 0);
    const size_t rotation = piece_of(rows * (size_t)model_.num_rotations * head_dim * sizeof(float));
    const size_t heads =
        piece_of(has_head_norms_ ? rows * (head_values + (size_t)shape.num_kv_heads * head_dim) * sizeof(float) : 0);
    const size_t produced = piece_of(has_norms_after_ ? rows * row_values * sizeof(float) : 0);
    const size_t scratch = piece_of(scratch_stride * (size_t)num_threads_);
    workspace_memory_ = Buffer(num_bytes);
    workspace_rows_ = rows;
    char* memory = workspace_memory_.as<char>();
    for (const size_t part : {normed, queries, attended, inner, quantized, rotation, heads, produced, scratch, num_bytes})
        forbid_gap(memory + part);
    workspace_ = {(float*)(memory + hidden),
                  (bf16*)(memory + normed),
                  (bf16*)(memory + queries),
                  (bf16*)(memory + attended),
                  (bf16*)(memory + inner),
                  memory + quantized,
                  (float*)(memory + rotation),
                  (float*)(memory + heads),
                  (float*)(memory + produced),
                  memory + scratch,
                  scratch_stride,
                  inputs_offset(shape, max_inputs_)};
}

Pool& NativeModel::pool() {
    if (!pool_) pool_ = std::make_unique<Pool>(num_threads_);
    return *pool_;
}

void NativeModel::run(const StepArrays& arrays) {
    if (!arrays.num_tokens) return;
    check_step(arrays);
    pool();
    make_tiles(arrays);
    reserve(arrays.num_tokens, arrays.num_sampled_rows);
    model_.operations = operations_.data();
    model_.num_operations = (int)operations_.size();
    const Batch batch = {(int)arrays.num_tokens,
                         arrays.token_ids,
                         arrays.positions,
                         arrays.slot_mapping,
                         arrays.block_tables,
                         (int)arrays.max_blocks,
                         tiles_.data(),
                         (int)tiles_.size(),
                         arrays.sampled_rows,
                         (int)arrays.num_sampled_rows,
                         arrays.logits,
                         arrays.is_finite};
    const Step step = {&model_, &batch, &workspace_, pool_.get(), collective_};
    if (collective_) collective_->begin_step();
    pool_->run([&](int thread) { kernels_.run_step(step, thread); });
    num_rows_of_last_step_ = arrays.num_tokens;
}

void NativeModel::run_head(const int64_t* rows, int64_t num_rows, float* logits) {
    if (!num_rows) return;
    // As many rows as the step had have room in the workspace.
    require(num_rows <= num_rows_of_last_step_, "There are more rows than the last step had.");
    pool().reserve_items((size_t)(num_rows * model_.head.num_panels));
    for (int64_t i = 0; i < num_rows; ++i)
        require(rows[i] >= 0 && rows[i] < num_rows_of_last_step_, "A row is not one of the last step's.");
    Batch batch{};
    batch.sampled_rows = rows;
    batch.num_sampled_rows = (int)num_rows;
    batch.logits = logits;
    const Step step = {&model_, &batch, &workspace_, pool_.get(), collective_};
    // The logits before these lie in the same memory, and another rank may still read them.
    if (collective_) collective_->meet();
    pool_->run([&](int thread) { kernels_.run_head(step, thread); });
}

double NativeModel::read_bandwidth(size_t num_bytes, int num_rounds) {
    Pool pool(num_threads_);
    Buffer memory(num_bytes);
    const size_t share = num_bytes / (size_t)num_threads_ / kAlignment * kAlignment;
    std::vector<float> sums((size_t)num_threads_);
    double best = 0.0;
    for (int round = 0; round < 2 * num_rounds; ++round) {
        const auto start = std::chrono::steady_clock::now();
        pool.run_on_all([&](int thread) {
            const char* from = memory.as<char>() + (size_t)thread * share;
            sums[(size_t)thread] = kernels_.read_memory(from, share, round % 2);
        });
        best = std::max(best, (double)share * num_threads_ / seconds_since(start));
    }
    return best;
}

double NativeModel::weight_bandwidth(size_t max_bytes, int num_rounds) {
    Pool pool(num_threads_);
    std::vector<const Panels*> all_panels;
    for (const Operation& operation : operations_) {
        all_panels.push_back(&operation.first);
        all_panels.push_back(&operation.second);
    }
    all_panels.push_back(&model_.head);
    std::vector<float> sums((size_t)num_threads_);
    double best = 0.0;
    for (int round = 0; round < 2 * num_rounds; ++round) {
        std::vector<size_t> num_read((size_t)num_threads_);
        const auto start = std::chrono::steady_clock::now();
        pool.run_on_all([&](int thread) {
            size_t left = max_bytes / (size_t)num_threads_ / kAlignment * kAlignment;
            for (const Panels* panels : all_panels) {
                const size_t share = bytes_of(*panels) / (size_t)num_threads_ / kAlignment * kAlignment;
                const size_t count = std::min(share, left);
                const char* from = (const char*)panels->data + (size_t)thread * share;
                sums[(size_t)thread] += kernels_.read_memory(from, count, round % 2);
                num_read[(size_t)thread] += count;
                left -= count;
            }
        });
        const double total = (double)std::accumulate(num_read.begin(), num_read.end(), size_t{0});
        best = std::max(best, total / seconds_since(start));
    }
    return best;
}

double NativeModel::multiply_rate(ValueType type, int num_rounds) {
    Pool pool(num_threads_);
    std::vector<float> sinks((size_t)num_threads_);
    double best = 0.0;
    for (int round = 0; round < num_rounds; ++round) {
        std::vector<double> operations((size_t)num_threads_);
        const auto start = std::chrono::steady_clock::now();
        pool.run_on_all([&](int thread) {
            operations[(size_t)thread] = kernels_.multiply_in_registers(type, 200'000, &sinks[(size_t)thread]);
        });
        double total = 0.0;
        for (double count : operations) total += count;
        best = std::max(best, total / seconds_since(start));
    }
    return best;
}

}  // namespace octavo
