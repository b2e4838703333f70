//! Random programs of one to six stages, with skip connections, several carried tensors, tied and
//! frozen parameters and running statistics, under random plans with delays. Every bit is that of
//! everything resident.

use crate::support::{Random, batches, options, tiny};
use std::sync::Arc;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::{
    ActivationFunction, Carried, DType, HeadLayout, Op, Program, Section, SectionBuilder, Shape,
    Stage, TensorClass, TensorId, Training,
};
use storm_model::{ModelConfig, initialization};
use storm_plan::{HardwareProfile, Lowering, check, random_decisions};
use storm_train::{Precision, ReferenceTrainer, TrainOptions, Trainer, task_of_program};

const WIDTH: usize = 16;
const HEADS: HeadLayout = HeadLayout { query_heads: 4, key_value_heads: 2, head_dim: 4 };
const STEPS: usize = 4;

/// Number of programs. More with `STORM_LONG_TESTS=1`.
fn program_count() -> u64 {
    if std::env::var_os("STORM_LONG_TESTS").is_some() { 600 } else { 60 }
}

/// Sections under construction, and the carried tensors besides `hidden` that no block has taken
/// yet.
struct Draft<'a> {
    config: &'a ModelConfig,
    options: &'a TrainOptions,
    dtype: DType,
    random: Random,
    templates: Vec<Section>,
    stages: Vec<Stage>,
    open: Vec<String>,
}

impl Draft<'_> {
    fn shape(&self) -> Shape {
        Shape::from([self.options.batch, self.options.sequence, WIDTH])
    }

    fn builder(&mut self, name: &str, may_freeze: bool) -> SectionBuilder {
        let TrainOptions { batch, sequence, .. } = *self.options;
        let mut builder = SectionBuilder::new(name, batch, sequence, self.dtype);
        if may_freeze && self.random.below(4) == 0 {
            builder.freeze();
        }
        builder
    }

    fn push(&mut self, section: Section, repeat: Option<usize>) {
        let (name, template) = (section.name.clone(), self.templates.len());
        self.stages.push(match repeat {
            Some(repeat) => Stage::repeated(name, template, repeat),
            None => Stage::once(name, template),
        });
        self.templates.push(section);
    }

    /// `x`, with a branch added to it.
    fn branch(&mut self, builder: &mut SectionBuilder, name: &str, x: TensorId) -> TensorId {
        let normed = builder.rms_norm(&format!("{name}.norm"), x, 1e-5).unwrap();
        if self.random.below(3) == 0 {
            builder.moving_average(&format!("{name}.average"), normed, 0.25).unwrap();
        }
        let inner = match self.random.below(2) {
            0 => {
                let up = builder.linear(&format!("{name}.up"), normed, 20).unwrap();
                let function = ActivationFunction::Silu;
                builder.activation(&format!("{name}.silu"), up, function).unwrap()
            }
            _ => {
                let qkv = builder.linear(&format!("{name}.qkv"), normed, HEADS.qkv_width());
                let attention = format!("{name}.attention");
                builder.causal_attention(&attention, qkv.unwrap(), HEADS).unwrap()
            }
        };
        builder.linear_onto(&format!("{name}.out"), inner, x).unwrap()
    }

    fn first(&mut self) {
        let mut builder = self.builder("first", true);
        let hidden = builder.embedding("tokens", self.config.vocab_size, WIDTH).unwrap();
        self.push(builder.hand_on(hidden), None);
    }

    fn middle(&mut self, number: usize) {
        let name = format!("middle{number}");
        let mut builder = self.builder(&name, true);
        let hidden = builder.take("hidden", self.shape());
        // Stages that run once share parameters of one name.
        let own = |part: &str| format!("{name}.{part}");
        let out = self.branch(&mut builder, &own("main"), hidden);
        let mut carried = vec![Carried::new("hidden", out)];
        let repeat = 1 + self.random.below(3);
        match self.random.below(4) {
            // A tensor that skips the stages after this one.
            0 => {
                let skip = builder.linear(&own("skip"), hidden, WIDTH).unwrap();
                let skip_name = format!("skip{number}");
                carried.push(Carried::new(skip_name.clone(), skip));
                self.open.push(skip_name);
                self.push(builder.hand_on_all(carried), None);
            }
            // A skipped tensor that is merged.
            1 if !self.open.is_empty() => {
                let which = self.random.below(self.open.len());
                let skip = builder.take(&self.open.remove(which), self.shape());
                let merged = builder.linear_onto(&own("merge"), skip, out).unwrap();
                carried[0] = Carried::new("hidden", merged);
                self.push(builder.hand_on_all(carried), None);
            }
            // Two streams side by side.
            2 if !self.open.is_empty() => {
                let which = self.random.below(self.open.len());
                let side_name = self.open[which].clone();
                let side = builder.take(&side_name, self.shape());
                let side = self.branch(&mut builder, &own("side"), side);
                carried.push(Carried::new(side_name, side));
                self.push(builder.hand_on_all(carried), Some(repeat));
            }
            _ => self.push(builder.hand_on_all(carried), Some(repeat)),
        }
    }

    /// Norm and loss. With `tied`, the loss uses the table of the first stage.
    fn last(&mut self, mut builder: SectionBuilder, hidden: TensorId, tied: bool) {
        let mut normed = builder.rms_norm("final.norm", hidden, 1e-5).unwrap();
        for name in std::mem::take(&mut self.open) {
            let skip = builder.take(&name, self.shape());
            normed = builder.linear_onto(&format!("{name}.merge"), skip, normed).unwrap();
        }
        let vocabulary = self.config.vocab_size;
        let mut section = match tied {
            false => builder.loss(normed, vocabulary, 7).unwrap(),
            true => builder.loss_of("tokens.weight", normed, vocabulary, 7).unwrap(),
        };
        // A second result, which must not be taken for the loss.
        let twice = Op::Scale { x: section.results[0].1, factor: 2.0 };
        let twice = section.graph.apply_one("twice", twice).unwrap();
        section.results.push(("twice".to_owned(), twice));
        self.push(section, None);
    }
}

fn random_program(
    config: &ModelConfig,
    options: &TrainOptions,
    dtype: DType,
    seed: u64,
) -> Program {
    let random = Random(seed);
    let (templates, stages, open) = (Vec::new(), Vec::new(), Vec::new());
    let mut draft = Draft { config, options, dtype, random, templates, stages, open };
    let count = 1 + draft.random.below(6);
    if count == 1 {
        let mut builder = draft.builder("only", false);
        let hidden = builder.embedding("tokens", config.vocab_size, WIDTH).unwrap();
        draft.last(builder, hidden, false);
    } else {
        draft.first();
        for number in 0..count - 2 {
            draft.middle(number);
        }
        let table = draft.templates[0].parameter("tokens.weight").expect("the embedding has it");
        let learns = table.class == TensorClass::Parameter(Training::Trainable);
        let tied = learns && draft.random.below(2) == 0;
        let mut builder = draft.builder("last", false);
        let hidden = builder.take("hidden", draft.shape());
        draft.last(builder, hidden, tied);
    }
    Program::new(draft.templates, draft.stages).expect("stages that meet")
}

/// The number of running statistics of a program.
fn running(program: &Program) -> usize {
    let instances = program.parameter_instances();
    instances.iter().filter(|i| i.parameter.training == Training::Running).count()
}

#[test]
fn random_programs_under_random_plans_are_exact() {
    let mut config = tiny("mistral-7b");
    config.hidden_size = WIDTH;
    let profile = HardwareProfile::builtin("reference").expect("built in");
    let mut statistics = 0;
    for seed in 0..program_count() {
        let precision = [Precision::Bf16Stochastic, Precision::F32][seed as usize % 2];
        let options = options(precision);
        let program = random_program(&config, &options, precision.compute(), seed);
        let micro_batches = 1 + seed as usize % 4;
        statistics += running(&program);

        let mut resident = ReferenceTrainer::of_program(&config, options.clone(), program.clone())
            .expect("a trainer");
        let mut expected = Vec::new();
        for step in 0..STEPS {
            let report = resident.step(&batches(&config, micro_batches, step), 0.01).unwrap();
            expected.push((report.loss.to_bits(), report.gradient_norm.to_bits()));
        }

        let task = task_of_program(&program, &options, micro_batches).expect("differentiable");
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        for variant in 0..3 {
            let decisions = random_decisions(&task, 10 * seed + variant);
            let about = format!("program {seed}, plan {variant}: {decisions:?}");
            let plan = lowering.lower_with_evaluation(&decisions).expect("decisions that work");
            let budget = plan.bytes;
            let plan = check(plan, budget).unwrap_or_else(|error| panic!("{error}\n{about}"));
            let device = CpuPlanOptions {
                threads: Some(1),
                chaos_seed: Some(seed),
                ..CpuPlanOptions::default()
            };
            let start = |name: &str| initialization(&config, name);
            let mut trainer: Trainer<CpuPlanDevice> =
                Trainer::of_program(&program, options.clone(), Arc::new(plan), device, start)
                    .expect("a trainer");
            for (step, &bits) in expected.iter().enumerate() {
                let batches = batches(&config, micro_batches, step);
                let evaluated = (step == 2).then(|| trainer.evaluate(&batches).unwrap().loss);
                let report = trainer.step(&batches, 0.01).unwrap();
                let found = (report.loss.to_bits(), report.gradient_norm.to_bits());
                assert_eq!(found, bits, "step {step} of {about}");
                if let Some(loss) = evaluated {
                    assert_eq!(loss.to_bits(), report.loss.to_bits(), "{about}");
                }
                if micro_batches == 1 {
                    let twice = trainer.result("twice").expect("a second result");
                    let twice = f32::from_ne_bytes(twice.try_into().unwrap());
                    assert_eq!(twice, 2.0 * report.loss, "{about}");
                }
            }
            for name in trainer.parameter_names().map(str::to_owned).collect::<Vec<_>>() {
                let found = trainer.read(&name).unwrap();
                assert_eq!(found, resident.read(&name).unwrap(), "{name} of {about}");
            }
        }
    }
    assert!(statistics > 20, "{statistics} running statistics are too few to prove anything");
}

/// Its value would depend on how often it was computed.
#[test]
fn a_statistic_that_the_backward_pass_needs_is_refused() {
    let (config, options) = (tiny("mistral-7b"), options(Precision::F32));
    let TrainOptions { batch, sequence, .. } = options;
    let mut first = SectionBuilder::new("first", batch, sequence, DType::F32);
    let hidden = first.embedding("tokens", config.vocab_size, WIDTH).unwrap();
    let mut middle = SectionBuilder::new("middle", batch, sequence, DType::F32);
    let taken = middle.take("hidden", [batch, sequence, WIDTH]);
    let shape = Shape::from([batch, sequence, WIDTH]);
    let (name, class) = ("mean", TensorClass::Parameter(Training::Running));
    let mut section = middle.hand_on(taken);
    let mean = section.graph.source(name, shape, DType::F32, class);
    let shifted = section.graph.apply_one("shifted", Op::Add { a: taken, b: mean }).unwrap();
    section.carried_out[0].tensor = shifted;
    let (last, hidden_in) = SectionBuilder::after(&section, "last").unwrap();
    let last = last.loss(hidden_in, config.vocab_size, 7).unwrap();
    let stages = vec![Stage::once("first", 0), Stage::once("middle", 1), Stage::once("last", 2)];
    let program = Program::new(vec![first.hand_on(hidden), section, last], stages).unwrap();
    let error = task_of_program(&program, &options, 1).unwrap_err().to_string();
    assert!(error.contains("`middle`") && error.contains("`shifted`"), "{error}");
}
