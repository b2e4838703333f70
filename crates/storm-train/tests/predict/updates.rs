//! What the learned controller sees of updates: compared with f64, under any plan, without changing
//! another bit.

use crate::support::{Case, F32, HeldOut, Made, RSSM, predict, trainer, whole};
use storm_graph::{OBSERVED_BLOCK, OBSERVED_RUN, is_observed};
use storm_plan::UpdateTime;
use storm_train::{
    AnyBatch, BatchSource, Direction, ParameterGroup, PhaseLengths, Precision, PredictOptions,
    StepReport, UpdateSeen,
};

const STEPS: u64 = 16;

fn learned() -> PredictOptions {
    PredictOptions {
        lengths: PhaseLengths { warm_up: 2, full: 2, correct: 1 },
        controller: RSSM,
        ..predict(Direction::Difference { window: 2 })
    }
}

fn group_of(name: &str) -> ParameterGroup {
    match name {
        name if name.contains("norm") => ParameterGroup::Vectors,
        name if name.contains("attention") => ParameterGroup::Attention,
        name if name.contains("mlp") => ParameterGroup::Mlp,
        _ => ParameterGroup::Tables,
    }
}

/// Cosines and ratios of updates, from the weights of a run without decay that observes nothing.
fn expected(case: &Case, steps: usize) -> Vec<[Option<UpdateSeen>; 5]> {
    let mut trainer = trainer(case);
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    let mut source = Made { next: 0, shift: 0 };
    let read = |trainer: &mut storm_train::Trainer<_>| -> Vec<Vec<f64>> {
        let values = |name: &String| trainer.read(name).expect("a parameter");
        names.iter().map(values).map(|v| v.into_iter().map(f64::from).collect()).collect()
    };
    let mut all = Vec::new();
    let (mut weights, mut before): (Vec<Vec<f64>>, Option<Vec<Vec<f64>>>) =
        (read(&mut trainer), None);
    for _ in 0..steps {
        let mut batches = vec![AnyBatch::default(); 2];
        for batch in &mut batches {
            source.next_batch(batch).expect("a batch");
        }
        let StepReport { .. } = trainer.step(&batches, case.learning_rate as f32).expect("a step");
        let now = read(&mut trainer);
        let difference: Vec<Vec<f64>> = now
            .iter()
            .zip(&weights)
            .map(|(now, old)| now.iter().zip(old).map(|(a, b)| a - b).collect())
            .collect();
        all.push(ParameterGroup::ALL.map(|group| {
            let members: Vec<usize> =
                (0..names.len()).filter(|&at| group_of(&names[at]) == group).collect();
            let dot = |a: &[Vec<f64>], b: &[Vec<f64>]| -> f64 {
                let of = |&at: &usize| {
                    let pairs = a[at].iter().zip(&b[at]).enumerate();
                    let seen = pairs.filter(|(i, _)| {
                        is_observed(i / OBSERVED_BLOCK, i % OBSERVED_BLOCK / OBSERVED_RUN)
                    });
                    seen.map(|(_, (a, b))| a * b).sum::<f64>()
                };
                members.iter().map(of).sum()
            };
            let (size, whole) = (dot(&difference, &difference), dot(&weights, &weights));
            let cosine = before.as_ref().map_or(0.0, |before| {
                dot(&difference, before) / (size * dot(before, before)).sqrt()
            });
            (!members.is_empty())
                .then(|| UpdateSeen { cosine: cosine as f32, ratio: (size / whole).sqrt() as f32 })
        }));
        (weights, before) = (now, Some(difference));
    }
    all
}

#[test]
fn they_are_what_weights_did() {
    // Without decay, and long before the first prediction.
    let case = Case { observes: true, decays: false, ..F32 };
    let options = PredictOptions {
        lengths: PhaseLengths { warm_up: STEPS - 3, full: 2, correct: 1 },
        ..learned()
    };
    let (_, heard) = whole(&case, STEPS, Some((options, HeldOut::Alike)));
    let expected = expected(&Case { observes: false, ..case }, 12);
    let zero = Some(UpdateSeen { cosine: 0.0, ratio: 0.0 });
    assert_eq!(heard.updates[0].1.0, [zero, zero, zero, zero, None], "no update yet");
    for step in 2..=12 {
        // Reported one step late.
        let (seen, want) = (heard.updates[step - 1], expected[step - 2]);
        assert_eq!(seen.0, step as u64);
        for (group, (seen, want)) in ParameterGroup::ALL.iter().zip(seen.1.0.iter().zip(&want)) {
            let context = format!("step {step}, {}: {seen:?}, not {want:?}", group.name());
            match (seen, want) {
                (Some(seen), Some(want)) => {
                    // Weights are rounded, and the epsilon of the previous update has another
                    // correction.
                    assert!((seen.cosine - want.cosine).abs() < 1e-3, "{context}");
                    assert!((seen.ratio / want.ratio - 1.0).abs() < 1e-3, "{context}");
                }
                (seen, want) => assert!(seen.is_none() && want.is_none(), "{context}"),
            }
        }
        assert_eq!(want.iter().flatten().count(), 4, "tables, attention, MLP and vectors");
    }
}

#[test]
fn no_plan_changes_what_is_seen() {
    let whole_of = |case: Case| whole(&case, 24, Some((learned(), HeldOut::Opposed)));
    for (precision, int8) in
        [(Precision::F32, false), (Precision::Bf16Master, false), (Precision::Bf16Stochastic, true)]
    {
        let case = Case { observes: true, precision, int8, ..F32 };
        let (want, first) = whole_of(case);
        assert!(first.kept() < first.judgements.len(), "something is undone");
        assert!(first.updates[5].1.0.iter().flatten().all(|seen| seen.ratio > 0.0));
        for other in [
            Case { update: UpdateTime::NextStep, ..case },
            Case { device_bytes: 30 << 10, ..case },
            Case { update: UpdateTime::NextStep, device_bytes: 30 << 10, ..case },
        ] {
            let (got, heard) = whole_of(other);
            assert!(heard.updates == first.updates, "{other:?}");
            assert!(got == want && heard.jumps == first.jumps, "{other:?}");
        }
    }
}

#[test]
fn looking_at_updates_changes_no_other_bit() {
    for (precision, int8) in [(Precision::F32, false), (Precision::Bf16Stochastic, true)] {
        let case = Case { precision, int8, ..F32 };
        let (plain, _) = whole(&case, STEPS, None);
        let (mut seen, _) = whole(&Case { observes: true, ..case }, STEPS, None);
        let count = seen.state.len();
        seen.state.retain(|(name, _)| !name.ends_with(".observed"));
        assert!(seen.state.len() < count && seen == plain, "{case:?}");
    }
}
