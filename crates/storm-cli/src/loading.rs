//! Shows progress while weights are read from disk.

use crate::progress::Bytes;
use std::cell::RefCell;
use std::ops::Range;
use storm_graph::DType;
use storm_model::{AnyModel, Element, ModelError, ParameterSource, ParameterSpec};

/// A weight source that shows how much of it has been read.
pub(crate) struct Loading<'a, S> {
    source: &'a S,
    /// Bytes per element in the compute type.
    element_bytes: u64,
    elements: u64,
    state: RefCell<State>,
}

struct State {
    shown: Bytes,
    done: u64,
    /// The last range read: a parameter with a master copy is read twice but counts once.
    last: (String, Range<usize>),
}

impl<'a, S: ParameterSource> Loading<'a, S> {
    /// Wraps a source, for a model that computes in `dtype`. Progress counts bytes of that type.
    pub(crate) fn new(source: &'a S, model: impl Into<AnyModel>, dtype: DType) -> Loading<'a, S> {
        let (elements, element_bytes) = (model.into().parameter_count(), dtype.size_bytes() as u64);
        let shown = Bytes::new("loading weights", elements * element_bytes);
        let state = RefCell::new(State { shown, done: 0, last: (String::new(), 0..0) });
        Loading { source, element_bytes, elements, state }
    }
}

impl<S: ParameterSource> ParameterSource for Loading<'_, S> {
    fn load_rows<E: Element>(
        &self,
        spec: &ParameterSpec,
        rows: Range<usize>,
        dest: &mut [E],
    ) -> Result<(), ModelError> {
        let count = dest.len() as u64;
        self.source.load_rows(spec, rows.clone(), dest)?;
        let mut state = self.state.borrow_mut();
        if (spec.name.as_str(), &rows) != (state.last.0.as_str(), &state.last.1) {
            state.done += count;
            state.last = (spec.name.clone(), rows);
        }
        // Adapters do not count as parameters and come last, so cap the count.
        let done = state.done.min(self.elements) * self.element_bytes;
        state.shown.show(done);
        Ok(())
    }

    fn starts_fresh(&self, spec: &ParameterSpec) -> bool {
        self.source.starts_fresh(spec)
    }
}
