#include "packing.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "pool.hpp"

namespace octavo {
namespace {

constexpr float kLargestInt8 = 127.0f;
constexpr float kRotationScale = 0.125f;  // butterflies give eight times the rotation of 64 inputs

int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

float float_of(bf16 value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

// Rounds a value below 2^22 to the nearest integer; of what is not a number something, but the scale is none then.
int32_t rounded(float value) {
    constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits.
    const float shifted = value + kRounder;
    int32_t bits, zero_bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    std::memcpy(&zero_bits, &kRounder, sizeof(zero_bits));
    return (int32_t)((uint32_t)bits - (uint32_t)zero_bits);
}

// A pair of inputs of one column is four bytes. Columns are read line by line, and what they make of one line each
// stays in the first-level cache until all have written their parts of it.
void pack_pairs(char* to, const bf16* const* columns, int64_t num_inputs) {
    constexpr int64_t kLinePairs = 16;
    constexpr int64_t kPairBytes = 2 * sizeof(bf16);
    const int64_t num_whole_pairs = num_inputs / 2;
    for (int64_t first = 0; first < num_whole_pairs; first += kLinePairs) {
        const int64_t num_pairs = std::min(kLinePairs, num_whole_pairs - first);
        for (int i = 0; i < kPanelColumns; ++i) {
            char* pair = to + (first * kPanelColumns + i) * kPairBytes;
            const char* column = (const char*)columns[i];
            uint32_t line[kLinePairs] = {};
            if (column) std::memcpy(line, column + first * kPairBytes, (size_t)(num_pairs * kPairBytes));
            for (int64_t k = 0; k < num_pairs; ++k)
                std::memcpy(pair + k * kPanelColumns * kPairBytes, &line[k], kPairBytes);
        }
    }
    if (num_inputs % 2) {
        bf16* pair = (bf16*)to + 2 * kPanelColumns * num_whole_pairs;
        for (int i = 0; i < kPanelColumns; ++i) {
            *pair++ = columns[i] ? columns[i][num_inputs - 1] : 0;
            *pair++ = 0;
        }
    }
}

// Rotates blocks of inputs of all columns; values are [num_inputs][32].
void rotate(float* values, int64_t num_inputs) {
    for (int64_t first = 0; first < num_inputs; first += kRotatedInputs)
        for (int distance = 1; distance < kRotatedInputs; distance *= 2)
            for (int input = 0; input < kRotatedInputs; ++input) {
                if (input & distance) continue;
                float* a = values + (first + input) * kPanelColumns;
                float* b = a + distance * kPanelColumns;
                for (int i = 0; i < kPanelColumns; ++i) {
                    const float sum = a[i] + b[i], difference = a[i] - b[i];
                    a[i] = sum;
                    b[i] = difference;
                }
            }
}

void pack_quads(char* to, const bf16* const* columns, int64_t num_inputs, int64_t num_padded, float* values) {
    for (int64_t input = 0; input < num_padded; ++input)
        for (int i = 0; i < kPanelColumns; ++i)
            values[input * kPanelColumns + i] =
                columns[i] && input < num_inputs ? float_of(columns[i][input]) : 0.0f;
    rotate(values, num_padded);
    float largest[kPanelColumns] = {}, inverses[kPanelColumns], scales[kPanelColumns];
    for (int64_t input = 0; input < num_padded; ++input)
        for (int i = 0; i < kPanelColumns; ++i) {
            const float size = std::fabs(values[input * kPanelColumns + i]);
            // What is not a number stays: it must show in the scale.
            if (size > largest[i] || size != size) largest[i] = size;
        }
    for (int i = 0; i < kPanelColumns; ++i) {
        inverses[i] = largest[i] > 0.0f ? kLargestInt8 / largest[i] : 0.0f;
        scales[i] = largest[i] * (kRotationScale / kLargestInt8);
    }
    uint8_t* quads = (uint8_t*)to;
    for (int64_t first = 0; first < num_padded; first += 4)
        for (int i = 0; i < kPanelColumns; ++i)
            for (int input = 0; input < 4; ++input) {
                const float value = values[(first + input) * kPanelColumns + i] * inverses[i];
                *quads++ = (uint8_t)(128u + (uint32_t)rounded(value));
            }
    std::memcpy(quads, scales, sizeof(scales));
}

// Returns panels for these columns, without memory.
Panels layout_of(ValueType type, int64_t num_columns, int64_t num_inputs) {
    const bool is_int8 = type == ValueType::kInt8;
    // Rows of activations are padded, to whole vectors or to whole blocks of the rotation, and so are weights.
    const int64_t num_groups =
        is_int8 ? rounded_up(num_inputs, kRotatedInputs) / 4 : rounded_up(num_inputs, kPanelColumns) / 2;
    const int64_t scale_bytes = is_int8 ? kPanelColumns * (int64_t)sizeof(float) : 0;
    return {nullptr, (int)(num_columns / kPanelColumns), (int)num_groups,
            num_groups * kPanelColumns * 4 + scale_bytes, type};
}

}  // namespace

int padded_inputs(const Panels& panels) { return panels.num_groups * (panels.type == ValueType::kInt8 ? 4 : 2); }

Panels pack_weight(ValueType type, const Columns& columns, int64_t num_inputs, int num_threads, Arena& arena) {
    // More products of 255 and 127 than these could be more than a sum holds.
    if (type == ValueType::kInt8 && num_inputs > 65'536)
        throw std::invalid_argument("A weight in int8 has at most 65,536 inputs.");
    Panels panels = layout_of(type, (int64_t)columns.size(), num_inputs);
    char* data = static_cast<char*>(arena.allocate((size_t)(panels.num_panels * panels.panel_bytes)));
    panels.data = data;
    // Threads that live for this weight alone: to start them takes a fraction of the time that packing takes.
    Pool pool(num_threads);
    pool.run([&](int) {
        std::vector<float> values(type == ValueType::kInt8 ? (size_t)padded_inputs(panels) * kPanelColumns : 0);
        for (int64_t panel; (panel = pool.next_number()) < panels.num_panels;) {
            char* to = data + panel * panels.panel_bytes;
            const bf16* const* of_panel = columns.data() + (size_t)panel * kPanelColumns;
            if (type == ValueType::kInt8)
                pack_quads(to, of_panel, num_inputs, padded_inputs(panels), values.data());
            else
                pack_pairs(to, of_panel, num_inputs);
        }
    });
    return panels;
}

}  // namespace octavo
