//! Queues, which run concurrently: kernels, copies over the links between tiers, data loading, and communication of
//! ranks.

use crate::per::per;
use crate::tier::Tier;
use serde::Serialize;
use std::fmt;

/// A direction between two tiers. Copies over different links run concurrently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Link {
    /// The source.
    pub from: Tier,
    /// The destination.
    pub to: Tier,
}

impl Link {
    /// Into device memory.
    pub const HOST_TO_DEVICE: Link = Link { from: Tier::HOST, to: Tier::DEVICE };
    /// Out of device memory.
    pub const DEVICE_TO_HOST: Link = Link { from: Tier::DEVICE, to: Tier::HOST };
    /// Reads of the disk.
    pub const DISK_TO_HOST: Link = Link { from: Tier::DISK, to: Tier::HOST };
    /// Writes to the disk.
    pub const HOST_TO_DISK: Link = Link { from: Tier::HOST, to: Tier::DISK };

    /// The opposite direction.
    #[must_use]
    pub fn reversed(self) -> Link {
        Link { from: self.to, to: self.from }
    }
}

/// For display: `host to device`.
impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.from, self.to)
    }
}

/// An ordered list of work that runs concurrently with other queues. A plan has one for kernels, one for copies over
/// each of its [`Links`], two for data if it fetches any, and one for collectives if several ranks share the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Queue(u8);

impl Queue {
    /// Kernels.
    pub const COMPUTE: Queue = Queue(0);
    /// Copies over [`Link::HOST_TO_DEVICE`], which every plan has.
    pub const HOST_TO_DEVICE: Queue = Queue(1);
    /// Copies over [`Link::DEVICE_TO_HOST`], which every plan has.
    pub const DEVICE_TO_HOST: Queue = Queue(2);
    /// Most queues of a plan.
    pub const COUNT_MAX: usize = 1 + Links::COUNT_MAX + 2 + 1;

    /// The queue as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    const fn at(index: usize) -> Queue {
        Queue(index as u8)
    }
}

per! {
    /// One entry per queue; the default for queues that a plan does not have.
    PerQueue by Queue
}

/// The links of a plan, in the order of their queues: each between two different tiers, no two the same. Host and
/// device are always linked. A plan may also have a data source, which is not a tier: its contents have no addresses,
/// and only [`Fetch`](crate::Fetch) copies them into one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Links {
    between: Vec<Link>,
    data: bool,
    ranks: bool,
}

impl Links {
    /// Most links: all directions between three tiers.
    pub const COUNT_MAX: usize = 6;

    /// Adds links between two tiers, in both directions.
    ///
    /// # Panics
    /// The tiers are already linked or the same, or there would be too many links.
    #[must_use]
    pub fn and_between(mut self, near: Tier, far: Tier) -> Links {
        let link = Link { from: far, to: near };
        assert!(near != far, "a link has two ends: {link}");
        for link in [link, link.reversed()] {
            assert!(!self.between.contains(&link), "there is a link from {link} already");
            self.between.push(link);
        }
        let count = self.between.len();
        assert!(count <= Links::COUNT_MAX, "too many links: {count}");
        self
    }

    /// Adds a data source.
    #[must_use]
    pub fn and_data(self) -> Links {
        Links { data: true, ..self }
    }

    /// Adds communication with other ranks.
    #[must_use]
    pub fn and_ranks(self) -> Links {
        Links { ranks: true, ..self }
    }

    /// All links.
    pub fn iter(&self) -> impl Iterator<Item = Link> {
        self.between.iter().copied()
    }

    /// Whether a link starts or ends at the tier.
    pub fn reach(&self, tier: Tier) -> bool {
        self.iter().any(|link| link.from == tier || link.to == tier)
    }

    /// All queues: kernels, links, data, collectives.
    pub fn queues(&self) -> impl ExactSizeIterator<Item = Queue> + use<> {
        (0..self.before_ranks() + usize::from(self.ranks)).map(Queue::at)
    }

    fn before_ranks(&self) -> usize {
        1 + self.between.len() + 2 * usize::from(self.data)
    }

    /// The queue of collectives, if several ranks share the step.
    pub fn rank_queue(&self) -> Option<Queue> {
        self.ranks.then(|| Queue::at(self.before_ranks()))
    }

    /// The queue that reads ahead from the data source, if there is one.
    pub fn data_queue(&self) -> Option<Queue> {
        self.data.then(|| Queue::at(1 + self.between.len()))
    }

    /// The queue that fills the pinned slots of inputs with data read ahead, if there is a data source.
    pub fn staging_queue(&self) -> Option<Queue> {
        self.data.then(|| Queue::at(2 + self.between.len()))
    }

    /// Whether a queue handles data instead of computing or copying.
    pub fn is_data(&self, queue: Queue) -> bool {
        [self.data_queue(), self.staging_queue()].contains(&Some(queue))
    }

    /// Whether a queue reads or writes the disk.
    pub fn is_disk(&self, queue: Queue) -> bool {
        self.link(queue).is_some_and(|link| link.from == Tier::DISK || link.to == Tier::DISK)
    }

    /// Whether host threads run a queue, rather than the device.
    pub fn is_of_host(&self, queue: Queue) -> bool {
        self.is_data(queue) || self.is_disk(queue)
    }

    /// The queue of a link; `None` if there is no such link.
    pub fn queue(&self, link: Link) -> Option<Queue> {
        self.between.iter().position(|&known| known == link).map(|index| Queue::at(1 + index))
    }

    /// The link of a queue; `None` for kernels, data and collectives.
    pub fn link(&self, queue: Queue) -> Option<Link> {
        queue.index().checked_sub(1).and_then(|index| self.between.get(index)).copied()
    }

    /// For display: `compute`, `host to device`, `data`.
    pub fn queue_name(&self, queue: Queue) -> String {
        match self.link(queue) {
            Some(link) => link.to_string(),
            None if self.data_queue() == Some(queue) => "data".to_owned(),
            None if self.staging_queue() == Some(queue) => "staging".to_owned(),
            None if self.rank_queue() == Some(queue) => "ranks".to_owned(),
            None => "compute".to_owned(),
        }
    }
}

/// Host and device only.
impl Default for Links {
    fn default() -> Links {
        Links {
            between: vec![Link::HOST_TO_DEVICE, Link::DEVICE_TO_HOST],
            data: false,
            ranks: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_follow_the_links() {
        let third = Tier::HOST.behind().unwrap();
        let links = Links::default().and_between(Tier::HOST, third);
        let names: Vec<String> = links.queues().map(|queue| links.queue_name(queue)).collect();
        let wanted = ["compute", "host to device", "device to host", "disk to host"];
        assert_eq!(names[..4], wanted);
        assert_eq!(links.queue(Link::HOST_TO_DEVICE), Some(Queue::HOST_TO_DEVICE));
        assert_eq!(links.queue(Link::DEVICE_TO_HOST), Some(Queue::DEVICE_TO_HOST));
        let out = Link { from: Tier::HOST, to: third };
        let queue = links.queue(out).unwrap();
        assert_eq!((queue.index(), links.link(queue)), (4, Some(out)));
        assert_eq!(links.queue(Link { from: Tier::DEVICE, to: third }), None);
        assert!(links.reach(third) && !Links::default().reach(third));
    }

    #[test]
    fn three_tiers_may_all_be_linked() {
        let third = Tier::HOST.behind().unwrap();
        let links =
            Links::default().and_between(Tier::HOST, third).and_between(Tier::DEVICE, third);
        assert_eq!(links.iter().count(), Links::COUNT_MAX);
        assert_eq!(links.clone().and_data().and_ranks().queues().len(), Queue::COUNT_MAX);
        assert_eq!((links.data_queue(), links.staging_queue()), (None, None));
    }

    #[test]
    fn data_has_two_queues_behind_the_links() {
        let links = Links::default().and_data();
        let names: Vec<String> = links.queues().map(|queue| links.queue_name(queue)).collect();
        assert_eq!(names, ["compute", "host to device", "device to host", "data", "staging"]);
        let found = [links.data_queue(), links.staging_queue()].map(|queue| queue.unwrap());
        assert_eq!(found.map(Queue::index), [3, 4]);
        assert_eq!(found.map(|queue| links.link(queue)), [None, None]);
        assert!(links.is_data(found[0]) && links.is_data(found[1]));
        assert!(!links.is_data(Queue::COMPUTE) && !Links::default().is_data(found[0]));
    }

    #[test]
    fn collectives_have_the_last_queue() {
        for links in [Links::default(), Links::default().and_data()] {
            assert_eq!(links.rank_queue(), None);
            let links = links.and_ranks();
            let queue = links.rank_queue().unwrap();
            assert_eq!(queue, links.queues().last().unwrap());
            assert_eq!((links.link(queue), links.is_data(queue)), (None, false));
            assert_eq!(links.queue_name(queue), "ranks");
        }
    }
}
