//! Attention against a naive softmax in f64, and its independence of threads and instruction set.

mod amx;
mod definition;

use half::bf16;
use storm_device::cpu::kernels::attention::{Attention, AttentionShape};
use storm_device::cpu::kernels::element::Element;
use storm_device::cpu::kernels::gemm::Bf16Products;
use storm_device::cpu::kernels::simd::{Isa, force_isa};
use storm_graph::Mask;
use storm_graph::random::Random;

/// Values in [-1, 1].
fn values<T: Element>(n: usize, seed: u64) -> Vec<T> {
    let mut random = Random(seed);
    (0..n).map(|_| T::from_f32(2.0 * random.unit() as f32 - 1.0)).collect()
}

/// Everything that a forward and a backward pass make.
struct Results<T, L = f32> {
    out: Vec<T>,
    lse: Vec<L>,
    d_qkv: Vec<T>,
}

struct Inputs<T> {
    qkv: Vec<T>,
    d_out: Vec<T>,
}

fn inputs<T: Element>(shape: AttentionShape) -> Inputs<T> {
    let tokens = shape.batch * shape.seq;
    let width = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim;
    Inputs {
        qkv: values(tokens * width, 1),
        d_out: values(tokens * shape.q_heads * shape.head_dim, 2),
    }
}

fn run<T: Element>(attention: &Attention, inputs: &Inputs<T>) -> Results<T> {
    // NaN everywhere shows whatever is not written.
    let nan = T::from_f32(f32::NAN);
    let shape = attention.shape;
    let rows = shape.batch * shape.q_heads * shape.seq;
    let mut out = vec![nan; inputs.d_out.len()];
    let mut lse = vec![f32::NAN; rows];
    let mut delta = vec![f32::NAN; rows];
    let mut d_qkv = vec![nan; inputs.qkv.len()];
    attention.forward(&inputs.qkv, &mut out, &mut lse);
    attention.backward(&inputs.d_out, &inputs.qkv, &out, &lse, &mut delta, &mut d_qkv);
    Results { out, lse, d_qkv }
}

/// The definition, with a row of scores at a time.
fn reference<T: Element>(attention: &Attention, inputs: &Inputs<T>) -> Results<f64, f64> {
    let AttentionShape { batch, seq, q_heads, kv_heads, head_dim } = attention.shape;
    let width = (q_heads + 2 * kv_heads) * head_dim;
    let wide = |x: &[T]| x.iter().map(|x| x.to_f32() as f64).collect::<Vec<_>>();
    let (qkv, d_out) = (wide(&inputs.qkv), wide(&inputs.d_out));
    let mut out = vec![0.0; d_out.len()];
    let mut lse = vec![0.0; batch * q_heads * seq];
    let mut d_qkv = vec![0.0; qkv.len()];
    let scale = attention.scale as f64;
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for b in 0..batch {
        let segment = |t: usize| attention.segments.map(|s| s[b * seq + t]);
        for h in 0..q_heads {
            let kv = h / (q_heads / kv_heads);
            let at = |t: usize, head: usize| {
                let start = (b * seq + t) * width + head * head_dim;
                start..start + head_dim
            };
            let (k_head, v_head) = (q_heads + kv, q_heads + kv_heads + kv);
            for t in 0..seq {
                let sees = |key: &usize| {
                    let window = attention.mask.window().unwrap_or(seq);
                    (attention.mask == Mask::Full || *key <= t)
                        && t < *key + window
                        && segment(*key) == segment(t)
                };
                let keys: Vec<usize> = (0..seq).filter(sees).collect();
                let q = &qkv[at(t, h)];
                let scores: Vec<f64> =
                    keys.iter().map(|key| scale * dot(q, &qkv[at(*key, k_head)])).collect();
                let maximum = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|s| (s - maximum).exp()).sum();
                lse[(b * q_heads + h) * seq + t] = maximum + total.ln();
                let weights: Vec<f64> =
                    scores.iter().map(|s| (s - maximum).exp() / total).collect();
                let o_start = (b * seq + t) * q_heads * head_dim + h * head_dim;
                let o_range = o_start..o_start + head_dim;
                let d_o = &d_out[o_range.clone()];
                for (key, weight) in keys.iter().zip(&weights) {
                    for (o, v) in out[o_range.clone()].iter_mut().zip(&qkv[at(*key, v_head)]) {
                        *o += weight * v;
                    }
                }
                let delta = dot(d_o, &out[o_range.clone()]);
                for (key, weight) in keys.iter().zip(&weights) {
                    let d_weight = dot(d_o, &qkv[at(*key, v_head)]);
                    let d_score = scale * weight * (d_weight - delta);
                    for i in 0..head_dim {
                        let (q_i, k_i) = (at(t, h).start + i, at(*key, k_head).start + i);
                        d_qkv[q_i] += d_score * qkv[k_i];
                        d_qkv[k_i] += d_score * qkv[q_i];
                        d_qkv[at(*key, v_head).start + i] += weight * d_o[i];
                    }
                }
            }
        }
    }
    Results { out, lse, d_qkv }
}

/// Largest difference relative to the largest value.
fn error<T: Element>(ours: &[T], exact: &[f64]) -> f64 {
    assert_eq!(ours.len(), exact.len());
    let largest = exact.iter().fold(1e-30f64, |m, x| m.max(x.abs()));
    let differences = ours.iter().zip(exact).map(|(o, e)| (o.to_f32() as f64 - e).abs());
    // `f64::max` would lose a NaN.
    differences.fold(0.0, |m, d| if d <= m { m } else { d }) / largest
}

fn check<T: Element>(attention: &Attention, tolerance: f64) {
    let inputs = inputs::<T>(attention.shape);
    let ours = run(attention, &inputs);
    let exact = reference(attention, &inputs);
    let errors = [
        ("out", error(&ours.out, &exact.out)),
        ("lse", error(&ours.lse, &exact.lse)),
        ("d_qkv", error(&ours.d_qkv, &exact.d_qkv)),
    ];
    for (name, error) in errors {
        assert!(error <= tolerance, "{name}: relative error {error:e} of {:?}", attention.shape);
    }
}

fn shape(
    batch: usize,
    seq: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
) -> AttentionShape {
    AttentionShape { batch, seq, q_heads, kv_heads, head_dim }
}

fn attention(shape: AttentionShape, mask: Mask) -> Attention<'static> {
    let scale = 1.0 / (shape.head_dim as f32).sqrt();
    Attention { shape, mask, scale, segments: None, products: Bf16Products::Fma }
}

/// Segments of irregular lengths that do not line up with blocks.
fn segments(shape: AttentionShape) -> Vec<i32> {
    let token = |i: usize| ((i % shape.seq) * 7 / (shape.seq + 1) + i / shape.seq) as i32;
    (0..shape.batch * shape.seq).map(token).collect()
}

#[test]
fn small_shapes() {
    let shapes = [
        shape(1, 1, 1, 1, 4),
        shape(2, 7, 2, 2, 8),
        shape(1, 65, 3, 3, 33),
        shape(2, 130, 4, 2, 64),
        shape(1, 64, 6, 1, 80),
        shape(1, 100, 1, 1, 256),
        shape(3, 128, 2, 1, 16),
    ];
    for shape in shapes {
        for mask in [Mask::Causal, Mask::Full, sliding(40)] {
            let attention = attention(shape, mask);
            check::<f32>(&attention, 1e-5);
            check::<bf16>(&attention, 1.5e-2);
            let segments = segments(shape);
            let segmented = Attention { segments: Some(&segments), ..attention };
            check::<f32>(&segmented, 1e-5);
        }
    }
}

#[test]
fn interleaved_segments() {
    // Blocks in which every query sees some keys of each block but never all.
    let shape = shape(1, 150, 1, 1, 32);
    let segments: Vec<i32> = (0..150).map(|t| t % 3).collect();
    for mask in [Mask::Causal, Mask::Full] {
        let attention = Attention { segments: Some(&segments), ..attention(shape, mask) };
        check::<f32>(&attention, 1e-5);
    }
}

#[test]
fn long_sequences() {
    check::<f32>(&attention(shape(1, 2048, 1, 1, 64), Mask::Causal), 1e-5);
    check::<f32>(&attention(shape(1, 2048, 1, 1, 32), Mask::Full), 1e-5);
    check::<bf16>(&attention(shape(1, 2048, 1, 1, 32), Mask::Causal), 1e-2);
    let grouped = shape(1, 2048, 2, 1, 32);
    let segments = segments(grouped);
    check::<f32>(
        &Attention { segments: Some(&segments), ..attention(grouped, Mask::Causal) },
        1e-5,
    );
}

fn sliding(window: usize) -> Mask {
    Mask::Sliding { window }
}

#[test]
fn windows_over_many_blocks() {
    for window in [1, 63, 64, 65, 129] {
        check::<f32>(&attention(shape(1, 300, 2, 1, 16), sliding(window)), 1e-5);
    }
    check::<bf16>(&attention(shape(1, 300, 2, 1, 16), sliding(100)), 1e-2);
}

/// A window that hides nothing changes no bit.
#[test]
fn windows_as_long_as_the_sequence_are_none() {
    let shape = shape(2, 150, 4, 2, 48);
    let inputs = inputs::<f32>(shape);
    let plain = bits(&run(&attention(shape, Mask::Causal), &inputs));
    for window in [150, 151, usize::MAX] {
        assert!(bits(&run(&attention(shape, sliding(window)), &inputs)) == plain, "{window}");
    }
    assert!(bits(&run(&attention(shape, sliding(149)), &inputs)) != plain);
}

#[test]
fn large_scores_do_not_overflow() {
    let large = Attention { scale: 30.0, ..attention(shape(1, 70, 1, 1, 64), Mask::Causal) };
    let results = run::<f32>(&large, &inputs(large.shape));
    let all = results.out.iter().chain(&results.lse).chain(&results.d_qkv);
    assert!(all.into_iter().all(|x| x.is_finite()));
}

fn bits<T: Element>(results: &Results<T>) -> Vec<u32> {
    let stored = results.out.iter().chain(&results.d_qkv).map(|x| x.to_f32().to_bits());
    stored.chain(results.lse.iter().map(|x| x.to_bits())).collect()
}

#[test]
fn threads_and_instruction_set_do_not_matter() {
    let shape = shape(2, 150, 4, 2, 48);
    let segments = segments(shape);
    let attention = Attention { segments: Some(&segments), ..attention(shape, Mask::Causal) };
    let windowed = Attention { mask: sliding(50), ..attention };
    let (wide, narrow) = (inputs::<f32>(shape), inputs::<bf16>(shape));
    let of = |call: &Attention| (bits(&run(call, &wide)), bits(&run(call, &narrow)));
    let both = || (of(&attention), of(&windowed));
    let expected = both();
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert!(pool.install(both) == expected, "{threads} threads");
    }
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        force_isa(isa);
        assert!(both() == expected, "{isa:?}");
    }
}

/// Attention over a cache that is filled piece by piece, from stale values.
fn run_pieces<T: Element>(
    attention: &Attention,
    window: usize,
    pieces: &[usize],
    qkv: &[T],
) -> Vec<T> {
    let AttentionShape { batch, seq, q_heads, kv_heads, head_dim } = attention.shape;
    let width = (q_heads + 2 * kv_heads) * head_dim;
    let out_width = q_heads * head_dim;
    let mut cache: Vec<T> = values(batch * window * 2 * kv_heads * head_dim, 9);
    let mut out = vec![T::from_f32(f32::NAN); batch * seq * out_width];
    let mut first = 0;
    for &tokens in pieces {
        let rows = |b: usize| b * seq + first..b * seq + first + tokens;
        let of_rows = |b: usize| &qkv[rows(b).start * width..rows(b).end * width];
        let piece: Vec<T> = (0..batch).flat_map(of_rows).copied().collect();
        let positions: Vec<i32> =
            (0..batch).flat_map(|_| first..first + tokens).map(|at| at as i32).collect();
        let mut piece_out = vec![T::from_f32(f32::NAN); batch * tokens * out_width];
        let shape = AttentionShape { seq: tokens, ..attention.shape };
        let call = Attention { shape, ..*attention };
        call.cached(&piece, &positions, &mut cache, &mut piece_out);
        for (b, made) in piece_out.chunks(tokens * out_width).enumerate() {
            out[rows(b).start * out_width..rows(b).end * out_width].copy_from_slice(made);
        }
        first += tokens;
    }
    assert_eq!(first, seq);
    out
}

#[test]
fn pieces_over_a_cache_equal_the_whole() {
    fn check<T: Element>(shape: AttentionShape, pieces: &[usize]) {
        let inputs = inputs::<T>(shape);
        for mask in [Mask::Causal, sliding(1), sliding(37)] {
            let attention = attention(shape, mask);
            let whole = run(&attention, &inputs);
            for window in [shape.seq, shape.seq + 70] {
                let out = run_pieces(&attention, window, pieces, &inputs.qkv);
                let bits =
                    |values: &[T]| values.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
                let what = format!("{mask:?} {shape:?} in {pieces:?} of {window}");
                assert!(bits(&out) == bits(&whole.out), "{what}");
            }
        }
    }
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        force_isa(isa);
        check::<f32>(shape(1, 1, 1, 1, 4), &[1]);
        check::<f32>(shape(2, 7, 2, 2, 8), &[1, 4, 1, 1]);
        check::<bf16>(shape(2, 140, 4, 2, 48), &[32, 31, 1, 1, 1, 33, 41]);
        check::<f32>(shape(1, 130, 6, 1, 80), &[63, 1, 1, 64, 1]);
        // More query heads on a key head than a block has columns.
        check::<f32>(shape(1, 70, 72, 1, 16), &[68, 1, 1]);
    }
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| check::<f32>(shape(2, 66, 4, 2, 33), &[5, 60, 1]));
    }
}

#[test]
#[should_panic(expected = "7 is no position of 7")]
fn positions_beyond_the_cache_are_refused() {
    let attention = attention(shape(1, 1, 1, 1, 4), Mask::Causal);
    attention.cached(&[0.0f32; 12], &[7], &mut [0.0; 7 * 8], &mut [0.0; 4]);
}
