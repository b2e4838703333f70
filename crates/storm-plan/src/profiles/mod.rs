//! Built-in profiles: measured ones as files, others computed from data sheets.

mod cards;
mod data_sheet;

use crate::profile::{HardwareProfile, ProfileError};
use cards::CARDS;
use data_sheet::DataSheet;

/// Measured profiles, and the one that tests pin their figures to.
const FILES: [(&str, &str); 2] = [
    ("h200", include_str!("../../profiles/h200.json")),
    ("reference", include_str!("../../profiles/reference.json")),
];

fn sheet(name: &str) -> Option<&'static DataSheet> {
    CARDS.iter().find(|card| card.name == name)
}

impl HardwareProfile {
    /// A built-in profile.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn builtin(name: &str) -> Result<HardwareProfile, ProfileError> {
        if let Some((_, text)) = FILES.iter().find(|(known, _)| *known == name) {
            return HardwareProfile::from_json(text);
        }
        match sheet(name) {
            Some(sheet) => Ok(sheet.profile(&HardwareProfile::builtin("h200")?)),
            None => Err(ProfileError::Unknown {
                name: name.to_owned(),
                known: HardwareProfile::builtin_names().collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// All names that [`HardwareProfile::builtin`] knows, sorted.
    pub fn builtin_names() -> impl Iterator<Item = &'static str> {
        let mut names: Vec<&str> = FILES.iter().map(|(name, _)| *name).collect();
        names.extend(CARDS.iter().map(|card| card.name));
        names.sort_unstable();
        names.into_iter()
    }

    /// The driver's names for the cards of a data-sheet profile, and their memory: enough to find a
    /// measured profile of such a card. Empty for other profiles.
    pub fn builtin_cards(name: &str) -> impl Iterator<Item = (&'static str, u64)> {
        let sheet = sheet(name);
        sheet
            .into_iter()
            .flat_map(|sheet| sheet.cards.iter().map(|card| (*card, sheet.memory_bytes())))
    }
}

#[cfg(test)]
mod tests {
    use super::data_sheet::{Accumulation, H200};
    use super::*;
    use crate::queue::Link;

    #[test]
    fn all_profiles_parse_under_their_own_name() {
        for name in HardwareProfile::builtin_names() {
            let profile = HardwareProfile::builtin(name).unwrap();
            assert_eq!(profile.name, name);
            assert!(profile.source.len() > 40, "{name} does not say where it comes from");
            assert!(profile.overhead_bytes < profile.memory_bytes);
            let read = HardwareProfile::from_json(&profile.to_json()).unwrap();
            assert!(read == profile, "{name} does not survive a file");
            let one_way = profile
                .link(Link::HOST_TO_DEVICE)
                .bandwidth
                .max(profile.link(Link::DEVICE_TO_HOST).bandwidth);
            assert!(profile.link(Link::HOST_TO_DEVICE).duplex_bandwidth >= one_way);
        }
    }

    #[test]
    fn names_are_sorted_and_files_are_known() {
        let names: Vec<_> = HardwareProfile::builtin_names().collect();
        assert!(names.is_sorted());
        let mut without_repeats = names.clone();
        without_repeats.dedup();
        assert_eq!(names, without_repeats);
        assert!(CARDS.is_sorted_by_key(|card| card.name));
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/profiles");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        assert_eq!(files, FILES.map(|(name, _)| format!("{name}.json")));
    }

    #[test]
    fn cards_have_8_bit_floats_from_ada_on() {
        let has_fp8 = |card: &str| HardwareProfile::builtin(card).unwrap().gemm_fp8_flops.is_some();
        let without: Vec<&str> =
            CARDS.iter().map(|card| card.name).filter(|card| !has_fp8(card)).collect();
        let ampere = ["a10", "a100-40gb", "a100-80gb", "a6000", "rtx-3060-12gb", "rtx-3080"];
        assert_eq!(without, [&ampere[..], &["rtx-3090"]].concat());
    }

    /// Every rate of a data-sheet profile is below the card's peak, and not far below it.
    #[test]
    fn no_card_exceeds_its_data_sheet() {
        for sheet in CARDS {
            let name = sheet.name;
            let profile = HardwareProfile::builtin(name).unwrap();
            let below = |rate: f64, peak: f64| {
                assert!((0.1..1.0).contains(&(rate / peak)), "{name}: {rate} of {peak}");
            };
            let bf16 = sheet.bf16_tflops * 1e12;
            below(profile.gemm_flops, bf16);
            below(profile.gemm_f32_flops, sheet.f32_tflops * 1e12);
            profile.gemm_fp8_flops.iter().for_each(|&flops| below(flops, 2.0 * bf16));
            below(profile.attention_forward_flops, bf16);
            below(profile.attention_backward_flops, bf16);
            for point in &profile.gemm {
                below(point.flops, if point.bf16 { bf16 } else { sheet.f32_tflops * 1e12 });
            }
            for point in &profile.attention {
                below(point.forward_flops, bf16);
                below(point.backward_flops, bf16);
            }
            for point in &profile.elementwise {
                below(point.bandwidth, sheet.bandwidth_gb * 1e9);
            }
            let bus = sheet.pcie.bandwidth();
            below(profile.link(Link::HOST_TO_DEVICE).bandwidth, bus);
            below(profile.link(Link::DEVICE_TO_HOST).bandwidth, bus);
            below(profile.link(Link::HOST_TO_DEVICE).duplex_bandwidth, 2.0 * bus);
            assert!(profile.memory_bytes <= sheet.memory_gib << 30, "{name}");
        }
    }

    /// A data-sheet profile says that it is one; a measured one does not.
    #[test]
    fn what_is_not_measured_says_so() {
        for name in HardwareProfile::builtin_names() {
            let profile = HardwareProfile::builtin(name).unwrap();
            let measured = ["h200", "reference"].contains(&name);
            assert_eq!(profile.uncertainty.is_none(), measured, "{name}");
            assert_eq!(profile.source.contains("not measured"), !measured, "{name}");
            assert_eq!(HardwareProfile::builtin_cards(name).count() == 0, measured, "{name}");
        }
    }

    /// The H200's own data sheet reproduces what was measured on it.
    #[test]
    fn shares_are_those_of_the_measured_card() {
        let measured = HardwareProfile::builtin("h200").unwrap();
        let derived = H200.profile(&measured);
        let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-3, "{a} and {b}");
        near(derived.gemm_flops, measured.gemm_flops);
        near(derived.attention_backward_flops, measured.attention_backward_flops);
        near(derived.memory_bandwidth, measured.memory_bandwidth);
        near(
            derived.link(Link::DEVICE_TO_HOST).bandwidth,
            measured.link(Link::DEVICE_TO_HOST).bandwidth,
        );
        for (a, b) in derived.elementwise.iter().zip(&measured.elementwise) {
            near(a.bandwidth, b.bandwidth);
        }
    }

    #[test]
    fn geforce_cards_accumulate_at_half_rate() {
        for card in CARDS {
            let geforce = card.name.starts_with("rtx-");
            assert_eq!(card.accumulation == Accumulation::HalfRate, geforce, "{}", card.name);
            // On these chips a tensor core at half rate is twice as fast as the plain cores.
            if geforce {
                assert!((card.bf16_tflops / card.f32_tflops - 2.0).abs() < 0.02, "{}", card.name);
            }
        }
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
