//! The file format of a profile: the link between host and device in separate fields, and a list of
//! any other links.

use super::{
    AttentionPoint, DiskProfile, ElementwisePoint, GemmPoint, HardwareProfile, LinkProfile,
    ProfileError, RankLink,
};
use crate::tier::Tier;
use serde::{Deserialize, Serialize};

/// See [`HardwareProfile`] for the fields.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProfileFile {
    name: String,
    source: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uncertainty: Option<f64>,
    memory_bytes: u64,
    overhead_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    multiprocessors: Option<u32>,
    gemm_flops: f64,
    gemm_f32_flops: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gemm_fp8_flops: Option<f64>,
    attention_forward_flops: f64,
    attention_backward_flops: f64,
    memory_bandwidth: f64,
    host_to_device_bandwidth: f64,
    device_to_host_bandwidth: f64,
    duplex_bandwidth: f64,
    copy_latency_seconds: f64,
    kernel_seconds: f64,
    launch_seconds: f64,
    pinned_seconds_per_gib: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data_bandwidth: Option<f64>,
    #[serde(default)]
    gemm: Vec<GemmPoint>,
    #[serde(default)]
    attention: Vec<AttentionPoint>,
    #[serde(default)]
    elementwise: Vec<ElementwisePoint>,
    /// Other than between host and device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    links: Vec<LinkProfile>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    disk: Option<DiskProfile>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ranks: Option<RankLink>,
}

fn joins_host_and_device(link: &LinkProfile) -> bool {
    (link.near, link.far) == (Tier::DEVICE, Tier::HOST)
}

impl ProfileFile {
    /// # Panics
    /// If host and device have no link.
    pub(super) fn new(profile: &HardwareProfile) -> ProfileFile {
        let profile = profile.clone();
        let (host, links): (Vec<_>, Vec<_>) =
            profile.links.into_iter().partition(joins_host_and_device);
        let host = host.first().expect("every machine links host and device");
        ProfileFile {
            name: profile.name,
            source: profile.source,
            uncertainty: profile.uncertainty,
            memory_bytes: profile.memory_bytes,
            overhead_bytes: profile.overhead_bytes,
            multiprocessors: profile.multiprocessors,
            gemm_flops: profile.gemm_flops,
            gemm_f32_flops: profile.gemm_f32_flops,
            gemm_fp8_flops: profile.gemm_fp8_flops,
            attention_forward_flops: profile.attention_forward_flops,
            attention_backward_flops: profile.attention_backward_flops,
            memory_bandwidth: profile.memory_bandwidth,
            host_to_device_bandwidth: host.to_near_bandwidth,
            device_to_host_bandwidth: host.to_far_bandwidth,
            duplex_bandwidth: host.duplex_bandwidth,
            copy_latency_seconds: host.latency_seconds,
            kernel_seconds: profile.kernel_seconds,
            launch_seconds: profile.launch_seconds,
            pinned_seconds_per_gib: profile.pinned_seconds_per_gib,
            data_bandwidth: profile.data_bandwidth,
            gemm: profile.gemm,
            attention: profile.attention,
            elementwise: profile.elementwise,
            links,
            disk: profile.disk,
            ranks: profile.ranks,
        }
    }

    /// The profile, if all of its numbers are valid.
    pub(super) fn into_profile(self) -> Result<HardwareProfile, ProfileError> {
        self.check_numbers()?;
        self.ranks.iter().try_for_each(RankLink::check)?;
        let host = LinkProfile {
            near: Tier::DEVICE,
            far: Tier::HOST,
            to_near_bandwidth: self.host_to_device_bandwidth,
            to_far_bandwidth: self.device_to_host_bandwidth,
            duplex_bandwidth: self.duplex_bandwidth,
            latency_seconds: self.copy_latency_seconds,
        };
        let mut links = vec![host];
        for link in self.links {
            let LinkProfile { near, far, .. } = link;
            if near >= far || links.iter().any(|known| (known.near, known.far) == (near, far)) {
                return Err(ProfileError::Link { near, far });
            }
            links.push(link);
        }
        Ok(HardwareProfile {
            name: self.name,
            source: self.source,
            uncertainty: self.uncertainty,
            memory_bytes: self.memory_bytes,
            overhead_bytes: self.overhead_bytes,
            multiprocessors: self.multiprocessors,
            gemm_flops: self.gemm_flops,
            gemm_f32_flops: self.gemm_f32_flops,
            gemm_fp8_flops: self.gemm_fp8_flops,
            attention_forward_flops: self.attention_forward_flops,
            attention_backward_flops: self.attention_backward_flops,
            memory_bandwidth: self.memory_bandwidth,
            links,
            kernel_seconds: self.kernel_seconds,
            launch_seconds: self.launch_seconds,
            pinned_seconds_per_gib: self.pinned_seconds_per_gib,
            data_bandwidth: self.data_bandwidth,
            gemm: self.gemm,
            attention: self.attention,
            elementwise: self.elementwise,
            disk: self.disk,
            ranks: self.ranks,
        })
    }

    fn check_numbers(&self) -> Result<(), ProfileError> {
        let positive = [
            ("memory_bytes", self.memory_bytes as f64),
            ("gemm_flops", self.gemm_flops),
            ("gemm_f32_flops", self.gemm_f32_flops),
            ("attention_forward_flops", self.attention_forward_flops),
            ("attention_backward_flops", self.attention_backward_flops),
            ("memory_bandwidth", self.memory_bandwidth),
            ("host_to_device_bandwidth", self.host_to_device_bandwidth),
            ("device_to_host_bandwidth", self.device_to_host_bandwidth),
            ("duplex_bandwidth", self.duplex_bandwidth),
            ("multiprocessors", self.multiprocessors.map_or(1.0, f64::from)),
        ];
        let points = (self.gemm.iter().map(|p| ("gemm.flops", p.flops)))
            .chain(self.attention.iter().map(|p| ("attention.forward_flops", p.forward_flops)))
            .chain(self.attention.iter().map(|p| ("attention.backward_flops", p.backward_flops)))
            .chain(self.elementwise.iter().map(|p| ("elementwise.bandwidth", p.bandwidth)))
            .chain(self.links.iter().flat_map(|link| link.figures().0))
            .chain(self.gemm_fp8_flops.map(|flops| ("gemm_fp8_flops", flops)))
            .chain(self.data_bandwidth.map(|rate| ("data_bandwidth", rate)))
            .chain(self.disk.iter().flat_map(|disk| {
                [
                    ("disk.sequential_bytes_per_second", disk.sequential_bytes_per_second),
                    ("disk.random_reads_per_second", disk.random_reads_per_second),
                    ("disk.decode_bytes_per_second", disk.decode_bytes_per_second),
                ]
            }))
            .chain(self.uncertainty.map(|share| ("uncertainty", share)));
        for (field, value) in positive.into_iter().chain(points) {
            if !(value > 0.0 && value.is_finite()) {
                return Err(ProfileError::Number { field, value });
            }
        }
        let times = [
            ("copy_latency_seconds", self.copy_latency_seconds),
            ("kernel_seconds", self.kernel_seconds),
            ("launch_seconds", self.launch_seconds),
            ("pinned_seconds_per_gib", self.pinned_seconds_per_gib),
        ];
        for (field, value) in times.into_iter().chain(self.links.iter().map(|l| l.figures().1)) {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(ProfileError::Number { field, value });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::MachineLink;
    use crate::queue::Link;

    fn with_a_third_tier() -> HardwareProfile {
        let mut profile = HardwareProfile::builtin("reference").unwrap();
        let far = Tier::HOST.behind().unwrap();
        let rates =
            LinkProfile { near: Tier::HOST, far, to_far_bandwidth: 2e9, ..profile.links[0] };
        profile.links.push(rates);
        profile
    }

    #[test]
    fn all_links_survive_a_file() {
        let profile = with_a_third_tier();
        let read = HardwareProfile::from_json(&profile.to_json()).unwrap();
        assert_eq!(read, profile);
        let third = Tier::HOST.behind().unwrap();
        assert_eq!(read.link(Link { from: Tier::HOST, to: third }).bandwidth, 2e9);
        assert_eq!(read.find_link(Link { from: Tier::DEVICE, to: third }), None);
    }

    /// Files from before there were figures of disks have none.
    #[test]
    fn a_disk_survives_a_file_and_may_be_missing() {
        let mut profile = HardwareProfile::builtin("reference").unwrap();
        assert!(!profile.to_json().contains("disk"));
        profile.disk = Some(DiskProfile {
            directory: "/data".to_owned(),
            reading_path: "io_uring O_DIRECT".to_owned(),
            sequential_bytes_per_second: 3e9,
            random_reads_per_second: 2e5,
            decode_bytes_per_second: 8e8,
        });
        let text = profile.to_json();
        assert_eq!(HardwareProfile::from_json(&text).unwrap(), profile);
        let error = HardwareProfile::from_json(&text.replace("200000.0", "-1.0")).unwrap_err();
        assert!(error.to_string().contains("disk.random_reads_per_second"), "{error}");
    }

    /// Files from before links between ranks were measured have none.
    #[test]
    fn a_link_between_ranks_survives_a_file_and_may_be_missing() {
        let mut profile = HardwareProfile::builtin("reference").unwrap();
        assert!(!profile.to_json().contains("\"ranks\""));
        let machines = Some(MachineLink { ranks: 4, bandwidth: 3e9 });
        let link =
            RankLink { ranks: 8, bandwidth: 7e9, latency_seconds: 2e-5, share: 0.25, machines };
        profile.ranks = Some(link);
        assert_eq!(HardwareProfile::from_json(&profile.to_json()).unwrap(), profile);
        let refused = |change: &dyn Fn(&mut RankLink), field: &str| {
            let mut bad = link;
            change(&mut bad);
            let text = HardwareProfile { ranks: Some(bad), ..profile.clone() }.to_json();
            let error = HardwareProfile::from_json(&text).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        };
        refused(&|link| link.bandwidth = 0.0, "ranks.bandwidth");
        refused(&|link| link.latency_seconds = -1.0, "ranks.latency_seconds");
        refused(&|link| link.share = 1.0, "ranks.share");
        refused(&|link| link.ranks = 1, "ranks.ranks");
        refused(
            &|link| link.machines = Some(MachineLink { ranks: 0, bandwidth: 1.0 }),
            "machines.ranks",
        );
        let still = Some(MachineLink { ranks: 4, bandwidth: -1.0 });
        refused(&|link| link.machines = still, "machines.bandwidth");
    }

    /// Files of machines with two tiers have no list of links.
    #[test]
    fn the_host_s_link_is_in_fields_of_its_own() {
        let profile = HardwareProfile::builtin("h200").unwrap();
        let text = profile.to_json();
        assert!(text.contains("\"host_to_device_bandwidth\"") && !text.contains("\"links\""));
        assert_eq!(HardwareProfile::from_json(&text).unwrap(), profile);
        let rates = profile.link(Link::DEVICE_TO_HOST);
        assert!(text.contains(&format!("\"device_to_host_bandwidth\": {:?}", rates.bandwidth)));
    }

    #[test]
    fn links_that_make_no_sense_are_refused() {
        let refused = |change: &dyn Fn(&mut LinkProfile)| {
            let mut profile = with_a_third_tier();
            change(&mut profile.links[1]);
            HardwareProfile::from_json(&profile.to_json()).unwrap_err().to_string()
        };
        let error = refused(&|link| link.far = Tier::HOST);
        assert!(error.contains("host and host"), "{error}");
        let error = refused(&|link| link.duplex_bandwidth = 0.0);
        assert!(error.contains("links.duplex_bandwidth"), "{error}");
        let error = refused(&|link| link.latency_seconds = -1.0);
        assert!(error.contains("links.latency_seconds"), "{error}");
        let text = with_a_third_tier().to_json().replace("\"far\": 2", "\"far\": 9");
        let error = HardwareProfile::from_json(&text).unwrap_err().to_string();
        assert!(error.contains("no tier 9"), "{error}");
    }
}
