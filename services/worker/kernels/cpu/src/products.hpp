// Products of rows with packed weights, divided among threads.
//
// Owns which thread computes what, in which order, and how weights are fetched. It must not know what a weight is for.
#pragma once

#include "int8_rows.hpp"
#include "plan.hpp"
#include "products_common.hpp"
#include "simd.hpp"
#if defined(OCTAVO_AMX)
#include "amx_products.hpp"
#endif

namespace octavo {
namespace {

#if !defined(OCTAVO_AMX)
constexpr int kFewRows = kMaxRows;

// Rows whose inputs stay in the second-level cache while panels go by.
constexpr int kChunkRows = 192;

// Computes ROWS rows of NUM_PANELS adjacent panels and hands each row's 32 columns on as two vectors.
template <class Groups, int ROWS, int NUM_PANELS, bool PREFETCH, class Epilogue>
OCTAVO_INLINE void multiply_tile(const Panels& weight, int panel, const Inputs& inputs, int first_row,
                                 Epilogue& epilogue, ptrdiff_t prefetch_distance) {
    using Sum = typename Groups::Sum;
    const char* base = weight.data + panel * weight.panel_bytes;
    const char* rows = inputs.data + first_row * inputs.stride;
    Sum sums[2 * ROWS * NUM_PANELS];
    if constexpr (kIsWide) {
        const char* columns[2 * NUM_PANELS];
        for (int j = 0; j < 2 * NUM_PANELS; ++j) columns[j] = base + (j / 2) * weight.panel_bytes + (j % 2) * 64;
        products<Groups, ROWS, 2 * NUM_PANELS, PREFETCH>(sums, rows, inputs.stride, columns, 128, weight.num_groups,
                                                         prefetch_distance);
    } else {
        Sum halves[2][ROWS];
        for (int half = 0; half < 2; ++half)
            products<Groups, ROWS, 1, PREFETCH>(halves[half], rows, inputs.stride, {base + half * 64}, 128,
                                                weight.num_groups, prefetch_distance);
        for (int i = 0; i < 2 * ROWS; ++i) sums[i] = halves[i % 2][i / 2];
    }
    for (int i = 0; i < ROWS; ++i)
        for (int p = 0; p < NUM_PANELS; ++p)
            epilogue(first_row + i, panel + p, sums[2 * (i * NUM_PANELS + p)], sums[2 * (i * NUM_PANELS + p) + 1]);
}

// A few rows: the weight is read once from memory, which is what takes the time.
template <class Groups, class Epilogue>
OCTAVO_INLINE void multiply_few_rows(const Panels& weight, Range panels, const Inputs& inputs, int num_rows,
                                     Epilogue& epilogue) {
    with_rows_up_to<kMaxRows>(num_rows, [&](auto size) __attribute__((always_inline)) {
        constexpr int kRows = decltype(size)::value;
        constexpr int kPanels = kIsWide ? columns_at_once(kRows) / 2 : 1;
        const ptrdiff_t ahead = kRows == 1 ? 2048 : weight.panel_bytes * kPanels;
        int panel = panels.first;
        for (; panel + kPanels <= panels.end; panel += kPanels)
            multiply_tile<Groups, kRows, kPanels, true>(weight, panel, inputs, 0, epilogue, ahead);
        for (; panel < panels.end; ++panel)
            multiply_tile<Groups, kRows, 1, true>(weight, panel, inputs, 0, epilogue, ahead);
    });
}

template <class Groups, class Epilogue>
OCTAVO_INLINE void multiply_rows(const Panels& weight, Range panels, const Inputs& inputs, Range rows,
                                 Epilogue& epilogue) {
    for (int panel = panels.first; panel < panels.end; ++panel)
        for_each_tile(rows.end - rows.first, [&](int first, auto size) __attribute__((always_inline)) {
            constexpr int kRows = decltype(size)::value;
            if (first == 0)
                multiply_tile<Groups, kRows, 1, true>(weight, panel, inputs, rows.first, epilogue,
                                                      weight.panel_bytes);
            else
                multiply_tile<Groups, kRows, 1, false>(weight, panel, inputs, rows.first + first, epilogue, 0);
        });
}

OCTAVO_INLINE int rows_of_chunk(ptrdiff_t) { return kChunkRows; }
OCTAVO_INLINE void begin_products() {}
OCTAVO_INLINE void end_products() {}
#endif

template <class Groups, class Epilogue>
void multiply_groups(const Step& step, int phase, int thread, const Panels& weight, const Inputs& inputs,
                     int num_rows, Epilogue epilogue) {
    begin_products();
    const int chunk_rows = rows_of_chunk(inputs.stride);
    if (num_rows <= chunk_rows) {
        const Range panels = share_of(weight.num_panels, thread, step.team->num_threads());
        if (num_rows <= kFewRows)
            multiply_few_rows<Groups>(weight, panels, inputs, num_rows, epilogue);
        else
            multiply_rows<Groups>(weight, panels, inputs, {0, num_rows}, epilogue);
        return;
    }
    const int num_chunks = (num_rows + chunk_rows - 1) / chunk_rows;
    const int num_groups = (weight.num_panels + kChunkPanels - 1) / kChunkPanels;
    for (int item; (item = step.team->next_item(phase)) < num_chunks * num_groups;) {
        const int group = item % num_groups;
        const Range panels = {group * kChunkPanels, at_most((group + 1) * kChunkPanels, weight.num_panels)};
        const int first_row = item / num_groups * chunk_rows;
        multiply_rows<Groups>(weight, panels, inputs, {first_row, at_most(first_row + chunk_rows, num_rows)},
                              epilogue);
    }
}

// Maps num_rows rows of `stride` bfloat16 values, or their int8 values in the workspace where the weight is int8;
// `epilogue(row, panel, left, right)` takes what comes out.
template <class Epilogue>
void multiply(const Step& step, int phase, int thread, const Panels& weight, const bf16* inputs, int stride,
              int num_rows, Epilogue epilogue) {
    if (weight.type == ValueType::kInt8) {
        const Inputs quantized = quantized_inputs(step, weight);
        multiply_groups<Int8Quads>(step, phase, thread, weight, quantized, num_rows,
                                   Scaled<Epilogue>{weight, quantized, epilogue});
    } else {
        const Inputs rows = {(const char*)inputs, stride * (ptrdiff_t)sizeof(bf16)};
        multiply_groups<Bfloat16Pairs>(step, phase, thread, weight, rows, num_rows, epilogue);
    }
}

}  // namespace
}  // namespace octavo
