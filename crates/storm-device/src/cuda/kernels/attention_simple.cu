// Attention without tensor cores: any head size up to 256, any storage, all sums in f32. For f32
// training and for sizes that attention.cu does not take. CPU reference: cpu/kernels/attention.
//
// Compile with -DELEMENT=float or -DELEMENT=bf16. `causal` is 0 or 1, `segments` may be
// null; a query sees `window` keys at most, its own included, or all of them if there are fewer. Deterministic, with the same order of sums as attention.cu: keys ascending, and for dK and
// dV (query head of the group, query) ascending.
//
// A block has 16 rows of its own (queries, or keys in attention_simple_grad_kv), and goes over the
// other side 16 at a time: a thread per score, then a sixteenth of a row of the result per thread.
#include "attention_common.cuh"

namespace {

constexpr int TILE = 16, THREADS = TILE * TILE, HEAD_DIM_MAX = 256;
// Columns of a row of the result that a thread adds up: lane, lane + 16, …
constexpr int COLUMNS = HEAD_DIM_MAX / TILE;

[[maybe_unused]] __device__ __forceinline__ void store(float *to, float x) { *to = x; }
[[maybe_unused]] __device__ __forceinline__ void store(bf16 *to, float x) { *to = from_float<bf16>(x); }

// Rows in shared memory have one float more, so that a column falls into different banks.
__device__ __forceinline__ void load_rows(float *tile, const ELEMENT *from, size_t stride, int valid_rows, int dim) {
    for (int i = threadIdx.x; i < TILE * dim; i += THREADS) {
        const int row = i / dim, column = i % dim;
        tile[row * (dim + 1) + column] = row < valid_rows ? to_float(from[row * stride + column]) : 0.0f;
    }
}

__device__ __forceinline__ void store_row(ELEMENT *to, const float (&sums)[COLUMNS], float factor, int lane, int dim) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (lane + i * TILE < dim) store(to + lane + i * TILE, sums[i] * factor);
}

__device__ __forceinline__ float dot(const float *a, const float *b, int dim) {
    float sum = 0.0f;
    for (int i = 0; i < dim; i++) sum = fmaf(a[i], b[i], sum);
    return sum;
}

// sums += Σ_j weights[j] · rows[j].
__device__ __forceinline__ void accumulate(float (&sums)[COLUMNS], const float *weights, const float *rows, int lane,
                                           int dim) {
    for (int j = 0; j < TILE; j++) {
        const float weight = weights[j];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
            if (lane + i * TILE < dim) sums[i] = fmaf(weight, rows[j * (dim + 1) + lane + i * TILE], sums[i]);
    }
}

// Over the 16 lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
    for (int distance = TILE / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
    return x;
}

__device__ __forceinline__ float row_sum(float x) {
    for (int distance = TILE / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
    return x;
}

__device__ __forceinline__ bool visible(int query, int key, int seq, int causal, int window, const int *ids) {
    if (query >= seq || key >= seq || (causal && key > query) || query - key >= window) return false;
    return ids == nullptr || ids[query] == ids[key];
}

} // namespace

// y and log_sum_exp (natural logarithm).
//
// Grid (B·Hq, ⌈T/16⌉), block 256, dynamic shared memory (3·16·(D + 1) + 256)·4 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_simple_forward(const ELEMENT *__restrict__ qkv, const int *__restrict__ segments, ELEMENT *__restrict__ y,
                             float *__restrict__ log_sum_exp, int seq, int q_heads, int kv_heads, int dim, int causal,
                             int window, float scale) {
    extern __shared__ float shared_floats[];
    const int tile_size = TILE * (dim + 1), lane = threadIdx.x % TILE, own = threadIdx.x / TILE;
    float *q_rows = shared_floats, *k_rows = q_rows + tile_size, *v_rows = k_rows + tile_size;
    float *weights = v_rows + tile_size; // (query, key)
    const int batch = blockIdx.x / q_heads, head = blockIdx.x % q_heads, kv_head = head / (q_heads / kv_heads);
    const int q_begin = (gridDim.y - 1 - blockIdx.y) * TILE, query = q_begin + own;
    const size_t stride = static_cast<size_t>(q_heads + 2 * kv_heads) * dim;
    const ELEMENT *sequence = qkv + static_cast<size_t>(batch) * seq * stride;
    const ELEMENT *keys = sequence + (q_heads + kv_head) * dim, *values = keys + kv_heads * dim;
    const int *ids = segments == nullptr ? nullptr : segments + static_cast<size_t>(batch) * seq;

    load_rows(q_rows, sequence + q_begin * stride + head * dim, stride, seq - q_begin, dim);
    float sums[COLUMNS] = {}, maximum = MINUS_INFINITY, total = 0.0f;
    const int key_end = causal ? min(seq, q_begin + TILE) : seq;
    for (int key_begin = max(0, q_begin + 1 - window) / TILE * TILE; key_begin < key_end; key_begin += TILE) {
        __syncthreads();
        load_rows(k_rows, keys + key_begin * stride, stride, seq - key_begin, dim);
        load_rows(v_rows, values + key_begin * stride, stride, seq - key_begin, dim);
        __syncthreads();
        const float product = dot(q_rows + own * (dim + 1), k_rows + lane * (dim + 1), dim) * scale;
        const float score = visible(query, key_begin + lane, seq, causal, window, ids) ? product : MINUS_INFINITY;
        const float high = fmaxf(maximum, row_max(score));
        const float offset = high == MINUS_INFINITY ? 0.0f : high;
        const float rescale = expf(maximum - offset), weight = expf(score - offset);
        maximum = high;
        total = total * rescale + row_sum(weight);
        weights[threadIdx.x] = weight;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) sums[i] *= rescale;
        accumulate(sums, weights + own * TILE, v_rows, lane, dim);
    }
    if (query < seq) {
        if (lane == 0) log_sum_exp[static_cast<size_t>(blockIdx.x) * seq + query] = maximum + logf(total);
        store_row(y + ((static_cast<size_t>(batch) * seq + query) * q_heads + head) * dim, sums, 1.0f / total, lane, dim);
    }
}

// delta = Σ dy·y of every query and head.
//
// Grid ⌈B·T·Hq / 16⌉, block 256, no dynamic shared memory. `rows` is B·T·Hq.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_simple_delta(const ELEMENT *__restrict__ dy, const ELEMENT *__restrict__ y, float *__restrict__ delta,
                           long long rows, int seq, int q_heads, int dim) {
    const int lane = threadIdx.x % TILE;
    const long long row = static_cast<long long>(blockIdx.x) * TILE + threadIdx.x / TILE;
    float sum = 0.0f;
    if (row < rows)
        for (int i = lane; i < dim; i += TILE) sum = fmaf(to_float(dy[row * dim + i]), to_float(y[row * dim + i]), sum);
    sum = row_sum(sum);
    if (row < rows && lane == 0) {
        const long long token = row / q_heads, head = row % q_heads;
        delta[(token / seq * q_heads + head) * seq + token % seq] = sum;
    }
}

// The key and value parts of d_qkv.
//
// Grid (B·Hkv, ⌈T/16⌉), block 256, dynamic shared memory (4·16·(D + 1) + 512)·4 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_simple_grad_kv(const ELEMENT *__restrict__ dy, const ELEMENT *__restrict__ qkv,
                             const float *__restrict__ log_sum_exp, const float *__restrict__ delta,
                             const int *__restrict__ segments, ELEMENT *__restrict__ d_qkv, int seq, int q_heads,
                             int kv_heads, int dim, int causal, int window, float scale) {
    extern __shared__ float shared_floats[];
    const int tile_size = TILE * (dim + 1), lane = threadIdx.x % TILE, own = threadIdx.x / TILE;
    float *k_rows = shared_floats, *v_rows = k_rows + tile_size, *q_rows = v_rows + tile_size;
    float *dy_rows = q_rows + tile_size;
    float *weights = dy_rows + tile_size, *d_scores = weights + THREADS; // (key, query)
    const int group = q_heads / kv_heads, batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
    const int key_begin = blockIdx.y * TILE, key = key_begin + own;
    const size_t stride = static_cast<size_t>(q_heads + 2 * kv_heads) * dim, y_stride = static_cast<size_t>(q_heads) * dim;
    const ELEMENT *sequence = qkv + static_cast<size_t>(batch) * seq * stride;
    const ELEMENT *keys = sequence + key_begin * stride + (q_heads + kv_head) * dim;
    const int *ids = segments == nullptr ? nullptr : segments + static_cast<size_t>(batch) * seq;

    load_rows(k_rows, keys, stride, seq - key_begin, dim);
    load_rows(v_rows, keys + kv_heads * dim, stride, seq - key_begin, dim);
    float d_keys[COLUMNS] = {}, d_values[COLUMNS] = {};
    const int q_end = window < seq ? min(seq, key_begin + TILE - 1 + window) : seq;
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const size_t row = (static_cast<size_t>(batch) * q_heads + head) * seq;
        for (int q_begin = causal ? key_begin : 0; q_begin < q_end; q_begin += TILE) {
            __syncthreads();
            load_rows(q_rows, sequence + q_begin * stride + head * dim, stride, seq - q_begin, dim);
            load_rows(dy_rows, dy + (static_cast<size_t>(batch) * seq + q_begin) * y_stride + head * dim, y_stride,
                      seq - q_begin, dim);
            __syncthreads();
            const int query = q_begin + lane;
            const float product = dot(k_rows + own * (dim + 1), q_rows + lane * (dim + 1), dim) * scale;
            const float d_weight = dot(v_rows + own * (dim + 1), dy_rows + lane * (dim + 1), dim);
            float weight = 0.0f, d_score = 0.0f;
            if (visible(query, key, seq, causal, window, ids)) {
                weight = expf(product - log_sum_exp[row + query]);
                d_score = weight * (d_weight - delta[row + query]);
            }
            weights[threadIdx.x] = weight;
            d_scores[threadIdx.x] = d_score;
            __syncwarp();
            accumulate(d_values, weights + own * TILE, dy_rows, lane, dim);
            accumulate(d_keys, d_scores + own * TILE, q_rows, lane, dim);
        }
    }
    if (key < seq) {
        ELEMENT *to = d_qkv + (static_cast<size_t>(batch) * seq + key) * stride + (q_heads + kv_head) * dim;
        store_row(to, d_keys, scale, lane, dim);
        store_row(to + kv_heads * dim, d_values, 1.0f, lane, dim);
    }
}

// The query part of d_qkv.
//
// Grid (B·Hq, ⌈T/16⌉), block 256, dynamic shared memory (4·16·(D + 1) + 256)·4 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_simple_grad_q(const ELEMENT *__restrict__ dy, const ELEMENT *__restrict__ qkv,
                            const float *__restrict__ log_sum_exp, const float *__restrict__ delta,
                            const int *__restrict__ segments, ELEMENT *__restrict__ d_qkv, int seq, int q_heads,
                            int kv_heads, int dim, int causal, int window, float scale) {
    extern __shared__ float shared_floats[];
    const int tile_size = TILE * (dim + 1), lane = threadIdx.x % TILE, own = threadIdx.x / TILE;
    float *q_rows = shared_floats, *dy_rows = q_rows + tile_size, *k_rows = dy_rows + tile_size;
    float *v_rows = k_rows + tile_size;
    float *d_scores = v_rows + tile_size; // (query, key)
    const int batch = blockIdx.x / q_heads, head = blockIdx.x % q_heads, kv_head = head / (q_heads / kv_heads);
    const int q_begin = (gridDim.y - 1 - blockIdx.y) * TILE, query = q_begin + own;
    const size_t stride = static_cast<size_t>(q_heads + 2 * kv_heads) * dim, y_stride = static_cast<size_t>(q_heads) * dim;
    const ELEMENT *sequence = qkv + static_cast<size_t>(batch) * seq * stride;
    const ELEMENT *keys = sequence + (q_heads + kv_head) * dim, *values = keys + kv_heads * dim;
    const int *ids = segments == nullptr ? nullptr : segments + static_cast<size_t>(batch) * seq;

    load_rows(q_rows, sequence + q_begin * stride + head * dim, stride, seq - q_begin, dim);
    load_rows(dy_rows, dy + (static_cast<size_t>(batch) * seq + q_begin) * y_stride + head * dim, y_stride, seq - q_begin,
              dim);
    const size_t place = static_cast<size_t>(blockIdx.x) * seq + min(query, seq - 1);
    const float lse = log_sum_exp[place], row_delta = delta[place];
    float d_query[COLUMNS] = {};
    const int key_end = causal ? min(seq, q_begin + TILE) : seq;
    for (int key_begin = max(0, q_begin + 1 - window) / TILE * TILE; key_begin < key_end; key_begin += TILE) {
        __syncthreads();
        load_rows(k_rows, keys + key_begin * stride, stride, seq - key_begin, dim);
        load_rows(v_rows, values + key_begin * stride, stride, seq - key_begin, dim);
        __syncthreads();
        const float product = dot(q_rows + own * (dim + 1), k_rows + lane * (dim + 1), dim) * scale;
        const float d_weight = dot(dy_rows + own * (dim + 1), v_rows + lane * (dim + 1), dim);
        const bool seen = visible(query, key_begin + lane, seq, causal, window, ids);
        d_scores[threadIdx.x] = seen ? expf(product - lse) * (d_weight - row_delta) : 0.0f;
        __syncwarp();
        accumulate(d_query, d_scores + own * TILE, k_rows, lane, dim);
    }
    if (query < seq)
        store_row(d_qkv + (static_cast<size_t>(batch) * seq + query) * stride + head * dim, d_query, scale, lane, dim);
}
