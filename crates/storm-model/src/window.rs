//! Sliding windows: their length and their layers.

use crate::ModelError;
use crate::config::{check, limit, within};
use std::ops::Range;

/// A sliding attention window of some layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Number of tokens that a token attends to, including itself.
    pub tokens: usize,
    /// Runs of layers that have the window, ascending and separated. The other layers attend to all
    /// earlier tokens.
    pub layers: Vec<Range<usize>>,
}

impl SlidingWindow {
    /// A window for the layers from `first` on.
    pub fn from_layer(tokens: usize, first: usize, layer_count: usize) -> SlidingWindow {
        SlidingWindow { tokens, layers: Vec::from([Range { start: first, end: layer_count }]) }
    }

    /// A window for the layers for which `has_it` is true. `None` if there are none.
    pub fn of_layers(
        tokens: usize,
        has_it: impl IntoIterator<Item = bool>,
    ) -> Option<SlidingWindow> {
        let mut layers: Vec<Range<usize>> = Vec::new();
        for (layer, _) in has_it.into_iter().enumerate().filter(|(_, has_it)| *has_it) {
            match layers.last_mut() {
                Some(run) if run.end == layer => run.end += 1,
                _ => layers.push(layer..layer + 1),
            }
        }
        (!layers.is_empty()).then_some(SlidingWindow { tokens, layers })
    }

    /// Whether a layer has the window.
    pub fn has(&self, layer: usize) -> bool {
        self.layers.iter().any(|run| run.contains(&layer))
    }

    /// The first layer with the window, if all layers after it have it too.
    pub(crate) fn only_from(&self, layer_count: usize) -> Option<usize> {
        match self.layers.as_slice() {
            [run] if run.end == layer_count => Some(run.start),
            _ => None,
        }
    }

    /// Partitions the layers into runs with and without the window.
    pub(crate) fn runs(&self, layer_count: usize) -> Vec<(Range<usize>, bool)> {
        let (mut runs, mut next) = (Vec::new(), 0);
        for run in self.layers.iter().cloned() {
            runs.push((next..run.start, false));
            next = run.end;
            runs.push((run, true));
        }
        runs.push((next..layer_count, false));
        runs.retain(|(run, _)| !run.is_empty());
        runs
    }

    pub(crate) fn validate(&self, layer_count: usize) -> Result<(), ModelError> {
        within("sliding_window", self.tokens, limit::POSITIONS)?;
        let is_apart = |pair: &[Range<usize>]| pair[0].end < pair[1].start;
        let holds = !self.layers.is_empty()
            && self.layers.iter().all(|run| !run.is_empty() && run.end <= layer_count)
            && self.layers.windows(2).all(is_apart);
        check(holds, "layers with a sliding window", format!("{:?}", self.layers), || {
            format!("runs of layers below {layer_count}, ascending and apart")
        })
    }
}
