#include "model.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kAlignment = 64;
constexpr size_t kArenaPieceBytes = size_t{32} << 20;

int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void require(bool is_true, const char* message) {
    if (!is_true) throw std::invalid_argument(message);
}

void require_shape(const Matrix& matrix, int64_t num_rows, int64_t num_columns, const char* message) {
    require(matrix.num_rows == num_rows && matrix.num_columns == num_columns, message);
}

// Packs one panel: columns[i] is the row of the weight that becomes column i, or null for a column of zeros.
void pack_panel(const Panels& panels, int64_t panel, const bf16* const (&columns)[kPanelColumns], int64_t num_inputs) {
    bf16* to = const_cast<bf16*>(panels.data) + panel * panels.num_pairs * kPanelColumns * 2;
    for (int64_t input = 0; input < num_inputs; input += 2)
        for (const bf16* column : columns) {
            *to++ = column ? column[input] : 0;
            *to++ = column && input + 1 < num_inputs ? column[input + 1] : 0;
        }
}

const bf16* row_or_null(const Matrix& matrix, int64_t row) {
    return row < matrix.num_rows ? matrix.data + row * matrix.num_columns : nullptr;
}

// Packs rows in their order; returns the panel after the last one.
int64_t pack_in_order(const Panels& panels, int64_t panel, const Matrix& matrix) {
    for (int64_t first = 0; first < matrix.num_rows; first += kPanelColumns, ++panel) {
        const bf16* columns[kPanelColumns];
        for (int i = 0; i < kPanelColumns; ++i) columns[i] = row_or_null(matrix, first + i);
        pack_panel(panels, panel, columns, matrix.num_columns);
    }
    return panel;
}

// Packs heads so that the two values that are rotated together lie in the two vectors of one panel.
int64_t pack_rotated(const Panels& panels, int64_t panel, const Matrix& matrix, int head_dim) {
    const int half_panel = kPanelColumns / 2, half = head_dim / 2;
    for (int64_t head = 0; head < matrix.num_rows; head += head_dim)
        for (int first = 0; first < half; first += half_panel, ++panel) {
            const bf16* columns[kPanelColumns];
            for (int i = 0; i < half_panel; ++i) {
                columns[i] = row_or_null(matrix, head + first + i);
                columns[half_panel + i] = row_or_null(matrix, head + half + first + i);
            }
            pack_panel(panels, panel, columns, matrix.num_columns);
        }
    return panel;
}

// Packs sixteen gates and the sixteen ups that they open into each panel.
void pack_gated(const Panels& panels, const Matrix& gate, const Matrix& up) {
    const int half_panel = kPanelColumns / 2;
    for (int64_t panel = 0; panel < panels.num_panels; ++panel) {
        const bf16* columns[kPanelColumns];
        for (int i = 0; i < half_panel; ++i) {
            columns[i] = row_or_null(gate, panel * half_panel + i);
            columns[half_panel + i] = row_or_null(up, panel * half_panel + i);
        }
        pack_panel(panels, panel, columns, gate.num_columns);
    }
}

size_t scratch_bytes(const Shape& shape) {
    const size_t rows = (size_t)kTileTokens * (size_t)(shape.num_heads / shape.num_kv_heads);
    const size_t chunk = (size_t)kChunkTiles * kTileTokens;
    const size_t values = rows * (chunk * (sizeof(float) + sizeof(bf16)) +
                                  (size_t)shape.head_dim * (sizeof(float) + sizeof(bf16)) + 3 * sizeof(float));
    return (size_t)rounded_up((int64_t)values, 4096);
}

#if defined(OCTAVO_X86)
bool has_avx512_bf16() {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// Tiles are large, so that Linux gives them only to processes that ask (arch_prctl, ARCH_REQ_XCOMP_PERM).
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    static const bool may_use = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
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

Buffer::Buffer(size_t num_bytes) { reserve(num_bytes); }

void Buffer::Free::operator()(void* memory) const { std::free(memory); }

void Buffer::reserve(size_t num_bytes) {
    if (num_bytes <= num_bytes_) return;
    memory_.reset();
    num_bytes_ = 0;
    const size_t alignment = num_bytes >= kHugePageBytes ? kHugePageBytes : kAlignment;
    const size_t size = (size_t)rounded_up((int64_t)num_bytes, (int64_t)alignment);
    memory_.reset(std::aligned_alloc(alignment, size));
    if (!memory_) throw std::bad_alloc();
#if defined(__linux__)
    if (alignment == kHugePageBytes) madvise(memory_.get(), size, MADV_HUGEPAGE);
#endif
    std::memset(memory_.get(), 0, size);
    num_bytes_ = size;
}

void* Arena::allocate(size_t num_bytes) {
    const size_t size = (size_t)rounded_up((int64_t)num_bytes, (int64_t)kAlignment);
    if (size > free_bytes_) {
        free_bytes_ = std::max(size, kArenaPieceBytes);
        pieces_.emplace_back(free_bytes_);
        free_ = pieces_.back().as<char>();
    }
    void* allocated = free_;
    free_ += size;
    free_bytes_ -= size;
    return allocated;
}

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> kernels;
#if defined(OCTAVO_X86)
    if (has_avx512_bf16() && may_use_tiles()) kernels.push_back(&amx_kernels());
    if (has_avx512_bf16()) kernels.push_back(&avx512_kernels());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels.push_back(&avx2_kernels());
#endif
    kernels.push_back(&portable_kernels());
    return kernels;
}

NativeModel::NativeModel(const Shape& shape, Values frequencies, int num_threads, const std::string& kernels)
    : kernels_(kernels_named(kernels)), num_threads_(num_threads) {
    require(shape.hidden_size > 0 && shape.vocab_size > 0, "A model has a hidden size and a vocabulary.");
    require(shape.num_kv_heads > 0 && shape.num_heads > 0 && shape.num_heads % shape.num_kv_heads == 0,
            "Query heads must share KV heads evenly.");
    require(shape.head_dim > 0 && shape.head_dim % kPanelColumns == 0, "The head size must be a multiple of 32.");
    require(shape.block_size > 0 && shape.block_size % kTileTokens == 0,
            "The block size must be a multiple of 16.");
    require(num_threads > 0, "A model needs a thread.");
    model_.shape = shape;
    model_.shape.hidden_stride = (int)rounded_up(shape.hidden_size, kPanelColumns);
    model_.frequencies = keep(frequencies, shape.head_dim / 2, shape.head_dim / 2);
}

Panels NativeModel::make_panels(int64_t num_columns, int64_t num_inputs) {
    const int64_t num_panels = rounded_up(num_columns, kPanelColumns) / kPanelColumns;
    // Rows of activations are padded to whole vectors, so the weight is padded to the same number of inputs.
    const int64_t num_pairs = rounded_up(num_inputs, kPanelColumns) / 2;
    const size_t num_bytes = (size_t)(num_panels * num_pairs * kPanelColumns * 2) * sizeof(bf16);
    weight_bytes_ += num_bytes;
    return {static_cast<bf16*>(weights_.allocate(num_bytes)), (int)num_panels, (int)num_pairs};
}

const float* NativeModel::keep(Values values, int64_t count, int64_t padded) {
    require(values.count == count, "A vector has another length than the model's shape says.");
    float* kept = static_cast<float*>(weights_.allocate((size_t)padded * sizeof(float)));
    std::copy(values.data, values.data + count, kept);
    return kept;
}

void NativeModel::set_embedding(Matrix weight) {
    const Shape& shape = model_.shape;
    require_shape(weight, shape.vocab_size, shape.hidden_size, "The embedding has another shape than the model.");
    model_.embedding = make_panels(weight.num_rows, weight.num_columns);
    pack_in_order(model_.embedding, 0, weight);
}

void NativeModel::add_attention(Values norm, Matrix query, Matrix key, Matrix value, Matrix output) {
    const Shape& shape = model_.shape;
    const int64_t query_size = (int64_t)shape.num_heads * shape.head_dim;
    const int64_t kv_size = (int64_t)shape.num_kv_heads * shape.head_dim;
    require_shape(query, query_size, shape.hidden_size, "The query weight has another shape than the model.");
    require_shape(key, kv_size, shape.hidden_size, "The key weight has another shape than the model.");
    require_shape(value, kv_size, shape.hidden_size, "The value weight has another shape than the model.");
    require_shape(output, shape.hidden_size, query_size, "The output weight has another shape than the model.");
    Operation operation{};
    operation.kind = OperationKind::kAttention;
    operation.norm = keep(norm, shape.hidden_size, shape.hidden_stride);
    operation.first = make_panels(query_size + 2 * kv_size, shape.hidden_size);
    int64_t panel = pack_rotated(operation.first, 0, query, shape.head_dim);
    panel = pack_rotated(operation.first, panel, key, shape.head_dim);
    pack_in_order(operation.first, panel, value);
    operation.second = make_panels(shape.hidden_size, query_size);
    pack_in_order(operation.second, 0, output);
    operations_.push_back(operation);
}

void NativeModel::add_feed_forward(Values norm, Matrix gate, Matrix up, Matrix down) {
    const Shape& shape = model_.shape;
    const int64_t inner = gate.num_rows;
    require_shape(gate, inner, shape.hidden_size, "The gate weight has another shape than the model.");
    require_shape(up, inner, shape.hidden_size, "The up weight has another shape than the gate.");
    require_shape(down, shape.hidden_size, inner, "The down weight has another shape than the gate.");
    Operation operation{};
    operation.kind = OperationKind::kFeedForward;
    operation.norm = keep(norm, shape.hidden_size, shape.hidden_stride);
    operation.first = make_panels(2 * rounded_up(inner, kPanelColumns), shape.hidden_size);
    pack_gated(operation.first, gate, up);
    operation.second = make_panels(shape.hidden_size, inner);
    pack_in_order(operation.second, 0, down);
    max_inner_ = std::max(max_inner_, operation.second.num_pairs * 2);
    operations_.push_back(operation);
}

void NativeModel::set_head(Values norm, const Matrix* weight) {
    const Shape& shape = model_.shape;
    model_.final_norm = keep(norm, shape.hidden_size, shape.hidden_stride);
    if (weight) {
        require_shape(*weight, shape.vocab_size, shape.hidden_size, "The head has another shape than the model.");
        model_.head = make_panels(shape.vocab_size, shape.hidden_size);
        pack_in_order(model_.head, 0, *weight);
    } else {
        model_.head = model_.embedding;
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
}

void NativeModel::reserve(int64_t num_tokens) {
    const Shape& shape = model_.shape;
    // Tiles of rows are read whole.
    const size_t rows = (size_t)rounded_up(num_tokens, kMaxRowsAtOnce), heads = (size_t)shape.num_heads * shape.head_dim;
    hidden_.reserve(rows * shape.hidden_stride * sizeof(float));
    normed_.reserve(rows * shape.hidden_stride * sizeof(bf16));
    queries_.reserve(rows * heads * sizeof(bf16));
    attended_.reserve(rows * heads * sizeof(bf16));
    inner_.reserve(rows * max_inner_ * sizeof(bf16));
    rotation_.reserve(rows * shape.head_dim * sizeof(float));
    workspace_ = {hidden_.as<float>(),  normed_.as<bf16>(),    queries_.as<bf16>(), attended_.as<bf16>(),
                  inner_.as<bf16>(),    rotation_.as<float>(), scratch_.as<char>(), scratch_bytes(shape)};
}

Pool& NativeModel::pool() {
    if (!pool_) {
        pool_ = std::make_unique<Pool>(num_threads_, 3 * (int)operations_.size() + 1);
        scratch_.reserve(scratch_bytes(model_.shape) * num_threads_);
    }
    return *pool_;
}

void NativeModel::run(const StepArrays& arrays) {
    if (!arrays.num_tokens) return;
    check_step(arrays);
    pool();
    make_tiles(arrays);
    reserve(arrays.num_tokens);
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
    const Step step = {&model_, &batch, &workspace_, pool_.get()};
    pool_->run([&](int thread) { kernels_.run_step(step, thread); });
    num_rows_of_last_step_ = arrays.num_tokens;
}

void NativeModel::run_head(const int64_t* rows, int64_t num_rows, float* logits) {
    if (!num_rows) return;
    // As many rows as the step had have room in the workspace.
    require(num_rows <= num_rows_of_last_step_, "There are more rows than the last step had.");
    for (int64_t i = 0; i < num_rows; ++i)
        require(rows[i] >= 0 && rows[i] < num_rows_of_last_step_, "A row is not one of the last step's.");
    Batch batch{};
    batch.sampled_rows = rows;
    batch.num_sampled_rows = (int)num_rows;
    batch.logits = logits;
    const Step step = {&model_, &batch, &workspace_, pool_.get()};
    pool_->run([&](int thread) { kernels_.run_head(step, thread); });
}

double NativeModel::read_bandwidth(size_t num_bytes, int num_rounds) {
    Pool pool(num_threads_, 1);
    Buffer memory(num_bytes);
    const size_t share = num_bytes / (size_t)num_threads_ / kAlignment * kAlignment;
    std::vector<float> sums((size_t)num_threads_);
    double best = 0.0;
    for (int round = 0; round < num_rounds; ++round) {
        const auto start = std::chrono::steady_clock::now();
        pool.run([&](int thread) {
            sums[(size_t)thread] = kernels_.read_memory(memory.as<char>() + (size_t)thread * share, share);
        });
        best = std::max(best, (double)share * num_threads_ / seconds_since(start));
    }
    return best;
}

double NativeModel::multiply_rate(int num_rounds) {
    Pool pool(num_threads_, 1);
    std::vector<float> sinks((size_t)num_threads_);
    double best = 0.0;
    for (int round = 0; round < num_rounds; ++round) {
        std::vector<double> operations((size_t)num_threads_);
        const auto start = std::chrono::steady_clock::now();
        pool.run([&](int thread) {
            operations[(size_t)thread] = kernels_.multiply_in_registers(200'000, &sinks[(size_t)thread]);
        });
        double total = 0.0;
        for (double count : operations) total += count;
        best = std::max(best, total / seconds_since(start));
    }
    return best;
}

}  // namespace octavo
