//! Changes of pictures: against their definition, what they depend on, and how often each happens.

use crate::reference::{Value, evaluate_graph};
use crate::support::*;
use std::collections::BTreeMap;
use storm_graph::random::{PHASE_WORDS, PhaseWords};
use storm_graph::{AugmentSettings, Border, DType, Flip, Graph, Op, Shape, TensorId};

fn settings(flip: Flip, padding: usize, border: Border, cutout: usize) -> AugmentSettings {
    let (mean, deviation) = ([0.5, 0.4, 0.3].into(), [0.25, 0.2, 0.3].into());
    AugmentSettings { mean, deviation, flip, padding, border, cutout }
}

struct Pictures {
    graph: Graph,
    values: BTreeMap<TensorId, Value>,
    out: TensorId,
}

/// Pictures of random pixels.
fn pictures(
    settings: AugmentSettings,
    axes: [usize; 4],
    dtype: DType,
    phase_words: PhaseWords,
    sample: impl Fn(usize) -> [i32; 3],
) -> Pictures {
    let mut graph = Graph::new();
    let images = graph.input("images", axes, DType::U8);
    let samples = graph.input("samples", [axes[0], 3], DType::I32);
    let phase = graph.input("phase", [PHASE_WORDS], DType::I32);
    let out = Op::Augment { images, samples, phase, settings, dtype };
    let out = graph.apply_one("out", out).expect("fits");
    let mut rng = Rng::new(3);
    let pixels = (0..axes.iter().product()).map(|_| rng.below(256) as f64).collect();
    let words = (0..axes[0]).flat_map(|i| sample(i).map(f64::from)).collect();
    let phase_words = phase_words.to_words().map(f64::from).to_vec();
    let values = [
        (images, Value::new(Shape::from(axes), pixels)),
        (samples, Value::new(Shape::from([axes[0], 3]), words)),
        (phase, Value::new(Shape::from([PHASE_WORDS]), phase_words)),
    ];
    Pictures { graph, values: values.into(), out }
}

impl Pictures {
    fn run(&self) -> Value {
        let mut machine = Machine::new(&self.graph, &self.values);
        machine.run();
        machine.get(self.out)
    }
}

const TRAINING: PhaseWords = PhaseWords { training: true, seed: 0x1234_5678_9abc };

fn sample(id: usize, epoch: i32) -> [i32; 3] {
    [id as i32, (id >> 32) as i32, epoch]
}

#[test]
fn augment() {
    for (flip, padding, border, cutout) in [
        (Flip::Never, 0, Border::Black, 0),
        (Flip::Horizontal, 4, Border::Reflect, 8),
        (Flip::Horizontal, 2, Border::Black, 0),
        (Flip::Never, 4, Border::Black, 5),
        (Flip::Never, 1, Border::Reflect, 1),
    ] {
        for (height, width) in [(32, 32), (7, 13), (5, 6)] {
            for dtype in [DType::F32, DType::BF16] {
                for training in [true, false] {
                    let phase = PhaseWords { training, ..TRAINING };
                    let settings = settings(flip, padding, border, cutout);
                    let axes = [9, height, width, 3];
                    let made = pictures(settings, axes, dtype, phase, |i| sample(i << 31, 2));
                    let want = &evaluate_graph(&made.graph, &made.values)[&made.out];
                    let tolerance =
                        if dtype == DType::F32 { F32_TOLERANCE } else { BF16_TOLERANCE };
                    let context =
                        format!("{flip:?} {padding} {border:?} {cutout}, {height} × {width}");
                    assert_close(&context, &made.run(), want, tolerance, 1.0);
                }
            }
        }
    }
}

/// A picture is changed in the same way wherever it is in whichever batch; another seed, epoch or id changes it in another.
#[test]
fn changes_depend_on_seed_epoch_and_sample_alone() {
    let settings = settings(Flip::Horizontal, 4, Border::Reflect, 6);
    let axes = [64, 16, 16, 3];
    let run = |phase, sample: &dyn Fn(usize) -> [i32; 3]| {
        pictures(settings.clone(), axes, DType::F32, phase, sample).run().data
    };
    let base = run(TRAINING, &|i| sample(i, 1));
    assert_eq!(base, run(TRAINING, &|i| sample(i, 1)));
    // The first 32 pictures alone, in a batch of another size.
    let half = pictures(settings.clone(), [32, 16, 16, 3], DType::F32, TRAINING, |i| sample(i, 1));
    let size = 16 * 16 * 3;
    assert_eq!(base[..32 * size], half.run().data);
    let changed = |other: Vec<f64>| {
        let pairs = base.chunks(size).zip(other.chunks(size));
        pairs.filter(|(a, b)| a != b).count()
    };
    let other_seed = PhaseWords { seed: TRAINING.seed + (1 << 40), ..TRAINING };
    assert!(changed(run(other_seed, &|i| sample(i, 1))) > 55);
    assert!(changed(run(TRAINING, &|i| sample(i, 2))) > 55);
    assert!(changed(run(TRAINING, &|i| sample(i + (1 << 33), 1))) > 55);
}

/// Every offset, every place of the hole and both directions come up about as often as the others.
#[test]
fn changes_are_even() {
    let settings = settings(Flip::Horizontal, 2, Border::Black, 1);
    let count = 20_000;
    let (mut flips, mut tops, mut holes) = (0, [0; 5], [0; 8]);
    for id in 0..count {
        let change = settings.change(TRAINING, sample(id, 7), [8, 8]).expect("a training step");
        flips += usize::from(change.flips);
        tops[change.top] += 1;
        holes[change.hole[1]] += 1;
    }
    // Five standard errors.
    let near = |found: usize, share: f64| {
        let (mean, count) = (count as f64 * share, count as f64);
        (found as f64 - mean).abs() < 5.0 * (count * share * (1.0 - share)).sqrt()
    };
    assert!(near(flips, 0.5), "{flips}");
    assert!(tops.iter().all(|&found| near(found, 0.2)), "{tops:?}");
    assert!(holes.iter().all(|&found| near(found, 0.125)), "{holes:?}");
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |settings: AugmentSettings, axes: [usize; 4]| {
        let mut graph = Graph::new();
        let images = graph.input("images", axes, DType::U8);
        let samples = graph.input("samples", [axes[0], 3], DType::I32);
        let phase = graph.input("phase", [PHASE_WORDS], DType::I32);
        let op = Op::Augment { images, samples, phase, settings, dtype: DType::F32 };
        graph.apply("out", op).unwrap_err().to_string()
    };
    let usual = settings(Flip::Never, 4, Border::Reflect, 0);
    let error = refused(usual.clone(), [2, 4, 8, 3]);
    assert!(error.contains("a border of 4 pixels cannot be a reflection"), "{error}");
    let error = refused(usual.clone(), [2, 8, 8, 1]);
    assert!(error.contains("1 channels, but there are 3 means"), "{error}");
    let error = refused(usual.clone(), [2, 8, 8, 5]);
    assert!(error.contains("1 to 4 channels, not 5"), "{error}");
    let flat = AugmentSettings { deviation: [0.1, 0.0, 0.1].into(), ..usual };
    assert!(refused(flat, [2, 8, 8, 3]).contains("deviations positive"));
}
