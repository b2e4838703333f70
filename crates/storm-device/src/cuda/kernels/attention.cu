// Attention on tensor cores (mma.sync, sm_80 and up), bf16 storage, f32 accumulation, forward and
// backward: no tensor of T × T exists at any time. CPU reference: cpu/kernels/attention.
//
// Compile with -DHEAD_DIM=64|96|128|192|256, -DCAUSAL=0|1, -DSEGMENTS=0|1, and -DWINDOW=1 for a window. With
// SEGMENTS=0 the `segments` arguments are ignored and may be null. FORWARD_SHARED, GRAD_KV_SHARED and GRAD_Q_SHARED are
// the bytes of dynamic shared memory that kernels are launched with. `scale` must be positive. qkv, y, dy and d_qkv must
// be 16-byte aligned.
//
// Deterministic: every sum has one fixed order. Forward and dQ go over keys ascending; dK and dV
// over (query head of the group, query) ascending. attention_grad_kv writes the key and value parts
// of d_qkv, attention_grad_q the query part; together all of it. Both need attention_delta before.
//
// A block's own rows stay in registers as fragments; the rows of the other side pass through shared memory. A
// multiprocessor with 100 KB of it has eight warps: two blocks of four, or one block of eight. Of all tile sizes only
// FORWARD_KEYS and FORWARD_RANGE are part of the results, because softmax is rescaled once a tile: they must not depend
// on the card.
//
// Blocks with the most work come first, across all heads, so that the last blocks are short.
#include "attention_common.cuh"

namespace {

constexpr int D = HEAD_DIM;
static_assert(D == 64 || D == 96 || D == 128 || D == 192 || D == 256, "head size");
// Output columns of an accumulator, and steps of a product over D.
constexpr int D_TILES = D / 8, D_STEPS = D / 16;
constexpr int ROW_BYTES = D * 2;

// Shared memory for the segments of a tile's tokens, of two tiles on the other side.
__device__ constexpr int ids_bytes(int own, int other) { return SEGMENTS ? (own + 2 * other) * 4 : 0; }

// Loads 16·M rows of a tile as A operands.
template <int M> __device__ __forceinline__ void rows_load(unsigned (&rows)[D_STEPS][M][4], unsigned address) {
#pragma unroll
    for (int k = 0; k < D_STEPS; k++)
#pragma unroll
        for (int m = 0; m < M; m++) matrices_load(rows[k][m], column_step<D>(address, k) + m * 16 * ROW_BYTES);
}

// scores (16·M × 8·N) += a (16·M × 16) · 16 columns of N·8 rows of a tile.
template <int M, int N>
__device__ __forceinline__ void scores_step(float (&scores)[M][N][4], const unsigned (&a)[M][4], unsigned columns) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        unsigned b[4];
        matrices_load(b, columns + n * 8 * ROW_BYTES);
#pragma unroll
        for (int m = 0; m < M; m++) {
            multiply_add(scores[m][n], a[m], b[0], b[1]);
            multiply_add(scores[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

template <int M, int N> __device__ __forceinline__ void clear(float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
}

// Scores of 16·M × 8·N: own rows by rows of a tile.
template <int M, int N>
__device__ __forceinline__ void scores_of(float (&scores)[M][N][4], const unsigned (&rows)[D_STEPS][M][4],
                                          unsigned columns) {
    clear(scores);
#pragma unroll
    for (int k = 0; k < D_STEPS; k++) scores_step(scores, rows[k], column_step<D>(columns, k));
}

// The same for own rows in shared memory.
template <int M, int N>
__device__ __forceinline__ void scores_of(float (&scores)[M][N][4], unsigned rows, unsigned columns) {
    clear(scores);
#pragma unroll
    for (int k = 0; k < D_STEPS; k++) {
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) matrices_load(a[m], column_step<D>(rows, k) + m * 16 * ROW_BYTES);
        scores_step(scores, a, column_step<D>(columns, k));
    }
}

// sums (16·M × D) += a (16·M × 16) · 16 rows of a tile.
template <int M>
__device__ __forceinline__ void accumulate(float (&sums)[M][D_TILES][4], const unsigned (&a)[M][4], unsigned values) {
#pragma unroll
    for (int n = 0; n < D_TILES; n += 2) {
        unsigned b[4];
        matrices_load_transposed(b, column_step<D>(values, n / 2));
#pragma unroll
        for (int m = 0; m < M; m++) {
            multiply_add(sums[m][n], a[m], b[0], b[1]);
            multiply_add(sums[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// Starts copying the segment numbers of a tile's tokens, zeros past the end.
template <int ROWS> __device__ __forceinline__ void ids_load(const int *to, const int *ids, int first, int seq) {
    const int token = first + threadIdx.x;
    if (threadIdx.x < ROWS) copy_4(shared_address(to + threadIdx.x), ids + min(token, seq - 1), token < seq);
}

// Whether ROWS rows and COLUMNS columns belong to several segments. Called by a whole warp.
template <int ROWS, int COLUMNS> __device__ __forceinline__ bool mixed(const int *row_ids, const int *column_ids) {
    const int lane = threadIdx.x % 32, first = row_ids[0];
    bool differs = row_ids[lane % ROWS] != first;
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 32) differs = differs || column_ids[i + lane % COLUMNS] != first;
    return __any_sync(0xffffffff, differs);
}

// Hides (−∞) the scores of 16·M × 8·N that do not count: keys after their query (CAUSAL), keys before its
// window (WINDOW), keys past the end, keys of another segment. Rows past the end may get any value: nothing of them is kept. The
// thread's own rows are row + 8·r, its columns column + 8·n + {0, 1}; `row_ids` and `column_ids`, in
// shared memory, are their segments.
enum class Rows { Queries, Keys };

template <Rows ROWS, int M, int N>
__device__ __forceinline__ void hide(float (&scores)[M][N][4], int row, int column, int seq, const int *row_ids,
                                     const int *column_ids WITH_WINDOW) {
    const int limit = row - column, left = seq - column;
    int own_ids[2 * M];
    // Volatile: read again for every tile, rather than kept in registers that are short.
#pragma unroll
    for (int r = 0; r < 2 * M; r++) own_ids[r] = SEGMENTS ? static_cast<const volatile int *>(row_ids)[8 * r] : 0;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int2 pair = SEGMENTS ? *reinterpret_cast<const int2 *>(column_ids + n * 8) : make_int2(0, 0);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int place = n * 8 + c, column_id = c == 0 ? pair.x : pair.y;
#pragma unroll
            for (int r = 0; r < 2 * M; r++) {
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

constexpr int FORWARD_THREADS = 128;
constexpr int FORWARD_M = D <= 96 ? 2 : 1, FORWARD_QUERIES = 64 * FORWARD_M;
constexpr int FORWARD_KEYS = (D == 64 || D == 128) && !SEGMENTS ? 64 : 32;
// Segments are looked up for so many queries together. A tile in which a query sees nothing may change its last bits.
constexpr int FORWARD_RANGE = 128;
constexpr int FORWARD_TILE = FORWARD_KEYS * ROW_BYTES, FORWARD_OWN = FORWARD_QUERIES * ROW_BYTES;
// A ring of three tiles. The first tile of keys, in the last place, arrives together with the queries.
constexpr int FORWARD_ROOM = FORWARD_OWN > 2 * FORWARD_TILE ? FORWARD_OWN + FORWARD_TILE : 3 * FORWARD_TILE;
static_assert(FORWARD_ROOM + ids_bytes(FORWARD_QUERIES, FORWARD_KEYS) == FORWARD_SHARED, "shared memory");

// y and log_sum_exp (natural logarithm).
//
// Grid (B·Hq, ⌈T/FORWARD_QUERIES⌉), block FORWARD_THREADS. Each warp has 16·M queries.
extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, 2)
    attention_forward(const bf16 *__restrict__ qkv, const int *__restrict__ segments, bf16 *__restrict__ y,
                      float *__restrict__ log_sum_exp, int seq, int q_heads, int kv_heads, float scale WITH_WINDOW) {
    extern __shared__ __align__(128) char shared[];
    constexpr int KEYS = FORWARD_KEYS, N = KEYS / 8, M = FORWARD_M, THREADS = FORWARD_THREADS, TILE = FORWARD_TILE;
    const int *key_ids = reinterpret_cast<const int *>(shared + FORWARD_ROOM); // [buffer][key]
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
    if (SEGMENTS) {
        const int group = q_begin / FORWARD_RANGE * FORWARD_RANGE;
        range = segment_range(ids, group, min(seq, group + FORWARD_RANGE), first, range.y);
    }
    const int tile_begin = range.x / KEYS, tile_end = (range.y + KEYS - 1) / KEYS;
    const bf16 *keys = tile_source<D>(
        sequence + static_cast<long long>(tile_begin) * KEYS * stride + (q_heads + kv_head) * D, stride);

    // Places in the ring: of the tile's keys, of its values, and of the next tile's keys.
    const unsigned room = shared_address(shared);
    unsigned k_tile = room + FORWARD_ROOM - TILE, v_tile = k_tile - 2 * TILE, next_tile = k_tile - TILE;
    auto load_keys = [&](unsigned to, int tile) {
        tile_load<KEYS, D, THREADS>(to, keys, stride, seq - tile * KEYS);
        if (SEGMENTS) ids_load<KEYS>(key_ids + tile % 2 * KEYS, ids, tile * KEYS, seq);
    };
    auto load_values = [&](unsigned to, int tile) {
        tile_load<KEYS, D, THREADS>(to, keys + kv_heads * D, stride, seq - tile * KEYS);
        keys += KEYS * stride;
    };
    tile_load<FORWARD_QUERIES, D, THREADS>(room, tile_source<D>(queries, stride), stride, seq - q_begin);
    if (SEGMENTS) ids_load<FORWARD_QUERIES>(query_ids, ids, q_begin, seq);
    load_keys(k_tile, tile_begin);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned q_rows[D_STEPS][M][4];
    rows_load(q_rows, fragment_address<D>(room, warp * 16 * M));
    __syncthreads();
    load_values(v_tile, tile_begin);
    copies_commit();

    // This thread's rows are row + 8·r for r = 0 … 2·M − 1; its columns 8·n + 2·(lane % 4) + {0, 1}.
    const int row = q_begin + warp * 16 * M + lane / 4;
    const int warp_first_row = q_begin + warp * 16 * M, warp_last_row = warp_first_row + 16 * M - 1;
    const float scale_log2 = scale * LOG2_E;
    const unsigned k_columns = fragment_address_nk<D>(0, 0), v_rows = fragment_address<D>(0, 0);

    float sums[M][D_TILES][4], maximum[2 * M], total[2 * M];
    clear(sums);
#pragma unroll
    for (int r = 0; r < 2 * M; r++) maximum[r] = MINUS_INFINITY, total[r] = 0.0f;

    for (int tile = tile_begin; tile < tile_end; tile++) {
        copies_wait<1>();
        __syncthreads();
        if (tile + 1 < tile_end) load_keys(next_tile, tile + 1);
        copies_commit();
        const int key_begin = tile * KEYS;
        const bool seen = !(CAUSAL && key_begin > warp_last_row) &&
                          !(WINDOW && warp_first_row - (key_begin + KEYS - 1) >= window);
        unsigned weights[KEYS / 16][M][4]; // as A operands
        if (seen) {
            float scores[M][N][4];
            scores_of(scores, q_rows, k_columns + k_tile);

            if (key_begin + KEYS > seq || (CAUSAL && key_begin + KEYS - 1 > warp_first_row) ||
                (WINDOW && warp_last_row - key_begin >= window) ||
                (SEGMENTS && mixed<16 * M, KEYS>(query_ids + warp * 16 * M, key_ids + tile % 2 * KEYS))) {
                hide<Rows::Queries>(scores, row, key_begin + lane % 4 * 2, seq, query_ids + warp * 16 * M + lane / 4,
                                    key_ids + tile % 2 * KEYS + lane % 4 * 2 PASS_WINDOW);
            }
#pragma unroll
            for (int r = 0; r < 2 * M; r++) {
                const int m = r / 2, c = r % 2 * 2;
                float high = maximum[r];
#pragma unroll
                for (int n = 0; n < N; n++) high = fmaxf(high, fmaxf(scores[m][n][c], scores[m][n][c + 1]));
                high = quad_max(high);
                // A query that has seen nothing yet keeps weights of zero.
                const float offset = high == MINUS_INFINITY ? 0.0f : high * scale_log2;
                const float rescale = exp_2(maximum[r] * scale_log2 - offset);
                maximum[r] = high;
                float sum = total[r] * rescale;
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
                total[r] = sum;
            }
        }
        copies_wait<1>();
        __syncthreads();
        if (tile + 1 < tile_end) load_values(k_tile, tile + 1);
        copies_commit();
        if (seen) {
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) accumulate(sums, weights[k], v_rows + v_tile + k * 16 * ROW_BYTES);
        }
        const unsigned free_tile = v_tile;
        v_tile = k_tile, k_tile = next_tile, next_tile = free_tile;
    }
    copies_wait<0>();
    __syncthreads();

    const int2 block = block_again();
    const int thread = thread_again(), rows_left = seq - (static_cast<int>(gridDim.y) - 1 - block.y) * FORWARD_QUERIES;
    const int own_row = thread / 32 * (16 * M) + thread % 32 / 4;
    float *lse_rows = log_sum_exp + (static_cast<long long>(block.x) + 1) * seq - rows_left;
    float factor[2 * M];
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        const float row_total = quad_sum(total[r]);
        factor[r] = 1.0f / row_total;
        const int place = own_row + 8 * r;
        if (thread % 4 == 0 && place < rows_left) lse_rows[place] = maximum[r] * scale + __log2f(row_total) * LN_2;
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < D_TILES; n++)
            accumulator_to_tile<D>(thread, shared, thread / 32 * (16 * M) + m * 16, n, sums[m][n], factor[2 * m],
                                   factor[2 * m + 1]);
    __syncthreads();
    bf16 *y_rows = y + (static_cast<long long>(block.x / q_heads + 1) * seq - rows_left) * (q_heads * D) + block.x % q_heads * D;
    tile_store<FORWARD_QUERIES, D, THREADS>(thread, shared, y_rows, q_heads * D, rows_left);
}

// ---- backward -----------------------------------------------------------------------------------

// delta = Σ dy·y of every query and head.
//
// Grid ⌈B·T·Hq·DELTA_LANES / 256⌉, block 256, no dynamic shared memory. `rows` is B·T·Hq.
constexpr int DELTA_LANES = D % 3 == 0 ? D / 24 : D / 8, DELTA_CHUNKS = D / 8 / DELTA_LANES;

extern "C" __global__ void __launch_bounds__(256)
    attention_delta(const bf16 *__restrict__ dy, const bf16 *__restrict__ y, float *__restrict__ delta,
                    long long rows, int seq, int q_heads) {
    const long long index = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    const long long row = index / DELTA_LANES;
    const int lane = threadIdx.x % DELTA_LANES;
    float sum = 0.0f;
    if (row < rows) {
#pragma unroll
        for (int chunk = 0; chunk < DELTA_CHUNKS; chunk++) {
            const long long place = row * (D / 8) + chunk * DELTA_LANES + lane;
            const uint4 left = reinterpret_cast<const uint4 *>(dy)[place];
            const uint4 right = reinterpret_cast<const uint4 *>(y)[place];
            const unsigned a[4] = {left.x, left.y, left.z, left.w}, b[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum += __uint_as_float(a[i] << 16) * __uint_as_float(b[i] << 16);
                sum += __uint_as_float(a[i] & 0xffff0000) * __uint_as_float(b[i] & 0xffff0000);
            }
        }
    }
#pragma unroll
    for (int distance = DELTA_LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (row < rows && lane == 0) {
        const long long token = row / q_heads, head = row % q_heads;
        delta[(token / seq * q_heads + head) * seq + token % seq] = sum;
    }
}

// Whether a pair of warps shares 16·M keys: the first one holds keys, makes weights and adds up dV; the second one holds
// values, makes gradients of scores from the first one's weights, and adds up dK. Otherwise each warp does both.
constexpr bool GRAD_KV_PAIRS = D > 64;
constexpr int GRAD_KV_THREADS = D <= 128 ? 128 : 256, GRAD_KV_M = D <= 128 ? 2 : 1;
constexpr int GRAD_KV_KEYS = GRAD_KV_THREADS / (GRAD_KV_PAIRS ? 64 : 32) * 16 * GRAD_KV_M, GRAD_KV_QUERIES = 32;
constexpr int GRAD_KV_TILE = GRAD_KV_QUERIES * ROW_BYTES, GRAD_KV_OWN = GRAD_KV_KEYS * ROW_BYTES;
constexpr int GRAD_KV_ROOM = 4 * GRAD_KV_TILE > 2 * GRAD_KV_OWN ? 4 * GRAD_KV_TILE : 2 * GRAD_KV_OWN;
// Without a mask there are too few registers for an unrolled loop. Heads of 96 are faster without.
constexpr int GRAD_KV_UNROLL = CAUSAL && D != 96 ? 2 : 1;
constexpr int GRAD_KV_WEIGHTS = GRAD_KV_PAIRS ? GRAD_KV_KEYS * GRAD_KV_QUERIES * 4 : 0;
static_assert(GRAD_KV_ROOM + GRAD_KV_WEIGHTS + 4 * GRAD_KV_QUERIES * 4 + ids_bytes(GRAD_KV_KEYS, GRAD_KV_QUERIES) ==
                  GRAD_KV_SHARED,
              "shared memory");

// The key and value parts of d_qkv.
//
// Grid (B·Hkv, ⌈T/GRAD_KV_KEYS⌉), block GRAD_KV_THREADS. Scores are transposed here (key × query).
extern "C" __global__ void __launch_bounds__(GRAD_KV_THREADS, 256 / GRAD_KV_THREADS)
    attention_grad_kv(const bf16 *__restrict__ dy, const bf16 *__restrict__ qkv, const float *__restrict__ log_sum_exp,
                      const float *__restrict__ delta, const int *__restrict__ segments, bf16 *__restrict__ d_qkv,
                      int seq, int q_heads, int kv_heads, float scale WITH_WINDOW) {
    extern __shared__ __align__(128) char shared[];
    constexpr int KEYS = GRAD_KV_KEYS, QUERIES = GRAD_KV_QUERIES, M = GRAD_KV_M, THREADS = GRAD_KV_THREADS;
    constexpr int TILE = GRAD_KV_TILE, PARTS = QUERIES / 16;
    const unsigned room = shared_address(shared);
    // [buffer] of queries, then [buffer] of dy.
    const unsigned q_tiles = room, dy_tiles = room + 2 * TILE;
    // [pair][part of 16 queries][m][n][lane]
    float4 *weights = reinterpret_cast<float4 *>(shared + GRAD_KV_ROOM);
    // [buffer][query]
    const float *lse_rows = reinterpret_cast<const float *>(shared + GRAD_KV_ROOM + GRAD_KV_WEIGHTS);
    const float *delta_rows = lse_rows + 2 * QUERIES;
    const int *query_ids = reinterpret_cast<const int *>(delta_rows + 2 * QUERIES), *key_ids = query_ids + 2 * QUERIES;

    const int group = q_heads / kv_heads;
    const int batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
    const int key_begin = blockIdx.y * KEYS;
    const int stride = (q_heads + 2 * kv_heads) * D, y_stride = q_heads * D;
    const bf16 *sequence = qkv + static_cast<long long>(batch) * seq * stride;
    const int *ids = SEGMENTS ? segments + static_cast<size_t>(batch) * seq : nullptr;

    int2 range = make_int2(CAUSAL ? key_begin : 0, WINDOW ? min(seq, key_begin + KEYS - 1 + window) : seq);
    if (SEGMENTS) range = segment_range(ids, key_begin, min(seq, key_begin + KEYS), range.x, range.y);
    const int tile_begin = range.x / QUERIES, tile_end = (range.y + QUERIES - 1) / QUERIES;
    const int steps = (tile_end - tile_begin) * group;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = GRAD_KV_PAIRS ? warp / 2 : warp;
    const bool second = GRAD_KV_PAIRS && warp % 2 == 1;
    // Keys, and values; in pairs, one of them.
    unsigned own_rows[D_STEPS][M][4], value_rows[D_STEPS][M][4];
    {
        const bf16 *keys =
            tile_source<D>(sequence + static_cast<long long>(key_begin) * stride + (q_heads + kv_head) * D, stride);
        tile_load<KEYS, D, THREADS>(room, keys, stride, seq - key_begin);
        tile_load<KEYS, D, THREADS>(room + GRAD_KV_OWN, keys + kv_heads * D, stride, seq - key_begin);
        if (SEGMENTS) ids_load<KEYS>(key_ids, ids, key_begin, seq);
        copies_commit();
        copies_wait<0>();
        __syncthreads();
        const unsigned own = fragment_address<D>(room, pair * 16 * M);
        rows_load(own_rows, second ? own + GRAD_KV_OWN : own);
        if (!GRAD_KV_PAIRS) rows_load(value_rows, own + GRAD_KV_OWN);
        __syncthreads();
    }

    // Of the step that is loaded next.
    int next_tile = tile_begin, next_head = kv_head * group;
    auto load_queries = [&](int buffer) {
        const int first = next_tile * QUERIES, left = seq - first;
        const bf16 *queries = sequence + static_cast<long long>(first) * stride + next_head * D;
        const bf16 *dy_rows = dy + (static_cast<size_t>(batch) * seq + first) * y_stride + next_head * D;
        tile_load<QUERIES, D, THREADS>(q_tiles + buffer * TILE, tile_source<D>(queries, stride), stride, left);
        tile_load<QUERIES, D, THREADS>(dy_tiles + buffer * TILE, tile_source<D>(dy_rows, y_stride), y_stride, left);
        if (threadIdx.x < 2 * QUERIES) {
            const int query = threadIdx.x % QUERIES;
            const size_t row = (static_cast<size_t>(batch) * q_heads + next_head) * seq;
            const float *source = (threadIdx.x < QUERIES ? log_sum_exp : delta) + row + min(first + query, seq - 1);
            const float *to = (threadIdx.x < QUERIES ? lse_rows : delta_rows) + buffer * QUERIES + query;
            copy_4(shared_address(to), source, query < left);
        }
        if (SEGMENTS) ids_load<QUERIES>(query_ids + buffer * QUERIES, ids, first, seq);
        if (++next_tile == tile_end) {
            next_tile = tile_begin;
            next_head++;
        }
    };
    if (steps > 0) load_queries(0);
    copies_commit();

    const int pair_begin = key_begin + pair * 16 * M, row = pair_begin + lane / 4;
    const float scale_log2 = scale * LOG2_E;
    const unsigned columns = fragment_address_nk<D>(second ? dy_tiles : q_tiles, 0);
    const unsigned values = fragment_address<D>(second ? q_tiles : dy_tiles, 0);

    // dV, and dK; in pairs, one of them.
    float sums[M][D_TILES][4], d_keys[M][D_TILES][4];
    clear(sums);
    clear(d_keys);

    int tile = tile_begin;
    for (int step = 0; step < steps; step++) {
        const int buffer = step % 2, tile_query = tile * QUERIES;
        if (++tile == tile_end) tile = tile_begin;
        copies_wait<0>();
        __syncthreads();
        if (step + 1 < steps) load_queries(1 - buffer);
        copies_commit();

#pragma unroll GRAD_KV_UNROLL
        for (int part = 0; part < PARTS; part++) {
            const int query_begin = tile_query + part * 16, column = buffer * QUERIES + part * 16 + lane % 4 * 2;
            const unsigned at = buffer * TILE + part * 16 * ROW_BYTES;
            if (CAUSAL && query_begin + 15 < pair_begin) continue;

            auto to_weights = [&](float(&scores)[M][2][4]) {
                // Queries past the end have dy = 0 and delta = 0: they add nothing.
                if ((CAUSAL && query_begin < pair_begin + 16 * M - 1) ||
                    (WINDOW && query_begin + 15 - pair_begin >= window) ||
                    (SEGMENTS && mixed<16 * M, 16>(key_ids + pair * 16 * M, query_ids + buffer * QUERIES + part * 16)))
                    hide<Rows::Keys>(scores, row, query_begin + lane % 4 * 2, seq, key_ids + pair * 16 * M + lane / 4,
                                     query_ids + column PASS_WINDOW);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float2 lse = *reinterpret_cast<const float2 *>(lse_rows + column + n * 8);
                    const float offset[2] = {lse.x * LOG2_E, lse.y * LOG2_E};
#pragma unroll
                    for (int i = 0; i < 4 * M; i++) {
                        float &score = scores[i / 4][n][i % 4];
                        score = exp_2(score * scale_log2 - offset[i % 2]);
                    }
                }
            };
            auto to_d_scores = [&](float(&d_weights)[M][2][4], const float(&of)[M][2][4]) {
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float2 of_row = *reinterpret_cast<const float2 *>(delta_rows + column + n * 8);
#pragma unroll
                    for (int i = 0; i < 4 * M; i++) {
                        float &d_weight = d_weights[i / 4][n][i % 4];
                        d_weight = of[i / 4][n][i % 4] * (d_weight - (i % 2 == 0 ? of_row.x : of_row.y));
                    }
                }
            };
            auto add = [&](float(&to)[M][D_TILES][4], const float(&factors)[M][2][4], unsigned rows) {
                unsigned a[M][4];
#pragma unroll
                for (int m = 0; m < M; m++) pack_fragment(a[m], factors[m][0], factors[m][1]);
                accumulate(to, a, rows);
            };

            float scores[M][2][4], others[M][2][4];
            scores_of(scores, own_rows, columns + at);
            if (!GRAD_KV_PAIRS) {
                to_weights(scores);
                scores_of(others, value_rows, columns + 2 * TILE + at);
                to_d_scores(others, scores);
                add(sums, scores, values + at);
                add(d_keys, others, values - 2 * TILE + at);
                continue;
            }
            float4 *passed = weights + (pair * PARTS + part) * M * 2 * 32 + lane;
            const int barrier = 1 + pair * PARTS + part;
            if (second) {
                asm volatile("bar.sync %0, 64;\n" ::"r"(barrier) : "memory");
#pragma unroll
                for (int i = 0; i < 2 * M; i++) {
                    const float4 weight = passed[i * 32];
                    others[i / 2][i % 2][0] = weight.x, others[i / 2][i % 2][1] = weight.y;
                    others[i / 2][i % 2][2] = weight.z, others[i / 2][i % 2][3] = weight.w;
                }
                to_d_scores(scores, others);
            } else {
                to_weights(scores);
#pragma unroll
                for (int i = 0; i < 2 * M; i++) {
                    const float(&weight)[4] = scores[i / 2][i % 2];
                    passed[i * 32] = make_float4(weight[0], weight[1], weight[2], weight[3]);
                }
                asm volatile("bar.arrive %0, 64;\n" ::"r"(barrier) : "memory");
            }
            add(sums, scores, values + at);
        }
    }
    copies_wait<0>();
    __syncthreads();

    auto put = [&](char *to, const float(&from)[M][D_TILES][4], float factor) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < D_TILES; n++)
                accumulator_to_tile<D>(threadIdx.x, to, pair * 16 * M + m * 16, n, from[m][n], factor, factor);
    };
    put(second ? shared : shared + GRAD_KV_OWN, sums, second ? scale : 1.0f);
    if (!GRAD_KV_PAIRS) put(shared, d_keys, scale);
    __syncthreads();
    bf16 *d_key_rows = d_qkv + (static_cast<size_t>(batch) * seq + key_begin) * stride + (q_heads + kv_head) * D;
    tile_store<KEYS, D, THREADS>(threadIdx.x, shared, d_key_rows, stride, seq - key_begin);
    tile_store<KEYS, D, THREADS>(threadIdx.x, shared + GRAD_KV_OWN, d_key_rows + kv_heads * D, stride, seq - key_begin);
}

// With heads of 256 there are registers for dy alone, and queries stay in shared memory.
constexpr bool GRAD_Q_SHARED_ROWS = D == 256;
constexpr int GRAD_Q_THREADS = D == 256 ? 256 : 128;
constexpr int GRAD_Q_M = D == 64 ? 2 : 1, GRAD_Q_QUERIES = GRAD_Q_THREADS / 2 * GRAD_Q_M, GRAD_Q_KEYS = D == 256 ? 16 : 32;
constexpr int GRAD_Q_UNROLL = CAUSAL ? 2 : 1;
constexpr int GRAD_Q_TILE = GRAD_Q_KEYS * ROW_BYTES, GRAD_Q_OWN = GRAD_Q_QUERIES * ROW_BYTES;
constexpr int GRAD_Q_TILES_AT = GRAD_Q_SHARED_ROWS ? GRAD_Q_OWN : 0, GRAD_Q_TILES_END = GRAD_Q_TILES_AT + 4 * GRAD_Q_TILE;
constexpr int GRAD_Q_ROOM =
    GRAD_Q_SHARED_ROWS || GRAD_Q_TILES_END > 2 * GRAD_Q_OWN ? GRAD_Q_TILES_END : 2 * GRAD_Q_OWN;
static_assert(GRAD_Q_ROOM + ids_bytes(GRAD_Q_QUERIES, GRAD_Q_KEYS) == GRAD_Q_SHARED, "shared memory");

// The query part of d_qkv.
//
// Grid (B·Hq, ⌈T/GRAD_Q_QUERIES⌉), block GRAD_Q_THREADS. Each warp has 16·M queries.
extern "C" __global__ void __launch_bounds__(GRAD_Q_THREADS, 256 / GRAD_Q_THREADS)
    attention_grad_q(const bf16 *__restrict__ dy, const bf16 *__restrict__ qkv, const float *__restrict__ log_sum_exp,
                     const float *__restrict__ delta, const int *__restrict__ segments, bf16 *__restrict__ d_qkv,
                     int seq, int q_heads, int kv_heads, float scale WITH_WINDOW) {
    extern __shared__ __align__(128) char shared[];
    constexpr int KEYS = GRAD_Q_KEYS, QUERIES = GRAD_Q_QUERIES, M = GRAD_Q_M, THREADS = GRAD_Q_THREADS, TILE = GRAD_Q_TILE;
    const unsigned room = shared_address(shared), k_tiles = room + GRAD_Q_TILES_AT, v_tiles = k_tiles + 2 * TILE;
    const int *key_ids = reinterpret_cast<const int *>(shared + GRAD_Q_ROOM); // [buffer][key]
    const int *query_ids = key_ids + 2 * KEYS;

    const int batch = blockIdx.x / q_heads, head = blockIdx.x % q_heads;
    const int kv_head = head / (q_heads / kv_heads);
    const int q_begin = (gridDim.y - 1 - blockIdx.y) * QUERIES;
    const int stride = (q_heads + 2 * kv_heads) * D, y_stride = q_heads * D;
    const bf16 *sequence = qkv + static_cast<long long>(batch) * seq * stride;
    const int *ids = SEGMENTS ? segments + static_cast<size_t>(batch) * seq : nullptr;

    const int first = WINDOW ? max(0, q_begin + 1 - window) : 0;
    int2 range = make_int2(first, CAUSAL ? min(seq, q_begin + QUERIES) : seq);
    if (SEGMENTS) range = segment_range(ids, q_begin, min(seq, q_begin + QUERIES), first, range.y);
    const int tile_begin = range.x / KEYS, tile_end = (range.y + KEYS - 1) / KEYS;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bf16 *queries =
        tile_source<D>(sequence + static_cast<long long>(q_begin) * stride + head * D, stride);
    const unsigned own = fragment_address<D>(room, warp * 16 * M);
    unsigned q_rows[D_STEPS][M][4], dy_rows[D_STEPS][M][4];
    tile_load<QUERIES, D, THREADS>(
        room, tile_source<D>(dy + (static_cast<size_t>(batch) * seq + q_begin) * y_stride + head * D, y_stride), y_stride,
        seq - q_begin);
    if (!GRAD_Q_SHARED_ROWS) tile_load<QUERIES, D, THREADS>(room + GRAD_Q_OWN, queries, stride, seq - q_begin);
    if (SEGMENTS) ids_load<QUERIES>(query_ids, ids, q_begin, seq);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    rows_load(dy_rows, own);
    if (!GRAD_Q_SHARED_ROWS) rows_load(q_rows, own + GRAD_Q_OWN);
    __syncthreads();
    if (GRAD_Q_SHARED_ROWS) tile_load<QUERIES, D, THREADS>(room, queries, stride, seq - q_begin);

    const bf16 *keys = tile_source<D>(
        sequence + static_cast<long long>(tile_begin) * KEYS * stride + (q_heads + kv_head) * D, stride);
    auto load_keys = [&](int tile) {
        const int left = seq - tile * KEYS, buffer = tile % 2 * TILE;
        tile_load<KEYS, D, THREADS>(k_tiles + buffer, keys, stride, left);
        tile_load<KEYS, D, THREADS>(v_tiles + buffer, keys + kv_heads * D, stride, left);
        if (SEGMENTS) ids_load<KEYS>(key_ids + tile % 2 * KEYS, ids, tile * KEYS, seq);
        keys += KEYS * stride;
    };
    load_keys(tile_begin);
    copies_commit();

    const int row = q_begin + warp * 16 * M + lane / 4;
    const int warp_first_row = q_begin + warp * 16 * M, warp_last_row = warp_first_row + 16 * M - 1;
    const float scale_log2 = scale * LOG2_E;
    const unsigned k_columns = fragment_address_nk<D>(k_tiles, 0), v_columns = fragment_address_nk<D>(v_tiles, 0);
    const unsigned k_rows = fragment_address<D>(k_tiles, 0);

    float offset[2 * M], row_delta[2 * M];
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        const int query = row + 8 * r;
        const size_t place = static_cast<size_t>(blockIdx.x) * seq + min(query, seq - 1);
        offset[r] = query < seq ? log_sum_exp[place] * LOG2_E : 0.0f;
        row_delta[r] = query < seq ? delta[place] : 0.0f;
    }
    float d_queries[M][D_TILES][4];
    clear(d_queries);

    for (int tile = tile_begin; tile < tile_end; tile++) {
        copies_wait<0>();
        __syncthreads();
        if (tile + 1 < tile_end) load_keys(tile + 1);
        copies_commit();
#pragma unroll GRAD_Q_UNROLL
        for (int part = 0; part < KEYS / 16; part++) {
            const int key_begin = tile * KEYS + part * 16, buffer = tile % 2 * TILE + part * 16 * ROW_BYTES;
            if (CAUSAL && key_begin > warp_last_row) continue;
            if (WINDOW && warp_first_row - (key_begin + 15) >= window) continue;

            float scores[M][2][4], d_weights[M][2][4];
            if (GRAD_Q_SHARED_ROWS)
                scores_of(scores, own, k_columns + buffer);
            else
                scores_of(scores, q_rows, k_columns + buffer);
            scores_of(d_weights, dy_rows, v_columns + buffer);

            // Keys past the end must be hidden: their weight may be infinite.
            const int *part_ids = key_ids + tile % 2 * KEYS + part * 16;
            if (key_begin + 16 > seq || (CAUSAL && key_begin + 15 > warp_first_row) ||
                (WINDOW && warp_last_row - key_begin >= window) ||
                (SEGMENTS && mixed<16 * M, 16>(query_ids + warp * 16 * M, part_ids)))
                hide<Rows::Queries>(scores, row, key_begin + lane % 4 * 2, seq, query_ids + warp * 16 * M + lane / 4,
                                    part_ids + lane % 4 * 2 PASS_WINDOW);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 4 * M; i++) {
                    const int m = i / 4, r = i / 2;
                    const float weight = exp_2(scores[m][n][i % 4] * scale_log2 - offset[r]);
                    d_weights[m][n][i % 4] = weight * (d_weights[m][n][i % 4] - row_delta[r]);
                }
            unsigned a[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) pack_fragment(a[m], d_weights[m][0], d_weights[m][1]);
            accumulate(d_queries, a, k_rows + buffer);
        }
    }
    copies_wait<0>();
    __syncthreads();

    const int2 block = block_again();
    const int thread = thread_again(), rows_left = seq - (static_cast<int>(gridDim.y) - 1 - block.y) * QUERIES;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < D_TILES; n++)
            accumulator_to_tile<D>(thread, shared, thread / 32 * (16 * M) + m * 16, n, d_queries[m][n], scale, scale);
    __syncthreads();
    const int d_stride = (q_heads + 2 * kv_heads) * D;
    bf16 *rows = d_qkv + (static_cast<long long>(block.x / q_heads + 1) * seq - rows_left) * d_stride + block.x % q_heads * D;
    tile_store<QUERIES, D, THREADS>(thread, shared, rows, d_stride, rows_left);
}
