use storm_device::DeviceError;
use storm_graph::Tensor;

/// Why a program could not be committed to a device or fed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ExecError {
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A graph could not be built.
    #[error(transparent)]
    Graph(#[from] storm_graph::GraphError),
    /// A tensor comes from outside, but no slot has its name.
    #[error(
        "section `{section}` reads `{tensor}`, which has no slot; declare it before scheduling"
    )]
    NoSlot {
        /// The section.
        section: String,
        /// Name of the tensor.
        tensor: String,
    },
    /// Two slots have the same name but differ.
    #[error("slot `{name}` is {known}, and cannot also be {wanted}")]
    SlotMismatch {
        /// Name of the slot.
        name: String,
        /// The existing slot.
        known: Box<Tensor>,
        /// The requested slot.
        wanted: Box<Tensor>,
    },
    /// A tensor kept on the host is to be computed on the device, which has no room for it.
    #[error(
        "`{tensor}` is to be made in {bytes} bytes of device memory, of which {largest_bytes} are \
         free in one piece; make it on the host and write it"
    )]
    NoRoom {
        /// Name of the tensor.
        tensor: String,
        /// Bytes that it needs.
        bytes: usize,
        /// The largest range that no persistent tensor covers.
        largest_bytes: usize,
    },
    /// The name was not declared.
    #[error("there is no `{name}`; there are: {known}")]
    UnknownName {
        /// The requested name.
        name: String,
        /// Some names that exist.
        known: String,
    },
}

impl ExecError {
    pub(crate) fn unknown<'a>(
        name: &str,
        known: impl ExactSizeIterator<Item = &'a String>,
    ) -> ExecError {
        let count = known.len();
        let mut known: Vec<&str> = known.map(String::as_str).take(12).collect();
        if count > known.len() {
            known.push("…");
        }
        ExecError::UnknownName { name: name.to_owned(), known: known.join(", ") }
    }
}
