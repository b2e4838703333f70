//! The cards with a built-in profile from their data sheet.

use super::data_sheet::{Accumulation, DataSheet, Ecc, Pcie};
use Accumulation::{FullRate, HalfRate};
use Ecc::{Free, Inline};

const PCIE_4: Pcie = Pcie { generation: 4, lanes: 16 };
const PCIE_4_X8: Pcie = Pcie { generation: 4, lanes: 8 };
const PCIE_5: Pcie = Pcie { generation: 5, lanes: 16 };
const PCIE_5_X8: Pcie = Pcie { generation: 5, lanes: 8 };

/// The source also gives 128 operations per clock and tensor core, from which the tensor rates of
/// unlisted cards follow.
const GA102: &str = "NVIDIA Ampere GA102 whitepaper";
const ADA: &str = "NVIDIA Ada whitepaper";
const BLACKWELL: &str = "NVIDIA RTX Blackwell whitepaper";

/// Sorted by name.
#[rustfmt::skip]
pub(super) const CARDS: &[DataSheet] = &[
    card("a10", 72, &["NVIDIA A10"], 24, Inline, 600.0, 125.0, FullRate, 31.2, PCIE_4, "NVIDIA A10 data sheet"),
    card("a100-40gb", 108, &["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"], 40, Free, 1555.0, 312.0, FullRate, 19.5, PCIE_4,
        "NVIDIA A100 data sheet"),
    card("a100-80gb", 108, &["NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"], 80, Free, 1935.0, 312.0, FullRate, 19.5, PCIE_4,
        "NVIDIA A100 data sheet, the PCIe board"),
    card("a6000", 84, &["NVIDIA RTX A6000"], 48, Free, 768.0, 154.8, FullRate, 38.7, PCIE_4,
        "NVIDIA RTX A6000 data sheet; 309.7 with sparsity"),
    card("h100", 132, &["NVIDIA H100 80GB HBM3"], 80, Free, 3350.0, 989.4, FullRate, 66.9, PCIE_5, "NVIDIA H100 data sheet, SXM"),
    card("l4", 58, &["NVIDIA L4"], 24, Inline, 300.0, 121.0, FullRate, 30.3, PCIE_4, "NVIDIA L4 data sheet; 242 with sparsity"),
    card("l40s", 142, &["NVIDIA L40S"], 48, Inline, 864.0, 362.05, FullRate, 91.6, PCIE_4, "NVIDIA L40S data sheet"),
    geforce("rtx-3060-12gb", 28, &["NVIDIA GeForce RTX 3060"], 12, 360.0, 25.5, 12.7, PCIE_4, GA102),
    geforce("rtx-3080", 68, &["NVIDIA GeForce RTX 3080"], 10, 760.0, 59.5, 29.8, PCIE_4, GA102),
    geforce("rtx-3090", 82, &["NVIDIA GeForce RTX 3090"], 24, 936.0, 71.0, 35.6, PCIE_4, GA102),
    geforce("rtx-4060", 24, &["NVIDIA GeForce RTX 4060"], 8, 272.0, 30.2, 15.1, PCIE_4_X8, ADA),
    geforce("rtx-4060-ti-16gb", 34, &["NVIDIA GeForce RTX 4060 Ti"], 16, 288.0, 44.1, 22.1, PCIE_4_X8, ADA),
    geforce("rtx-4070", 46, &["NVIDIA GeForce RTX 4070"], 12, 504.0, 58.3, 29.1, PCIE_4, ADA),
    geforce("rtx-4080", 76, &["NVIDIA GeForce RTX 4080"], 16, 717.0, 97.5, 48.7, PCIE_4, ADA),
    geforce("rtx-4090", 128, &["NVIDIA GeForce RTX 4090"], 24, 1008.0, 165.2, 82.6, PCIE_4, ADA),
    geforce("rtx-5060-ti-16gb", 36, &["NVIDIA GeForce RTX 5060 Ti"], 16, 448.0, 47.4, 23.7, PCIE_5_X8, BLACKWELL),
    geforce("rtx-5070-ti", 70, &["NVIDIA GeForce RTX 5070 Ti"], 16, 896.0, 87.9, 43.9, PCIE_5, BLACKWELL),
    geforce("rtx-5080", 84, &["NVIDIA GeForce RTX 5080"], 16, 960.0, 112.6, 56.3, PCIE_5, BLACKWELL),
    geforce("rtx-5090", 170, &["NVIDIA GeForce RTX 5090"], 32, 1792.0, 209.5, 104.8, PCIE_5, BLACKWELL),
];

#[expect(clippy::too_many_arguments, reason = "one row of a table")]
const fn card(
    name: &'static str,
    multiprocessors: u32,
    cards: &'static [&'static str],
    memory_gib: u64,
    ecc: Ecc,
    bandwidth_gb: f64,
    bf16_tflops: f64,
    accumulation: Accumulation,
    f32_tflops: f64,
    pcie: Pcie,
    source: &'static str,
) -> DataSheet {
    DataSheet {
        name,
        multiprocessors,
        cards,
        memory_gib,
        ecc,
        bandwidth_gb,
        bf16_tflops,
        accumulation,
        f32_tflops,
        pcie,
        source,
    }
}

#[expect(clippy::too_many_arguments, reason = "one row of a table")]
const fn geforce(
    name: &'static str,
    multiprocessors: u32,
    cards: &'static [&'static str],
    memory_gib: u64,
    bandwidth_gb: f64,
    bf16_tflops: f64,
    f32_tflops: f64,
    pcie: Pcie,
    source: &'static str,
) -> DataSheet {
    card(
        name,
        multiprocessors,
        cards,
        memory_gib,
        Free,
        bandwidth_gb,
        bf16_tflops,
        HalfRate,
        f32_tflops,
        pcie,
        source,
    )
}
