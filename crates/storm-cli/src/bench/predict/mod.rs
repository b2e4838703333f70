//! `storm bench predict`: measures what predictions gain over plain training.
//!
//! Plain training is tuned over learning rates, then run at several lengths, each with its own
//! schedule that falls to zero. All methods use that learning rate and the same seeds. Runs of a
//! seed follow one another, so that a slow phase of the machine affects all methods. The controls
//! must show no gain. Otherwise, the measurement is wrong, and the report says so.

mod child;
mod compare;
mod draw;
mod methods;
mod page;
mod records;
mod table;

use super::outputs::Output;
use crate::predict::held_out_rows;
use crate::{UsageError, train};
use anyhow::{Context, Result, bail};
use child::{Job, Runner};
use clap::Args;
use compare::{Comparison, Estimate, Pair};
use methods::{LENGTHS, Method, Phases};
use records::{Finished, Records};
use std::io::{Read, Write};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use storm_files::{open_plain, replace_file};
use table::{Line, Plain};

/// Seed of the runs that choose a learning rate. No comparison uses it.
const TUNING_SEED: u64 = 1_000_000;

/// Rates to try beyond the given ones, if the best is the lowest or highest of them.
const MORE_RATES: usize = 3;

/// Maximum bytes read of a document.
const DOCUMENT_BYTES_MAX: u64 = 4 << 20;

#[derive(Args)]
pub(crate) struct PredictBenchArgs {
    /// Config of a run without `predict`, with held-out data: some for validation (`eval-steps`), some for predictions,
    /// and the rest as a test set.
    config: PathBuf,
    /// Steps of each run. Default: those of the config.
    #[arg(long)]
    steps: Option<NonZeroU64>,
    /// Number of seeds to run everything with: 0, 1, 2, …
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: u64,
    /// Learning rates to try, as multiples of the config's.
    #[arg(long, value_delimiter = ',', default_values_t = [0.5, 1.0, 2.0], value_parser = factor)]
    rates: Vec<f64>,
    /// Methods to compare; see docs/predictive.md. Default: all.
    #[arg(long, value_delimiter = ',')]
    methods: Vec<String>,
    /// Steps of a full phase.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    full: u64,
    /// Steps of a correction.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    correct: u64,
    /// Micro-batches of the probe, and as many for corrections.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=65_536))]
    probe_batches: u32,
    /// Folder of the runs. Runs listed in its `finished.jsonl` are not repeated.
    #[arg(long, default_value = "runs/predict")]
    runs: PathBuf,
    /// Start no new run after this many seconds. Run the same command again to continue.
    #[arg(long, value_name = "SECONDS")]
    within: Option<u64>,
    /// Write an HTML page with plots.
    #[arg(long, value_name = "FILE.html")]
    page: Option<PathBuf>,
    /// Update the table of this task in a Markdown file, between `<!-- storm bench predict: NAME -->` and `<!-- end of
    /// NAME -->`, where NAME is the name of the config without `.toml`.
    #[arg(long, value_name = "FILE.md")]
    document: Option<PathBuf>,
    /// Print one line of JSON per method instead of a table.
    #[arg(long)]
    json: bool,
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if (1e-6..=1e6).contains(&factor) => Ok(factor),
        _ => Err("must be a number above 0: 0.5,1,2".to_owned()),
    }
}

pub(super) fn run(args: &PredictBenchArgs) -> Result<()> {
    let task = Task::new(args)?;
    let methods = methods::chosen(&args.methods)?;
    let page = Output::create(args.page.as_deref(), "page")?;
    let document = args.document.as_deref().map(read_document).transpose()?;
    let name = args.config.file_stem().map_or("task".into(), |name| name.to_string_lossy());
    if let Some(text) = &document
        && table::put_between(text, &name, "").is_none()
    {
        let problem = format!(
            "--document: it has no lines <!-- storm bench predict: {name} --> and <!-- end of {name} -->"
        );
        return Err(UsageError(problem).into());
    }
    let mut bench = Bench {
        runner: Runner::new(&args.config, &args.runs),
        records: Records::open(&args.runs)?,
        config: String::new(),
        begun: Instant::now(),
        within: args.within.map(Duration::from_secs),
    };
    bench.config = bench.runner.hash()?;
    let Some(rate) = bench.tuned(&task, &args.rates)? else {
        eprintln!(
            "the time limit was reached before a learning rate was chosen; run the same command again to resume"
        );
        return Ok(());
    };
    let left = bench.fill(&task, &methods, rate, args.seeds)?;
    let found = Found::new(&bench, &task, &methods, rate, args.seeds);
    let Some(found) = found else {
        eprintln!(
            "{left}, and too few have finished to compare; run the same command again to resume"
        );
        return Ok(());
    };
    let markdown = table::markdown(&found.plain, &found.lines);
    match args.json {
        true => found.print_json(rate),
        false => print!("{markdown}"),
    }
    if let Some(page) = page {
        page.write(|out| page::write(&name, &task, rate, &found, out))?;
    }
    if let (Some(path), Some(text)) = (&args.document, document) {
        let text = table::put_between(&text, &name, &markdown).context("its marks are gone")?;
        replace_file(path, |out| out.write_all(text.as_bytes()))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    if left.runs > 0 {
        eprintln!("{left}; run the same command again to resume");
    }
    match found.problems.is_empty() {
        true => Ok(()),
        false => bail!("this measurement is wrong:\n{}", found.problems.join("\n")),
    }
}

fn read_document(path: &Path) -> Result<String> {
    let cannot = || format!("cannot read {}", path.display());
    let mut text = String::new();
    let file = open_plain(path).with_context(cannot)?;
    file.take(DOCUMENT_BYTES_MAX).read_to_string(&mut text).with_context(cannot)?;
    Ok(text)
}

/// The runs that are missing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Left {
    runs: usize,
    /// The time that they are expected to take.
    seconds: f64,
}

impl std::fmt::Display for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Left { runs, seconds } = self;
        let words = if *runs == 1 { "1 run is left" } else { &format!("{runs} runs are left") };
        match *seconds > 0.0 {
            true => write!(f, "{words}, which will take about {seconds:.0} s"),
            false => f.write_str(words),
        }
    }
}

/// The training task.
struct Task {
    phases: Phases,
    learning_rate: f64,
    warmup: u64,
    /// Held-out rows of runs that predict.
    predicted_rows: u64,
}

impl Task {
    fn new(args: &PredictBenchArgs) -> Result<Task> {
        let settings = train::settings_of(&args.config)?;
        let refuse = |problem: String| Err(UsageError(problem).into());
        if settings.predict.is_some() {
            return refuse(format!("{} predicts; leave [predict] out", args.config.display()));
        }
        let Some(steps) = args.steps.or(settings.steps).map(NonZeroU64::get) else {
            return refuse(format!("{} has no steps; give --steps", args.config.display()));
        };
        let Some(learning_rate) = settings.learning_rate else {
            return refuse(format!(
                "{} has no learning-rate, and --rates are multiples of it; add one",
                args.config.display()
            ));
        };
        let (full, correct) = (args.full, args.correct);
        let probe_batches = args.probe_batches as usize;
        let phases = Phases { steps, full, correct, probe_batches };
        let cycle = phases.warm_up() + full + correct;
        if cycle > steps {
            return refuse(format!(
                "warm-up, full and correct take {cycle} steps, and runs have {steps}; give more --steps"
            ));
        }
        if settings.batch.is_none() && settings.tokens_per_step.is_some() {
            return refuse(format!(
                "{} leaves the size of micro-batches to each run, and with it that of the probe; give batch and accumulate \
                 instead of tokens-per-step",
                args.config.display()
            ));
        }
        let batch = settings.batch.map_or(1, NonZeroUsize::get);
        let predicted_rows = held_out_rows(probe_batches, batch);
        Ok(Task { phases, learning_rate, warmup: settings.warmup, predicted_rows })
    }

    /// A run without predictions.
    fn plain(&self, rate: f64, steps: u64, seed: u64) -> Job {
        let mut flags = self.flags(rate, steps);
        flags.extend(["--final-learning-rate".to_owned(), "0".to_owned()]);
        Job { name: format!("plain, {steps} steps, learning rate {rate}"), flags, seed, steps }
    }

    fn of(&self, method: &Method, rate: f64, seed: u64) -> Job {
        let steps = self.phases.steps;
        let mut flags = self.flags(rate, steps);
        if method.is_decayed() {
            flags.extend(["--final-learning-rate".to_owned(), "0".to_owned()]);
        }
        flags.extend(method.flags(&self.phases));
        Job { name: method.name.to_owned(), flags, seed, steps }
    }

    /// Steps, learning rate and rows of the test. The warm-up keeps its share of the steps. Runs that do not predict
    /// test on the same rows as those that do.
    fn flags(&self, rate: f64, steps: u64) -> Vec<String> {
        let warmup = (self.warmup as f64 * steps as f64 / self.phases.steps as f64).round();
        let pairs = [
            ("--steps", steps.to_string()),
            ("--learning-rate", rate.to_string()),
            ("--warmup", (warmup as u64).to_string()),
            ("--test", true.to_string()),
            ("--test-leave", self.predicted_rows.to_string()),
        ];
        pairs.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect()
    }

    /// Lengths of plain runs, shortest first.
    fn lengths(&self) -> Vec<u64> {
        LENGTHS.iter().map(|share| (share * self.phases.steps as f64).round() as u64).collect()
    }
}

/// The finished runs, and what is needed to make more.
struct Bench<'a> {
    runner: Runner<'a>,
    records: Records,
    config: String,
    begun: Instant,
    within: Option<Duration>,
}

impl Bench<'_> {
    fn find(&self, job: &Job) -> Option<&Finished> {
        self.records.find(&self.config, &job.flags, job.seed)
    }

    fn is_time_up(&self) -> bool {
        self.within.is_some_and(|within| self.begun.elapsed() >= within)
    }

    /// Makes a run unless it is finished. Returns false if there is no time for it.
    fn make(&mut self, job: &Job, place: &str) -> Result<bool> {
        if self.find(job).is_some() {
            return Ok(true);
        }
        if self.is_time_up() {
            return Ok(false);
        }
        eprintln!("{place}: {}, seed {}", job.name, job.seed);
        let finished = self.runner.run(job, &self.config)?;
        self.records.push(finished)?;
        Ok(true)
    }

    /// The learning rate with the best validation loss. `None` if there is no time to find it.
    fn tuned(&mut self, task: &Task, factors: &[f64]) -> Result<Option<f64>> {
        let mut factors = factors.to_vec();
        factors.sort_by(f64::total_cmp);
        factors.dedup();
        for _ in 0..=MORE_RATES {
            let mut losses = Vec::new();
            for &factor in &factors {
                let job = task.plain(factor * task.learning_rate, task.phases.steps, TUNING_SEED);
                if !self.make(&job, "learning rate")? {
                    return Ok(None);
                }
                losses.extend(self.find(&job).map(|run| run.validation_loss));
            }
            let Some(best) = lowest(&losses) else { bail!("no plain run has a finite loss") };
            let (first, last) = (factors[0], factors[factors.len() - 1]);
            let more = match best {
                _ if factors.len() == 1 => None,
                best if best == factors.len() - 1 => Some(2.0 * last),
                0 => Some(0.5 * first),
                _ => None,
            };
            match more {
                Some(factor) => {
                    factors.push(factor);
                    factors.sort_by(f64::total_cmp);
                }
                None => return Ok(Some(factors[best] * task.learning_rate)),
            }
        }
        bail!(
            "the best learning rate is still the lowest or the highest that was tried; give other --rates"
        )
    }

    /// Makes the missing runs, and returns what is left.
    fn fill(&mut self, task: &Task, methods: &[Method], rate: f64, seeds: u64) -> Result<Left> {
        let mut jobs = Vec::new();
        for seed in 0..seeds {
            let plain = task.lengths().into_iter().map(|steps| task.plain(rate, steps, seed));
            let all = methods.iter().map(|method| task.of(method, rate, seed));
            let mut of_seed: Vec<Job> = plain.chain(all).collect();
            // Rotates, so that changes over time do not always affect the same methods.
            let turn = seed as usize * 5 % of_seed.len();
            of_seed.rotate_left(turn);
            jobs.extend(of_seed);
        }
        let total = jobs.len();
        let mut missing = Vec::new();
        for (number, job) in jobs.iter().enumerate() {
            let place = format!("run {} of {total}", number + 1);
            if !self.make(job, &place)? {
                missing.push(job);
            }
        }
        let seconds = |job: &&Job| self.records.whole_seconds(&self.config, &job.flags);
        let seconds = missing.iter().filter_map(seconds).sum();
        Ok(Left { runs: missing.len(), seconds })
    }
}

/// The index of the lowest finite number.
fn lowest(losses: &[f64]) -> Option<usize> {
    let finite = losses.iter().enumerate().filter(|(_, loss)| loss.is_finite());
    finite.min_by(|a, b| a.1.total_cmp(b.1)).map(|(at, _)| at)
}

/// Results of the finished runs.
struct Found<'m> {
    plain: Plain,
    /// Plain training: cost in steps, and mean loss.
    curve: Vec<(f64, f64)>,
    lines: Vec<Line<'m>>,
    /// Why the measurement is wrong.
    problems: Vec<String>,
}

impl<'m> Found<'m> {
    /// `None` if no seed has all its plain runs.
    fn new(
        bench: &Bench<'_>,
        task: &Task,
        methods: &'m [Method],
        rate: f64,
        seeds: u64,
    ) -> Option<Found<'m>> {
        let of_seed = |seed: u64| -> Option<Vec<&Finished>> {
            task.lengths()
                .into_iter()
                .map(|steps| bench.find(&task.plain(rate, steps, seed)))
                .collect()
        };
        let whole: Vec<(u64, Vec<&Finished>)> =
            (0..seeds).filter_map(|seed| Some((seed, of_seed(seed)?))).collect();
        let at = |length: usize, of: fn(&Finished) -> f64| -> Vec<f64> {
            whole.iter().map(|(_, runs)| of(runs[length])).collect()
        };
        let same = LENGTHS.iter().position(|share| *share == 1.0)?;
        let curve = (0..LENGTHS.len())
            .map(|length| {
                let cost = Estimate::of(&at(length, Finished::cost_steps))?;
                Some((cost.mean, Estimate::of(&at(length, |run| run.test_loss))?.mean))
            })
            .collect::<Option<Vec<_>>>()?;
        let plain = Plain {
            test_loss: Estimate::of(&at(same, |run| run.test_loss))?,
            seeds: whole.len(),
            seeds_asked: seeds as usize,
            steps: task.phases.steps,
            seconds: Estimate::of(&at(same, |run| run.seconds))?.mean,
        };
        let (mut lines, mut problems) = (Vec::new(), Vec::new());
        for method in methods {
            let pairs: Vec<Pair<'_>> = whole
                .iter()
                .filter_map(|(seed, runs)| {
                    let run = bench.find(&task.of(method, rate, *seed))?;
                    Some(Pair { plain: runs.clone(), method: run })
                })
                .collect();
            let found = Comparison::new(&pairs);
            problems.extend(problems_of(method, &pairs, same, found.as_ref()));
            lines.push(Line { method, found });
        }
        Some(Found { plain, curve, lines, problems })
    }

    fn print_json(&self, rate: f64) {
        println!("{}", table::plain_object(&self.plain, rate));
        self.lines.iter().filter_map(table::object).for_each(|object| println!("{object}"));
    }
}

/// Results that can only come from a wrong measurement.
fn problems_of(
    method: &Method,
    pairs: &[Pair<'_>],
    same: usize,
    found: Option<&Comparison>,
) -> Vec<String> {
    let mut problems = Vec::new();
    let name = method.name;
    for Pair { plain, method } in pairs {
        let (expected, loss, seed) = (plain[same].test_loss, method.test_loss, method.seed);
        if name == "null" && loss.to_bits() != expected.to_bits() {
            problems.push(format!(
                "`null` makes no jump, but its loss with seed {seed} is {loss} and that of plain training {expected}"
            ));
        }
        if method.distance_min.is_some_and(|distance| distance <= 0.0) {
            problems
                .push(format!("`{name}` accepted a jump that moved no weight, with seed {seed}"));
        }
    }
    if name == "random" && pairs.len() > 1 && found.is_some_and(Comparison::is_gain) {
        problems.push("`random` is a control and came out as a gain".to_owned());
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::records::tests::finished;
    use super::*;

    fn found(name: &str, loss: f64, distance_min: Option<f64>) -> Vec<String> {
        let method = methods::chosen(&[name.to_owned()]).expect("a method").remove(0);
        let plain = [finished(0, 60, 3.1), finished(0, 100, 3.0), finished(0, 160, 2.9)];
        let run = Finished { distance_min, ..finished(0, 100, loss) };
        let pair = || Pair { plain: plain.iter().collect(), method: &run };
        let pairs = [pair(), pair()];
        problems_of(&method, &pairs, 1, Comparison::new(&pairs).as_ref())
    }

    #[test]
    fn controls_that_are_none_are_problems() {
        assert_eq!(found("null", 3.0, None), [""; 0]);
        assert_eq!(found("null", 3.0 + 1e-12, None).len(), 2);
        assert_eq!(found("random", 3.0, Some(0.1)), [""; 0]);
        assert_eq!(found("random", 3.05, Some(0.1)), [""; 0]);
        assert_eq!(found("random", 2.95, Some(0.1)).len(), 1);
        assert_eq!(found("snoo", 2.95, Some(0.1)), [""; 0]);
        assert_eq!(found("snoo", 2.95, Some(0.0)).len(), 2);
    }

    #[test]
    fn what_is_left_is_said_with_its_time() {
        let left = |runs, seconds| Left { runs, seconds }.to_string();
        assert_eq!(left(1, 0.0), "1 run is left");
        assert_eq!(left(12, 34.4), "12 runs are left, which will take about 34 s");
    }

    #[test]
    fn what_is_not_finite_is_not_the_lowest() {
        assert_eq!(lowest(&[f64::NAN, 2.0, f64::NEG_INFINITY, 1.0, 3.0]), Some(3));
        assert_eq!(lowest(&[f64::NAN]), None);
    }
}
