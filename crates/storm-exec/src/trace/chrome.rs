use super::class_name;
use super::occupancy::occupancy;
use super::summary::largest_class;
use serde_json::{Value, json};
use std::io::{self, Write};
use storm_device::{Span, Trace, WaitedFor};
use storm_plan::{InstructionId, Plan, Work};

/// Writes a trace in the format of Chrome and Perfetto: a thread per queue, arrows to an instruction from
/// those that it waited for, and the bytes in use of each tier.
///
/// # Errors
/// From `out`.
pub fn write_chrome(plan: &Plan, trace: &Trace, out: &mut impl Write) -> io::Result<()> {
    let start_ns = trace.spans.iter().map(|span| span.start_ns).min().unwrap_or(0);
    let mut events = Events { out, start_ns, count: 0 };
    events.out.write_all(b"{\"displayTimeUnit\": \"ms\", \"traceEvents\": [")?;
    events.name_threads(plan)?;
    for span in &trace.spans {
        events.span(plan, span)?;
    }
    events.arrows(plan, trace)?;
    for point in occupancy(plan, trace) {
        let name = format!("{} memory in use", point.tier);
        let ts = events.microseconds(point.start_ns);
        let args = json!({"bytes": point.bytes});
        events.add(json!({"ph": "C", "pid": 1, "name": name, "ts": ts, "args": args}))?;
    }
    events.out.write_all(b"\n]}\n")
}

struct Events<'a, W> {
    out: &'a mut W,
    start_ns: u64,
    count: usize,
}

impl<W: Write> Events<'_, W> {
    fn add(&mut self, event: Value) -> io::Result<()> {
        let separator = if self.count == 0 { "\n" } else { ",\n" };
        self.count += 1;
        write!(self.out, "{separator}{event}")
    }

    fn microseconds(&self, ns: u64) -> f64 {
        (ns - self.start_ns) as f64 / 1000.0
    }

    fn name_threads(&mut self, plan: &Plan) -> io::Result<()> {
        let process = json!({"name": "storm"});
        self.add(json!({"ph": "M", "pid": 1, "name": "process_name", "args": process}))?;
        for queue in plan.queues() {
            let tid = queue.index();
            let (name, order) = (plan.links.queue_name(queue), json!({"sort_index": tid}));
            let about = [("thread_name", json!({"name": name})), ("thread_sort_index", order)];
            for (kind, args) in about {
                self.add(json!({"ph": "M", "pid": 1, "tid": tid, "name": kind, "args": args}))?;
            }
        }
        Ok(())
    }

    fn span(&mut self, plan: &Plan, span: &Span) -> io::Result<()> {
        let instruction = plan.instruction(span.instruction);
        let (category, values, mut args) = match &instruction.work {
            Work::Compute(compute) => {
                ("kernel", &compute.writes[..], json!({"layer": compute.layer}))
            }
            Work::Copy(copy) => {
                let class = class_name(largest_class(plan, copy));
                ("copy", &copy.values[..], json!({"bytes": copy.bytes, "class": class}))
            }
            Work::Fetch(_) => ("data", &[][..], json!({})),
            Work::ReadAhead(read) => ("data", &[][..], json!({"bytes": read.bytes})),
            Work::Collective(collective) => {
                let (bytes, kind) = (collective.busiest_bytes(plan), collective.kind.name());
                ("ranks", &[][..], json!({"bytes": bytes, "kind": kind}))
            }
        };
        if let Some(first) = values.first() {
            args["tensor"] = json!(plan.value(first.value).name);
        }
        match span.waited_for {
            WaitedFor::Nothing => {}
            WaitedFor::Host => args["waited_for"] = json!("the host"),
            WaitedFor::Instruction(id) => args["waited_for"] = json!(plan.describe(id)),
        }
        let (ts, end) = (self.microseconds(span.start_ns), self.microseconds(span.end_ns));
        self.add(json!({
            "ph": "X",
            "pid": 1,
            "tid": plan.queue(span.instruction).index(),
            "name": plan.describe(span.instruction),
            "cat": category,
            "ts": ts,
            "dur": end - ts,
            "args": args,
        }))
    }

    fn arrows(&mut self, plan: &Plan, trace: &Trace) -> io::Result<()> {
        let mut runs: Vec<Vec<&Span>> = vec![Vec::new(); plan.instructions.len()];
        for span in &trace.spans {
            runs[span.instruction.index()].push(span);
        }
        let tid = |id: InstructionId| plan.queue(id).index();
        for (id, span) in trace.spans.iter().enumerate() {
            let WaitedFor::Instruction(awaited) = span.waited_for else { continue };
            let runs = &runs[awaited.index()];
            let ended = runs.partition_point(|run| run.end_ns <= span.start_ns);
            let Some(from) = ended.checked_sub(1).map(|last| runs[last]) else { continue };
            // An arrow belongs to the span that contains its time.
            let inside_ns = from.end_ns.saturating_sub(1).max(from.start_ns);
            let (ts, tid_from) = (self.microseconds(inside_ns), tid(awaited));
            self.add(json!({
                "ph": "s", "pid": 1, "tid": tid_from, "name": "wait", "cat": "wait", "id": id, "ts": ts,
            }))?;
            let (ts, tid_to) = (self.microseconds(span.start_ns), tid(span.instruction));
            self.add(json!({
                "ph": "f", "bp": "e", "pid": 1, "tid": tid_to, "name": "wait", "cat": "wait",
                "id": id, "ts": ts,
            }))?;
        }
        Ok(())
    }
}
