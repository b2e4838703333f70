//! Lanes on several ranks: for any number of ranks, every bit is that of one rank with the same
//! lanes.

use crate::exactness::reference;
use crate::lora::adapted;
use crate::support::{batches, options, tiny};
use std::sync::Arc;
use std::thread;
use storm_device::Collectives;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_graph::TensorClass;
use storm_model::{LoraOptions, ModelConfig};
use storm_plan::{
    CheckedPlan, CollectiveKind, Instruction, Lanes, Lowering, Plan, RankPlace, RanksError, Work,
    check, random_decisions, verify_ranks,
};
use storm_ranks::{RankError, in_process};
use storm_train::{
    Heard, Moments, Precision, Ranks, ReferenceTrainer, TrainError, TrainOptions, Trainer,
    rank_task,
};

/// What to train, the micro-batches of a step, and the seed of the decisions, which all ranks
/// share.
pub(crate) type Case<'a> = (&'a ModelConfig, &'a TrainOptions, usize, u64);

/// The plan of each rank, checked alone and together.
pub(crate) fn plans_of_ranks(case: Case<'_>, ranks: u32) -> Vec<CheckedPlan> {
    plans_on_machines(case, (ranks, ranks))
}

/// The same for machines of `machine` ranks, which add up their own lanes.
pub(crate) fn plans_on_machines(
    (config, options, micro_batches, seed): Case<'_>,
    (ranks, machine): (u32, u32),
) -> Vec<CheckedPlan> {
    let profile = reference();
    let mut plans = Vec::new();
    for rank in 0..ranks {
        let place = RankPlace::on_machines(rank, ranks, machine);
        let task = rank_task(config, options, micro_batches, place).expect("a valid model");
        let lowering = Lowering::new(&task, &profile).expect("a task that can be lowered");
        let decisions = random_decisions(&task, seed);
        let plan = lowering.lower_with_evaluation(&decisions).expect("decisions that work");
        let budget = plan.bytes;
        let about = |error| panic!("rank {rank} of {ranks}, seed {seed}: {error}: {decisions:?}");
        plans.push(check(plan, budget).unwrap_or_else(about));
    }
    let all: Vec<&Plan> = plans.iter().map(|plan| &**plan).collect();
    verify_ranks(&all).unwrap_or_else(|error| panic!("{ranks} ranks, seed {seed}: {error}"));
    plans
}

/// A trainer of a rank. Its weights differ from those of other ranks.
fn of_rank(case: Case<'_>, plan: CheckedPlan, ranks: &Ranks) -> Trainer<CpuPlanDevice> {
    let (config, options, _, seed) = case;
    let rank = u64::from(plan.rank.rank);
    let chaos_seed = Some(seed + rank);
    let ranks: Option<Arc<dyn Collectives>> = Some(Arc::new(ranks.clone()));
    let device =
        CpuPlanOptions { threads: Some(1), chaos_seed, ranks, ..CpuPlanOptions::default() };
    let mut trainer =
        Trainer::new(config, options.clone(), plan.into(), device).expect("a trainer");
    if rank > 0 {
        let name = trainer.parameter_names().next().expect("a parameter").to_owned();
        let values = trainer.read(&name).expect("values");
        trainer.write(&name, &vec![0.5; values.len()]).expect("as many");
    }
    trainer
}

/// Runs `lead` on the first rank.
fn on_ranks<T>(
    ranks: u32,
    case: Case<'_>,
    lead: impl FnOnce(&mut Trainer<CpuPlanDevice>) -> T,
) -> T {
    on_machines((ranks, ranks), case, lead)
}

/// The same on machines of `machine` ranks.
fn on_machines<T>(
    (ranks, machine): (u32, u32),
    case: Case<'_>,
    lead: impl FnOnce(&mut Trainer<CpuPlanDevice>) -> T,
) -> T {
    let mut plans = plans_on_machines(case, (ranks, machine)).into_iter();
    let own = plans.next().expect("at least one");
    thread::scope(|scope| {
        let mut engines = in_process::connect(ranks).into_iter();
        let first = Ranks::new(Box::new(engines.next().expect("at least one")));
        let mut others = Vec::new();
        for (plan, engine) in plans.zip(engines) {
            others.push(scope.spawn(move || {
                let ranks = Ranks::new(Box::new(engine));
                assert_eq!(ranks.hear().expect("a message"), Heard::Message(b"begin".to_vec()));
                of_rank(case, plan, &ranks).follow(&ranks)
            }));
        }
        first.say(b"begin").expect("all are there");
        let mut trainer = of_rank(case, own, &first);
        trainer.lead(first.clone()).expect("a plan for the first rank");
        assert_eq!(trainer.micro_batches(), case.2);
        let made = lead(&mut trainer);
        first.end(9).expect("all are there");
        for other in others {
            let code = other.join().expect("no panic").expect("no error");
            assert_eq!(code, 9);
        }
        made
    })
}

/// Losses, norms and all parameters after some steps, with an evaluation and a manual change
/// between them.
fn run_on_ranks(machines: (u32, u32), case: Case<'_>) -> Vec<u32> {
    let (config, _, micro_batches, _) = case;
    on_machines(machines, case, |trainer| {
        let mut bits = Vec::new();
        for step in 0..4 {
            let given = batches(config, micro_batches, step);
            if step == 2 {
                trainer.evaluate(&given).expect("an evaluation");
                let name = trainer.parameter_names().next().expect("a parameter").to_owned();
                let values = trainer.read(&name).expect("values");
                let half: Vec<f32> = values.iter().map(|x| x / 2.0).collect();
                trainer.write(&name, &half).expect("the same number");
            }
            let report = trainer.step(&given, 0.01).expect("a step");
            bits.extend([report.loss.to_bits(), report.gradient_norm.to_bits()]);
        }
        let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
        for name in names {
            for name in with_state(&name) {
                let values = trainer.read(&name);
                bits.extend(values.into_iter().flatten().map(f32::to_bits));
            }
        }
        bits
    })
}

/// A parameter and its state.
fn with_state(name: &str) -> [String; 4] {
    ["", ".first_moment", ".second_moment", ".master"].map(|suffix| format!("{name}{suffix}"))
}

/// The same by the reference, with everything resident.
fn run_alone(config: &ModelConfig, options: &TrainOptions, micro_batches: usize) -> Vec<u32> {
    let mut trainer = ReferenceTrainer::new(config, options.clone()).expect("a valid model");
    let mut bits = Vec::new();
    for step in 0..4 {
        if step == 2 {
            let name = trainer.parameter_names().next().expect("a parameter").to_owned();
            let values = trainer.read(&name).expect("values");
            let half: Vec<f32> = values.iter().map(|x| x / 2.0).collect();
            trainer.write(&name, &half).expect("the same number");
        }
        let report = trainer.step(&batches(config, micro_batches, step), 0.01).expect("a step");
        bits.extend([report.loss.to_bits(), report.gradient_norm.to_bits()]);
    }
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    for name in names {
        for name in with_state(&name) {
            bits.extend(trainer.read(&name).into_iter().flatten().map(f32::to_bits));
        }
    }
    bits
}

/// Random plans with delays, or 200 with `STORM_LONG_TESTS=1`.
#[test]
fn any_number_of_ranks_gives_the_bits_of_one() {
    let seeds = if std::env::var_os("STORM_LONG_TESTS").is_some() { 17 } else { 1 };
    let dropping = LoraOptions { dropout: 0.3, ..LoraOptions::new(3, 6.0) };
    let (full, int8) = (Moments::Full, Moments::Int8);
    for (number, (config, precision, moments, micro_batches, lanes)) in [
        (tiny("gpt2"), Precision::F32, full, 8, 4),
        (tiny("llama-3.2-1b"), Precision::Bf16Stochastic, int8, 4, 4),
        (tiny("mistral-7b"), Precision::Bf16Master, full, 8, 4),
        (adapted("qwen3-0.6b", dropping), Precision::Bf16Stochastic, full, 4, 4),
        (large_vocabulary(), Precision::Bf16Master, full, 4, 4),
    ]
    .into_iter()
    .enumerate()
    {
        let mut options = TrainOptions { lanes: lanes.into(), ..options(precision) };
        options.optimizer.moments = moments;
        let expected = run_alone(&config, &options, micro_batches);
        for (ranks, seed) in [1, 2, 4].into_iter().flat_map(|r| (0..seeds).map(move |s| (r, s))) {
            let seed = 100 * seed + 10 * number as u64 + u64::from(ranks);
            let found = run_on_ranks((ranks, ranks), (&config, &options, micro_batches, seed));
            let family = &config.family;
            assert!(found == expected, "{family:?} {precision:?}, {ranks} ranks, seed {seed}");
        }
    }
}

/// Groups of lanes, on one level and on two: 4 ranks as two machines of two, 6 as three of two and
/// two of three. Random plans with delays.
#[test]
fn groups_of_lanes_have_the_bits_of_one_rank() {
    let seeds = if std::env::var_os("STORM_LONG_TESTS").is_some() { 17 } else { 1 };
    let (full, int8) = (Moments::Full, Moments::Int8);
    // For each case, the machines to run it on: how many ranks there are, and how many each machine
    // has.
    for (number, (config, precision, moments, lanes, machines)) in [
        (tiny("gpt2"), Precision::F32, full, "2x2", &[(1, 1), (2, 2), (4, 4), (4, 2)][..]),
        (
            tiny("llama-3.2-1b"),
            Precision::Bf16Stochastic,
            int8,
            "4x2",
            &[(1, 1), (2, 2), (4, 4), (4, 2), (8, 2)],
        ),
        (
            large_vocabulary(),
            Precision::Bf16Master,
            full,
            "2x3",
            &[(1, 1), (2, 2), (3, 3), (6, 6), (6, 3)],
        ),
        (tiny("mistral-7b"), Precision::Bf16Master, full, "3x2", &[(1, 1), (2, 2), (3, 3), (6, 2)]),
        (large_vocabulary(), Precision::Bf16Stochastic, full, "2x2", &[(4, 2)]),
    ]
    .into_iter()
    .enumerate()
    {
        let lanes: Lanes = lanes.parse().expect("lanes");
        let micro_batches = lanes.count() * (1 + number % 2);
        let mut options = TrainOptions { lanes, ..options(precision) };
        options.optimizer.moments = moments;
        let expected = run_alone(&config, &options, micro_batches);
        for (place, &machines) in machines.iter().enumerate() {
            for seed in 0..seeds {
                let seed = 1000 * seed + 10 * number as u64 + place as u64;
                let found = run_on_ranks(machines, (&config, &options, micro_batches, seed));
                let family = &config.family;
                assert!(
                    found == expected,
                    "{family:?} {precision:?}, {lanes} on {machines:?}, seed {seed}"
                );
            }
        }
    }
}

/// On two levels, ranks exchange lanes inside their machine, and sums with the ranks of the same
/// number in others.
#[test]
fn only_sums_leave_a_machine() {
    let config = large_vocabulary();
    let lanes = "2x2".parse().expect("lanes");
    let options = TrainOptions { lanes, ..options(Precision::Bf16Master) };
    let plans = plans_on_machines((&config, &options, 4, 3), (4, 2));
    let mut sums = 0;
    for plan in &plans {
        let rank = plan.rank.rank;
        for instruction in &plan.instructions {
            let Work::Collective(collective) = &instruction.work else { continue };
            for piece in &collective.pieces {
                let receiver = collective.kind.receiver(plan.rank, piece.owner);
                match collective.kind {
                    CollectiveKind::Exchange => {
                        assert_eq!(receiver.expect("every rank has a lane") / 2, rank / 2);
                        assert!(piece.received.iter().all(|(from, _)| from / 2 == rank / 2));
                    }
                    CollectiveKind::ExchangeSums => {
                        assert_eq!((receiver, piece.owner % 2), (Some(piece.owner), rank % 2));
                        assert!(piece.received.iter().all(|(from, _)| *from == (rank + 2) % 4));
                        sums += 1;
                    }
                    CollectiveKind::Gather => {}
                }
            }
        }
    }
    assert!(sums > 0, "no sums are exchanged");
}

/// All ranks alike send the gradients of one block twice and those of another never, or sums.
#[test]
fn what_ranks_exchange_twice_is_refused() {
    let config = large_vocabulary();
    let lanes = "2x2".parse().expect("lanes");
    let options = TrainOptions { lanes, ..options(Precision::Bf16Master) };
    for (machine, kind) in [
        (4, CollectiveKind::Exchange),
        (2, CollectiveKind::Exchange),
        (2, CollectiveKind::ExchangeSums),
    ] {
        let plans = plans_on_machines((&config, &options, 4, 3), (4, machine));
        let mut plans: Vec<Plan> = plans.into_iter().map(|plan| plan.into_plan()).collect();
        for plan in &mut plans {
            let is_one =
                |i: &&mut Instruction| matches!(&i.work, Work::Collective(c) if c.kind == kind);
            let mut exchanges = plan.instructions.iter_mut().filter(is_one);
            let first = exchanges.next().expect("an exchange").work.clone();
            exchanges.next().expect("another exchange").work = first;
        }
        let error = verify_ranks(&plans.iter().collect::<Vec<_>>()).expect_err("sent twice");
        assert!(matches!(error, RanksError::NotNew { .. }), "{error}");
    }
}

/// A model with a parameter in several pieces, so that ranks own parts of it.
pub(crate) fn large_vocabulary() -> ModelConfig {
    let mut config = tiny("llama-3.2-1b");
    (config.hidden_size, config.head_dim, config.intermediate_size) = (64, 16, 160);
    config.vocab_size = 2500;
    config
}

/// Ranks own disjoint parts of optimizer state, and together all of it.
#[test]
fn every_rank_has_its_share_of_the_state() {
    let config = large_vocabulary();
    let options = TrainOptions { lanes: 4.into(), ..options(Precision::Bf16Master) };
    let state = |plan: &Plan| -> usize {
        let own = plan.lasting.iter().map(|lasting| &lasting.tensor);
        let own = own.filter(|tensor| tensor.class == TensorClass::OptimizerState);
        own.map(|tensor| tensor.size_bytes()).sum()
    };
    let whole: usize = plans_of_ranks((&config, &options, 4, 3), 1).iter().map(|p| state(p)).sum();
    for ranks in [2, 4] {
        let plans = plans_of_ranks((&config, &options, 4, 3), ranks);
        let sizes: Vec<usize> = plans.iter().map(|plan| state(plan)).collect();
        assert_eq!(sizes.iter().sum::<usize>(), whole, "{sizes:?}");
        let most = *sizes.iter().max().expect("some");
        assert!(most * ranks as usize <= whole * 4 / 3, "{sizes:?} of {whole}");
        assert!(plans.iter().all(|plan| plan.bytes == plans[0].bytes), "one budget is for all");
    }
}

/// One rank has no collectives.
#[test]
fn one_rank_has_the_plan_of_before() {
    let config = tiny("mistral-7b");
    let options = TrainOptions { lanes: 2.into(), ..options(Precision::F32) };
    let plans = plans_of_ranks((&config, &options, 4, 3), 1);
    let is_collective = |i: &Instruction| matches!(i.work, Work::Collective(_));
    assert!(plans[0].links.rank_queue().is_none());
    assert!(!plans[0].instructions.iter().any(is_collective) && plans[0].sharded.is_empty());
}

/// A non-finite gradient changes nothing on any rank.
#[test]
fn ranks_agree_on_a_step_that_is_not_finite() {
    let config = tiny("mistral-7b");
    let options = TrainOptions { lanes: 2.into(), ..options(Precision::F32) };
    let after = |poison: bool| {
        on_ranks(2, (&config, &options, 2, 4), |trainer| {
            let name = trainer.parameter_names().last().expect("a parameter").to_owned();
            if poison {
                let values = trainer.read(&name).expect("values");
                trainer.write(&name, &vec![f32::MAX; values.len()]).expect("values");
                let report = trainer.step(&batches(&config, 2, 5), 0.01).expect("a step");
                assert!(!report.gradient_norm.is_finite(), "{report:?}");
                trainer.write(&name, &values).expect("values");
            }
            let report = trainer.step(&batches(&config, 2, 0), 0.01).expect("a step");
            (report.loss.to_bits(), report.gradient_norm.to_bits(), trainer.updates())
        })
    };
    assert_eq!(after(true), after(false));
}

#[test]
fn what_ranks_cannot_share_is_refused() {
    let config = tiny("mistral-7b");
    let options = TrainOptions { lanes: 3.into(), ..options(Precision::F32) };
    let place = RankPlace::flat(0, 2);
    let error = rank_task(&config, &options, 3, place).expect_err("3 lanes on 2 ranks");
    assert!(matches!(error, TrainError::Option { option: "lanes", .. }), "{error}");
    let case = (&config, &options, 3, 1);
    let of = |ranks| Ranks::new(Box::new(in_process::connect(ranks).swap_remove(0)));
    let mut trainer = of_rank(case, plans_of_ranks(case, 1).remove(0), &of(1));
    let error = trainer.lead(of(2)).expect_err("3 lanes on 2 ranks");
    assert!(matches!(error, TrainError::Option { option: "lanes", .. }), "{error}");
    let error = trainer.lead(of(3)).expect_err("a plan for one rank");
    assert!(matches!(error, TrainError::Option { option: "plan", .. }), "{error}");
    let plan = plans_of_ranks(case, 3).remove(0);
    let device = CpuPlanOptions::default();
    let alone = Trainer::<CpuPlanDevice>::new(&config, options.clone(), plan.into(), device);
    let error = alone.err().expect("a device without other ranks");
    assert!(error.to_string().contains("not connected to the others"), "{error}");
}

/// Every rank hears what all say. If one says why it failed, all fail with that.
#[test]
fn all_ranks_hear_what_each_says() {
    let heard = |failing: Option<u32>| -> Vec<Result<Vec<String>, RankError>> {
        thread::scope(|scope| {
            let threads: Vec<_> = in_process::connect(3)
                .into_iter()
                .map(|engine| {
                    scope.spawn(move || {
                        let ranks = Ranks::new(Box::new(engine));
                        let rank = ranks.place().rank;
                        let own = match failing == Some(rank) {
                            true => Err(format!("no card on rank {rank}")),
                            false => Ok("x".repeat(10 * rank as usize)),
                        };
                        ranks.hear_all(&own)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        })
    };
    let all: Vec<String> = [0, 10, 20].map(|length| "x".repeat(length)).into();
    assert_eq!(heard(None), vec![Ok(all); 3]);
    let reason = "no card on rank 1".to_owned();
    assert_eq!(heard(Some(1)), vec![Err(RankError::Aborted { rank: 1, reason }); 3]);
}
