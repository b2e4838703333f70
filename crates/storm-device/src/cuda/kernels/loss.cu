// Cross-entropy of a chunk of logits, and its gradient over them. Storage type: E.
#include "common.cuh"

/// A target that costs nothing: `storm_graph::IGNORE_INDEX`.
constexpr int IGNORE = -100;

/// Threads of a block, which has a row.
constexpr int THREADS = 512;
/// Packs in flight per thread.
constexpr int UNROLL = 2;

/// e^x: for bf16 logits the hardware's approximation is far below their rounding.
__device__ inline float exponential(float x) { return EXACT<E> ? expf(x) : __expf(x); }

/// The logits of a row. Most columns come first, whole packs per row, for all rows; the last few of all rows follow.
struct Logits {
    E *start, *rest;
    i64 count, body;

    /// Of a chunk of as many rows as the grid has blocks.
    __device__ Logits(E* logits, i64 row, i64 vocabulary, i64 even)
        : start(logits + row * even), rest(logits + gridDim.x * even + row * (vocabulary - even)), count(vocabulary),
          body(even) {}

    __device__ E& at(i64 i) const { return i < body ? start[i] : rest[i - body]; }

    /// Calls `f` on each of this thread's single elements: the index, and the element.
    template <class F> __device__ void each_edge(F f) const {
        if (body + threadIdx.x < count) f(body + threadIdx.x, rest[threadIdx.x]);
    }

    /// Calls `f` on each of this thread's packs: the index of the first element, and the address.
    template <class F> __device__ void each_pack(F f) const {
        i64 i = i64(threadIdx.x) * PACK;
        for (; i + i64(UNROLL - 1) * THREADS * PACK < body; i += i64(UNROLL) * THREADS * PACK) {
            Pack<E> loaded[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; k++) loaded[k] = load_pack(start + i + k * THREADS * PACK);
#pragma unroll
            for (int k = 0; k < UNROLL; k++) {
                const i64 at = i + k * THREADS * PACK;
                f(at, loaded[k], start + at);
            }
        }
        for (; i < body; i += i64(THREADS) * PACK) f(i, load_pack(start + i), start + i);
    }
};

/// A maximum, and the sum of e^(x − maximum). NaN reaches the sum.
struct Softmax {
    float max, sum;

    __device__ void raise(float to) {
        if (to > max) {
            sum *= exponential(max - to);
            max = to;
        }
    }

    __device__ void add(float x) {
        raise(x);
        sum += exponential(x - max);
    }

    __device__ void join(const Softmax& other) {
        raise(other.max);
        sum += other.sum * exponential(other.max - max);
    }

    __device__ Softmax neighbour(int step) const {
        return {__shfl_xor_sync(ALL_LANES, max, step), __shfl_xor_sync(ALL_LANES, sum, step)};
    }
};

__device__ inline Softmax warp_join(Softmax x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x.join(x.neighbour(step));
    return x;
}

/// The softmax of the row, to every thread.
__device__ inline Softmax row_softmax(const Logits& logits) {
    __shared__ Softmax slots[THREADS / WARP];
    Softmax own = {LOWEST, 0.0f};
    logits.each_edge([&](i64, E& x) { own.add(to_float(x)); });
    logits.each_pack([&](i64, const Pack<E>& pack, E*) {
        float x[PACK];
        unpack(pack, x);
        float max = x[0];
#pragma unroll
        for (int j = 1; j < PACK; j++) max = fmaxf(max, x[j]);
        own.raise(max);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < PACK; j++) sum += exponential(x[j] - own.max);
        own.sum += sum;
    });
    own = warp_join(own);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (lane == 0) slots[warp] = own;
    __syncthreads();
    return warp_join(lane < THREADS / WARP ? slots[lane] : Softmax{LOWEST, 0.0f});
}

/// The mean of a row, to every thread; and whether its target, whose logit is `at_target`, is the first of the largest ones,
/// into `correct`, where not null.
__device__ inline float row_mean(const Logits& logits, int target, float at_target, float* correct) {
    __shared__ float slots[WARP];
    float sum = 0.0f;
    // A NaN is larger than anything.
    bool is_largest = true;
    const auto see = [&](i64 i, float x) {
        sum += x;
        is_largest = is_largest && (i < target ? x < at_target : x <= at_target);
    };
    logits.each_edge([&](i64 i, E& x) { see(i, to_float(x)); });
    logits.each_pack([&](i64 i, const Pack<E>& pack, E*) {
        float x[PACK];
        unpack(pack, x);
#pragma unroll
        for (int j = 0; j < PACK; j++) see(i + j, x[j]);
    });
    const bool all = __syncthreads_and(is_largest);
    if (correct != nullptr && threadIdx.x == 0) *correct = all ? 1.0f : 0.0f;
    return block_sum(sum, slots) / float(logits.count);
}

/// The loss of the block's row and, to every thread, the logarithm of its normalizer. `correct` may be null. All threads
/// have read the row when it returns.
__device__ inline float row_loss(const Logits& logits, int target, float smoothing, float denominator, float* loss,
                                 float* correct) {
    // A target that is no token gives NaN.
    const bool known = target >= 0 && target < logits.count;
    const float at_target = known ? to_float(logits.at(target)) : not_a_number();
    const Softmax softmax = row_softmax(logits);
    const float log_sum = softmax.max + logf(softmax.sum);
    float expected = at_target;
    if (smoothing != 0.0f || correct != nullptr) {
        const float mean = row_mean(logits, target, at_target, correct);
        if (smoothing != 0.0f) expected = (1.0f - smoothing) * at_target + smoothing * mean;
    }
    if (threadIdx.x == 0) *loss = (log_sum - expected) / denominator;
    return log_sum;
}

/// An ignored row costs nothing and is not right.
__device__ inline void ignore(float* loss, float* correct) {
    if (threadIdx.x != 0) return;
    *loss = 0.0f;
    if (correct != nullptr) *correct = 0.0f;
}

/// A block per row of logits (rows, vocabulary), of whose columns the first `even` are together. `correct` may be null.
extern "C" __global__ void __launch_bounds__(THREADS)
    head_loss(E* logits, const int* targets, const float* denominator, float* losses, float* correct,
              i64 vocabulary, i64 even, float smoothing) {
    const i64 row = blockIdx.x;
    const int target = targets[row];
    float* const own = correct == nullptr ? nullptr : correct + row;
    if (target == IGNORE) return ignore(losses + row, own);
    row_loss(Logits(logits, row, vocabulary, even), target, smoothing, *denominator, losses + row, own);
}

/// The same, and each logit becomes its gradient.
extern "C" __global__ void __launch_bounds__(THREADS)
    head_loss_grad(E* logits, const int* targets, const float* denominator,
                   const float* d_row_loss, float* losses, float* correct, i64 vocabulary, i64 even,
                   float smoothing) {
    const i64 row = blockIdx.x;
    float* const own = correct == nullptr ? nullptr : correct + row;
    const int target = targets[row];
    const Logits row_logits(logits, row, vocabulary, even);
    if (target == IGNORE) {
        ignore(losses + row, own);
        const float zeros[PACK] = {};
        row_logits.each_edge([&](i64, E& x) { x = from_float<E>(0.0f); });
        row_logits.each_pack([&](i64, const Pack<E>&, E* to) { store_pack(to, packed<E>(zeros)); });
        return;
    }
    const float scale = d_row_loss[row] / *denominator;
    const float log_sum = row_loss(row_logits, target, smoothing, *denominator, losses + row, own);
    // What the target has, and what every class has of it.
    const float rest = 1.0f - smoothing, spread = smoothing / float(vocabulary);
    row_logits.each_edge([&](i64 i, E& x) {
        const float excess = exponential(to_float(x) - log_sum) - spread;
        x = from_float<E>((i == target ? excess - rest : excess) * scale);
    });
    row_logits.each_pack([&](i64 i, const Pack<E>& pack, E* to) {
        float x[PACK];
        unpack(pack, x);
        const int in_pack = target - int(i);
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            const float excess = exponential(x[j] - log_sum) - spread;
            x[j] = (j == in_pack ? excess - rest : excess) * scale;
        }
        store_pack(to, packed<E>(x));
    });
}
