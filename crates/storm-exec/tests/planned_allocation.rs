//! After a plan is committed, no thread allocates in a step. A separate binary, because it counts
//! the allocations of the whole process.

use storm_device::bytes_of;
use storm_device::cpu::{CpuPlanDevice, CpuPlanOptions};
use storm_exec::{ExecError, Feed, Planned};
use storm_graph::Tensor;
use storm_host::allocation::{AllocationMeter, count_of_all_threads};
use storm_testing::{numbers, tiny_plan};

#[global_allocator]
static METER: AllocationMeter = AllocationMeter;

/// The same data again and again.
struct Same {
    data: Vec<f32>,
    results: usize,
}

impl Feed for Same {
    type Error = ExecError;

    fn input(&mut self, _: usize, _: &Tensor, _: Option<usize>) -> Result<&[u8], ExecError> {
        Ok(bytes_of(&self.data))
    }

    fn result(&mut self, _: usize, _: &Tensor, _: Option<usize>, _: &[u8]) {
        self.results += 1;
    }
}

#[test]
fn a_step_allocates_nothing() {
    let options = CpuPlanOptions {
        threads: Some(3),
        commands_max: 7,
        trace: true,
        chaos_seed: Some(1),
        ..CpuPlanOptions::default()
    };
    let mut planned: Planned<CpuPlanDevice> = Planned::commit(tiny_plan(3), options).unwrap();
    let mut feed = Same { data: numbers(1), results: 0 };
    let rounds = [(); 3].map(|()| {
        let before = count_of_all_threads();
        for _ in 0..10 {
            planned.step(&mut feed).unwrap();
            planned.flush(&mut feed).unwrap();
        }
        planned.synchronize().unwrap();
        count_of_all_threads() - before
    });
    // The test harness's thread may allocate in between, but not in every round.
    assert_eq!(rounds.into_iter().min(), Some(0), "{rounds:?}");
    assert_eq!(feed.results, 30 * (planned.micro_batches() + 1));
}
