//! Checks, one by one, what a GPU needs: driver, cards and libraries.

use super::context::{self, Card};
use super::memory::MemoryMeter;
use super::{CudaError, libraries};

/// The result of the checks. They take no GPU memory.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaDiagnosis {
    /// The CUDA version that the driver supports.
    pub driver: Result<String, CudaError>,
    /// The cards that the driver sees. Empty without a driver.
    pub cards: Vec<CardDiagnosis>,
    /// NVRTC, which compiles the kernels.
    pub compiler: Result<(), CudaError>,
    /// cuBLASLt, which computes matrix products.
    pub products: Result<(), CudaError>,
}

/// The result for one card.
#[derive(Clone, Debug, PartialEq)]
pub struct CardDiagnosis {
    /// The card.
    pub card: Card,
    /// Free memory, if NVML reports it.
    pub free_bytes: Option<u64>,
    /// Why it cannot be used, if it cannot.
    pub problem: Option<CudaError>,
}

impl CudaDiagnosis {
    /// Whether a GPU can be used.
    pub fn is_ready(&self) -> bool {
        let card = self.cards.iter().any(|card| card.problem.is_none());
        card && self.driver.is_ok() && self.compiler.is_ok() && self.products.is_ok()
    }
}

/// Checks driver, cards and libraries.
pub fn diagnose() -> CudaDiagnosis {
    let (driver, cards) = match find_cards() {
        Ok((driver, cards)) => (Ok(driver), cards),
        Err(error) => (Err(error), Vec::new()),
    };
    let (compiler, products) = (libraries::require_nvrtc(), libraries::require_blas());
    CudaDiagnosis { driver, cards, compiler, products }
}

fn find_cards() -> Result<(String, Vec<CardDiagnosis>), CudaError> {
    let driver = context::start_driver(0, context::Purpose::Kernels)?;
    let card = |ordinal| {
        let (device, card) = context::find_card(ordinal)?;
        let free_bytes = MemoryMeter::new(device).card_free();
        let problem = context::card_problem(&card);
        Ok(CardDiagnosis { card, free_bytes, problem })
    };
    let cards = (0..context::card_count()?).map(card).collect::<Result<_, CudaError>>()?;
    Ok((driver, cards))
}
