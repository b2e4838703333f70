//! One definition of every option: it makes the flag, the key of the config file, the help and the
//! table in docs/config.md.

/// The type of a setting: always there if it has a default.
macro_rules! setting_type {
    ($type:ty) => { Option<$type> };
    ($type:ty, $default:expr) => { $type };
}

/// The value of a setting that may have been given.
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

/// Makes `Given` (what a user wrote, as flags or as keys), `Settings` (what holds), and the list of
/// all keys.
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

        /// What holds.
        #[derive(Clone, Debug)]
        pub(crate) struct Settings {$($(
            pub(crate) $name: setting_type!($type $(, $default)?),
        )*)*}

        impl Given {
            /// What is given here, and else there.
            pub(crate) fn or(self, other: Given) -> Given {
                Given {$($( $name: self.$name.or(other.$name), )*)*}
            }

            /// What holds if nothing is given.
            pub(crate) fn defaults() -> Given {
                Given {$($( $name: default_value!($($default)?), )*)*}
            }

            /// With defaults for the rest.
            pub(crate) fn resolve(self) -> Settings {
                Settings {$($( $name: setting_value!(self.$name $(, $default)?), )*)*}
            }
        }
    };
}
