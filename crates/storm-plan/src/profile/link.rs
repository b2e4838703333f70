//! What copies between two tiers cost.

use crate::queue::Link;
use crate::tier::Tier;
use serde::{Deserialize, Serialize};

/// A connection between two tiers: a link in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkProfile {
    /// The tier that is closer to the kernels.
    pub near: Tier,
    /// The one behind it.
    pub far: Tier,
    /// Into the near tier, bytes per second.
    pub to_near_bandwidth: f64,
    /// Into the far tier, bytes per second.
    pub to_far_bandwidth: f64,
    /// Both directions at once, in total bytes per second.
    pub duplex_bandwidth: f64,
    /// From the end of one copy in a queue to the start of the next.
    pub latency_seconds: f64,
}

/// The rates of one link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRates {
    /// Bytes per second.
    pub bandwidth: f64,
    /// Total bytes per second of this link and the opposite one when both are busy.
    pub duplex_bandwidth: f64,
    /// From the end of one copy in a queue to the start of the next.
    pub latency_seconds: f64,
}

impl LinkProfile {
    /// Whether the link is one of the two.
    pub(super) fn has(&self, link: Link) -> bool {
        let to_near = Link { from: self.far, to: self.near };
        link == to_near || link == to_near.reversed()
    }

    pub(super) fn rates(&self, link: Link) -> LinkRates {
        let is_to_near = link.to == self.near;
        LinkRates {
            bandwidth: if is_to_near { self.to_near_bandwidth } else { self.to_far_bandwidth },
            duplex_bandwidth: self.duplex_bandwidth,
            latency_seconds: self.latency_seconds,
        }
    }

    /// Makes copies over one of the links take `factor` times as long.
    pub(super) fn slow(&mut self, link: Link, factor: f64) {
        self.duplex_bandwidth /= factor.sqrt();
        match link.to == self.near {
            true => self.to_near_bandwidth /= factor,
            false => self.to_far_bandwidth /= factor,
        }
    }

    /// What must be positive, and what may be 0.
    pub(super) fn figures(&self) -> ([(&'static str, f64); 3], (&'static str, f64)) {
        let positive = [
            ("links.to_near_bandwidth", self.to_near_bandwidth),
            ("links.to_far_bandwidth", self.to_far_bandwidth),
            ("links.duplex_bandwidth", self.duplex_bandwidth),
        ];
        (positive, ("links.latency_seconds", self.latency_seconds))
    }
}
