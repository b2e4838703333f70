// What the kernels share: storage types, packs of eight elements, reductions, random bits.
//
// Needs no header: NVRTC compiles it without an include path. Arithmetic is f32; a storage type
// only says how a value lies in memory. Reductions are trees whose shape depends on the launch
// geometry alone, which depends on tensor shapes alone: results are the same in every run.
#pragma once

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
/// The lowest finite f32. As the start of a maximum it keeps `-inf - max` from being NaN.
constexpr float LOWEST = -3.402823466e38f;

__device__ inline i64 minimum(i64 a, i64 b) { return a < b ? a : b; }
__device__ inline float not_a_number() { return __int_as_float(0x7fffffff); }

/// The most tensors of a launch over several, `TENSORS_MAX` on the host.
constexpr int TENSORS_MAX = 16;

/// The tensor of this block, in a launch over several: `first_block` has the first block of each.
__device__ inline int tensor_of_block(const int (&first_block)[TENSORS_MAX], int count) {
    int tensor = 0;
    while (tensor + 1 < count && int(blockIdx.x) >= first_block[tensor + 1]) tensor++;
    return tensor;
}

// ---- storage types ----------------------------------------------------------------------------

/// The upper half of an f32.
struct bf16 {
    unsigned short bits;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

/// Two values rounded to nearest, ties to even; `low` in the lower half. NaN stays NaN.
__device__ inline u32 two_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

template <class T> __device__ inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline bf16 from_float<bf16>(float x) {
    return bf16{(unsigned short)two_bf16(x, 0.0f)};
}

/// Whether `T` keeps every f32.
template <class T> constexpr bool EXACT = sizeof(T) == 4;

// ---- packs: eight elements, the unit of memory access -----------------------------------------

constexpr int PACK = 8;

/// Eight elements as they lie in memory.
template <class T> struct Pack;
template <> struct Pack<bf16> {
    uint4 words;
};
template <> struct Pack<float> {
    float4 low, high;
};

/// From an address aligned to 16 bytes.
__device__ inline Pack<bf16> load_pack(const bf16* from) {
    return {*reinterpret_cast<const uint4*>(from)};
}
__device__ inline Pack<float> load_pack(const float* from) {
    const float4* halves = reinterpret_cast<const float4*>(from);
    return {halves[0], halves[1]};
}

/// To an address aligned to 16 bytes.
__device__ inline void store_pack(bf16* to, const Pack<bf16>& pack) {
    *reinterpret_cast<uint4*>(to) = pack.words;
}
__device__ inline void store_pack(float* to, const Pack<float>& pack) {
    float4* halves = reinterpret_cast<float4*>(to);
    halves[0] = pack.low;
    halves[1] = pack.high;
}

__device__ inline void unpack(const Pack<bf16>& pack, float (&x)[PACK]) {
    const u32 words[4] = {pack.words.x, pack.words.y, pack.words.z, pack.words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
__device__ inline void unpack(const Pack<float>& pack, float (&x)[PACK]) {
    x[0] = pack.low.x, x[1] = pack.low.y, x[2] = pack.low.z, x[3] = pack.low.w;
    x[4] = pack.high.x, x[5] = pack.high.y, x[6] = pack.high.z, x[7] = pack.high.w;
}

template <class T> __device__ inline Pack<T> packed(const float (&x)[PACK]);
template <> __device__ inline Pack<bf16> packed<bf16>(const float (&x)[PACK]) {
    return {make_uint4(two_bf16(x[0], x[1]), two_bf16(x[2], x[3]), two_bf16(x[4], x[5]),
                       two_bf16(x[6], x[7]))};
}
template <> __device__ inline Pack<float> packed<float>(const float (&x)[PACK]) {
    return {make_float4(x[0], x[1], x[2], x[3]), make_float4(x[4], x[5], x[6], x[7])};
}

/// A row of `width` elements, or a part of one. Whole packs are accessed at once if it is
/// `aligned`: if it starts on a pack.
template <class T> struct Row {
    T* start;
    i64 width;
    bool aligned;
};

/// Row `row` of a tensor. Tensors are aligned to 256 bytes, so every row starts on a pack if the
/// width is a multiple of 8.
template <class T> __device__ inline Row<T> row_of(T* tensor, i64 row, i64 width) {
    return {tensor + row * width, width, width % PACK == 0};
}

/// A tensor as one row.
template <class T> __device__ inline Row<T> flat(T* tensor, i64 elements) {
    return {tensor, elements, true};
}

/// Elements `i .. i + 8` of a row; those past its end are zero.
template <class T> __device__ inline Pack<T> read_pack(const Row<const T>& row, i64 i) {
    if (row.aligned && i + PACK <= row.width) return load_pack(row.start + i);
    float x[PACK];
#pragma unroll
    for (int j = 0; j < PACK; j++) x[j] = i + j < row.width ? to_float(row.start[i + j]) : 0.0f;
    return packed<T>(x);
}

/// Writes elements `i .. i + 8` of a row; those past its end are dropped.
template <class T>
__device__ inline void write_pack(const Row<T>& row, i64 i, const Pack<T>& pack) {
    if (row.aligned && i + PACK <= row.width) return store_pack(row.start + i, pack);
    float x[PACK];
    unpack(pack, x);
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        if (i + j < row.width) row.start[i + j] = from_float<T>(x[j]);
    }
}

template <class T>
__device__ inline void read8(const Row<const T>& row, i64 i, float (&x)[PACK]) {
    unpack(read_pack(row, i), x);
}

template <class T> __device__ inline void write8(const Row<T>& row, i64 i, const float (&x)[PACK]) {
    write_pack(row, i, packed<T>(x));
}

// ---- reductions -------------------------------------------------------------------------------

/// Sum over groups of `lanes` neighbours (a power of two); every lane gets it.
template <class T> __device__ inline T lanes_sum(T x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

template <class T> __device__ inline T warp_sum(T x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

/// Sum over the block, whose size is a multiple of 32; every thread gets it. `slots` must not be
/// in use: between two calls with the same slots there is a barrier besides those in here.
template <class T> __device__ inline T block_sum(T x, T (&slots)[WARP]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_sum(x);
    if (lane == 0) slots[warp] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / WARP ? slots[lane] : T(0));
}

// ---- kernels that begin early ----------------------------------------------------------------

/// Lets the next kernel of the stream begin as soon as all blocks of this one have, if it is one that waits.
__device__ inline void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until all kernels before this one have ended and what they wrote can be read. A kernel that is launched to begin
/// early calls it in every thread, before it reads or writes anything; in others it does nothing.
__device__ inline void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Both, for kernels that have nothing to prepare.
__device__ inline void take_turn() {
    let_next_kernel_begin();
    wait_for_kernels_before();
}

// ---- random bits ------------------------------------------------------------------------------

/// Tags of `storm_graph::random::Purpose`.
constexpr u32 PURPOSE_INITIALIZATION = 0;
constexpr u32 PURPOSE_ROUNDING = 0x5bd1e995u;
constexpr u32 PURPOSE_DROPOUT = 0x27d4eb2fu;
constexpr u32 PURPOSE_AUGMENTATION = 0x165667b1u;
constexpr u32 PURPOSE_SAMPLING = 0x2545f491u;

/// Where random bits come from: seed words (low, high, step) in device memory, what the bits are
/// for, and the tensor's stream.
struct Random {
    u32 key[2];
    u32 stream, step;

    __device__ Random(const int* seed, u32 purpose, u32 stream)
        : key{u32(seed[0]), u32(seed[1]) ^ purpose}, stream(stream), step(u32(seed[2])) {}

    /// The four words of a block: Philox 4x32-10, as `storm_graph::random::words`.
    __device__ uint4 words(u64 block) const {
        uint4 c = make_uint4(u32(block), u32(block >> 32), stream, step);
        u32 k0 = key[0], k1 = key[1];
#pragma unroll
        for (int round = 0; round < 10; round++) {
            const u64 a = u64(c.x) * 0xD2511F53u;
            const u64 b = u64(c.z) * 0xCD9E8D57u;
            c = make_uint4(u32(b >> 32) ^ c.y ^ k0, u32(b), u32(a >> 32) ^ c.w ^ k1, u32(a));
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        return c;
    }
};
