/// Default minimum of kept items. At twice as many, every other one is dropped.
pub(super) const KEPT_MIN: usize = 2000;

/// A list of any length, thinned to what a chart can show: the first item, then every second, fourth, … one.
#[derive(Clone, Debug)]
pub(super) struct Thinned<T> {
    kept: Vec<T>,
    /// Minimum of kept items, if there are as many.
    kept_min: usize,
    /// Keeps one of this many items.
    stride: u64,
    seen: u64,
}

impl<T> Thinned<T> {
    pub(super) fn new() -> Thinned<T> {
        Thinned::keeping(KEPT_MIN)
    }

    /// Keeps between `kept_min` and twice as many items.
    pub(super) fn keeping(kept_min: usize) -> Thinned<T> {
        Thinned { kept: Vec::new(), kept_min, stride: 1, seen: 0 }
    }

    pub(super) fn push(&mut self, item: T) {
        if self.seen.is_multiple_of(self.stride) {
            self.kept.push(item);
        }
        self.seen += 1;
        if self.kept.len() > 2 * self.kept_min {
            let mut index = 0;
            self.kept.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.stride *= 2;
        }
    }

    pub(super) fn as_slice(&self) -> &[T] {
        &self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_evenly_spaced() {
        let mut thinned = Thinned::new();
        for item in 0..50 * KEPT_MIN {
            thinned.push(item);
            assert!(thinned.as_slice().len() <= 2 * KEPT_MIN);
        }
        let kept = thinned.as_slice();
        assert!(kept.len() >= KEPT_MIN, "{}", kept.len());
        let stride = kept[1];
        assert!(kept.iter().enumerate().all(|(index, item)| *item == index * stride));
    }
}
