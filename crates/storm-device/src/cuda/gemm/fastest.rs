//! Finds the fastest of several candidates by repeatedly measuring the better half of them.

/// Minimum runs of a candidate in a round. If there is not enough time for that, fewer candidates are measured.
const RUNS_MIN: f64 = 3.0;

/// Finds the fastest of `count` candidates in about `seconds`. `time` runs one of them a given number of times and
/// returns the time of one run. Each round measures half as many candidates as the previous one, each for twice as
/// long. `first_seconds` is roughly the time of one run of the first candidate, which wins if there is no time to
/// measure others.
pub(super) fn fastest<E>(
    count: usize,
    seconds: f64,
    first_seconds: f64,
    mut time: impl FnMut(usize, usize) -> Result<f64, E>,
) -> Result<usize, E> {
    let affordable = (seconds / first_seconds / RUNS_MIN / rounds(count) as f64) as usize;
    let mut left: Vec<usize> = (0..count.min(affordable)).collect();
    if left.len() < 2 {
        return Ok(0);
    }
    let round_seconds = seconds / rounds(left.len()) as f64;
    while left.len() > 1 {
        let runs = (round_seconds / left.len() as f64 / first_seconds).max(RUNS_MIN) as usize;
        let mut times = Vec::with_capacity(left.len());
        for &way in &left {
            times.push((time(way, runs)?, way));
        }
        times.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        left = times[..left.len().div_ceil(2)].iter().map(|&(_, way)| way).collect();
    }
    Ok(left[0])
}

/// Rounds until one of `count` is left.
fn rounds(count: usize) -> u32 {
    count.next_power_of_two().ilog2().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates with these times, plus noise that halves with every round.
    fn found(times: &[f64], seconds: f64) -> (usize, f64) {
        let (mut spent, mut calls) = (0.0, 0u32);
        let way = fastest(times.len(), seconds, times[0], |way, runs| {
            calls += 1;
            let noise = if calls % 2 == 0 { 0.02 } else { -0.02 } / runs as f64;
            spent += times[way] * runs as f64;
            Ok::<f64, ()>(times[way] * (1.0 + noise))
        });
        (way.unwrap(), spent)
    }

    #[test]
    fn the_fastest_wins_in_about_the_time_given() {
        let times = [1.0, 1.02, 0.99, 1.3, 0.97, 1.1, 1.0, 0.98];
        let (way, spent) = found(&times, 300.0);
        assert_eq!(way, 4);
        assert!((200.0..360.0).contains(&spent), "{spent}");
        let (way, _) = found(&[1.0, 1.01, 1.02], 300.0);
        assert_eq!(way, 0);
    }

    #[test]
    fn the_first_wins_without_time_to_measure() {
        assert_eq!(found(&[1.0, 0.5], 2.0), (0, 0.0));
        assert_eq!(found(&[1.0], 100.0), (0, 0.0));
        // There is time for only some of them: those that the library proposes first.
        let (way, spent) = found(&[1.0, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1], 20.0);
        assert_eq!(way, 1);
        assert!(spent < 25.0, "{spent}");
    }

    #[test]
    fn an_error_ends_it() {
        assert_eq!(fastest(3, 100.0, 1.0, |_, _| Err::<f64, _>("broken")), Err("broken"));
    }
}
