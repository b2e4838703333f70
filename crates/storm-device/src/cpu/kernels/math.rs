//! Elementary functions in f32, written so that loops over them vectorize: no branches, no tables,
//! and no library calls where the hardware has fused multiply-add.
//!
//! Use them inside [`simd_dispatch!`](crate::simd_dispatch). All instruction sets give the same
//! bits.

/// Limits `x` to `low..=high`. NaN stays NaN.
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// eˣ, to about 1 ulp. Infinite above 88.73; NaN stays NaN.
///
/// Exactly 0 below −87.33, where the result would be subnormal. Processors take a hundred times
/// longer for subnormal results, which masked scores (−∞) would otherwise cause.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5 · 2²³ rounds to an integer, which is then in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts. The product of the first part and n is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;

    /// The smallest argument with a normal result.
    const LEAST: f32 = -87.336_54;

    let vanishes = x < LEAST;
    // Beyond these limits, the result is 0 or infinite anyway. Inside, n fits two scale factors.
    let x = clamp(x, LEAST, 89.0);
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    // e^r = 1 + r + r² p(r) on |r| ≤ ln 2 / 2 (Cephes).
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_6e-1);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;
    // 2ⁿ in two factors: n may be 128, where 2ⁿ overflows but the result need not.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let result = p * power_of_two(half) * power_of_two(n.wrapping_sub(half));
    if vanishes { 0.0 } else { result }
}

/// 2ⁿ for −126 ≤ n ≤ 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// 1 / (1 + e⁻ˣ). Exactly 0 below −88.73 and 1 above 16.64.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The hyperbolic tangent, to about 2 ulp. Exactly ±1 far from 0. NaN stays NaN.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    // A polynomial near 0 (Cephes), where the other form would suffer from cancellation.
    let z = x * x;
    let p = -5.704_988_7e-3f32;
    let p = p.mul_add(z, 2.063_909e-2);
    let p = p.mul_add(z, -5.373_971_6e-2);
    let p = p.mul_add(z, 1.333_144_2e-1);
    let p = p.mul_add(z, -3.333_328e-1);
    let near = (p * z).mul_add(x, x);
    let far = 1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0);
    if x.abs() < 0.625 { near } else { far.copysign(x) }
}

/// x · sigmoid(x), with the limit 0 at −∞.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    let x = if x < -150.0 { -150.0 } else { x };
    x * sigmoid(x)
}

/// Derivative of [`silu`].
#[inline(always)]
pub fn silu_derivative(x: f32) -> f32 {
    // Beyond the limits, the derivative is exactly 0 or 1. They avoid ∞ · 0.
    let x = clamp(x, -150.0, 150.0);
    let (s, slope) = sigmoid_and_slope(x);
    x.mul_add(slope, s)
}

/// s = sigmoid(x) and its derivative s (1 − s), the latter without cancellation for large x.
#[inline(always)]
fn sigmoid_and_slope(x: f32) -> (f32, f32) {
    let e = exp(-x.abs());
    let d = 1.0 / (1.0 + e);
    let s = if x < 0.0 { e * d } else { d };
    (s, e * d * d)
}

/// 2 √(2/π), the factor of the argument of the sigmoid form of GELU.
const GELU_SCALE: f32 = 1.595_769;
const GELU_CUBIC: f32 = 0.044_715;

/// GELU in its tanh approximation, ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))).
///
/// Computed as x · sigmoid(2u), which is the same function without cancellation for negative x.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    // The result is exactly −0 below this limit, which avoids −∞ · 0.
    let x = if x < -20.0 { -20.0 } else { x };
    let inner = GELU_SCALE * x * GELU_CUBIC.mul_add(x * x, 1.0);
    x * sigmoid(inner)
}

/// Derivative of [`gelu_tanh`].
#[inline(always)]
pub fn gelu_tanh_derivative(x: f32) -> f32 {
    // Beyond the limits, the derivative is exactly 0 or 1.
    let x = clamp(x, -20.0, 20.0);
    let square = x * x;
    let inner = GELU_SCALE * x * GELU_CUBIC.mul_add(square, 1.0);
    let inner_slope = GELU_SCALE * (3.0 * GELU_CUBIC).mul_add(square, 1.0);
    let (s, slope) = sigmoid_and_slope(inner);
    (x * inner_slope).mul_add(slope, s)
}

/// ½ erfc(|x| / √2): the share of a normal distribution beyond |x| (W. H. Press et al., Numerical
/// Recipes, erfcc). The relative error is about 4e-7 up to |x| = 2, and rises to 4e-6 far from 0.
#[inline(always)]
fn normal_tail(x: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / 0.5f32.mul_add(z, 1.0);
    let p = 0.170_872_77f32;
    let p = p.mul_add(t, -0.822_152_23);
    let p = p.mul_add(t, 1.488_515_9);
    let p = p.mul_add(t, -1.135_204);
    let p = p.mul_add(t, 0.278_868_07);
    let p = p.mul_add(t, -0.186_288_06);
    let p = p.mul_add(t, 0.096_784_18);
    let p = p.mul_add(t, 0.374_091_96);
    let p = p.mul_add(t, 1.000_023_7);
    let p = p.mul_add(t, -1.265_512_2);
    0.5 * t * exp((-0.5 * x).mul_add(x, p))
}

/// The share of a normal distribution below x.
#[inline(always)]
fn normal_share(x: f32) -> f32 {
    let tail = normal_tail(x);
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// GELU in its exact form, ½ x (1 + erf(x/√2)).
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    // The result is exactly −0 below this limit, which avoids −∞ · 0.
    let x = if x < -20.0 { -20.0 } else { x };
    x * normal_share(x)
}

/// Derivative of [`gelu`].
#[inline(always)]
pub fn gelu_derivative(x: f32) -> f32 {
    /// 1 / √(2π).
    const DENSITY: f32 = 0.398_942_3;
    // Beyond the limits, the derivative is exactly 0 or 1.
    let x = clamp(x, -20.0, 20.0);
    (x * DENSITY).mul_add(exp(-0.5 * x * x), normal_share(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error over evenly spaced x, in ulp of the result, or of `floor` where the result is
    /// smaller.
    fn worst_ulp(
        ours: fn(f32) -> f32,
        reference: fn(f64) -> f64,
        (low, high): (f32, f32),
        floor: f32,
    ) -> f64 {
        let steps = 200_001;
        let error = |i: usize| {
            let x = low + (high - low) * (i as f32 / (steps - 1) as f32);
            let exact = reference(x as f64);
            let scale = (exact.abs() as f32).max(floor);
            let ulp = (scale.next_up() - scale) as f64;
            (ours(x) as f64 - exact).abs() / ulp
        };
        (0..steps).map(error).fold(0.0, f64::max)
    }

    fn sigmoid64(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    fn gelu64(x: f64) -> f64 {
        x * sigmoid64(2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3)))
    }

    /// ½ x (1 + erf(x/√2)), by the series of erf whose terms are all positive.
    fn exact_gelu64(x: f64) -> f64 {
        let z = x / std::f64::consts::SQRT_2;
        let (mut term, mut sum, mut n) = (z, z, 0.0);
        while term.abs() > 1e-18 * sum.abs() {
            n += 1.0;
            term *= 2.0 * z * z / (2.0 * n + 1.0);
            sum += term;
        }
        let erf = std::f64::consts::FRAC_2_SQRT_PI * (-z * z).exp() * sum;
        0.5 * x * (1.0 + erf)
    }

    fn derivative(f: fn(f64) -> f64, x: f64) -> f64 {
        // Central difference of fourth order. Its error is about 1e-12, far below an f32 ulp of 1.
        let h = 1e-3;
        (8.0 * (f(x + h) - f(x - h)) - (f(x + 2.0 * h) - f(x - 2.0 * h))) / (12.0 * h)
    }

    #[test]
    fn accuracy() {
        let tiny = f32::MIN_POSITIVE;
        let check = |name, error: f64, limit| {
            assert!(error <= limit, "{name}: {error} ulp, allowed {limit}");
        };
        check("exp", worst_ulp(exp, f64::exp, (-87.0, 88.7), tiny), 1.1);
        check("exp near 0", worst_ulp(exp, f64::exp, (-1.0, 1.0), tiny), 1.1);
        check("sigmoid", worst_ulp(sigmoid, sigmoid64, (-80.0, 80.0), tiny), 3.0);
        check("tanh", worst_ulp(tanh, f64::tanh, (-12.0, 12.0), tiny), 2.0);
        check("tanh near 0", worst_ulp(tanh, f64::tanh, (-0.01, 0.01), tiny), 1.5);
        let silu64 = |x| x * sigmoid64(x);
        check("silu", worst_ulp(silu, silu64, (-80.0, 80.0), tiny), 3.5);
        // For negative x the relative error is that of the argument u, times u.
        check("gelu", worst_ulp(gelu_tanh, gelu64, (-8.0, 8.0), 0.1), 8.0);
        check("exact gelu", worst_ulp(gelu, exact_gelu64, (-8.0, 8.0), 0.1), 8.0);
        let slope = |x| derivative(exact_gelu64, x);
        check("exact gelu'", worst_ulp(gelu_derivative, slope, (-8.0, 8.0), 0.5), 8.0);
        let slope = |x| derivative(gelu64, x);
        check("gelu'", worst_ulp(gelu_tanh_derivative, slope, (-8.0, 8.0), 0.5), 8.0);
        let slope = |x| derivative(|x| x * sigmoid64(x), x);
        check("silu'", worst_ulp(silu_derivative, slope, (-20.0, 20.0), 0.5), 8.0);
    }

    #[test]
    fn limits() {
        let inf = f32::INFINITY;
        assert_eq!(exp(0.0), 1.0);
        assert_eq!((exp(-inf), exp(-87.34), exp(-1e30)), (0.0, 0.0, 0.0));
        assert_eq!((exp(inf), exp(88.73), exp(1e30)), (inf, inf, inf));
        assert_eq!((sigmoid(-inf), sigmoid(inf), sigmoid(0.0)), (0.0, 1.0, 0.5));
        assert_eq!((tanh(-inf), tanh(inf), tanh(-30.0), tanh(0.0)), (-1.0, 1.0, -1.0, 0.0));
        assert_eq!((silu(-inf), silu(inf)), (0.0, inf));
        assert_eq!((gelu_tanh(-inf), gelu_tanh(inf)), (0.0, inf));
        assert_eq!((gelu(-inf), gelu(inf)), (0.0, inf));
        assert_eq!((gelu_derivative(-inf), gelu_derivative(inf)), (0.0, 1.0));
        assert_eq!((silu_derivative(-inf), silu_derivative(inf)), (0.0, 1.0));
        assert_eq!((gelu_tanh_derivative(-inf), gelu_tanh_derivative(inf)), (0.0, 1.0));
        let functions: [fn(f32) -> f32; 6] = [exp, sigmoid, tanh, silu, gelu_tanh, gelu];
        let slopes: [fn(f32) -> f32; 3] = [silu_derivative, gelu_tanh_derivative, gelu_derivative];
        assert!(functions.iter().chain(&slopes).all(|f| f(f32::NAN).is_nan()));
    }
}
