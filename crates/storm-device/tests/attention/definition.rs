//! Attention with the sums of AMX as its definition says, one element at a time. There are no
//! denormal numbers.

use super::{Inputs, Results};
use half::bf16;
use std::ops::Range;
use storm_device::cpu::kernels::attention::{Attention, AttentionShape};
use storm_device::cpu::kernels::element::Element;
use storm_device::cpu::kernels::math::exp;
use storm_device::cpu::kernels::simd::lane_sum;
use storm_graph::Mask;

const BLOCK: usize = 64;

fn round(value: f32) -> f32 {
    Element::to_f32(<bf16 as Element>::from_f32(value))
}

/// `start` and the sums of each 32 products, in order.
fn sum(start: f32, k: usize, a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32) -> f32 {
    let mut sum = start;
    for first in (0..k).step_by(32) {
        let (mut even, mut odd) = (0.0f32, 0.0f32);
        for p in first..k.min(first + 32) {
            let chain = if p % 2 == 0 { &mut even } else { &mut odd };
            *chain = a(p).mul_add(b(p), *chain);
        }
        sum += even + odd;
    }
    sum
}

/// The weights P, the gradients dS, and the pairs of blocks that are visited, of a head.
struct Head {
    seq: usize,
    weights: Vec<f32>,
    d_scores: Vec<f32>,
    visited: Vec<bool>,
}

impl Head {
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let seq = self.seq;
        (0..seq).step_by(BLOCK).map(move |first| first..seq.min(first + BLOCK))
    }

    fn is_visited(&self, query: usize, key: usize) -> bool {
        self.visited[query / BLOCK * self.seq.div_ceil(BLOCK) + key / BLOCK]
    }
}

/// The results of a forward and a backward pass.
pub(super) fn defined(attention: &Attention, inputs: &Inputs<bf16>) -> Results<bf16> {
    let AttentionShape { batch, seq, q_heads, kv_heads, head_dim } = attention.shape;
    let heads = q_heads + 2 * kv_heads;
    let at = |b: usize, t: usize, head: usize| ((b * seq + t) * heads + head) * head_dim;
    let out_at = |b: usize, t: usize, head: usize| ((b * seq + t) * q_heads + head) * head_dim;
    let qkv = |i: usize| Element::to_f32(inputs.qkv[i]);
    let d_out = |i: usize| Element::to_f32(inputs.d_out[i]);
    let mut out = vec![bf16::NAN; inputs.d_out.len()];
    let mut lse = vec![f32::NAN; batch * q_heads * seq];
    let mut d_qkv = vec![bf16::NAN; inputs.qkv.len()];
    let group = q_heads / kv_heads;
    for b in 0..batch {
        let sees = |query: usize, key: usize| {
            let window = attention.mask.window().unwrap_or(seq);
            (attention.mask == Mask::Full || key <= query)
                && query < key.saturating_add(window)
                && attention.segments.is_none_or(|s| s[b * seq + query] == s[b * seq + key])
        };
        for kv in 0..kv_heads {
            let (k_head, v_head) = (q_heads + kv, q_heads + kv_heads + kv);
            let key_at = |key: usize, i: usize| qkv(at(b, key, k_head) + i);
            let value_at = |key: usize, i: usize| qkv(at(b, key, v_head) + i);
            let mut of_group = Vec::new();
            for h in kv * group..(kv + 1) * group {
                let mut head = Head {
                    seq,
                    weights: vec![0.0; seq * seq],
                    d_scores: vec![0.0; seq * seq],
                    visited: vec![false; seq.div_ceil(BLOCK).pow(2)],
                };
                for query in 0..seq {
                    for key in (0..seq).filter(|key| sees(query, *key)) {
                        head.visited[query / BLOCK * seq.div_ceil(BLOCK) + key / BLOCK] = true;
                    }
                }
                for query in 0..seq {
                    let q = |i: usize| qkv(at(b, query, h) + i);
                    let score = |key: usize| match sees(query, key) {
                        true => sum(0.0, head_dim, q, |i| key_at(key, i)) * attention.scale,
                        false => f32::NEG_INFINITY,
                    };
                    let scores: Vec<f32> = (0..seq).map(score).collect();
                    let (mut maximum, mut total) = (f32::NEG_INFINITY, 0.0f32);
                    let mut sums = vec![0.0f32; head_dim];
                    for keys in head.blocks().filter(|keys| head.is_visited(query, keys.start)) {
                        let scores = &scores[keys.clone()];
                        let new = scores.iter().fold(maximum, |a, b| if *b > a { *b } else { a });
                        let reference = if new == f32::NEG_INFINITY { 0.0 } else { new };
                        let rescale = exp(maximum - reference);
                        maximum = new;
                        let weights: Vec<f32> = scores.iter().map(|s| exp(s - reference)).collect();
                        let chain = weights.iter().fold(0.0f32, |a, b| a + b);
                        total = total.mul_add(rescale, chain);
                        for (i, element) in sums.iter_mut().enumerate() {
                            let value = |p: usize| value_at(keys.start + p, i);
                            let before = *element * rescale;
                            *element = sum(before, keys.len(), |p| round(weights[p]), value);
                        }
                    }
                    let this_lse = maximum + total.ln();
                    lse[(b * q_heads + h) * seq + query] = this_lse;
                    let place = out_at(b, query, h);
                    for (i, element) in sums.iter().enumerate() {
                        out[place + i] = Element::from_f32(element * (1.0 / total));
                    }
                    let of_query = place..place + head_dim;
                    let d_outs = [&inputs.d_out[of_query.clone()], &out[of_query]];
                    let delta = lane_sum(d_outs, |[d_out, out]| d_out * out);
                    for key in 0..seq {
                        let d_o = |i: usize| d_out(place + i);
                        let d_weight = sum(0.0, head_dim, d_o, |i| value_at(key, i));
                        let weight = exp(scores[key] - this_lse);
                        head.weights[query * seq + key] = round(weight);
                        head.d_scores[query * seq + key] = round(weight * (d_weight - delta));
                    }
                }
                for query in 0..seq {
                    for i in 0..head_dim {
                        let mut element = 0.0;
                        for keys in head.blocks().filter(|keys| head.is_visited(query, keys.start))
                        {
                            let d_score = |p| head.d_scores[query * seq + keys.start + p];
                            let key = |p| key_at(keys.start + p, i);
                            element = sum(element, keys.len(), d_score, key);
                        }
                        d_qkv[at(b, query, h) + i] = Element::from_f32(element * attention.scale);
                    }
                }
                of_group.push((h, head));
            }
            for key in 0..seq {
                for i in 0..head_dim {
                    let (mut d_k, mut d_v) = (0.0, 0.0);
                    for (h, head) in &of_group {
                        for queries in head.blocks().filter(|q| head.is_visited(q.start, key)) {
                            let (first, n) = (queries.start, queries.len());
                            let place = |p: usize| (first + p) * seq + key;
                            let d_o = |p: usize| d_out(out_at(b, first + p, *h) + i);
                            let q = |p: usize| qkv(at(b, first + p, *h) + i);
                            d_v = sum(d_v, n, |p| head.weights[place(p)], d_o);
                            d_k = sum(d_k, n, |p| head.d_scores[place(p)], q);
                        }
                    }
                    d_qkv[at(b, key, k_head) + i] = Element::from_f32(d_k * attention.scale);
                    d_qkv[at(b, key, v_head) + i] = Element::from_f32(d_v);
                }
            }
        }
    }
    Results { out, lse, d_qkv }
}
