//! Compiled and loaded kernels, each loaded once.

use super::CudaError;
use super::compile::{KernelCache, KernelSource};
use super::context::{Card, Kernel, Module};
use super::plan::KernelChoice;
use std::sync::Mutex;

/// All kernels requested so far.
#[derive(Debug)]
pub(super) struct Kernels {
    cache: KernelCache,
    card: Card,
    loaded: Mutex<Vec<Loaded>>,
}

/// A module and the kernels taken from it. A plan's step has tens of thousands of launches but a few
/// dozen modules, so scanning the modules is cheaper than building a key for each launch.
#[derive(Debug)]
struct Loaded {
    source: KernelSource,
    definitions: Vec<(&'static str, String)>,
    module: Module,
    kernels: Vec<Known>,
}

/// A kernel by its name.
#[derive(Debug)]
struct Known {
    name: String,
    kernel: Kernel,
    /// Its limit on dynamic shared memory. Never lowered: launches prepared earlier for other shapes
    /// still run.
    shared_bytes: usize,
}

impl Kernels {
    pub(super) fn new(card: Card) -> Result<Kernels, CudaError> {
        Ok(Kernels { cache: KernelCache::of_user()?, card, loaded: Mutex::default() })
    }

    /// The card that they are for.
    pub(super) fn card(&self) -> &Card {
        &self.card
    }

    /// How many modules are loaded.
    pub(super) fn module_count(&self) -> usize {
        self.loaded.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).len()
    }

    /// The kernel. Compiles and loads it on the first request with this source and these definitions.
    pub(super) fn get(&self, choice: &KernelChoice<'_>) -> Result<Kernel, CudaError> {
        let KernelChoice { source, name, definitions, shared_bytes } = choice;
        let mut loaded = self.loaded.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let is_wanted = |loaded: &Loaded| {
            loaded.source.name == source.name && loaded.definitions == *definitions
        };
        let index = match loaded.iter().position(is_wanted) {
            Some(index) => index,
            None => {
                loaded.push(self.load(*source, definitions)?);
                loaded.len() - 1
            }
        };
        let Loaded { module, kernels, .. } = &mut loaded[index];
        let index = match kernels.iter().position(|known| known.name == *name) {
            Some(index) => index,
            None => {
                let kernel = module.kernel(name)?;
                kernels.push(Known { name: (*name).to_owned(), kernel, shared_bytes: 0 });
                kernels.len() - 1
            }
        };
        let known = &mut kernels[index];
        if *shared_bytes > known.shared_bytes {
            known.kernel.allow_shared(*shared_bytes)?;
            known.shared_bytes = *shared_bytes;
        }
        Ok(known.kernel)
    }

    /// Compiles a source, so that [`Kernels::get`] finds it in the cache.
    pub(super) fn compile(
        &self,
        source: KernelSource,
        definitions: &[(&'static str, String)],
    ) -> Result<(), CudaError> {
        self.cubin(source, definitions).map(drop)
    }

    fn load(
        &self,
        source: KernelSource,
        definitions: &[(&'static str, String)],
    ) -> Result<Loaded, CudaError> {
        let module = Module::load(source.name, &self.cubin(source, definitions)?)?;
        Ok(Loaded { source, definitions: definitions.to_vec(), module, kernels: Vec::new() })
    }

    fn cubin(
        &self,
        source: KernelSource,
        definitions: &[(&'static str, String)],
    ) -> Result<Vec<u8>, CudaError> {
        let architecture = match source.only_for {
            Some(architecture) => architecture.to_owned(),
            None => self.card.architecture(),
        };
        self.cache.get(source, &architecture, definitions)
    }
}
