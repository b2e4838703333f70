// Copies, conversions, constants and random values. Storage types: A read, B written.
#include "common.cuh"

/// Packs per thread: loads in flight.
constexpr int PACKS = 2;

__device__ inline i64 place(int k) {
    return ((i64(blockIdx.x) * PACKS + k) * blockDim.x + threadIdx.x) * PACK;
}

/// The same values, rounded to nearest.
extern "C" __global__ void convert(const A* x, B* out, i64 elements) {
    Pack<A> packs[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++) packs[k] = read_pack(flat(x, elements), place(k));
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        float values[PACK];
        unpack(packs[k], values);
        write8(flat(out, elements), place(k), values);
    }
}

__device__ inline void fill_with(float value, B* out, i64 elements) {
    float values[PACK];
#pragma unroll
    for (int j = 0; j < PACK; j++) values[j] = value;
#pragma unroll
    for (int k = 0; k < PACKS; k++) write8(flat(out, elements), place(k), values);
}

extern "C" __global__ void fill(B* out, i64 elements, float value) {
    fill_with(value, out, elements);
}

/// A scalar in device memory, everywhere.
extern "C" __global__ void broadcast(const float* value, B* out, i64 elements) {
    fill_with(*value, out, elements);
}

/// Rows of `out`, `width` wide, zero but for `part` (rows × columns) at `row`, `column`, multiplied by `factor`. An element
/// per thread.
extern "C" __global__ void place_block(const A* part, B* out, i64 elements, i64 width, i64 row, i64 column, i64 rows,
                                       i64 columns, float factor) {
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= elements) return;
    const i64 r = i / width - row, c = i % width - column;
    const bool inside = r >= 0 && r < rows && c >= 0 && c < columns;
    out[i] = from_float<B>(inside ? to_float(part[r * columns + c]) * factor : 0.0f);
}

/// The block of `dy` at `row`, `column`, multiplied by `factor`, into `out` or onto what is there. An element per thread.
extern "C" __global__ void block_grad(const A* dy, B* out, i64 elements, i64 width, i64 row, i64 column, i64 dy_width,
                                      float factor, int accumulate) {
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= elements) return;
    const float value = __fmul_rn(to_float(dy[(row + i / width) * dy_width + column + i % width]), factor);
    out[i] = from_float<B>(accumulate ? __fadd_rn(value, to_float(out[i])) : value);
}

/// 16 bytes per thread; the last thread copies the rest as well.
extern "C" __global__ void copy_bytes(const unsigned char* x, unsigned char* out, i64 bytes) {
    const i64 i = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
    if (i + 16 <= bytes) {
        *reinterpret_cast<uint4*>(out + i) = *reinterpret_cast<const uint4*>(x + i);
    } else {
        for (i64 j = i; j < bytes; j++) out[j] = x[j];
    }
}

/// An element of `out` per thread. Extents are those of the result, strides the steps in `x` for
/// one step along each of its axes; unused axes come first, with extent 1.
template <class T>
__device__ inline void transpose(const T* x, T* out, i64 elements, const i64 (&extents)[8],
                                 const i64 (&strides)[8]) {
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= elements) return;
    i64 rest = i, from = 0;
#pragma unroll
    for (int axis = 7; axis >= 0; axis--) {
        if (extents[axis] == 1) continue;
        from += rest % extents[axis] * strides[axis];
        rest /= extents[axis];
    }
    out[i] = x[from];
}

#define TRANSPOSE(NAME, T)                                                                         \
    extern "C" __global__ void NAME(const T* x, T* out, i64 elements, i64 e0, i64 e1, i64 e2,      \
                                    i64 e3, i64 e4, i64 e5, i64 e6, i64 e7, i64 s0, i64 s1,        \
                                    i64 s2, i64 s3, i64 s4, i64 s5, i64 s6, i64 s7) {              \
        const i64 extents[8] = {e0, e1, e2, e3, e4, e5, e6, e7};                                   \
        const i64 strides[8] = {s0, s1, s2, s3, s4, s5, s6, s7};                                   \
        transpose<T>(x, out, elements, extents, strides);                                          \
    }

TRANSPOSE(transpose_1, unsigned char)
TRANSPOSE(transpose_2, unsigned short)
TRANSPOSE(transpose_4, unsigned int)

/// Normal values of mean 0 by the Box–Muller transform: four words give four values. In f64, as on
/// the CPU, so that a run starts from the same weights on every device.
extern "C" __global__ void random_normal(const int* seed, B* out, i64 elements, float deviation,
                                         int stream) {
    const i64 i = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i >= elements) return;
    const uint4 block = Random(seed, PURPOSE_INITIALIZATION, stream).words(u64(i) / 4);
    const u32 words[4] = {block.x, block.y, block.z, block.w};
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        const double uniform[2] = {(double(words[2 * pair]) + 0.5) / 4294967296.0,
                                   (double(words[2 * pair + 1]) + 0.5) / 4294967296.0};
        const double radius = sqrt(-2.0 * log(uniform[0]));
        double sine, cosine;
        sincospi(2.0 * uniform[1], &sine, &cosine);
        const i64 at = i + 2 * pair;
        if (at < elements) out[at] = from_float<B>(float(radius * cosine * double(deviation)));
        if (at + 1 < elements) {
            out[at + 1] = from_float<B>(float(radius * sine * double(deviation)));
        }
    }
}
