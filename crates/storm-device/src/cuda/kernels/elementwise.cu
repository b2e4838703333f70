// Ops on single elements, and the gated unit on pairs of halves. Storage type: E.
#include "activations.cuh"
#include "common.cuh"

/// Packs per thread of the flat kernels: loads in flight.
constexpr int PACKS = 2;

/// First element of pack `k` of this thread.
__device__ inline i64 place(int k) {
    return ((i64(blockIdx.x) * PACKS + k) * blockDim.x + threadIdx.x) * PACK;
}

template <class F> __device__ inline void unary(const E* x, E* out, i64 elements, F f) {
    const Row<const E> from = flat(x, elements);
    const Row<E> to = flat(out, elements);
    Pack<E> packs[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++) packs[k] = read_pack(from, place(k));
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        float values[PACK];
        unpack(packs[k], values);
#pragma unroll
        for (int j = 0; j < PACK; j++) values[j] = f(values[j]);
        write8(to, place(k), values);
    }
}

/// `out` may be one of the operands: a thread reads its elements before it writes them.
template <class F>
__device__ inline void binary(const E* a, const E* b, E* out, i64 elements, F f) {
    const Row<const E> from_a = flat(a, elements), from_b = flat(b, elements);
    const Row<E> to = flat(out, elements);
    Pack<E> packs_a[PACKS], packs_b[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        packs_a[k] = read_pack(from_a, place(k));
        packs_b[k] = read_pack(from_b, place(k));
    }
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        float x[PACK], y[PACK];
        unpack(packs_a[k], x);
        unpack(packs_b[k], y);
#pragma unroll
        for (int j = 0; j < PACK; j++) x[j] = f(x[j], y[j]);
        write8(to, place(k), x);
    }
}

// ---- kernels over all elements; gradients overwrite `x`, sums `sum` ---------------------------

extern "C" __global__ void add(const E* a, const E* b, E* out, i64 elements) {
    binary(a, b, out, elements, [](float x, float y) { return x + y; });
}

extern "C" __global__ void accumulate(const E* x, E* sum, i64 elements) {
    binary(x, sum, sum, elements, [](float x, float sum) { return sum + x; });
}

/// The sum is wider than what is added.
extern "C" __global__ void accumulate_in_f32(const E* x, float* sum, i64 elements) {
    const Row<const E> from = flat(x, elements);
    const Row<const float> before = flat((const float*)sum, elements);
    const Row<float> to = flat(sum, elements);
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        float added[PACK], sums[PACK];
        read8(from, place(k), added);
        read8(before, place(k), sums);
#pragma unroll
        for (int j = 0; j < PACK; j++) sums[j] = sums[j] + added[j];
        write8(to, place(k), sums);
    }
}

extern "C" __global__ void moving_average(const E* x, E* average, i64 elements, float momentum) {
    binary(x, average, average, elements, [momentum](float x, float average) {
        return fmaf(momentum, x - average, average);
    });
}

extern "C" __global__ void mul(const E* a, const E* b, E* out, i64 elements) {
    binary(a, b, out, elements, [](float x, float y) { return x * y; });
}

extern "C" __global__ void scale(const E* x, E* out, i64 elements, float factor) {
    unary(x, out, elements, [factor](float x) { return x * factor; });
}

extern "C" __global__ void gelu_tanh(const E* x, E* out, i64 elements) {
    unary(x, out, elements, [](float x) { return gelu_tanh_value(x); });
}

extern "C" __global__ void gelu(const E* x, E* out, i64 elements) {
    unary(x, out, elements, [](float x) { return gelu_value(x); });
}

/// NaN stays NaN.
extern "C" __global__ void relu(const E* x, E* out, i64 elements) {
    unary(x, out, elements, [](float x) { return x < 0.0f ? 0.0f : x; });
}

extern "C" __global__ void silu(const E* x, E* out, i64 elements) {
    unary(x, out, elements, [](float x) { return x * sigmoid(x); });
}

extern "C" __global__ void gelu_tanh_grad(const E* dy, E* x, i64 elements) {
    binary(dy, x, x, elements, [](float dy, float x) { return dy * gelu_tanh_slope(x); });
}

extern "C" __global__ void gelu_grad(const E* dy, E* x, i64 elements) {
    binary(dy, x, x, elements, [](float dy, float x) { return dy * gelu_slope(x); });
}

extern "C" __global__ void relu_grad(const E* dy, E* x, i64 elements) {
    binary(dy, x, x, elements, [](float dy, float x) { return x <= 0.0f ? 0.0f : dy; });
}

extern "C" __global__ void silu_grad(const E* dy, E* x, i64 elements) {
    binary(dy, x, x, elements, [](float dy, float x) { return dy * silu_slope(x, sigmoid(x)); });
}

extern "C" __global__ void hyperbolic_tangent(const E* x, E* out, i64 elements) {
    unary(x, out, elements, [](float x) { return tanhf(x); });
}

extern "C" __global__ void hyperbolic_tangent_grad(const E* dy, const E* y, E* out, i64 elements) {
    binary(dy, y, out, elements, [](float dy, float y) { return dy * (1.0f - y * y); });
}

// ---- gated unit: grid (rows, packs of a row in blocks) ----------------------------------------

/// gate_up (rows, 2·width), out (rows, width).
template <class F>
__device__ inline void gated(const E* gate_up, E* out, i64 width) {
    take_turn();
    const i64 row = blockIdx.x, i = (i64(blockIdx.y) * blockDim.x + threadIdx.x) * PACK;
    if (i >= width) return;
    const bool aligned = width % PACK == 0;
    const Row<const E> gate_row = {gate_up + 2 * row * width, width, aligned};
    const Row<const E> up_row = {gate_row.start + width, width, aligned};
    const Pack<E> gate_pack = read_pack(gate_row, i), up_pack = read_pack(up_row, i);
    float gate[PACK], up[PACK];
    unpack(gate_pack, gate);
    unpack(up_pack, up);
#pragma unroll
    for (int j = 0; j < PACK; j++) gate[j] = F::at(gate[j]).value * up[j];
    write8(row_of(out, row, width), i, gate);
}

/// Gradient of the gated unit. `RECOMPUTES`: `dy` is overwritten by what the unit made.
template <class F, bool RECOMPUTES>
__device__ inline void gated_backward(const E* dy, E* output, E* gate_up, i64 width) {
    const i64 row = blockIdx.x, i = (i64(blockIdx.y) * blockDim.x + threadIdx.x) * PACK;
    if (i >= width) return;
    const bool aligned = width % PACK == 0;
    E* const start = gate_up + 2 * row * width;
    const Pack<E> dy_pack = read_pack(row_of(dy, row, width), i);
    const Pack<E> gate_pack = read_pack(Row<const E>{start, width, aligned}, i);
    const Pack<E> up_pack = read_pack(Row<const E>{start + width, width, aligned}, i);
    float d[PACK], gate[PACK], up[PACK];
    unpack(dy_pack, d);
    unpack(gate_pack, gate);
    unpack(up_pack, up);
    float d_gate[PACK], d_up[PACK];
    gated_gradients<F>(d, gate, up, d_gate, d_up);
    write8(Row<E>{start, width, aligned}, i, d_gate);
    write8(Row<E>{start + width, width, aligned}, i, d_up);
    if (RECOMPUTES) write8(row_of(output, row, width), i, gate);
}

/// The unit; its gradient from dy (rows, width), over gate_up (rows, 2·width); and both, where `dy` becomes f(gate) · up,
/// with the bits that the unit gives.
#define GATED_KERNELS(name, F)                                                                \
    extern "C" __global__ void name##_gated(const E* gate_up, E* out, i64 width) {            \
        gated<F>(gate_up, out, width);                                                        \
    }                                                                                         \
    extern "C" __global__ void name##_gated_grad(const E* dy, E* gate_up, i64 width) {        \
        gated_backward<F, false>(dy, nullptr, gate_up, width);                                \
    }                                                                                         \
    extern "C" __global__ void name##_gated_grad_and_output(E* dy, E* gate_up, i64 width) {   \
        gated_backward<F, true>(dy, dy, gate_up, width);                                      \
    }

GATED_KERNELS(silu, SiluOf)
GATED_KERNELS(gelu, GeluOf)
GATED_KERNELS(gelu_tanh, GeluTanhOf)
GATED_KERNELS(relu, ReluOf)
