//! Joins launches of one kernel over several tensors into one launch of its kernel for several
//! tensors.

use super::context::{Argument, Joint, Launch};

/// The largest number of tensors of a joined launch, `TENSORS_MAX` in the sources.
pub(super) const TENSORS_MAX: usize = 16;

/// One launch that does what all of these do, if they can be joined. They must not depend on each
/// other.
pub(super) fn join(launches: &[&Launch]) -> Option<Launch> {
    let (first, rest) = launches.split_first()?;
    let joint = first.joint?;
    let fits = rest.iter().all(|launch| is_like(first, launch, joint));
    let is_flat = launches.iter().all(|launch| (launch.grid.1, launch.grid.2) == (1, 1));
    if !fits || !is_flat || launches.len() > TENSORS_MAX {
        return None;
    }
    let mut first_blocks = Vec::with_capacity(launches.len());
    let mut blocks = 0u32;
    for launch in launches {
        first_blocks.push(i32::try_from(blocks).ok()?);
        blocks = blocks.checked_add(launch.grid.0)?;
    }
    // The driver's limit on the first extent of a grid.
    i32::try_from(blocks).ok()?;
    let mut arguments = vec![Argument::Struct(differing(launches, joint, &first_blocks)?.into())];
    arguments.extend(joint.common.iter().map(|&position| first.arguments[position].clone()));
    Some(Launch {
        kernel: joint.kernel,
        grid: (blocks, 1, 1),
        block: first.block,
        shared_bytes: first.shared_bytes,
        arguments,
        begins_early: false,
        joint: None,
    })
}

/// Whether two launches are alike enough for [`join`].
pub(super) fn can_join(one: &Launch, other: &Launch) -> bool {
    one.joint.is_some_and(|joint| is_like(one, other, joint))
}

/// Whether two launches differ only in their grids and in arguments that are not common.
fn is_like(one: &Launch, other: &Launch, joint: Joint) -> bool {
    one.kernel == other.kernel
        && other.joint == Some(joint)
        && (one.block, one.shared_bytes) == (other.block, other.shared_bytes)
        && one.arguments.len() == other.arguments.len()
        && joint.common.iter().all(|&position| one.arguments[position] == other.arguments[position])
}

/// The struct of the arguments that differ, as the sources declare it: an array of [`TENSORS_MAX`]
/// for each argument that is not common, those of 8 bytes before those of 4, then the first block
/// of each tensor and the number of tensors.
fn differing(launches: &[&Launch], joint: Joint, first_blocks: &[i32]) -> Option<Vec<u64>> {
    let count = launches[0].arguments.len();
    let own = || (0..count).filter(|position| !joint.common.contains(position));
    let mut words: Vec<u64> = Vec::new();
    let mut halves: Vec<u32> = Vec::new();
    for position in own() {
        let of = |launch: &&Launch| match launch.arguments[position] {
            Argument::Pointer(value) => Some(Value::Word(value)),
            Argument::I64(value) => Some(Value::Word(value as u64)),
            Argument::I32(value) => Some(Value::Half(value as u32)),
            Argument::F32(value) => Some(Value::Half(value.to_bits())),
            Argument::Floats(_) | Argument::Struct(_) => None,
        };
        let values: Vec<Value> = launches.iter().map(of).collect::<Option<_>>()?;
        for value in &values {
            match value {
                Value::Word(value) => words.push(*value),
                Value::Half(value) => halves.push(*value),
            }
        }
        match values[0] {
            Value::Word(_) => words.resize(words.len().next_multiple_of(TENSORS_MAX), 0),
            Value::Half(_) => halves.resize(halves.len().next_multiple_of(TENSORS_MAX), 0),
        }
    }
    halves.extend(first_blocks.iter().map(|&block| block as u32));
    halves.resize(halves.len().next_multiple_of(TENSORS_MAX), 0);
    halves.push(launches.len() as u32);
    halves.resize(halves.len().next_multiple_of(2), 0);
    words.extend(halves.chunks(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32));
    Some(words)
}

/// An argument as stored in memory.
enum Value {
    Word(u64),
    Half(u32),
}

#[cfg(test)]
mod tests {
    use super::super::context::Kernel;
    use super::*;

    const COMMON: &[usize] = &[1, 3];

    /// A launch over a tensor. Its arguments: an address, a common pointer, a 32-bit number of its
    /// own, a common factor, and a 64-bit number of its own.
    fn launch(address: u64, blocks: u32, own: i32) -> Launch {
        let arguments = vec![
            Argument::Pointer(address),
            Argument::Pointer(7),
            Argument::I32(own),
            Argument::F32(0.5),
            Argument::I64(i64::from(own) - 100),
        ];
        Launch {
            kernel: Kernel::named(1),
            grid: (blocks, 1, 1),
            block: 256,
            shared_bytes: 0,
            arguments,
            begins_early: false,
            joint: Some(Joint { kernel: Kernel::named(2), common: COMMON }),
        }
    }

    fn words(launch: &Launch) -> Vec<u64> {
        match &launch.arguments[0] {
            Argument::Struct(words) => words.to_vec(),
            other => panic!("{other:?} comes first"),
        }
    }

    #[test]
    fn what_differs_lies_as_the_sources_declare_it() {
        let launches = [launch(1000, 3, -1), launch(2000, 1, 5), launch(3000, 9, 6)];
        let joined = join(&launches.iter().collect::<Vec<_>>()).expect("they are alike");
        assert_eq!((joined.kernel, joined.grid, joined.block), (Kernel::named(2), (13, 1, 1), 256));
        assert_eq!(joined.arguments[1..], [Argument::Pointer(7), Argument::F32(0.5)]);
        let words = words(&joined);
        assert_eq!(words[..4], [1000, 2000, 3000, 0]);
        assert_eq!(words[16..20], [-101i64 as u64, -95i64 as u64, -94i64 as u64, 0]);
        // Halves, the lower one first: each tensor's number, the first blocks, the count.
        let halves: Vec<i32> =
            words[32..].iter().flat_map(|&word| [word as i32, (word >> 32) as i32]).collect();
        assert_eq!(halves[..4], [-1, 5, 6, 0]);
        assert_eq!(halves[16..20], [0, 3, 4, 0]);
        assert_eq!(halves[32..], [3, 0]);
    }

    #[test]
    fn only_what_is_alike_is_joined() {
        let one = launch(1000, 3, 1);
        let joins = |other: &Launch| {
            assert_eq!(can_join(&one, other), join(&[&one, other]).is_some());
            can_join(&one, other)
        };
        assert!(joins(&launch(2000, 4, 2)));
        assert!(!joins(&Launch { kernel: Kernel::named(3), ..launch(2000, 4, 2) }));
        assert!(!joins(&Launch { block: 128, ..launch(2000, 4, 2) }));
        assert!(!joins(&Launch { joint: None, ..launch(2000, 4, 2) }));
        let mut other = launch(2000, 4, 2);
        other.arguments[3] = Argument::F32(0.25);
        assert!(!joins(&other), "what all have in common differs");
        let many: Vec<Launch> = (0..17).map(|number| launch(number, 1, 0)).collect();
        let many: Vec<&Launch> = many.iter().collect();
        assert!(join(&many).is_none());
        assert!(join(&many[..TENSORS_MAX]).is_some());
        assert!(join(&[&Launch { grid: (1, 2, 1), ..launch(0, 1, 0) }, &one]).is_none());
        let (half, rest) = (launch(0, 1 << 30, 0), launch(0, (1 << 30) + 1, 0));
        assert!(join(&[&half, &rest]).is_none(), "more blocks than a grid has");
    }
}
