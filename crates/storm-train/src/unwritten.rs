//! Which parameters lost their memory between steps and were not written since.

use std::collections::BTreeMap;
use storm_graph::ParameterInstance;

/// Parameters whose memory was released.
#[derive(Debug, Default)]
pub(crate) struct Unwritten(BTreeMap<String, Part>);

/// How much of a parameter was written, from its start on.
#[derive(Clone, Copy, Debug)]
struct Part {
    written_bytes: usize,
    bytes: usize,
}

impl Unwritten {
    /// All of these.
    pub(crate) fn all(instances: &[ParameterInstance]) -> Unwritten {
        let part = |instance: &ParameterInstance| {
            let parameter = &instance.parameter;
            let bytes = parameter.shape.elements() * parameter.dtype.size_bytes();
            (instance.name.clone(), Part { written_bytes: 0, bytes })
        };
        Unwritten(instances.iter().map(part).collect())
    }

    /// The first of them, if any is left.
    pub(crate) fn first(&self) -> Option<&str> {
        self.0.keys().next().map(String::as_str)
    }

    /// Notes that bytes of a tensor were written. The pieces of a parameter come in order.
    pub(crate) fn wrote(&mut self, name: &str, first: usize, bytes: usize) {
        let Some(part) = self.0.get_mut(name) else { return };
        if first <= part.written_bytes {
            part.written_bytes = part.written_bytes.max(first + bytes);
        }
        if part.written_bytes >= part.bytes {
            self.0.remove(name);
        }
    }

    /// Notes that a whole parameter was written.
    pub(crate) fn wrote_all(&mut self, name: &str) {
        self.0.remove(name);
    }
}
