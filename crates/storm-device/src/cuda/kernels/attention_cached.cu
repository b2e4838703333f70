// Attention of new tokens to themselves and to the keys and values of the tokens before them. CPU reference:
// cpu/kernels/attention/cached.rs.
//
// The keys are cut into as many parts as there are blocks for a head and a few queries; what the parts yield is put together
// by a second kernel, in order. Queries of all heads that share a key head are columns of one list, token by token, so a
// single token reads its keys once. Parts depend on the length of the cache alone, and a query's sums on its own keys
// alone: the result does not depend on how many tokens are new.
//
// Compile with -DELEMENT=float or -DELEMENT=bf16, -DQUERIES: columns of a block, at most 8, and -DLANE_PACKS=1, 2 or 4:
// the head's width in units of 64, rounded up.
#include "common.cuh"

namespace {

typedef ELEMENT E;

constexpr int THREADS = 256, WARPS = THREADS / WARP;
/// Keys of a tile.
constexpr int KEYS = 64;
/// A score is computed by eight lanes, each of which has two keys.
constexpr int LANES = 8, GROUPS = THREADS / LANES, KEYS_OF_GROUP = KEYS / GROUPS;
/// Columns of packs, and threads for each of them that share the keys.
constexpr int PACKS = LANES * LANE_PACKS, WIDTH_MAX = PACKS * PACK, SHARES = THREADS / PACKS;
/// Queries whose sums are put together at a time.
constexpr int AT_ONCE = QUERIES < 4 ? QUERIES : 4;
/// Parts at most: `CACHE_PARTS_MAX` of the shape rule.
constexpr int PARTS_MAX = 64;
/// log2(e): weights are powers of two.
constexpr float LOG2_E = 1.44269504f;

static_assert(QUERIES <= LANES && QUERIES <= WARPS, "a lane stores a query's score, a warp has its softmax");

struct Sizes {
    /// New tokens, positions that there are, query heads, key heads, a head's width.
    int tokens, window, query_heads, key_heads, dim;
    /// Parts of the keys, and keys of each.
    int parts, part_keys;
};

__device__ inline float negative_infinity() { return __int_as_float(0xff800000); }

} // namespace

/// A query sees `reach` keys, its own included. Grid: parts, blocks of columns, key heads of all sequences. qkv (B, T, (Q+2K)·D), positions (B, T), cache (B, W, 2K·D);
/// partial (B, T, Q, parts, D + 2): sums of values, the largest score, the sum of weights.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_cached(const E* qkv, const int* positions, E* cache, float* partial, int tokens, int window,
                     int query_heads, int key_heads, int dim, int parts, int part_keys, int reach, float scale) {
    const Sizes s = {tokens, window, query_heads, key_heads, dim, parts, part_keys};
    __shared__ float queries[QUERIES][WIDTH_MAX]; // scaled
    __shared__ float weights[QUERIES][KEYS];
    __shared__ float maximum_so_far[QUERIES], total[QUERIES], rescale[QUERIES];
    __shared__ int seen[QUERIES];  // keys that a column sees
    __shared__ int source[KEYS];   // the new token that is the key, or −1
    __shared__ float sums[AT_ONCE][SHARES][WIDTH_MAX];

    take_turn();
    const int part = blockIdx.x, batch = blockIdx.z / s.key_heads, key_head = blockIdx.z % s.key_heads;
    const int group_size = s.query_heads / s.key_heads, columns = s.tokens * group_size;
    const int first_column = blockIdx.y * QUERIES;
    const i64 token_stride = i64(s.query_heads + 2 * s.key_heads) * s.dim, cache_stride = i64(2 * s.key_heads) * s.dim;
    qkv += i64(batch) * s.tokens * token_stride;
    positions += i64(batch) * s.tokens;
    cache += i64(batch) * s.window * cache_stride;
    // From a token's start to its key and its value, and from a position's.
    const i64 new_key = i64(s.query_heads + key_head) * s.dim, new_value = new_key + i64(s.key_heads) * s.dim;
    const i64 old_key = i64(key_head) * s.dim, old_value = old_key + i64(s.key_heads) * s.dim;
    const int begin = part * s.part_keys, part_end = min(s.window, begin + s.part_keys);
    const bool aligned = s.dim % PACK == 0;

    // The first block of columns adds the new keys and values. No block reads them there in this launch: new ones come from `qkv`.
    if (blockIdx.y == 0) {
        for (int token = 0; token < s.tokens; token++) {
            const int position = positions[token];
            if (position < begin || position >= part_end) continue;
            const E* from = qkv + token * token_stride;
            E* to = cache + position * cache_stride;
            for (int i = threadIdx.x; i < s.dim; i += THREADS) {
                to[old_key + i] = from[new_key + i];
                to[old_value + i] = from[new_value + i];
            }
        }
    }

    int end = 0, first_seen = s.window; // of the keys that any column sees
    for (int q = 0; q < QUERIES && first_column + q < columns; q++) {
        const int count = positions[(first_column + q) / group_size] + 1;
        end = max(end, count);
        first_seen = min(first_seen, count - reach);
    }
    end = min(end, part_end);
    // Most parts of a long cache are not in use yet, or not any more.
    if (begin >= end || part_end <= first_seen) return;

    if (threadIdx.x < QUERIES) {
        const int column = first_column + threadIdx.x;
        int count = 0;
        if (column < columns) count = positions[column / group_size] + 1;
        seen[threadIdx.x] = count;
        maximum_so_far[threadIdx.x] = negative_infinity();
        total[threadIdx.x] = 0.0f;
    }
    for (int i = threadIdx.x; i < QUERIES * WIDTH_MAX; i += THREADS) {
        const int q = i / WIDTH_MAX, d = i % WIDTH_MAX, column = first_column + q;
        float value = 0.0f;
        if (column < columns && d < s.dim) {
            const int token = column / group_size, head = key_head * group_size + column % group_size;
            value = to_float(qkv[token * token_stride + i64(head) * s.dim + d]) * (scale * LOG2_E);
        }
        queries[q][d] = value;
    }

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int part_of_key = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int pack = threadIdx.x % PACKS, share = threadIdx.x / PACKS;
    float sum[QUERIES][PACK] = {};

    for (int start = begin; start < end; start += KEYS) {
        const int count = min(KEYS, end - start);
        // Everybody is done with the tile before.
        __syncthreads();
        if (threadIdx.x < KEYS) source[threadIdx.x] = -1;
        __syncthreads();
        for (int token = threadIdx.x; token < s.tokens; token += THREADS) {
            const int place = positions[token] - start;
            if (place >= 0 && place < KEYS) source[place] = token;
        }
        __syncthreads();

        // Scores: a dot product by eight lanes.
        float score[KEYS_OF_GROUP][QUERIES] = {};
#pragma unroll
        for (int j = 0; j < LANE_PACKS; j++) {
            const int d = (part_of_key + j * LANES) * PACK;
            float key[KEYS_OF_GROUP][PACK] = {};
#pragma unroll
            for (int i = 0; i < KEYS_OF_GROUP; i++) {
                const int place = group + i * GROUPS;
                if (place >= count || d >= s.dim) continue;
                const int token = source[place];
                const E* from = token >= 0 ? qkv + token * token_stride + new_key
                                           : cache + (start + place) * cache_stride + old_key;
                read8(Row<const E>{from, s.dim, aligned}, d, key[i]);
            }
#pragma unroll
            for (int q = 0; q < QUERIES; q++) {
#pragma unroll
                for (int e = 0; e < PACK; e++) {
                    const float query = queries[q][d + e];
#pragma unroll
                    for (int i = 0; i < KEYS_OF_GROUP; i++) score[i][q] = fmaf(query, key[i][e], score[i][q]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < KEYS_OF_GROUP; i++) {
            const int place = group + i * GROUPS;
#pragma unroll
            for (int q = 0; q < QUERIES; q++) {
                const float whole = lanes_sum(score[i][q], LANES);
                const int key = start + place;
                const bool is_seen = key < seen[q] && key >= seen[q] - reach;
                if (part_of_key == q) weights[q][place] = is_seen ? whole : negative_infinity();
            }
        }
        __syncthreads();

        // Softmax so far: a warp for each column, two keys a lane.
        if (warp < QUERIES) {
            const float low = weights[warp][lane], high = weights[warp][lane + WARP];
            float largest = fmaxf(low, high);
#pragma unroll
            for (int step = WARP / 2; step > 0; step /= 2)
                largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
            const float before = maximum_so_far[warp];
            const float now = fmaxf(before, largest);
            // A column that has seen no key yet has the maximum −∞; subtracting it would give NaN.
            const float reference = now == negative_infinity() ? 0.0f : now;
            const float low_weight = exp2f(low - reference), high_weight = exp2f(high - reference);
            weights[warp][lane] = low_weight;
            weights[warp][lane + WARP] = high_weight;
            const float of_tile = warp_sum(low_weight + high_weight);
            if (lane == 0) {
                const float factor = exp2f(before - reference);
                rescale[warp] = factor;
                maximum_so_far[warp] = now;
                total[warp] = fmaf(total[warp], factor, of_tile);
            }
        }
        __syncthreads();

        // Values: a thread has a pack of the width, and some of the keys.
        if (share < SHARES) {
#pragma unroll
            for (int q = 0; q < QUERIES; q++) {
                const float factor = rescale[q];
#pragma unroll
                for (int e = 0; e < PACK; e++) sum[q][e] *= factor;
            }
            const int d = pack * PACK;
            for (int place = share; place < count && d < s.dim; place += SHARES) {
                const int token = source[place];
                const E* from = token >= 0 ? qkv + token * token_stride + new_value
                                           : cache + (start + place) * cache_stride + old_value;
                float value[PACK];
                read8(Row<const E>{from, s.dim, aligned}, d, value);
#pragma unroll
                for (int q = 0; q < QUERIES; q++) {
                    const float weight = weights[q][place];
#pragma unroll
                    for (int e = 0; e < PACK; e++) sum[q][e] = fmaf(weight, value[e], sum[q][e]);
                }
            }
        }
    }

    const int width = s.dim + 2;
#pragma unroll
    for (int first = 0; first < QUERIES; first += AT_ONCE) {
        __syncthreads();
        if (share < SHARES) {
#pragma unroll
            for (int q = 0; q < AT_ONCE; q++) {
#pragma unroll
                for (int e = 0; e < PACK; e++) sums[q][share][pack * PACK + e] = sum[first + q][e];
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < AT_ONCE * width; i += THREADS) {
            const int q = i / width, d = i % width, column = first_column + first + q;
            if (column >= columns) continue;
            const int token = column / group_size, head = key_head * group_size + column % group_size;
            float value;
            if (d < s.dim) {
                value = 0.0f;
                for (int j = 0; j < SHARES; j++) value += sums[q][j][d];
            } else {
                value = d == s.dim ? maximum_so_far[first + q] : total[first + q];
            }
            const i64 row = (i64(batch) * s.tokens + token) * s.query_heads + head;
            partial[(row * s.parts + part) * width + d] = value;
        }
    }
}

/// Grid: query heads of all tokens. Puts the parts that a query sees together: out (B, T, Q·D).
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_cached_sum(const float* partial, const int* positions, E* out, int query_heads, int dim, int parts,
                         int part_keys, int reach) {
    __shared__ float factors[PARTS_MAX];
    __shared__ float whole;
    take_turn();
    const i64 row = blockIdx.x, width = dim + 2;
    const int position = positions[row / query_heads];
    const int seen = position < 0 ? 0 : min(parts, position / part_keys + 1);
    const int first = max(0, position - reach + 1) / part_keys;
    const float* from = partial + row * parts * width;
    if (threadIdx.x < WARP) {
        float largest = negative_infinity();
        for (int i = first + threadIdx.x; i < seen; i += WARP) largest = fmaxf(largest, from[i * width + dim]);
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
        float total = 0.0f;
        for (int i = first + threadIdx.x; i < seen; i += WARP) {
            const float factor = exp2f(from[i * width + dim] - largest);
            factors[i] = factor;
            total = fmaf(factor, from[i * width + dim + 1], total);
        }
        total = warp_sum(total);
        if (threadIdx.x == 0) whole = total;
    }
    __syncthreads();
    const float share = 1.0f / whole;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float sum = 0.0f;
        // Many loads on their way together: a long cache has 64 parts.
#pragma unroll 16
        for (int i = first; i < seen; i++) sum = fmaf(factors[i], from[i * width + d], sum);
        out[row * dim + d] = from_float<E>(sum * share);
    }
}
