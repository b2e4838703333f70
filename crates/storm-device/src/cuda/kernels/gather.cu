// Copies many small pieces of device memory to one place, which may be mapped host memory. One launch instead of a copy
// for each piece.
#include "common.cuh"

constexpr int PIECES_MAX = 128;

/// Addresses, first words in the output, and numbers of words, each of 16 bytes.
struct Pieces {
    const uint4* from[PIECES_MAX];
    int first[PIECES_MAX];
    int count[PIECES_MAX];
};
static_assert(sizeof(Pieces) == 16 * PIECES_MAX, "as the host fills it");

/// One block for each piece.
extern "C" __global__ void __launch_bounds__(256)
    gather(const __grid_constant__ Pieces pieces, uint4* to) {
    const uint4* from = pieces.from[blockIdx.x];
    uint4* own = to + pieces.first[blockIdx.x];
    const int count = pieces.count[blockIdx.x];
    for (int i = threadIdx.x; i < count; i += blockDim.x) own[i] = from[i];
}
