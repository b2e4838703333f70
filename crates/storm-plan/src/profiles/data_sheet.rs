//! Profiles of unmeasured cards: the vendor's figures, times the share of such figures that the H200 reached
//! when measured.

use crate::profile::{HardwareProfile, LinkProfile};
use crate::queue::Link;

/// How far off step times may be. Power limits, the slot and the host's memory differ between machines and
/// are in no data sheet.
const UNCERTAINTY: f64 = 0.3;

/// A vendor's figures for a card.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataSheet {
    /// As `--hardware` takes it.
    pub(super) name: &'static str,
    pub(super) multiprocessors: u32,
    /// The driver's names for it; boards with one chip may have several.
    pub(super) cards: &'static [&'static str],
    pub(super) memory_gib: u64,
    pub(super) ecc: Ecc,
    /// Of device memory.
    pub(super) bandwidth_gb: f64,
    /// Dense bf16 tensor products with f32 accumulation, TFLOP/s.
    pub(super) bf16_tflops: f64,
    pub(super) accumulation: Accumulation,
    /// Without tensor cores, TFLOP/s.
    pub(super) f32_tflops: f64,
    pub(super) pcie: Pcie,
    /// Where the figures are published.
    pub(super) source: &'static str,
}

/// Whether error correction takes a share of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ecc {
    /// Off, or in separate memory chips.
    Free,
    /// A sixteenth of GDDR6 holds check bits.
    Inline,
}

/// How fast tensor cores accumulate in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accumulation {
    /// As fast as in f16: data center and workstation cards.
    FullRate,
    /// Half as fast: GeForce.
    HalfRate,
}

/// PCIe generation and lanes of the card.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pcie {
    pub(super) generation: u32,
    pub(super) lanes: u32,
}

impl Pcie {
    /// Bytes per second each way, after line coding.
    pub(super) fn bandwidth(self) -> f64 {
        // 8 GT/s per lane in generation 3, doubled by each later one; 128 of 130 bits are data.
        let transfers = 8e9 * f64::from(1u32 << (self.generation - 3));
        transfers * f64::from(self.lanes) / 8.0 * 128.0 / 130.0
    }
}

/// The share of the tensor peak that large products reach on GeForce. The H200 is limited by power and
/// reaches less; tensor cores at half rate draw less. An RTX 4090 was measured at 158.6 of 165.2 TFLOP/s
/// (github.com/mli/transformers-benchmarks/issues/4).
const HALF_RATE_SHARE: f64 = 0.9;

/// Cards of the generation before 8-bit floats.
const AMPERE: [&str; 7] =
    ["a10", "a100-40gb", "a100-80gb", "a6000", "rtx-3060-12gb", "rtx-3080", "rtx-3090"];

/// The card whose shares are used for all others.
pub(super) const H200: DataSheet = DataSheet {
    name: "h200",
    multiprocessors: 132,
    cards: &["NVIDIA H200"],
    memory_gib: 141,
    ecc: Ecc::Free,
    bandwidth_gb: 4800.0,
    bf16_tflops: 989.4,
    accumulation: Accumulation::FullRate,
    f32_tflops: 66.9,
    pcie: Pcie { generation: 5, lanes: 16 },
    source: "NVIDIA H200 data sheet",
};

impl DataSheet {
    /// Whether its tensor cores multiply 8-bit floats: all but Ampere's do, at twice the rate of bf16 as on the H200.
    fn has_fp8(&self) -> bool {
        !AMPERE.contains(&self.name)
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        let bytes = self.memory_gib << 30;
        match self.ecc {
            Ecc::Free => bytes,
            Ecc::Inline => bytes / 16 * 15,
        }
    }

    /// What the card would do at the shares of its peaks that the H200 reached; `measured` is the H200's
    /// profile.
    pub(super) fn profile(&self, measured: &HardwareProfile) -> HardwareProfile {
        let gemm_share = match self.accumulation {
            Accumulation::FullRate => measured.gemm_flops / (H200.bf16_tflops * 1e12),
            Accumulation::HalfRate => HALF_RATE_SHARE,
        };
        // Attention keeps its ratio to products, and every op its share of the bandwidth.
        let tensor = gemm_share * self.bf16_tflops * 1e12 / measured.gemm_flops;
        let memory = self.bandwidth_gb / H200.bandwidth_gb;
        let f32_products = self.f32_tflops / H200.f32_tflops;
        let bus = self.pcie.bandwidth() / H200.pcie.bandwidth();

        let mut profile = measured.clone();
        profile.name = self.name.to_owned();
        profile.source = self.describe(gemm_share, measured);
        profile.uncertainty = Some(UNCERTAINTY);
        profile.memory_bytes = self.memory_bytes();
        profile.multiprocessors = Some(self.multiprocessors);
        scale(&mut profile.gemm_flops, tensor);
        scale(&mut profile.gemm_f32_flops, f32_products);
        profile.gemm_fp8_flops = measured.gemm_fp8_flops.filter(|_| self.has_fp8());
        profile.gemm_fp8_flops.iter_mut().for_each(|flops| scale(flops, tensor));
        scale(&mut profile.attention_forward_flops, tensor);
        scale(&mut profile.attention_backward_flops, tensor);
        scale(&mut profile.memory_bandwidth, memory);
        for point in &mut profile.gemm {
            scale(&mut point.flops, if point.bf16 { tensor } else { f32_products });
        }
        for point in &mut profile.attention {
            scale(&mut point.forward_flops, tensor);
            scale(&mut point.backward_flops, tensor);
        }
        for point in &mut profile.elementwise {
            scale(&mut point.bandwidth, memory);
        }
        for link in &mut profile.links {
            let LinkProfile { to_near_bandwidth, to_far_bandwidth, duplex_bandwidth, .. } = link;
            for rate in [to_near_bandwidth, to_far_bandwidth, duplex_bandwidth] {
                scale(rate, bus);
            }
        }
        profile
    }

    fn describe(&self, gemm_share: f64, measured: &HardwareProfile) -> String {
        let DataSheet { memory_gib, bandwidth_gb, bf16_tflops, f32_tflops, .. } = self;
        let Pcie { generation, lanes } = self.pcie;
        let rate = match self.accumulation {
            Accumulation::FullRate => "as on the H200",
            Accumulation::HalfRate => "an RTX 4090 was measured at 0.96",
        };
        let ecc = match self.ecc {
            Ecc::Free => "",
            Ecc::Inline => ", a sixteenth of it for ECC",
        };
        let attention = measured.attention_forward_flops / measured.gemm_flops;
        let memory = measured.memory_bandwidth / (H200.bandwidth_gb * 1e9);
        let f32_share = measured.gemm_f32_flops / (H200.f32_tflops * 1e12);
        let copies = measured.link(Link::HOST_TO_DEVICE).bandwidth / H200.pcie.bandwidth();
        format!(
            "Data sheet, not measured: {memory_gib} GiB{ecc} at {bandwidth_gb} GB/s, {bf16_tflops} TFLOP/s dense bf16 \
             with f32 accumulation, {f32_tflops} f32, PCIe {generation}.0 x{lanes} ({}). Shares of these: matrix \
             products {gemm_share:.2} ({rate}); from the measured H200: attention {attention:.2} of products, f32 \
             products {f32_share:.2}, memory {memory:.2} and less per op, copies {copies:.2}. Latencies and overhead \
             are the H200's. Expect step times within ±{:.0} %.",
            self.source,
            UNCERTAINTY * 100.0
        )
    }
}

/// To four digits, as in measured profiles: more would suggest precision that a data sheet does not have.
fn scale(rate: &mut f64, factor: f64) {
    let scaled = *rate * factor;
    *rate = format!("{scaled:.3e}").parse().unwrap_or(scaled);
}
