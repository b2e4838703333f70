//! What a rank does: the same program, started by a launcher.

use super::reference::{Case, expected, run};
use std::io::Write;
use std::time::Duration;
use storm_ranks::rendezvous::Rendezvous;
use storm_ranks::{
    Address, Engine, Launch, Launcher, Mpi, Pace, Place, Sockets, Watch, end_on_loss,
    process_variables,
};

/// Random collectives of each run.
const COLLECTIVES: u32 = 40;

/// Does nothing unless a launcher started this program with a task.
#[test]
fn worker() {
    let Ok(task) = std::env::var("STORM_RANKS_TASK") else { return };
    let mut words = task.split(' ');
    let name = words.next().unwrap_or_default();
    let numbers: Vec<u64> = words.map(|word| word.parse().expect("a number")).collect();
    let launch = Launch::of_this_process().expect("a launcher");
    match launch.launcher {
        Launcher::Torchrun => return under_torchrun(&launch, name),
        Launcher::Slurm => return watch_and_kill(&launch, numbers[0] as u32),
        _ => {}
    }
    let mpi = match Mpi::start(&launch, &process_variables()) {
        Ok(mpi) => mpi,
        Err(error) => {
            say(&format!("refused: {error}"));
            std::process::exit(3)
        }
    };
    match name {
        "collectives" => collectives(mpi, numbers[0]),
        "kill" => kill(mpi, &launch, numbers[0] as u32, numbers[1] as u32),
        "leave" => leave(mpi),
        "order" => other_order(mpi),
        "length" => other_length(mpi),
        "large" => large(mpi),
        _ => panic!("no task {name}"),
    }
}

/// One line, whole: other ranks print at the same time.
fn say(text: &str) {
    let _ = std::io::stdout().write_all(format!("\n{text}\n").as_bytes());
}

/// Random collectives, and a message by MPI's broadcast, compared with threads of this process.
fn collectives(mut mpi: Mpi, seed: u64) {
    let ranks = mpi.place().ranks;
    let rank = mpi.place().rank as usize;
    let version = mpi.version().to_owned();
    // From messages in one piece to many pieces, some as long as a piece exactly.
    for (round, chunk_bytes) in [1 << 30, 1000, 64].into_iter().enumerate() {
        mpi = mpi.with_chunks_of(chunk_bytes);
        let case = Case { seed: seed + round as u64, ranks, count: COLLECTIVES, bytes_max: 2000 };
        let received = run(&mut mpi, case).expect("no failure");
        assert!(received == expected(case)[rank], "rank {rank} received something else");
    }
    // Large enough that MPI does not copy it aside.
    let case = Case { seed: seed + 10, ranks, count: 4, bytes_max: 1 << 20 };
    mpi = mpi.with_chunks_of(300_000);
    let received = run(&mut mpi, case).expect("no failure");
    assert!(received == expected(case)[rank], "rank {rank} received something else");
    mpi.finish().expect("finished");
    say(&format!("rank {rank} of {ranks} agrees, {version}"));
}

/// Watches the other ranks, whatever connects them.
fn watch(rendezvous: &mut Rendezvous, launch: &Launch) -> Watch {
    let place = Place { rank: launch.rank, ranks: launch.ranks };
    let (mut own, mut address) = (None, Vec::new());
    if place.rank == 0 {
        let (watch, listening) =
            Watch::listen(place, Pace::default(), end_on_loss(place)).expect("a port");
        own = Some(watch);
        address = listening.to_bytes();
    }
    let address = rendezvous.share(launch, "watch", &address).expect("shared");
    let address = Address::from_bytes(&address).expect("an address");
    own.unwrap_or_else(|| {
        Watch::join(place, &address, Pace::default(), end_on_loss(place)).expect("connected")
    })
}

fn kill_self() {
    let own = rustix::process::getpid();
    rustix::process::kill_process(own, rustix::process::Signal::KILL).expect("killed");
}

/// Collectives without end, until a rank kills itself.
fn kill(mut mpi: Mpi, launch: &Launch, victim: u32, step: u32) {
    let rank = launch.rank;
    let _watch = watch(&mut Rendezvous::Engine(&mut mpi), launch);
    for count in 0.. {
        mpi.agree(&mut [count]).expect("no failure");
        if (rank, count as u32) == (victim, step) {
            kill_self();
        }
    }
}

/// Ranks that only watch each other. One kills itself, and nothing else ends the others.
fn watch_and_kill(launch: &Launch, victim: u32) {
    let time = Duration::from_secs(300);
    let mut rendezvous =
        Rendezvous::of_launcher(launch, &process_variables(), time).expect("a rendezvous");
    let _watch = watch(&mut rendezvous, launch);
    // Everyone is connected when this returns.
    rendezvous.share(launch, "ready", &[]).expect("shared");
    if launch.rank == victim {
        kill_self();
    }
    loop {
        std::thread::park();
    }
}

/// One rank leaves without a word.
fn leave(mut mpi: Mpi) {
    mpi.barrier().expect("no failure");
    if mpi.place().rank == 1 {
        return;
    }
    let _ = mpi.barrier();
    say("a rank went on");
}

/// The first rank is at another collective than the others.
fn other_order(mut mpi: Mpi) {
    let ranks = mpi.place().ranks as usize;
    let ranges: Vec<_> = (0..ranks).map(|rank| 2 * rank..2 * rank + 2).collect();
    let (bytes, mut all) = (vec![1; 2 * ranks], vec![0; 2 * ranks]);
    let _ = match mpi.place().rank {
        0 => mpi.exchange(&bytes, &ranges, &mut all, &ranges),
        _ => mpi.gather(&[1; 2], &mut all, &ranges),
    };
    // All messages have the expected lengths, so only some ranks can notice before the others go on.
    let _ = mpi.barrier();
    say("a rank went on");
}

/// The first rank sends fewer bytes than the others expect.
fn other_length(mut mpi: Mpi) {
    let _ = mpi.broadcast(0, &mut vec![0; if mpi.place().rank == 0 { 10 } else { 20 }]);
    let _ = mpi.barrier();
    say("a rank went on");
}

/// More bytes than 31 bits count, from each rank to the next.
fn large(mut mpi: Mpi) {
    let (rank, ranks) = (mpi.place().rank as usize, mpi.place().ranks as usize);
    let length = (1usize << 31) + 12_345;
    let at =
        |rank: usize, index: usize| (index.wrapping_mul(2_654_435_761) >> 24) as u8 ^ rank as u8;
    let send: Vec<u8> = (0..length).map(|index| at(rank, index)).collect();
    let mut receive = vec![0; length];
    let only = |other: usize| {
        (0..ranks).map(|rank| if rank == other { 0..length } else { 0..0 }).collect::<Vec<_>>()
    };
    let (to, from) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    mpi.exchange(&send, &only(to), &mut receive, &only(from)).expect("no failure");
    assert!((0..length).all(|index| receive[index] == at(from, index)), "other bytes");
    mpi.finish().expect("finished");
    say(&format!("rank {rank} received {length} bytes"));
}

fn under_torchrun(launch: &Launch, task: &str) {
    match task {
        "sockets" => collectives_by_sockets(launch),
        "abort" => abort_by_sockets(launch),
        _ => share_by_launcher(launch),
    }
}

fn sockets(launch: &Launch) -> Sockets {
    let time = Duration::from_secs(300);
    let mut rendezvous =
        Rendezvous::of_launcher(launch, &process_variables(), time).expect("a rendezvous");
    Sockets::connect(launch, &mut rendezvous, time).expect("connected")
}

/// Random collectives over sockets, compared with threads of this process.
fn collectives_by_sockets(launch: &Launch) {
    let mut sockets = sockets(launch);
    let (rank, ranks) = (launch.rank as usize, launch.ranks);
    let case = Case { seed: 3, ranks, count: COLLECTIVES, bytes_max: 200_000 };
    let received = run(&mut sockets, case).expect("no failure");
    assert!(received == expected(case)[rank], "rank {rank} received something else");
    sockets.finish().expect("finished");
    say(&format!("rank {rank} of {ranks} agrees"));
}

/// A rank ends all of them.
fn abort_by_sockets(launch: &Launch) {
    let mut sockets = sockets(launch);
    if launch.rank == 1 {
        sockets.abort("it has had enough");
    }
    sockets.barrier().expect_err("a rank has ended the run");
    sockets.barrier().expect_err("it stays ended");
    if sockets.barrier().is_ok() {
        say("a rank continued");
    }
}

/// A message by the launcher's own rendezvous.
fn share_by_launcher(launch: &Launch) {
    let variables = process_variables();
    let time = Duration::from_secs(300);
    let mut rendezvous = Rendezvous::of_launcher(launch, &variables, time).expect("a rendezvous");
    let restarts = &variables["TORCHELASTIC_RESTART_COUNT"];
    for name in ["id", "address"] {
        let own: Vec<u8> =
            format!("{name} {restarts} of rank {} ", launch.rank).repeat(1000).into();
        let shared = rendezvous.share(launch, name, &own).expect("shared");
        assert_eq!(shared, format!("{name} {restarts} of rank 0 ").repeat(1000).as_bytes());
    }
    say(&format!("start {restarts} rank {} of {} met", launch.rank, launch.ranks));
    if restarts == "0" && launch.rank == 1 {
        // Once more, with the same store.
        std::process::exit(1);
    }
}
