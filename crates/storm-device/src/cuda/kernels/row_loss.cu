// Losses of rows whose targets are numbers. Storage type: E.
#include "activations.cuh"

/// A warp per row.
extern "C" __global__ void squared_error(const E* x, const E* target, float* out, i64 rows, i64 width) {
    const i64 row = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    if (row >= rows) return;
    float sum = 0.0f;
    for (i64 i = threadIdx.x % WARP; i < width; i += WARP) {
        const float off = to_float(x[row * width + i]) - to_float(target[row * width + i]);
        sum += off * off;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) out[row] = 0.5f * sum;
}

/// A thread per element.
extern "C" __global__ void squared_error_grad(const float* d_row_loss, const E* x, const E* target, E* out,
                                              i64 elements, i64 width) {
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= elements) return;
    out[i] = from_float<E>(d_row_loss[i / width] * (to_float(x[i]) - to_float(target[i])));
}

/// A thread per row of mean, log variance and logit.
extern "C" __global__ void outcome_loss(const E* heads, const float* change, const float* accepted, float* out,
                                        i64 rows) {
    const i64 row = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const float mean = to_float(heads[3 * row]), log_variance = to_float(heads[3 * row + 1]);
    const float logit = to_float(heads[3 * row + 2]), off = change[row] - mean;
    const float of_change = 0.5f * (log_variance + off * off * expf(-log_variance));
    // ln(1 + e^x), without overflow.
    const float softplus = fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit)));
    out[row] = of_change + (softplus - accepted[row] * logit);
}

/// A thread per row.
extern "C" __global__ void outcome_loss_grad(const float* d_row_loss, const E* heads, const float* change,
                                             const float* accepted, E* out, i64 rows) {
    const i64 row = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const float mean = to_float(heads[3 * row]), log_variance = to_float(heads[3 * row + 1]);
    const float off = change[row] - mean, precision = expf(-log_variance), d = d_row_loss[row];
    out[3 * row] = from_float<E>(d * (-off * precision));
    out[3 * row + 1] = from_float<E>(d * (0.5f * (1.0f - off * off * precision)));
    out[3 * row + 2] = from_float<E>(d * (sigmoid(to_float(heads[3 * row + 2])) - accepted[row]));
}
