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

/// The logits of a row. Rows of an odd vocabulary start anywhere: elements up to the first address
/// that is aligned to 16 bytes, then packs, then the rest.
struct Logits {
    E* start;
    i64 count, head, body;

    __device__ Logits(E* logits, i64 row, i64 vocabulary)
        : start(logits + row * vocabulary), count(vocabulary) {
        const u64 past = reinterpret_cast<u64>(start) % 16;
        head = minimum(count, past == 0 ? 0 : i64((16 - past) / sizeof(E)));
        body = (count - head) / PACK * PACK;
    }

    /// Calls `f` on each of this thread's single elements: the index, and the element.
    template <class F> __device__ void each_edge(F f) const {
        const i64 tail = head + body;
        if (threadIdx.x < head) f(i64(threadIdx.x), start[threadIdx.x]);
        if (tail + threadIdx.x < count) f(tail + threadIdx.x, start[tail + threadIdx.x]);
    }

    /// Calls `f` on each of this thread's packs: the index of the first element, and the address.
    template <class F> __device__ void each_pack(F f) const {
        E* const packs = start + head;
        i64 i = i64(threadIdx.x) * PACK;
        for (; i + i64(UNROLL - 1) * THREADS * PACK < body; i += i64(UNROLL) * THREADS * PACK) {
            Pack<E> loaded[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; k++) loaded[k] = load_pack(packs + i + k * THREADS * PACK);
#pragma unroll
            for (int k = 0; k < UNROLL; k++) {
                const i64 at = i + k * THREADS * PACK;
                f(head + at, loaded[k], packs + at);
            }
        }
        for (; i < body; i += i64(THREADS) * PACK) f(head + i, load_pack(packs + i), packs + i);
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

/// The loss of the block's row and, to every thread, the logarithm of its normalizer. All threads
/// have read the row when it returns.
__device__ inline float row_loss(const Logits& logits, int target, float denominator, float* loss) {
    // A target that is no token gives NaN.
    const bool known = target >= 0 && target < logits.count;
    const float at_target = known ? to_float(logits.start[target]) : not_a_number();
    const Softmax softmax = row_softmax(logits);
    const float log_sum = softmax.max + logf(softmax.sum);
    if (threadIdx.x == 0) *loss = (log_sum - at_target) / denominator;
    return log_sum;
}

/// A block per row of logits (rows, vocabulary).
extern "C" __global__ void __launch_bounds__(THREADS)
    head_loss(E* logits, const int* targets, const float* denominator, float* losses,
              i64 vocabulary) {
    const i64 row = blockIdx.x;
    const int target = targets[row];
    if (target == IGNORE) {
        if (threadIdx.x == 0) losses[row] = 0.0f;
        return;
    }
    row_loss(Logits(logits, row, vocabulary), target, *denominator, losses + row);
}

/// The same, and each logit becomes its gradient.
extern "C" __global__ void __launch_bounds__(THREADS)
    head_loss_grad(E* logits, const int* targets, const float* denominator,
                   const float* d_row_loss, float* losses, i64 vocabulary) {
    const i64 row = blockIdx.x;
    const int target = targets[row];
    const Logits row_logits(logits, row, vocabulary);
    if (target == IGNORE) {
        if (threadIdx.x == 0) losses[row] = 0.0f;
        const float zeros[PACK] = {};
        row_logits.each_edge([&](i64, E& x) { x = from_float<E>(0.0f); });
        row_logits.each_pack([&](i64, const Pack<E>&, E* to) { store_pack(to, packed<E>(zeros)); });
        return;
    }
    const float scale = d_row_loss[row] / *denominator;
    const float log_sum = row_loss(row_logits, target, *denominator, losses + row);
    row_logits.each_edge([&](i64 i, E& x) {
        const float probability = exponential(to_float(x) - log_sum);
        x = from_float<E>((i == target ? probability - 1.0f : probability) * scale);
    });
    row_logits.each_pack([&](i64 i, const Pack<E>& pack, E* to) {
        float x[PACK];
        unpack(pack, x);
        const int in_pack = target - int(i);
#pragma unroll
        for (int j = 0; j < PACK; j++) {
            const float probability = exponential(x[j] - log_sum);
            x[j] = (j == in_pack ? probability - 1.0f : probability) * scale;
        }
        store_pack(to, packed<E>(x));
    });
}
