use storm_device::Span;

/// The busy times of one queue, for queries over time ranges.
pub(super) struct BusyTime {
    /// For each span in order: start, end, and how long the queue has been busy up to the end.
    spans: Vec<(u64, u64, u64)>,
}

impl BusyTime {
    /// From the spans of a queue, in execution order.
    pub(super) fn new<'a>(spans: impl IntoIterator<Item = &'a Span>) -> BusyTime {
        let mut total_ns = 0;
        let spans = spans.into_iter().map(|span| {
            total_ns += span.end_ns - span.start_ns;
            (span.start_ns, span.end_ns, total_ns)
        });
        BusyTime { spans: spans.collect() }
    }

    /// How long it is busy between two times.
    pub(super) fn between_ns(&self, from_ns: u64, to_ns: u64) -> u64 {
        self.until_ns(to_ns) - self.until_ns(from_ns)
    }

    fn until_ns(&self, moment_ns: u64) -> u64 {
        let started = self.spans.partition_point(|&(start_ns, ..)| start_ns < moment_ns);
        let Some(&(_, end_ns, total_ns)) = started.checked_sub(1).map(|last| &self.spans[last])
        else {
            return 0;
        };
        total_ns - end_ns.saturating_sub(moment_ns)
    }
}
