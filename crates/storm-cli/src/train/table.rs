//! The macro that defines every option once: from it come the flag, the config key, the help and
//! the table in docs/config.md.

/// The type of a setting: `Option` only if it has no default.
macro_rules! setting_type {
    ($type:ty) => { Option<$type> };
    ($type:ty, $default:expr) => { $type };
}

/// The value of a setting: the given one, else its default.
macro_rules! setting_value {
    ($given:expr) => {
        $given
    };
    ($given:expr, $default:expr) => {
        $given.unwrap_or_else(|| $default)
    };
}

macro_rules! default_value {
    () => {
        None
    };
    ($default:expr) => {
        Some($default)
    };
}

/// Defines `Given` (what the user wrote, as flags or keys), `Settings` (with defaults filled in),
/// and the list of all keys.
macro_rules! options {
    ($( $heading:literal { $(
        $(#[doc = $doc:literal])+
        $name:ident : $type:ty $(= $default:expr)?;
    )* } )*) => {
        /// What was given, in one place.
        #[derive(Clone, Debug, Default, clap::Args, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "kebab-case", deny_unknown_fields)]
        pub(crate) struct Given {$($(
            $(#[doc = $doc])+
            #[arg(long, help_heading = $heading)]
            #[serde(skip_serializing_if = "Option::is_none")]
            pub(crate) $name: Option<$type>,
        )*)*}

        /// The options with defaults filled in.
        #[derive(Clone, Debug)]
        pub(crate) struct Settings {$($(
            pub(crate) $name: setting_type!($type $(, $default)?),
        )*)*}

        impl Given {
            /// These options, with `other` filling the gaps.
            pub(crate) fn or(self, other: Given) -> Given {
                Given {$($( $name: self.$name.or(other.$name), )*)*}
            }

            /// The default of every option that has one.
            pub(crate) fn defaults() -> Given {
                Given {$($( $name: default_value!($($default)?), )*)*}
            }

            /// Fills in the defaults.
            pub(crate) fn resolve(self) -> Settings {
                Settings {$($( $name: setting_value!(self.$name $(, $default)?), )*)*}
            }
        }
    };
}
