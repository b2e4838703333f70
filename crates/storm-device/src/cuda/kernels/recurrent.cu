// The gates of a GRU, a thread per element. Storage type: E.
#include "activations.cuh"

__device__ inline i64 element_of_thread() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }

extern "C" __global__ void gru_reset(const E* gate, const E* hidden, E* out, i64 elements) {
    const i64 i = element_of_thread();
    if (i >= elements) return;
    out[i] = from_float<E>(sigmoid(to_float(gate[i])) * to_float(hidden[i]));
}

extern "C" __global__ void gru_reset_grad(const E* dy, const E* gate, const E* hidden, E* d_gate, E* d_hidden,
                                          i64 elements) {
    const i64 i = element_of_thread();
    if (i >= elements) return;
    const float d = to_float(dy[i]), reset = sigmoid(to_float(gate[i]));
    d_gate[i] = from_float<E>(d * to_float(hidden[i]) * (reset * (1.0f - reset)));
    d_hidden[i] = from_float<E>(d * reset);
}

extern "C" __global__ void gru_state(const E* gate, const E* candidate, const E* hidden, E* out, i64 elements) {
    const i64 i = element_of_thread();
    if (i >= elements) return;
    const float update = sigmoid(to_float(gate[i]));
    out[i] = from_float<E>(update * to_float(hidden[i]) + (1.0f - update) * tanhf(to_float(candidate[i])));
}

extern "C" __global__ void gru_state_grad(const E* dy, const E* gate, const E* candidate, const E* hidden, E* d_gate,
                                          E* d_candidate, E* d_hidden, i64 elements) {
    const i64 i = element_of_thread();
    if (i >= elements) return;
    const float d = to_float(dy[i]), update = sigmoid(to_float(gate[i]));
    const float made = tanhf(to_float(candidate[i]));
    d_gate[i] = from_float<E>(d * (to_float(hidden[i]) - made) * (update * (1.0f - update)));
    d_candidate[i] = from_float<E>(d * (1.0f - update) * (1.0f - made * made));
    d_hidden[i] = from_float<E>(d * update);
}
