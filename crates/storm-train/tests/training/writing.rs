//! Text generation with a KV cache, compared with rereading the whole text for each token.

use crate::support::{Random, families, tiny};
use std::sync::Arc;
use storm_device::cpu::{CpuDevice, CpuPlanDevice, CpuPlanOptions};
use storm_graph::DType;
use storm_model::{
    BuildOptions, DecodeOptions, HfDirectory, ModelConfig, RotaryScaling, SaveOptions,
    SlidingWindow, WeightDtype,
};
use storm_plan::{
    Budget, CheckedPlan, Decisions, Forced, HardwareProfile, Lowering, PlanError, Tier, check,
    plan, random_decisions,
};
use storm_train::{
    Batch, Decoder, Generator, Inference, Precision, ReferenceTrainer, Sampling, TrainOptions,
    decoding_task,
};
use tempfile::TempDir;

/// Longer than a block of keys, and than three pieces of a prompt.
const WINDOW: usize = 100;

/// A model in files, with every parameter changed from its initial value.
struct Model {
    directory: HfDirectory,
    _folder: TempDir,
}

impl Model {
    fn new(config: &ModelConfig) -> Model {
        let options = TrainOptions { seed: 5, ..TrainOptions::new(1, 8, Precision::F32) };
        let mut trainer = ReferenceTrainer::new(config, options).expect("a trainer");
        let mut random = Random(3);
        let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
        for name in names {
            let mut values = trainer.read(&name).expect("a parameter");
            for value in &mut values {
                *value += random.below(2001) as f32 / 1e4 - 0.1;
            }
            trainer.write(&name, &values).expect("a parameter");
        }
        let folder = TempDir::new().expect("a folder");
        let path = folder.path().join("model");
        let options = SaveOptions { dtype: WeightDtype::F32, ..SaveOptions::default() };
        trainer.save(&path, &options).expect("saved");
        Model { directory: HfDirectory::open(&path).expect("a model"), _folder: folder }
    }

    fn decoder(&self, window: usize, dtype: DType) -> Decoder {
        let options = DecodeOptions { window, dtype };
        Decoder::load(self.directory.model(), &options, &self.directory, CpuDevice::new)
            .expect("a decoder")
    }

    fn whole(&self, sequence: usize, dtype: DType) -> Inference {
        let options = BuildOptions::training(1, sequence, dtype);
        Inference::load(self.directory.model(), &options, &self.directory).expect("a model")
    }
}

fn long(mut config: ModelConfig) -> ModelConfig {
    config.max_positions = WINDOW;
    config
}

/// Sliding windows of all layers and of some, one within a block of keys and one across.
fn windowed() -> [ModelConfig; 2] {
    let [mut mistral, mut qwen] = ["mistral-7b", "qwen2.5-0.5b"].map(tiny);
    mistral.sliding_window = Some(SlidingWindow::from_layer(20, 0, mistral.layer_count));
    qwen.sliding_window = Some(SlidingWindow::from_layer(67, 1, qwen.layer_count));
    [mistral, qwen]
}

fn random_text(config: &ModelConfig, count: usize) -> Vec<u32> {
    let mut random = Random(17);
    (0..count).map(|_| random.below(config.vocab_size) as u32).collect()
}

/// The logits after `text`, computed over all of it at once.
fn logits_of_whole(model: &mut Inference, text: &[u32]) -> Vec<f32> {
    let mut tokens: Vec<i32> = text.iter().map(|&token| token as i32).collect();
    tokens.resize(model.sequence(), 0);
    let batch = Batch::new(tokens.clone(), tokens, model.sequence());
    let logits = model.logits(&batch).expect("logits");
    logits.chunks(model.vocabulary()).nth(text.len() - 1).expect("a row").to_vec()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

#[test]
fn kept_keys_and_values_do_not_change_a_bit() {
    for config in families().into_iter().chain(windowed()).map(long) {
        let model = Model::new(&config);
        for dtype in [DType::F32, DType::BF16] {
            let mut decoder = model.decoder(WINDOW, dtype);
            let mut whole = model.whole(WINDOW, dtype);
            let text = random_text(&config, WINDOW);
            // Grows by one, by a few, by pieces, and to the end of the window. Then it gets shorter
            // again.
            for length in [1, 2, 3, 8, 9, 42, 43, 64, 65, 66, 97, 98, 99, 100, 100, 70, 1, 100] {
                let expected = logits_of_whole(&mut whole, &text[..length]);
                let found = decoder.logits(&text[..length]).expect("logits");
                assert_eq!(bits(found), bits(&expected), "{:?} {dtype} {length}", config.family);
            }
            // Another text with a common prefix.
            let mut other = text;
            other[50] = (other[50] + 1) % config.vocab_size as u32;
            let expected = logits_of_whole(&mut whole, &other[..90]);
            let found = decoder.logits(&other[..90]).expect("logits");
            assert_eq!(bits(found), bits(&expected), "{:?} {dtype}", config.family);
        }
    }
}

/// The most likely tokens. Each is computed over its whole context.
fn greedy(model: &Model, window: usize, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut whole = model.whole(window, DType::F32);
    let (mut text, mut first) = (prompt.to_vec(), 0);
    for _ in 0..count {
        if text.len() - first > window {
            first = text.len() - (window / 2).max(1);
        }
        text.push(likeliest(&logits_of_whole(&mut whole, &text[first..])));
    }
    text.split_off(prompt.len())
}

fn write(decoder: &mut Decoder, prompt: &[u32], sampling: Sampling, count: usize) -> Vec<u32> {
    let mut generator = Generator::new(decoder, prompt.to_vec(), sampling).expect("a generator");
    (0..count).map(|_| generator.next_token().expect("a token")).collect()
}

#[test]
fn prompts_of_any_length_are_gone_on_with() {
    for config in families().into_iter().map(long) {
        let model = Model::new(&config);
        for (window, lengths) in [(40, &[1, 2, 39, 40, 41, 95][..]), (3, &[1, 3, 7]), (1, &[1, 2])]
        {
            let mut decoder = model.decoder(window, DType::F32);
            for &length in lengths {
                let prompt = random_text(&config, length);
                let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
                let found = write(&mut decoder, &prompt, sampling, 50);
                let expected = greedy(&model, window, &prompt, 50);
                assert_eq!(found, expected, "{:?} {window} {length}", config.family);
            }
        }
    }
}

#[test]
fn seeds_decide_what_is_written() {
    let config = long(tiny("qwen3-0.6b"));
    let model = Model::new(&config);
    let mut decoder = model.decoder(30, DType::F32);
    let mut sample = |seed, top_k| {
        let sampling = Sampling { seed, top_k, ..Sampling::default() };
        write(&mut decoder, &[7, 8], sampling, 40)
    };
    let one = sample(1, None);
    assert_ne!(one, sample(2, None));
    assert_eq!(one, sample(1, None));
    assert_eq!(sample(1, Some(1)), sample(2, Some(1)));
    assert_eq!(one, sample(1, Some(config.vocab_size + 1)));
}

#[test]
fn what_cannot_be_gone_on_with_is_refused() {
    let config = tiny("gpt2");
    let model = Model::new(&config);
    let mut decoder = model.decoder(20, DType::F32);
    let before = bits(decoder.logits(&[1, 2, 3]).expect("logits"));
    let error = decoder.logits(&[]).unwrap_err().to_string();
    assert_eq!(error, "prompt: there is no token to go on from");
    let error = decoder.logits(&[0; 21]).unwrap_err().to_string();
    assert_eq!(error, "prompt: has 21 tokens, and the model looks back on 20");
    for unknown in [53, u32::MAX] {
        let error = decoder.logits(&[0, unknown]).unwrap_err().to_string();
        assert_eq!(error, format!("prompt: has token {unknown}; the model knows 0 to 52"));
    }
    assert_eq!(bits(decoder.logits(&[1, 2, 3]).expect("logits")), before);
    assert!(Generator::new(&mut decoder, Vec::new(), Sampling::default()).is_err());
    let mut generator = Generator::new(&mut decoder, vec![99], Sampling::default()).expect("new");
    assert!(generator.next_token().is_err());
}

#[test]
fn windows_that_the_model_cannot_take_are_refused() {
    let refusal = |config: &ModelConfig, window| {
        let model = Model::new(config);
        let options = DecodeOptions { window, dtype: DType::F32 };
        let result = Decoder::load(config, &options, &model.directory, CpuDevice::new);
        result.err().expect("must be refused").to_string()
    };
    let gpt2 = tiny("gpt2");
    let problem = refusal(&gpt2, 41);
    assert!(problem.contains("at most 40, the positions that the model has"), "{problem}");
    assert!(refusal(&gpt2, 0).contains("from 1 to"));
    let mut scaled = tiny("llama-3.2-1b");
    if let Some(rotary) = &mut scaled.rotary {
        let factors = vec![1.0; rotary.pairs(scaled.head_dim)];
        rotary.scaling = RotaryScaling::LongRope {
            short_factors: factors.clone(),
            long_factors: factors,
            attention_factor: 1.1,
            original_max_positions: 16,
        };
    }
    assert!(refusal(&scaled, 17).contains("at most 16: beyond it, the model's rotary scaling"));
}

/// Plans of every budget down to the smallest generate the same text, to the bit.
#[test]
fn weights_that_are_streamed_do_not_change_a_bit() {
    let profile = HardwareProfile::builtin("reference").expect("a profile");
    for config in families().into_iter().map(long) {
        let model = Model::new(&config);
        for dtype in [DType::F32, DType::BF16] {
            let options = DecodeOptions { window: WINDOW, dtype };
            let task = decoding_task(&config, &options).expect("a task");
            let lowering = Lowering::new(&task, &profile).expect("plannable");
            let mut all = vec![Decisions::resident(&task), Decisions::streamed(&task)];
            all.extend((0..3).map(|seed| random_decisions(&task, seed)));
            let mut bytes = Vec::new();
            for decisions in all {
                let plan = lowering.lower(&decisions).expect("a plan");
                bytes.push(plan.bytes[Tier::DEVICE]);
                let within = plan.bytes;
                let plan = Arc::new(check(plan, within).expect("sound"));
                check_streamed(&model, &options, plan, &format!("{:?} {dtype}", config.family));
            }
            assert!(bytes[1] < bytes[0], "{bytes:?}");
        }
    }
}

/// The planner's own plan, with as little memory as it needs.
#[test]
fn a_model_that_is_larger_than_the_budget_writes_the_same_text() {
    let profile = HardwareProfile::builtin("reference").expect("a profile");
    let config = ModelConfig { layer_count: 6, ..long(tiny("qwen2.5-0.5b")) };
    let model = Model::new(&config);
    let options = DecodeOptions { window: WINDOW, dtype: DType::F32 };
    let task = decoding_task(&config, &options).expect("a task");
    let least = {
        let budget = Budget::new(1, 1 << 30);
        match plan(&task, &profile, budget, &Forced::default()) {
            Err(PlanError::TooSmall(too_small)) => too_small.min_bytes[Tier::DEVICE],
            other => panic!("{:?}", other.map(|planned| planned.prediction)),
        }
    };
    let budget = Budget::new(least, 1 << 30);
    let planned = plan(&task, &profile, budget, &Forced::default()).expect("a plan");
    check_streamed(&model, &options, Arc::new(planned.plan), "the smallest");
}

/// Compares text under a plan, with delays in the queues, with text from everything in memory.
fn check_streamed(model: &Model, options: &DecodeOptions, plan: Arc<CheckedPlan>, what: &str) {
    let config = model.directory.model();
    let device = CpuPlanOptions { chaos_seed: Some(3), ..CpuPlanOptions::default() };
    let mut streamed =
        Decoder::streamed::<CpuPlanDevice>(config, options, &model.directory, plan, device)
            .expect("a decoder");
    let mut whole = model.decoder(options.window, options.dtype);
    let text = random_text(config, WINDOW);
    // Pieces, single tokens, the end of the window, a shorter text, another text.
    let mut other = text.clone();
    other[40] = (other[40] + 1) % config.vocab_size as u32;
    for (text, length) in [
        (&text, 1),
        (&text, 2),
        (&text, 33),
        (&text, 70),
        (&text, 99),
        (&text, 100),
        (&text, 5),
        (&other, 90),
    ] {
        let expected = bits(whole.logits(&text[..length]).expect("logits"));
        let found = bits(streamed.logits(&text[..length]).expect("logits"));
        assert_eq!(found, expected, "{what} {length}");
    }
}
