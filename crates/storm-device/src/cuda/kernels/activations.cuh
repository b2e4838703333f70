// Activations, their slopes, and the gradients of a gated unit.
#pragma once
#include "common.cuh"

__device__ inline float reciprocal(float x) { return __fdividef(1.0f, x); }

__device__ inline float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

/// d(x·σ(x))/dx, given σ(x).
__device__ inline float silu_slope(float x, float s) { return s * (1.0f + x * (1.0f - s)); }

/// 2 √(2/π): the tanh form of GELU is x · sigmoid(2u).
constexpr float GELU_SCALE = 1.595769f;
constexpr float GELU_CUBIC = 0.044715f;

__device__ inline float gelu_tanh_value(float x) {
    // Exactly −0 below; the limit avoids −∞ · 0. NaN passes the comparison.
    x = x < -20.0f ? -20.0f : x;
    return x * sigmoid(GELU_SCALE * x * (GELU_CUBIC * x * x + 1.0f));
}

__device__ inline float gelu_tanh_slope(float x) {
    // Exactly 0 or 1 beyond.
    x = x < -20.0f ? -20.0f : x;
    x = x > 20.0f ? 20.0f : x;
    const float square = x * x;
    const float inner = GELU_SCALE * x * (GELU_CUBIC * square + 1.0f);
    const float inner_slope = GELU_SCALE * (3.0f * GELU_CUBIC * square + 1.0f);
    // The sigmoid and its slope, the latter without cancellation for large arguments.
    const float e = expf(-fabsf(inner)), d = reciprocal(1.0f + e);
    const float s = inner < 0.0f ? e * d : d;
    return x * inner_slope * (e * d * d) + s;
}

/// The normal distribution up to x.
__device__ inline float normal_share(float x) { return 0.5f * erfcf(x * -0.70710678f); }

/// The exact form of GELU.
__device__ inline float gelu_value(float x) {
    // As for the tanh form.
    x = x < -20.0f ? -20.0f : x;
    return x * normal_share(x);
}

__device__ inline float gelu_slope(float x) {
    x = x < -20.0f ? -20.0f : x;
    x = x > 20.0f ? 20.0f : x;
    return normal_share(x) + x * 0.39894228f * expf(-0.5f * x * x);
}

/// The value of an activation and its slope at one place.
struct Active {
    float value, slope;
};

struct SiluOf {
    __device__ static Active at(float x) {
        const float s = sigmoid(x);
        return {x * s, silu_slope(x, s)};
    }
};
struct GeluOf {
    __device__ static Active at(float x) { return {gelu_value(x), gelu_slope(x)}; }
};
struct GeluTanhOf {
    __device__ static Active at(float x) { return {gelu_tanh_value(x), gelu_tanh_slope(x)}; }
};
struct ReluOf {
    __device__ static Active at(float x) {
        return {x < 0.0f ? 0.0f : x, x <= 0.0f ? 0.0f : 1.0f};
    }
};

/// What a gated unit makes of a gate and an up, and their gradients.
struct Gated {
    float made, d_gate, d_up;
};

/// From `d`, the gradient of what the unit makes.
template <class F> __device__ inline Gated gated_gradient(float d, float gate, float up) {
    const Active active = F::at(gate);
    return {active.value * up, d * up * active.slope, d * active.value};
}

/// The same of eight gates and ups; `gate` becomes what the unit makes.
template <class F>
__device__ inline void gated_gradients(const float (&d)[PACK], float (&gate)[PACK], const float (&up)[PACK],
                                       float (&d_gate)[PACK], float (&d_up)[PACK]) {
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        const Gated gated = gated_gradient<F>(d[j], gate[j], up[j]);
        d_gate[j] = gated.d_gate;
        d_up[j] = gated.d_up;
        gate[j] = gated.made;
    }
}
