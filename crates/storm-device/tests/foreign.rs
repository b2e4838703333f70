//! Copies of another framework's memory, on the CPU, with random delays.

use std::sync::Arc;
use storm_device::DeviceError;
use storm_device::foreign::{ComputeStream, Copies, CopyOptions, HostMemory, SlabPool};
use storm_graph::random::{Purpose, Seed, Stream, words};

const HERE: ComputeStream = ComputeStream::CALLING_THREAD;

fn copies(seed: u64) -> Arc<Copies> {
    Copies::cpu(CopyOptions { chaos_seed: Some(seed) }).expect("threads")
}

fn random(seed: u64, index: u64) -> u32 {
    let stream = Stream { tensor: 0, layer: 0 };
    words(Seed { seed, step: 0 }, Purpose::Rounding, stream, index)[0]
}

fn bytes(seed: u64, count: usize) -> Vec<u8> {
    (0..count).map(|index| random(seed, index as u64) as u8).collect()
}

#[test]
fn bytes_go_out_and_come_back() -> Result<(), DeviceError> {
    let copies = copies(1);
    let mut pool = SlabPool::new(&copies, 1 << 30);
    let all = bytes(7, 10_000);
    let mut slot = pool.take(6000)?;
    let leaving = copies.store(HostMemory::new(&all), 1000, &mut slot, HERE)?;
    assert_eq!(leaving.memory().contents(), all);
    let (memory, _) = leaving.release(HERE)?;
    drop(memory);
    let coming = copies.fetch(&mut slot, HostMemory::new(&[0; 7000]), HERE)?;
    let (memory, _) = coming.arrive(HERE)?;
    assert_eq!(memory.contents()[..6000], all[1000..7000]);
    Ok(())
}

/// The last copy counts, however late the ones before it were.
#[test]
fn a_later_copy_takes_the_place_of_an_earlier_one() -> Result<(), DeviceError> {
    let copies = copies(8);
    let mut pool = SlabPool::new(&copies, 1 << 30);
    for round in 0..50 {
        let (older, newer) = (bytes(round, 6000), bytes(round + 100, 6000));
        let mut slot = pool.take(5000)?;
        let first = copies.store(HostMemory::new(&older), 1000, &mut slot, HERE)?;
        let second = copies.store(HostMemory::new(&newer), 1000, &mut slot, HERE)?;
        let third = copies.store_again(second, 1000, &mut slot, HERE)?;
        let coming = copies.fetch(&mut slot, HostMemory::new(&[0; 5000]), HERE)?;
        assert_eq!(coming.arrive(HERE)?.0.contents(), newer[1000..]);
        assert!(third.is_done()?, "it was waited for");
        assert_eq!(third.release(HERE)?.0.contents(), newer);
        drop(first);
    }
    Ok(())
}

#[test]
#[should_panic(expected = "others may read")]
fn what_is_read_is_not_copied_over() {
    let copies = copies(9);
    let mut slot = SlabPool::new(&copies, 1 << 30).take(100).expect("little");
    let leaving = copies.store(HostMemory::new(&[0; 100]), 0, &mut slot, HERE).expect("stored");
    let _coming = copies.fetch(&mut slot, HostMemory::new(&[0; 100]), HERE).expect("fetched");
    let _ = copies.store_again(leaving, 0, &mut slot, HERE);
}

#[test]
fn guards_that_are_dropped_wait() -> Result<(), DeviceError> {
    let copies = copies(2);
    let mut pool = SlabPool::new(&copies, 1 << 30);
    for round in 0..50 {
        let all = bytes(round, 5000);
        let mut slot = pool.take(5000)?;
        drop(copies.store(HostMemory::new(&all), 0, &mut slot, HERE)?);
        drop(copies.fetch(&mut slot, HostMemory::new(&all), HERE)?);
        let (memory, _) =
            copies.fetch(&mut slot, HostMemory::new(&[0; 5000]), HERE)?.arrive(HERE)?;
        assert_eq!(memory.contents(), all);
    }
    Ok(())
}

/// Slots are taken, filled, read by several and given back in any order, while older copies still run:
/// no caller sees the bytes of another.
#[test]
fn places_are_reused_without_a_race() -> Result<(), DeviceError> {
    for seed in 0..4 {
        let copies = copies(seed);
        let mut pool = SlabPool::new(&copies, 1 << 30);
        pool.reserve(64 << 10)?;
        let mut held = Vec::new();
        let mut arriving = Vec::new();
        for round in 0..400 {
            let word = random(seed, round) as usize;
            if word.is_multiple_of(3) && !held.is_empty() {
                let (contents, mut slot, leaving): (Vec<u8>, _, _) =
                    held.swap_remove(word / 3 % held.len());
                let coming =
                    copies.fetch(&mut slot, HostMemory::new(&vec![0; contents.len()]), HERE)?;
                arriving.push((contents, coming));
                // The slot is free for others while both copies may still run.
                drop(slot);
                drop(leaving);
            } else {
                let contents = bytes(round, 1 + word % 9000);
                let mut slot = match word % 2 {
                    0 => match pool.take_at(word % 100 * 512, contents.len()) {
                        Some(slot) => slot,
                        None => continue,
                    },
                    _ => pool.take(contents.len())?,
                };
                let leaving = copies.store(HostMemory::new(&contents), 0, &mut slot, HERE)?;
                held.push((contents, slot, leaving));
            }
            if arriving.len() > 5 {
                let (contents, coming) = arriving.remove(0);
                assert_eq!(coming.arrive(HERE)?.0.contents(), contents);
            }
        }
        drop((held, arriving));
        pool.reserve(0)?;
        assert_eq!(pool.held_bytes(), 0);
    }
    Ok(())
}

#[test]
fn the_pool_holds_exactly_what_was_reserved() -> Result<(), DeviceError> {
    let copies = copies(3);
    let mut pool = SlabPool::new(&copies, 1 << 30);
    pool.reserve(12_345)?;
    assert_eq!(pool.held_bytes(), 12_345);
    let all = pool.take_at(0, 12_345).expect("all of it is free");
    assert!(pool.take_at(0, 1).is_none());
    assert!(pool.take_at(20_000, 1).is_none());
    // In use: it is kept, and nothing else is taken in its place.
    pool.reserve(99)?;
    assert_eq!(pool.held_bytes(), 12_345);
    drop(all);
    pool.reserve(99)?;
    assert_eq!(pool.held_bytes(), 99);
    Ok(())
}

#[test]
fn the_pool_keeps_to_its_limit() -> Result<(), DeviceError> {
    let copies = copies(6);
    let mut pool = SlabPool::new(&copies, 4096);
    let first = pool.take(3000)?;
    assert_eq!(pool.held_bytes(), 4096, "growth stops at the limit");
    let refused = pool.take(2000).map(drop).expect_err("no room");
    assert!(refused.to_string().contains("4096 bytes were allowed in all"), "{refused}");
    drop(first);
    assert!(pool.reserve(5000).is_err());
    pool.reserve(4096)
}

#[test]
#[should_panic(expected = "outside of its memory")]
fn ranges_outside_are_refused() {
    let copies = copies(4);
    let mut slot = SlabPool::new(&copies, 1 << 30).take(100).expect("little");
    let _ = copies.store(HostMemory::new(&[0; 50]), 0, &mut slot, HERE);
}

#[test]
#[should_panic(expected = "nothing was stored")]
fn empty_slots_are_not_fetched() {
    let copies = copies(5);
    let mut slot = SlabPool::new(&copies, 1 << 30).take(100).expect("little");
    let _ = copies.fetch(&mut slot, HostMemory::new(&[0; 100]), HERE);
}
