//! Driver, cards and CUDA libraries.

use super::Finding;
use crate::size;
use storm_device::cuda::{CudaDiagnosis, CudaError, diagnose};

pub(super) fn look() -> Vec<Finding> {
    findings(&diagnose())
}

fn findings(found: &CudaDiagnosis) -> Vec<Finding> {
    let mut findings = vec![driver(found)];
    for card in &found.cards {
        let (major, minor) = card.card.capability;
        let memory = size::show(card.card.memory_bytes as u64);
        let free = card.free_bytes.map(|free| format!(" ({} free)", size::show(free)));
        let what = format!(
            "{}, {memory}{}, compute capability {major}.{minor}",
            card.card.name,
            free.unwrap_or_default()
        );
        findings.push(match &card.problem {
            None => Finding::good("card", what),
            Some(problem) => Finding::missing("card", what, &format!("cannot be used: {problem}")),
        });
    }
    findings.push(library("NVRTC", "compiles kernels", &found.compiler));
    findings.push(library("cuBLASLt", "matrix products", &found.products));
    findings
}

fn driver(found: &CudaDiagnosis) -> Finding {
    let name = "driver";
    match &found.driver {
        Ok(version) if found.cards.is_empty() => Finding::missing(
            name,
            format!("supports CUDA {version}, but sees no card"),
            "check that `nvidia-smi` lists one; docker: --gpus all",
        ),
        Ok(version) => Finding::good(name, format!("supports CUDA {version}")),
        Err(CudaError::NoDriver) => Finding::missing(
            name,
            "no NVIDIA driver (libcuda.so.1)".to_owned(),
            "Ubuntu: `sudo ubuntu-drivers install`, then `nvidia-smi`; docker: --gpus all",
        ),
        Err(CudaError::NoDevice { .. }) => Finding::missing(
            name,
            "installed, but sees no card".to_owned(),
            "check that `nvidia-smi` lists one; docker: --gpus all",
        ),
        Err(error @ CudaError::DriverTooOld { .. }) => Finding::missing(
            name,
            error.to_string(),
            "Ubuntu: `sudo ubuntu-drivers install`, or a driver of series 580 or newer",
        ),
        Err(error) => Finding::missing(name, error.to_string(), "check that `nvidia-smi` works"),
    }
}

fn library(name: &'static str, purpose: &str, found: &Result<(), CudaError>) -> Finding {
    match found {
        Ok(()) => Finding::good(name, format!("found; {purpose}")),
        Err(CudaError::NoDriver) => Finding::missing(
            name,
            format!("not checked, because there is no driver; {purpose}"),
            "install the driver first",
        ),
        Err(_) => Finding::missing(
            name,
            format!("not found; {purpose}"),
            "`pip install nvidia-cuda-nvrtc nvidia-cublas` in the active Python environment, or set \
             STORM_CUDA_LIBRARIES to the absolute path of the folder that has it",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;
    use storm_device::cuda::{Card, CardDiagnosis};

    fn machine(capability: (i32, i32)) -> CudaDiagnosis {
        let card = Card {
            name: "NVIDIA Test".to_owned(),
            capability,
            multiprocessors: 1,
            memory_bytes: 16 << 30,
        };
        let (major, minor) = capability;
        let name = card.name.clone();
        let problem = (major < 8).then_some(CudaError::CardTooOld { name, major, minor });
        CudaDiagnosis {
            driver: Ok("13.0".to_owned()),
            cards: vec![CardDiagnosis { card, free_bytes: Some(8 << 30), problem }],
            compiler: Ok(()),
            products: Ok(()),
        }
    }

    /// Names of what is missing.
    fn missing(found: &CudaDiagnosis) -> Vec<&'static str> {
        let findings = findings(found);
        let missing = findings.iter().filter(|found| found.state == State::Missing);
        missing.inspect(|found| assert!(found.remedy.is_some())).map(|found| found.name).collect()
    }

    #[test]
    fn what_is_missing_is_named() {
        let whole = machine((9, 0));
        assert!(missing(&whole).is_empty() && whole.is_ready());
        assert!(findings(&whole)[1].what.contains("16.00 GiB (8.00 GiB free)"));
        assert_eq!(missing(&machine((7, 5))), ["card"]);
        let no_compiler = CudaDiagnosis {
            compiler: Err(CudaError::LibraryMissing { library: "libnvrtc.so.13" }),
            ..machine((9, 0))
        };
        assert_eq!(missing(&no_compiler), ["NVRTC"]);
        let nothing = CudaDiagnosis {
            driver: Err(CudaError::NoDriver),
            cards: Vec::new(),
            compiler: Ok(()),
            products: Err(CudaError::NoDriver),
        };
        assert_eq!(missing(&nothing), ["driver", "cuBLASLt"]);
        assert!(!nothing.is_ready());
        let no_card = CudaDiagnosis { cards: Vec::new(), ..machine((9, 0)) };
        assert_eq!(missing(&no_card), ["driver"]);
    }
}
