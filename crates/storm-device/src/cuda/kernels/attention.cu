// Attention on tensor cores (mma.sync, sm_80 and up), bf16 storage, f32 accumulation, forward and
// backward: no tensor of T × T exists at any time. CPU reference: cpu/kernels/attention.
//
// Compile with -DHEAD_DIM=64|128, -DCAUSAL=0|1, -DSEGMENTS=0|1, and -DWINDOW=1 for a window. With SEGMENTS=0 the `segments`
// arguments are ignored and may be null. `scale` must be positive. qkv, y, dy and d_qkv must be
// 16-byte aligned.
//
// Deterministic: every sum has one fixed order. Forward and dQ go over keys ascending; dK and dV
// over (query head of the group, query) ascending. attention_grad_kv writes the key and value parts
// of d_qkv, attention_grad_q the query part; together all of it. Both need attention_delta before.
//
// Blocks with the most work come first, across all heads, so that the last blocks are short.
#include "attention_common.cuh"

namespace {

constexpr int D = HEAD_DIM;
static_assert(D == 64 || D == 128, "head size");
constexpr int THREADS = 128;
// Output columns of an accumulator, and steps of a product over D.
constexpr int D_TILES = D / 8, D_STEPS = D / 16;
constexpr int ROW_BYTES = D * 2;

// Scores of 32 × 8·N: rows of one tile by rows of another, both (·, D).
template <int N>
__device__ __forceinline__ void scores_of(float (&scores)[2][N][4], unsigned rows, unsigned columns) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[m][n][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < D_STEPS; k++) {
        unsigned a[2][4];
        matrices_load(a[0], rows ^ (k << 5));
        matrices_load(a[1], (rows ^ (k << 5)) + 16 * ROW_BYTES);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned b[4];
            matrices_load(b, (columns ^ (k << 5)) + n * 8 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                multiply_add(scores[m][n], a[m], b[0], b[1]);
                multiply_add(scores[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// sums (32 × 8·N) += a (32 × 16) · 16 rows of a tile, from the columns that `values` points to.
template <int N>
__device__ __forceinline__ void accumulate(float (&sums)[2][N][4], const unsigned (&a)[2][4], unsigned values) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        unsigned b[4];
        matrices_load_transposed(b, values ^ (n << 4));
#pragma unroll
        for (int m = 0; m < 2; m++) {
            multiply_add(sums[m][n], a[m], b[0], b[1]);
            multiply_add(sums[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

template <int N> __device__ __forceinline__ void clear(float (&sums)[2][N][4]) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
}

// Starts copying the segment numbers of a tile's tokens, zeros past the end.
template <int ROWS> __device__ __forceinline__ void ids_load(const int *to, const int *ids, int first, int seq) {
    const int token = first + threadIdx.x;
    if (threadIdx.x < ROWS) copy_4(shared_address(to + threadIdx.x), ids + min(token, seq - 1), token < seq);
}

// Whether 32 rows and COLUMNS columns belong to several segments. Called by a whole warp.
template <int COLUMNS> __device__ __forceinline__ bool mixed(const int *row_ids, const int *column_ids) {
    const int lane = threadIdx.x % 32, first = row_ids[0];
    bool differs = row_ids[lane] != first;
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 32) differs = differs || column_ids[i + lane] != first;
    return __any_sync(0xffffffff, differs);
}

// Hides (−∞) the scores of 32 × 8·N that do not count: keys after their query (CAUSAL), keys before its
// window (WINDOW), keys past the end, keys of another segment. Rows past the end may get any value: nothing of them is kept. The
// thread's own rows are row + 8·r, its columns column + 8·n + {0, 1}; `row_ids` and `column_ids`, in
// shared memory, are their segments.
enum class Rows { Queries, Keys };

template <Rows ROWS, int N>
__device__ __forceinline__ void hide(float (&scores)[2][N][4], int row, int column, int seq, const int *row_ids,
                                     const int *column_ids WITH_WINDOW) {
    const int limit = row - column, left = seq - column;
    int own_ids[4];
    // Volatile: read again for every tile, rather than kept in registers that are short.
#pragma unroll
    for (int r = 0; r < 4; r++) own_ids[r] = SEGMENTS ? static_cast<const volatile int *>(row_ids)[8 * r] : 0;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int2 pair = SEGMENTS ? *reinterpret_cast<const int2 *>(column_ids + n * 8) : make_int2(0, 0);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int place = n * 8 + c, column_id = c == 0 ? pair.x : pair.y;
#pragma unroll
            for (int r = 0; r < 4; r++) {
                bool seen = ROWS == Rows::Keys || CAUSAL || place < left;
                if (CAUSAL) seen = ROWS == Rows::Queries ? place - 8 * r <= limit : place - 8 * r >= limit;
                if (WINDOW)
                    seen = seen && (ROWS == Rows::Queries ? place - 8 * r > limit - window : place - 8 * r < limit + window);
                if (SEGMENTS) seen = seen && column_id == own_ids[r];
                float &score = scores[r / 2][n][r % 2 * 2 + c];
                score = seen ? score : MINUS_INFINITY;
            }
        }
    }
}

} // namespace

// ---- forward ------------------------------------------------------------------------------------

constexpr int FORWARD_QUERIES = 128, FORWARD_KEYS = SEGMENTS ? 32 : 64;

// y and log_sum_exp (natural logarithm).
//
// Grid (B·Hq, ⌈T/128⌉), block 128, dynamic shared memory (128 + 4·K)·D·2 + 2048 bytes with K = 64: 100352
// for D = 128, 51200 for D = 64. With SEGMENTS, K = 32 and 768 bytes more: 68352 and 35584. Each warp
// has 32 queries.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_forward(const bf16 *__restrict__ qkv, const int *__restrict__ segments, bf16 *__restrict__ y,
                      float *__restrict__ log_sum_exp, int seq, int q_heads, int kv_heads, float scale WITH_WINDOW) {
    extern __shared__ __align__(1024) char shared[];
    constexpr int KEYS = FORWARD_KEYS, N = KEYS / 8, TILE = KEYS * ROW_BYTES;
    const unsigned q_tile = shared_address(shared);
    const unsigned k_tiles = q_tile + FORWARD_QUERIES * ROW_BYTES, v_tiles = k_tiles + 2 * TILE;
    // Each thread's part of the sums of its four rows: it has no registers left for them.
    float4 *total = reinterpret_cast<float4 *>(shared + FORWARD_QUERIES * ROW_BYTES + 4 * TILE) + threadIdx.x;
    const int *key_ids = reinterpret_cast<const int *>(shared + FORWARD_QUERIES * ROW_BYTES + 4 * TILE + 2048); // [buffer][key]
    const int *query_ids = key_ids + 2 * KEYS;

    const int batch = blockIdx.x / q_heads, head = blockIdx.x % q_heads;
    const int kv_head = head / (q_heads / kv_heads);
    const int q_begin = (gridDim.y - 1 - blockIdx.y) * FORWARD_QUERIES;
    const int stride = (q_heads + 2 * kv_heads) * D;
    const bf16 *sequence = qkv + static_cast<long long>(batch) * seq * stride;
    const bf16 *queries = sequence + static_cast<long long>(q_begin) * stride + head * D;
    const int *ids = SEGMENTS ? segments + static_cast<size_t>(batch) * seq : nullptr;

    const int first = WINDOW ? max(0, q_begin + 1 - window) : 0;
    int2 range = make_int2(first, CAUSAL ? min(seq, q_begin + FORWARD_QUERIES) : seq);
    if (SEGMENTS) range = segment_range(ids, q_begin, min(seq, q_begin + FORWARD_QUERIES), first, range.y);
    const int tile_begin = range.x / KEYS, tile_end = (range.y + KEYS - 1) / KEYS;
    const bf16 *keys = tile_source<D, THREADS>(
        sequence + static_cast<long long>(tile_begin) * KEYS * stride + (q_heads + kv_head) * D, stride);

    auto load_keys = [&](int tile) {
        const int left = seq - tile * KEYS, buffer = tile % 2 * TILE;
        tile_load<KEYS, D, THREADS>(k_tiles + buffer, keys, stride, left);
        tile_load<KEYS, D, THREADS>(v_tiles + buffer, keys + kv_heads * D, stride, left);
        if (SEGMENTS) ids_load<KEYS>(key_ids + tile % 2 * KEYS, ids, tile * KEYS, seq);
        keys += KEYS * stride;
    };
    tile_load<FORWARD_QUERIES, D, THREADS>(q_tile, tile_source<D, THREADS>(queries, stride), stride, seq - q_begin);
    if (SEGMENTS) ids_load<FORWARD_QUERIES>(query_ids, ids, q_begin, seq);
    load_keys(tile_begin);
    copies_commit();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // This thread's rows are row + 8·r for r = 0 … 3; its columns 8·n + 2·(lane % 4) + {0, 1}.
    const int row = q_begin + warp * 32 + lane / 4;
    const int warp_last_row = q_begin + warp * 32 + 31;
    const float scale_log2 = scale * LOG2_E;
    const unsigned q_rows = fragment_address<D>(q_tile, warp * 32);
    const unsigned k_columns = fragment_address_nk<D>(k_tiles, 0);
    const unsigned v_rows = fragment_address<D>(v_tiles, 0);

    float sums[2][D_TILES][4], maximum[4];
    clear(sums);
#pragma unroll
    for (int r = 0; r < 4; r++) maximum[r] = MINUS_INFINITY;
    *total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    for (int tile = tile_begin; tile < tile_end; tile++) {
        copies_wait<0>();
        __syncthreads();
        if (tile + 1 < tile_end) load_keys(tile + 1);
        copies_commit();
        const int key_begin = tile * KEYS;
        if (CAUSAL && key_begin > warp_last_row) continue;
        if (WINDOW && warp_last_row - 31 - (key_begin + KEYS - 1) >= window) continue;

        float scores[2][N][4];
        scores_of<N>(scores, q_rows, k_columns + tile % 2 * TILE);

        if (key_begin + KEYS > seq || (CAUSAL && key_begin + KEYS - 1 > warp_last_row - 31) ||
            (WINDOW && warp_last_row - key_begin >= window) ||
            (SEGMENTS && mixed<KEYS>(query_ids + warp * 32, key_ids + tile % 2 * KEYS))) {
            hide<Rows::Queries>(scores, row, key_begin + lane % 4 * 2, seq, query_ids + warp * 32 + lane / 4,
                                key_ids + tile % 2 * KEYS + lane % 4 * 2 PASS_WINDOW);
        }

        unsigned weights[KEYS / 16][2][4]; // as A operands
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int m = r / 2, c = r % 2 * 2;
            float high = maximum[r];
#pragma unroll
            for (int n = 0; n < N; n++) high = fmaxf(high, fmaxf(scores[m][n][c], scores[m][n][c + 1]));
            high = quad_max(high);
            // A query that has seen nothing yet keeps weights of zero.
            const float offset = high == MINUS_INFINITY ? 0.0f : high * scale_log2;
            const float rescale = exp_2(maximum[r] * scale_log2 - offset);
            maximum[r] = high;
            float &row_total = reinterpret_cast<float *>(total)[r], sum = row_total * rescale;
#pragma unroll
            for (int n = 0; n < D_TILES; n++) {
                sums[m][n][c] *= rescale;
                sums[m][n][c + 1] *= rescale;
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float left = exp_2(scores[m][n][c] * scale_log2 - offset);
                const float right = exp_2(scores[m][n][c + 1] * scale_log2 - offset);
                sum += left + right;
                weights[n / 2][m][n % 2 * 2 + r % 2] = pack(left, right);
            }
            row_total = sum;
        }

#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            accumulate<D_TILES>(sums, weights[k], v_rows + tile % 2 * TILE + k * 16 * ROW_BYTES);
    }
    copies_wait<0>();
    __syncthreads();

    const int2 block = block_again();
    const int thread = thread_again(), rows_left = seq - (static_cast<int>(gridDim.y) - 1 - block.y) * FORWARD_QUERIES;
    const int own_row = thread / 32 * 32 + thread % 32 / 4;
    const float *own_totals =
        reinterpret_cast<const float *>(shared + FORWARD_QUERIES * ROW_BYTES + 4 * TILE) + thread * 4;
    float *lse_rows = log_sum_exp + (static_cast<long long>(block.x) + 1) * seq - rows_left;
    float factor[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const float row_total = quad_sum(own_totals[r]);
        factor[r] = 1.0f / row_total;
        const int place = own_row + 8 * r;
        if (thread % 4 == 0 && place < rows_left) lse_rows[place] = maximum[r] * scale + __log2f(row_total) * LN_2;
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < D_TILES; n++)
            accumulator_to_tile<D>(thread, shared, thread / 32 * 32 + m * 16, n, sums[m][n], factor[2 * m],
                                   factor[2 * m + 1]);
    __syncthreads();
    bf16 *y_rows = y + (static_cast<long long>(block.x / q_heads + 1) * seq - rows_left) * (q_heads * D) + block.x % q_heads * D;
    tile_store<FORWARD_QUERIES, D, THREADS>(thread, shared, y_rows, q_heads * D, rows_left);
}

// ---- backward -----------------------------------------------------------------------------------

// delta = Σ dy·y of every query and head.
//
// Grid ⌈B·T·Hq·(D/8) / 256⌉, block 256, no dynamic shared memory. `rows` is B·T·Hq.
extern "C" __global__ void __launch_bounds__(256)
    attention_delta(const bf16 *__restrict__ dy, const bf16 *__restrict__ y, float *__restrict__ delta,
                    long long rows, int seq, int q_heads) {
    constexpr int LANES = D / 8;
    const long long index = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    const long long row = index / LANES;
    float sum = 0.0f;
    if (row < rows) {
        const uint4 left = reinterpret_cast<const uint4 *>(dy)[index];
        const uint4 right = reinterpret_cast<const uint4 *>(y)[index];
        const unsigned a[4] = {left.x, left.y, left.z, left.w}, b[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum += __uint_as_float(a[i] << 16) * __uint_as_float(b[i] << 16);
            sum += __uint_as_float(a[i] & 0xffff0000) * __uint_as_float(b[i] & 0xffff0000);
        }
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (row < rows && index % LANES == 0) {
        const long long token = row / q_heads, head = row % q_heads;
        delta[(token / seq * q_heads + head) * seq + token % seq] = sum;
    }
}

constexpr int GRAD_KV_KEYS = 64, GRAD_KV_QUERIES = 64;

// The key and value parts of d_qkv.
//
// Grid (B·Hkv, ⌈T/64⌉), block 128, dynamic shared memory 5·64·D·2 + 17408 bytes: 99328 for D = 128,
// 58368 for D = 64; with SEGMENTS 768 bytes more.
//
// Scores are transposed here (key × query). The warps are two by two: a pair has 32 keys; within it
// a warp makes the weights of half the queries, then adds up half the columns of dK and dV. Weights
// pass between the two through shared memory, as fragments.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_grad_kv(const bf16 *__restrict__ dy, const bf16 *__restrict__ qkv, const float *__restrict__ log_sum_exp,
                      const float *__restrict__ delta, const int *__restrict__ segments, bf16 *__restrict__ d_qkv,
                      int seq, int q_heads, int kv_heads, float scale WITH_WINDOW) {
    extern __shared__ __align__(1024) char shared[];
    constexpr int KEYS = GRAD_KV_KEYS, QUERIES = GRAD_KV_QUERIES, TILE = 64 * ROW_BYTES;
    constexpr int N = QUERIES / 2 / 8, COLUMNS = D_TILES / 2;
    const unsigned k_tile = shared_address(shared), v_tile = k_tile + TILE;
    const unsigned q_tiles = v_tile + TILE, dy_tile = q_tiles + 2 * TILE;
    // [pair][step of 16 queries][m][lane], 16 bytes each
    char *weights = shared + 5 * TILE, *d_scores = weights + KEYS * QUERIES * 2;
    // [buffer][query]
    const float *lse_rows = reinterpret_cast<const float *>(d_scores + KEYS * QUERIES * 2);
    const float *delta_rows = lse_rows + 2 * QUERIES;
    const int *query_ids = reinterpret_cast<const int *>(delta_rows + 2 * QUERIES), *key_ids = query_ids + 2 * QUERIES;

    const int group = q_heads / kv_heads;
    const int batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
    const int key_begin = blockIdx.y * KEYS;
    const int stride = (q_heads + 2 * kv_heads) * D, y_stride = q_heads * D;
    const bf16 *sequence = qkv + static_cast<long long>(batch) * seq * stride;
    const bf16 *keys = tile_source<D, THREADS>(
        sequence + static_cast<long long>(key_begin) * stride + (q_heads + kv_head) * D, stride);
    const int *ids = SEGMENTS ? segments + static_cast<size_t>(batch) * seq : nullptr;

    int2 range = make_int2(CAUSAL ? key_begin : 0, WINDOW ? min(seq, key_begin + KEYS - 1 + window) : seq);
    if (SEGMENTS) range = segment_range(ids, key_begin, min(seq, key_begin + KEYS), range.x, range.y);
    const int tile_begin = range.x / QUERIES, tile_end = (range.y + QUERIES - 1) / QUERIES;
    const int steps = (tile_end - tile_begin) * group;

    // Of the step that is loaded next.
    int next_tile = tile_begin, next_head = kv_head * group;
    auto load_queries = [&](int buffer) {
        const int first = next_tile * QUERIES;
        tile_load<QUERIES, D, THREADS>(
            q_tiles + buffer * TILE,
            tile_source<D, THREADS>(sequence + static_cast<long long>(first) * stride + next_head * D, stride), stride,
            seq - first);
        const size_t row = (static_cast<size_t>(batch) * q_heads + next_head) * seq;
        const int query = first + threadIdx.x % QUERIES;
        const float *source = (threadIdx.x < QUERIES ? log_sum_exp : delta) + row;
        copy_4(shared_address(threadIdx.x < QUERIES ? lse_rows : delta_rows) + (buffer * QUERIES + threadIdx.x % QUERIES) * 4,
               source + min(query, seq - 1), query < seq);
        if (SEGMENTS) ids_load<QUERIES>(query_ids + buffer * QUERIES, ids, first, seq);
    };
    auto load_dy = [&]() {
        const int first = next_tile * QUERIES;
        tile_load<QUERIES, D, THREADS>(
            dy_tile,
            tile_source<D, THREADS>(dy + (static_cast<size_t>(batch) * seq + first) * y_stride + next_head * D, y_stride),
            y_stride, seq - first);
        if (++next_tile == tile_end) {
            next_tile = tile_begin;
            next_head++;
        }
    };
    tile_load<KEYS, D, THREADS>(k_tile, keys, stride, seq - key_begin);
    tile_load<KEYS, D, THREADS>(v_tile, keys + kv_heads * D, stride, seq - key_begin);
    if (SEGMENTS) ids_load<KEYS>(key_ids, ids, key_begin, seq);
    load_queries(0);
    load_dy();
    copies_commit();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = warp / 2, half = warp % 2;
    const int row = key_begin + pair * 32 + lane / 4;
    const float scale_log2 = scale * LOG2_E;
    const unsigned k_rows = fragment_address<D>(k_tile, pair * 32), v_rows = fragment_address<D>(v_tile, pair * 32);
    const unsigned q_columns = fragment_address_nk<D>(q_tiles, half * (QUERIES / 2));
    const unsigned dy_columns = fragment_address_nk<D>(dy_tile, half * (QUERIES / 2));
    const unsigned q_rows = fragment_address<D>(q_tiles, 0) ^ (half * D), dy_rows = fragment_address<D>(dy_tile, 0) ^ (half * D);

    float d_keys[2][COLUMNS][4], d_values[2][COLUMNS][4];
    clear(d_keys);
    clear(d_values);

    int tile = tile_begin;
    for (int step = 0; step < steps; step++) {
        const int buffer = step % 2, query_begin = tile * QUERIES;
        if (++tile == tile_end) tile = tile_begin;
        copies_wait<0>();
        __syncthreads();
        if (step + 1 < steps) load_queries(1 - buffer);
        copies_commit();

        float scores[2][N][4], d_weights[2][N][4];
        scores_of<N>(scores, k_rows, q_columns + buffer * TILE);
        scores_of<N>(d_weights, v_rows, dy_columns);

        // Queries past the end have dy = 0 and delta = 0: they add nothing.
        const int column = half * (QUERIES / 2) + lane % 4 * 2;
        if ((CAUSAL && query_begin < key_begin + KEYS) || (WINDOW && query_begin + QUERIES - 1 - key_begin >= window) ||
            (SEGMENTS && mixed<QUERIES / 2>(key_ids + pair * 32, query_ids + buffer * QUERIES + half * (QUERIES / 2))))
            hide<Rows::Keys>(scores, row, query_begin + column, seq, key_ids + pair * 32 + lane / 4,
                             query_ids + buffer * QUERIES + column PASS_WINDOW);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 lse = *reinterpret_cast<const float2 *>(lse_rows + buffer * QUERIES + column + n * 8);
            const float2 del = *reinterpret_cast<const float2 *>(delta_rows + buffer * QUERIES + column + n * 8);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float offset = (c == 0 ? lse.x : lse.y) * LOG2_E, query_delta = c == 0 ? del.x : del.y;
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    float &score = scores[r / 2][n][r % 2 * 2 + c];
                    float &d_weight = d_weights[r / 2][n][r % 2 * 2 + c];
                    score = exp_2(score * scale_log2 - offset);
                    d_weight = score * (d_weight - query_delta);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < N / 2; k++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const int place = (((pair * (QUERIES / 16) + half * (N / 2) + k) * 2 + m) * 32 + lane) * 16;
                unsigned a[4];
                pack_fragment(a, scores[m][2 * k], scores[m][2 * k + 1]);
                *reinterpret_cast<uint4 *>(weights + place) = make_uint4(a[0], a[1], a[2], a[3]);
                pack_fragment(a, d_weights[m][2 * k], d_weights[m][2 * k + 1]);
                *reinterpret_cast<uint4 *>(d_scores + place) = make_uint4(a[0], a[1], a[2], a[3]);
            }
        // The two warps of the pair.
        asm volatile("bar.sync %0, 64;\n" ::"r"(1 + pair) : "memory");

        auto fragments = [&](unsigned(&a)[2][4], const char *from, int k) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const uint4 value = *reinterpret_cast<const uint4 *>(
                    from + (((pair * (QUERIES / 16) + k) * 2 + m) * 32 + lane) * 16);
                a[m][0] = value.x, a[m][1] = value.y, a[m][2] = value.z, a[m][3] = value.w;
            }
        };
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++) {
            unsigned a[2][4];
            fragments(a, weights, k);
            accumulate<COLUMNS>(d_values, a, dy_rows + k * 16 * ROW_BYTES);
        }
        __syncthreads();
        if (step + 1 < steps) load_dy();
        copies_commit();
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++) {
            unsigned a[2][4];
            fragments(a, d_scores, k);
            accumulate<COLUMNS>(d_keys, a, q_rows + buffer * TILE + k * 16 * ROW_BYTES);
        }
    }
    copies_wait<0>();
    __syncthreads();

#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            accumulator_to_tile<D>(threadIdx.x, shared, pair * 32 + m * 16, half * COLUMNS + n, d_keys[m][n], scale, scale);
            accumulator_to_tile<D>(threadIdx.x, shared + TILE, pair * 32 + m * 16, half * COLUMNS + n, d_values[m][n], 1.0f, 1.0f);
        }
    __syncthreads();
    bf16 *d_key_rows = d_qkv + (static_cast<size_t>(batch) * seq + key_begin) * stride + (q_heads + kv_head) * D;
    tile_store<KEYS, D, THREADS>(threadIdx.x, shared, d_key_rows, stride, seq - key_begin);
    tile_store<KEYS, D, THREADS>(threadIdx.x, shared + TILE, d_key_rows + kv_heads * D, stride, seq - key_begin);
}

constexpr int GRAD_Q_QUERIES = 128, GRAD_Q_KEYS = 32;

// The query part of d_qkv.
//
// Grid (B·Hq, ⌈T/128⌉), block 128, dynamic shared memory (2·128 + 4·32)·D·2 bytes: 98304 for
// D = 128, 49152 for D = 64; with SEGMENTS 768 bytes more. Each warp has 32 queries.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_grad_q(const bf16 *__restrict__ dy, const bf16 *__restrict__ qkv, const float *__restrict__ log_sum_exp,
                     const float *__restrict__ delta, const int *__restrict__ segments, bf16 *__restrict__ d_qkv,
                     int seq, int q_heads, int kv_heads, float scale WITH_WINDOW) {
    extern __shared__ __align__(1024) char shared[];
    constexpr int KEYS = GRAD_Q_KEYS, N = KEYS / 8, TILE = KEYS * ROW_BYTES;
    const unsigned q_tile = shared_address(shared), dy_tile = q_tile + GRAD_Q_QUERIES * ROW_BYTES;
    const unsigned k_tiles = dy_tile + GRAD_Q_QUERIES * ROW_BYTES, v_tiles = k_tiles + 2 * TILE;
    const int *key_ids = reinterpret_cast<const int *>(shared + 2 * GRAD_Q_QUERIES * ROW_BYTES + 4 * TILE); // [buffer][key]
    const int *query_ids = key_ids + 2 * KEYS;

    const int batch = blockIdx.x / q_heads, head = blockIdx.x % q_heads;
    const int kv_head = head / (q_heads / kv_heads);
    const int q_begin = (gridDim.y - 1 - blockIdx.y) * GRAD_Q_QUERIES;
    const int stride = (q_heads + 2 * kv_heads) * D, y_stride = q_heads * D;
    const bf16 *sequence = qkv + static_cast<long long>(batch) * seq * stride;
    const int *ids = SEGMENTS ? segments + static_cast<size_t>(batch) * seq : nullptr;

    const int first = WINDOW ? max(0, q_begin + 1 - window) : 0;
    int2 range = make_int2(first, CAUSAL ? min(seq, q_begin + GRAD_Q_QUERIES) : seq);
    if (SEGMENTS) range = segment_range(ids, q_begin, min(seq, q_begin + GRAD_Q_QUERIES), first, range.y);
    const int tile_begin = range.x / KEYS, tile_end = (range.y + KEYS - 1) / KEYS;
    const bf16 *keys = tile_source<D, THREADS>(
        sequence + static_cast<long long>(tile_begin) * KEYS * stride + (q_heads + kv_head) * D, stride);

    auto load_keys = [&](int tile) {
        const int left = seq - tile * KEYS, buffer = tile % 2 * TILE;
        tile_load<KEYS, D, THREADS>(k_tiles + buffer, keys, stride, left);
        tile_load<KEYS, D, THREADS>(v_tiles + buffer, keys + kv_heads * D, stride, left);
        if (SEGMENTS) ids_load<KEYS>(key_ids + tile % 2 * KEYS, ids, tile * KEYS, seq);
        keys += KEYS * stride;
    };
    tile_load<GRAD_Q_QUERIES, D, THREADS>(
        q_tile, tile_source<D, THREADS>(sequence + static_cast<long long>(q_begin) * stride + head * D, stride), stride,
        seq - q_begin);
    tile_load<GRAD_Q_QUERIES, D, THREADS>(
        dy_tile, tile_source<D, THREADS>(dy + (static_cast<size_t>(batch) * seq + q_begin) * y_stride + head * D, y_stride),
        y_stride, seq - q_begin);
    if (SEGMENTS) ids_load<GRAD_Q_QUERIES>(query_ids, ids, q_begin, seq);
    load_keys(tile_begin);
    copies_commit();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = q_begin + warp * 32 + lane / 4;
    const int warp_last_row = q_begin + warp * 32 + 31;
    const float scale_log2 = scale * LOG2_E;
    const unsigned q_rows = fragment_address<D>(q_tile, warp * 32), dy_rows = fragment_address<D>(dy_tile, warp * 32);
    const unsigned k_columns = fragment_address_nk<D>(k_tiles, 0), v_columns = fragment_address_nk<D>(v_tiles, 0);
    const unsigned k_rows = fragment_address<D>(k_tiles, 0);

    float offset[4], row_delta[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int query = row + 8 * r;
        const size_t place = static_cast<size_t>(blockIdx.x) * seq + min(query, seq - 1);
        offset[r] = query < seq ? log_sum_exp[place] * LOG2_E : 0.0f;
        row_delta[r] = query < seq ? delta[place] : 0.0f;
    }
    float d_queries[2][D_TILES][4];
    clear(d_queries);

    for (int tile = tile_begin; tile < tile_end; tile++) {
        copies_wait<0>();
        __syncthreads();
        if (tile + 1 < tile_end) load_keys(tile + 1);
        copies_commit();
        const int key_begin = tile * KEYS, buffer = tile % 2 * TILE;
        if (CAUSAL && key_begin > warp_last_row) continue;
        if (WINDOW && warp_last_row - 31 - (key_begin + KEYS - 1) >= window) continue;

        float scores[2][N][4], d_weights[2][N][4];
        scores_of<N>(scores, q_rows, k_columns + buffer);
        scores_of<N>(d_weights, dy_rows, v_columns + buffer);

        // Keys past the end must be hidden: their weight may be infinite.
        if (key_begin + KEYS > seq || (CAUSAL && key_begin + KEYS - 1 > warp_last_row - 31) ||
            (WINDOW && warp_last_row - key_begin >= window) ||
            (SEGMENTS && mixed<KEYS>(query_ids + warp * 32, key_ids + tile % 2 * KEYS)))
            hide<Rows::Queries>(scores, row, key_begin + lane % 4 * 2, seq, query_ids + warp * 32 + lane / 4,
                                key_ids + tile % 2 * KEYS + lane % 4 * 2 PASS_WINDOW);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int m = i / 4, r = i / 2;
                const float weight = exp_2(scores[m][n][i % 4] * scale_log2 - offset[r]);
                d_weights[m][n][i % 4] = weight * (d_weights[m][n][i % 4] - row_delta[r]);
            }
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            unsigned a[2][4];
#pragma unroll
            for (int m = 0; m < 2; m++) pack_fragment(a[m], d_weights[m][2 * k], d_weights[m][2 * k + 1]);
            accumulate<D_TILES>(d_queries, a, k_rows + buffer + k * 16 * ROW_BYTES);
        }
    }
    copies_wait<0>();
    __syncthreads();

    const int2 block = block_again();
    const int thread = thread_again(), rows_left = seq - (static_cast<int>(gridDim.y) - 1 - block.y) * GRAD_Q_QUERIES;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < D_TILES; n++)
            accumulator_to_tile<D>(thread, shared, thread / 32 * 32 + m * 16, n, d_queries[m][n], scale, scale);
    __syncthreads();
    const int d_stride = (q_heads + 2 * kv_heads) * D;
    bf16 *rows = d_qkv + (static_cast<long long>(block.x / q_heads + 1) * seq - rows_left) * d_stride + block.x % q_heads * D;
    tile_store<GRAD_Q_QUERIES, D, THREADS>(thread, shared, rows, d_stride, rows_left);
}
