//! Processors and memory.

use super::Finding;
use crate::memory_limits;
use crate::size;
use std::thread::available_parallelism;
use storm_host::locked_memory_limit;

/// What the smallest training takes.
const MEMORY_BYTES_MIN: u64 = 1 << 30;

pub(super) fn look() -> Vec<Finding> {
    vec![processors(), memory(), locked_memory(locked_memory_limit())]
}

fn processors() -> Finding {
    let count = available_parallelism().map_or(1, usize::from);
    let words = |wide: &str| format!("{count} threads, {wide}");
    #[cfg(target_arch = "x86_64")]
    let (avx2, avx512) = (
        std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma"),
        std::is_x86_feature_detected!("avx512f"),
    );
    #[cfg(not(target_arch = "x86_64"))]
    let (avx2, avx512) = (false, false);
    match (avx2, avx512) {
        (_, true) => Finding::good("processors", words("AVX-512")),
        (true, false) => Finding::good("processors", words("AVX2")),
        (false, false) => Finding::limited(
            "processors",
            words("neither AVX2 nor AVX-512"),
            "the CPU device works, but slowly; use a newer x86-64 processor or a GPU",
        ),
    }
}

/// What a run takes if it is not told.
fn memory() -> Finding {
    let name = "memory";
    match memory_limits::host(None) {
        Ok(limit) => {
            let origin = limit.origin.unwrap_or_default();
            let what = format!("{} to use: {origin}", size::show(limit.bytes));
            match limit.bytes >= MEMORY_BYTES_MIN {
                true => Finding::good(name, what),
                false => Finding::missing(
                    name,
                    what,
                    "end other programs, or raise the container's limit (docker: --memory)",
                ),
            }
        }
        Err(error) => {
            Finding::limited(name, error.to_string(), "give the memory to use with --ram")
        }
    }
}

/// Copies to and from a GPU need locked memory; the CPU device does not.
fn locked_memory(limit: Option<u64>) -> Finding {
    let name = "locked memory";
    match limit {
        None => Finding::good(name, "no limit".to_owned()),
        Some(bytes) => Finding::limited(
            name,
            format!(
                "at most {}: training on a GPU cannot pin more host memory than that",
                size::show(bytes)
            ),
            "`ulimit -l unlimited`, for good in /etc/security/limits.conf; docker: --ulimit memlock=-1",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn limits_are_named_with_a_remedy() {
        assert!(locked_memory(None).state == State::Good);
        let limited = locked_memory(Some(8 << 20));
        assert!(limited.state == State::Limited && limited.what.contains("8.00 MiB"));
        assert!(limited.remedy.is_some_and(|remedy| remedy.contains("ulimit -l")));
    }
}
