// Ops on the query and key heads of packed rows: per-head RMS norm and rotary embedding; values are
// copied. A row is (query_heads + 2 · key_heads) heads of `dim`, queries first. Storage type: E.
//
// Threads of a block are dealt out in groups of `lanes`, one head at a time each.
#include "common.cuh"

/// Head `head` of a row of `heads` heads.
template <class T>
__device__ inline Row<T> head_of(T* tensor, i64 row, int heads, int head, int dim) {
    return {tensor + (row * heads + head) * dim, dim, dim % PACK == 0};
}

// ---- rotation -----------------------------------------------------------------------------------

/// Both elements of a rotated pair. Roundings are explicit, so that they are the same in all kernels.
__device__ inline float turned_low(float low, float high, float cosine, float sine) {
    return __fmaf_rn(low, cosine, -__fmul_rn(high, sine));
}
__device__ inline float turned_high(float low, float high, float cosine, float sine) {
    return __fmaf_rn(high, cosine, __fmul_rn(low, sine));
}

/// Cosines and sines of eight pairs of a row.
struct Angles {
    float cosine[PACK], sine[PACK];
};

/// Those of pairs `place .. place + 8` of a row of a table (rows, pairs, 2). `sign` is −1 to turn back.
__device__ inline Angles angles_of(const float* table, i64 row, int pairs, int place, float sign) {
    float both[2][PACK]; // cosine, sine, cosine, …
    const Row<const float> angles = {table + row * 2 * pairs, 2 * pairs, pairs % PACK == 0};
    read8(angles, 2 * place, both[0]);
    read8(angles, 2 * place + PACK, both[1]);
    Angles found;
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        found.cosine[j] = both[j / 4][2 * j % 8];
        found.sine[j] = sign * both[j / 4][2 * j % 8 + 1];
    }
    return found;
}

/// The lanes that share a head which is rotated: the first `half` have the first elements of pairs,
/// as many after them the second, and what comes then stays.
struct Turn {
    int lane, half, lanes;

    __device__ bool is_low() const { return lane < half; }
    __device__ bool turns() const { return lane < 2 * half; }

    /// The angles of this lane's pairs.
    __device__ Angles angles(const float* table, i64 row, float sign) const {
        return angles_of(table, row, half * PACK, (is_low() ? lane : lane - half) * PACK, sign);
    }

    /// Rotates if `wanted`. All threads of a warp call it, since pairs are exchanged.
    __device__ void turn(float (&x)[PACK], const Angles& angles, bool wanted) const {
        const int partner = is_low() ? lane + half : lane - half;
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            const float other = __shfl_sync(ALL_LANES, x[j], partner, lanes);
            if (!wanted || !turns()) continue;
            x[j] = is_low() ? turned_low(x[j], other, angles.cosine[j], angles.sine[j])
                            : turned_high(other, x[j], angles.cosine[j], angles.sine[j]);
        }
    }
};

// ---- kernels ------------------------------------------------------------------------------------

/// A block per row; `lanes`, a power of two up to 32, times 8 is at least `dim`. With `half` > 0,
/// query and key heads are rotated by table (rows, 8 · half, 2) after they were rounded.
extern "C" __global__ void __launch_bounds__(256)
    qk_norm(const E* qkv, const E* query_weight, const E* key_weight, const float* table, E* y,
            float* rstd, int query_heads, int key_heads, int dim, int lanes, int half,
            float epsilon) {
    take_turn();
    const i64 row = blockIdx.x;
    const int normed = query_heads + key_heads, heads = normed + key_heads;
    const int group = threadIdx.x / lanes, groups = blockDim.x / lanes;
    const int lane = threadIdx.x % lanes, place = lane * PACK;
    const float per_element = 1.0f / float(dim);
    const Turn turn = {lane, half, lanes};
    Angles angles = {};
    if (turn.turns()) angles = turn.angles(table, row, 1.0f);
    // All threads stay in the loop: the sums are over neighbours.
    for (int start = 0; start < heads; start += groups) {
        const int head = start + group;
        const bool active = head < heads && place < dim;
        float x[PACK] = {};
        if (active) read8(head_of(qkv, row, heads, head, dim), place, x);
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < PACK; j++) squares += x[j] * x[j];
        const float variance = per_element * lanes_sum(squares, lanes);
        if (active && head < normed) {
            const float inverse = 1.0f / sqrtf(variance + epsilon);
            float weight[PACK];
            read8(row_of(head < query_heads ? query_weight : key_weight, 0, dim), place, weight);
#pragma unroll
            for (int j = 0; j < PACK; j++) x[j] = x[j] * inverse * weight[j];
            if (lane == 0) rstd[row * normed + head] = inverse;
        }
        if (half > 0) {
            unpack(packed<E>(x), x);
            turn.turn(x, angles, head < normed);
        }
        if (active) write8(head_of(y, row, heads, head, dim), place, x);
    }
}

/// Heads that a group of threads loads at a time, so that several are on their way.
constexpr int HEADS_AT_ONCE = 4;

/// A block per `rows_per_block` rows: dx, and where `partials` (blocks, 2·dim) is not null, the
/// sums over these rows that the gradients of query weight and key weight are made of. With `half` >
/// 0, `dy` is turned back and rounded first. `dx` may be `dy`.
extern "C" __global__ void __launch_bounds__(256)
    qk_norm_grad(const E* dy, const E* qkv, const E* query_weight, const E* key_weight,
                 const float* table, const float* rstd, E* dx, float* partials, i64 rows,
                 int rows_per_block, int query_heads, int key_heads, int dim, int lanes, int half) {
    take_turn();
    __shared__ float sums[2][256 * PACK];
    const int normed = query_heads + key_heads, heads = normed + key_heads;
    const int group = threadIdx.x / lanes, groups = blockDim.x / lanes;
    const int lane = threadIdx.x % lanes, place = lane * PACK;
    const float per_element = 1.0f / float(dim);
    const i64 first = i64(blockIdx.x) * rows_per_block;
    // The heads of all rows of the block, one row after the other.
    const int count = int(minimum(rows - first, rows_per_block)) * heads;
    const Turn turn = {lane, half, lanes};
    float query_scale[PACK], key_scale[PACK], d_query[PACK] = {}, d_key[PACK] = {};
    read8(row_of(query_weight, 0, dim), place, query_scale);
    read8(row_of(key_weight, 0, dim), place, key_scale);
    // All threads stay in the loop: the sums are over neighbours.
    for (int start = 0; start < count; start += HEADS_AT_ONCE * groups) {
        Pack<E> gradients[HEADS_AT_ONCE], inputs[HEADS_AT_ONCE];
        float inverse[HEADS_AT_ONCE] = {};
#pragma unroll
        for (int k = 0; k < HEADS_AT_ONCE; k++) {
            const int at = start + k * groups + group, head = at % heads;
            const i64 row = first + at / heads;
            // Nothing of what is past the end; value heads have no input.
            const int d_width = at < count ? dim : 0, x_width = head < normed ? d_width : 0;
            const bool aligned = dim % PACK == 0;
            gradients[k] = read_pack(Row<const E>{dy + (row * heads + head) * dim, d_width, aligned}, place);
            inputs[k] = read_pack(Row<const E>{qkv + (row * heads + head) * dim, x_width, aligned}, place);
            if (x_width > 0) inverse[k] = rstd[row * normed + head];
        }
#pragma unroll
        for (int k = 0; k < HEADS_AT_ONCE; k++) {
            const int at = start + k * groups + group, head = at % heads;
            const i64 row = first + at / heads;
            const bool is_query = head < query_heads;
            float d[PACK], x[PACK];
            unpack(gradients[k], d);
            unpack(inputs[k], x);
            if (half > 0) {
                const bool turns = at < count && head < normed;
                Angles angles = {};
                if (turns && turn.turns()) angles = turn.angles(table, row, -1.0f);
                turn.turn(d, angles, turns);
                unpack(packed<E>(d), d);
            }
            float along = 0.0f;
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                x[j] *= inverse[k]; // normalized; zero for a value head
                along += d[j] * (is_query ? query_scale[j] : key_scale[j]) * x[j];
                const float gradient = d[j] * x[j];
                d_query[j] += is_query ? gradient : 0.0f;
                d_key[j] += is_query ? 0.0f : gradient;
            }
            along = per_element * lanes_sum(along, lanes);
            if (at >= count || place >= dim) continue;
            if (head < normed) {
#pragma unroll
                for (int j = 0; j < PACK; j++) {
                    const float scale = is_query ? query_scale[j] : key_scale[j];
                    d[j] = (d[j] * scale - x[j] * along) * inverse[k];
                }
            }
            write8(head_of(dx, row, heads, head, dim), place, d);
        }
    }
    if (partials == nullptr) return;
    // (groups, lanes · 8) each.
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        sums[0][threadIdx.x * PACK + j] = d_query[j];
        sums[1][threadIdx.x * PACK + j] = d_key[j];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < 2 * dim; column += blockDim.x) {
        const int part = column < dim ? 0 : 1, i = column - part * dim;
        float total = 0.0f;
        for (int from = 0; from < groups; from++) total += sums[part][from * lanes * PACK + i];
        partials[i64(blockIdx.x) * 2 * dim + column] = total;
    }
}

/// A block per row; a thread handles a pack of the first `pairs` elements of a head and their partners, `pairs`
/// further on: `lanes` times 8 is at least `pairs`. Elements after those are copied. `sign` is −1 to
/// turn back. table: (rows, pairs, 2). `y` may be `qkv`.
extern "C" __global__ void __launch_bounds__(256)
    rotary(const E* qkv, const float* table, E* y, int query_heads, int key_heads, int dim,
           int lanes, int pairs, float sign) {
    take_turn();
    const i64 row = blockIdx.x;
    const int turned = query_heads + key_heads, heads = turned + key_heads;
    const int group = threadIdx.x / lanes, groups = blockDim.x / lanes;
    const int place = threadIdx.x % lanes * PACK;
    if (place >= pairs || group >= groups) return;
    const Angles angles = angles_of(table, row, pairs, place, sign);
    const int rest = dim - 2 * pairs;
    const bool aligned = pairs % PACK == 0 && rest % PACK == 0;
    for (int head = group; head < heads; head += groups) {
        const i64 start = (row * heads + head) * dim;
        const Row<const E> x_rest = {qkv + start + 2 * pairs, rest, aligned};
        const Row<E> y_rest = {y + start + 2 * pairs, rest, aligned};
        for (int i = place; i < rest; i += lanes * PACK) write_pack(y_rest, i, read_pack(x_rest, i));
        const Row<const E> x_low = {qkv + start, pairs, aligned};
        const Row<const E> x_high = {x_low.start + pairs, pairs, aligned};
        const Pack<E> low_pack = read_pack(x_low, place), high_pack = read_pack(x_high, place);
        const Row<E> y_low = {y + start, pairs, aligned};
        const Row<E> y_high = {y_low.start + pairs, pairs, aligned};
        if (head >= turned) {
            write_pack(y_low, place, low_pack);
            write_pack(y_high, place, high_pack);
            continue;
        }
        float low[PACK], high[PACK];
        unpack(low_pack, low);
        unpack(high_pack, high);
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            const float a = low[j], b = high[j];
            low[j] = turned_low(a, b, angles.cosine[j], angles.sine[j]);
            high[j] = turned_high(a, b, angles.cosine[j], angles.sine[j]);
        }
        write8(y_low, place, low);
        write8(y_high, place, high);
    }
}

/// Angle per position of each pair.
struct Frequencies {
    float of[128];
};

/// table: (rows, pairs, 2), cosine and sine times `factor`. Grid (blocks of `rows_per_block` rows, blocks of
/// pairs).
extern "C" __global__ void rotary_table(const int* positions, float* table, i64 rows,
                                        int rows_per_block, int pairs, float factor,
                                        const __grid_constant__ Frequencies frequencies) {
    const int pair = blockIdx.y * blockDim.x + threadIdx.x;
    if (pair >= pairs) return;
    const float frequency = frequencies.of[pair];
    const i64 first = i64(blockIdx.x) * rows_per_block;
    const i64 end = minimum(rows, first + rows_per_block);
    for (i64 row = first; row < end; row++) {
        // The product is rounded to f32; the cosine of that angle is then exact.
        const double angle = double(__fmul_rn(float(positions[row]), frequency));
        double sine, cosine;
        sincos(angle, &sine, &cosine);
        table[(row * pairs + pair) * 2] = __fmul_rn(float(cosine), factor);
        table[(row * pairs + pair) * 2 + 1] = __fmul_rn(float(sine), factor);
    }
}
