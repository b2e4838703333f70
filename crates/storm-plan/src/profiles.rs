//! Profiles that come with STORM.

use crate::profile::{HardwareProfile, ProfileError};

/// Name and text of each; the name is that of the file.
const BUILTIN: &[(&str, &str)] = &[
    ("h200", include_str!("../profiles/h200.json")),
    ("reference", include_str!("../profiles/reference.json")),
    ("rtx-3060-12gb", include_str!("../profiles/rtx-3060-12gb.json")),
    ("rtx-4090", include_str!("../profiles/rtx-4090.json")),
    ("rtx-5060-ti-16gb", include_str!("../profiles/rtx-5060-ti-16gb.json")),
];

impl HardwareProfile {
    /// A profile that comes with STORM.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn builtin(name: &str) -> Result<HardwareProfile, ProfileError> {
        match BUILTIN.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => HardwareProfile::from_json(text),
            None => Err(ProfileError::Unknown {
                name: name.to_owned(),
                known: HardwareProfile::builtin_names().collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// All names that [`HardwareProfile::builtin`] knows, sorted.
    pub fn builtin_names() -> impl Iterator<Item = &'static str> {
        BUILTIN.iter().map(|(name, _)| *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::Link;

    #[test]
    fn all_profiles_parse_under_their_own_name() {
        for name in HardwareProfile::builtin_names() {
            let profile = HardwareProfile::builtin(name).unwrap();
            assert_eq!(profile.name, name);
            assert!(profile.source.len() > 40, "{name} does not say where it comes from");
            assert!(profile.overhead_bytes < profile.memory_bytes);
            let one_way = profile
                .link(Link::HOST_TO_DEVICE)
                .bandwidth
                .max(profile.link(Link::DEVICE_TO_HOST).bandwidth);
            assert!(profile.link(Link::HOST_TO_DEVICE).duplex_bandwidth >= one_way);
        }
    }

    #[test]
    fn names_are_sorted_and_match_their_files() {
        let names: Vec<_> = HardwareProfile::builtin_names().collect();
        assert!(names.is_sorted());
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/profiles");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        assert_eq!(files, names.iter().map(|name| format!("{name}.json")).collect::<Vec<_>>());
    }

    /// FLOP per PCIe byte decides between recomputing and offloading.
    #[test]
    fn small_cards_favour_offloading() {
        let balance = |name: &str| {
            let profile = HardwareProfile::builtin(name).unwrap();
            profile.gemm_flops / profile.link(Link::HOST_TO_DEVICE).bandwidth
        };
        assert!(balance("rtx-3060-12gb") < balance("rtx-5060-ti-16gb"));
        assert!(balance("rtx-5060-ti-16gb") < balance("rtx-4090") / 3.0);
        assert!(balance("rtx-4090") < balance("reference") / 2.0);
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = HardwareProfile::builtin("gtx-970").unwrap_err().to_string();
        assert!(
            error.contains("`gtx-970`") && error.contains("reference, rtx-3060-12gb"),
            "{error}"
        );
    }
}
