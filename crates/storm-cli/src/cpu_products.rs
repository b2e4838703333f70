//! Summation order of bf16 products on the CPU device.

use crate::UsageError;
use crate::precision::PrecisionArg;
use crate::train::DeviceKind;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use storm_device::cpu::Bf16Products;
use storm_device::cpu::kernels::gemm::amx_availability;

/// The sums of products of bf16 operands on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CpuProductsArg {
    /// A chain of f32 fused multiply-adds for each element, with the same bits on every processor.
    Fma,
    /// In the order of Intel's AMX: many times faster on a processor with AMX; elsewhere emulated, with the same bits
    /// but much slower than fma.
    Amx,
}

impl CpuProductsArg {
    /// Refuses AMX where it would have no effect.
    pub(crate) fn check(self, kind: DeviceKind, precision: PrecisionArg) -> Result<(), UsageError> {
        let problem = match (self, kind, precision) {
            (CpuProductsArg::Fma, ..) => return Ok(()),
            (_, DeviceKind::Cuda, _) => {
                "cpu-products = \"amx\" is for the CPU, and this run computes on a GPU; leave it out, or set device = \"cpu\""
            }
            (_, _, PrecisionArg::F32) => {
                "cpu-products = \"amx\" is for products of bf16, and precision = \"f32\" has none; leave it out, or set \
                 precision = \"bf16-master\" or \"bf16-stochastic\""
            }
            _ => return Ok(()),
        };
        Err(UsageError(problem.to_owned()))
    }

    /// A warning if this machine would have to emulate AMX.
    pub(crate) fn warning(self) -> Option<String> {
        let reason = (self == CpuProductsArg::Amx).then(amx_availability)?.err()?;
        Some(format!(
            "warning: cpu-products = \"amx\" is emulated here, with the same bits but far slower than \"fma\": {reason}"
        ))
    }
}

impl From<CpuProductsArg> for Bf16Products {
    fn from(products: CpuProductsArg) -> Bf16Products {
        match products {
            CpuProductsArg::Fma => Bf16Products::Fma,
            CpuProductsArg::Amx => Bf16Products::Amx,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amx_is_refused_where_it_would_change_nothing() {
        let check = |products: CpuProductsArg, kind, precision| {
            products.check(kind, precision).map_err(|error| error.to_string())
        };
        let (fma, amx) = (CpuProductsArg::Fma, CpuProductsArg::Amx);
        let (cpu, cuda) = (DeviceKind::Cpu, DeviceKind::Cuda);
        for precision in [PrecisionArg::F32, PrecisionArg::Bf16Master, PrecisionArg::Fp8] {
            assert!(check(fma, cpu, precision).is_ok() && check(fma, cuda, precision).is_ok());
            assert!(check(amx, cuda, precision).unwrap_err().contains("computes on a GPU"));
        }
        assert!(check(amx, cpu, PrecisionArg::F32).unwrap_err().contains("products of bf16"));
        for precision in [PrecisionArg::Bf16Master, PrecisionArg::Bf16Stochastic, PrecisionArg::Fp8]
        {
            assert!(check(amx, cpu, precision).is_ok());
        }
    }
}
