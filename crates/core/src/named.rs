//! Serialisation of enums by the names that the command line uses, and of numbers.

use crate::codec::Codec;
use crate::dtype::Dtype;

/// Serialises by [`Display`](std::fmt::Display), and deserialises by [`FromStr`](std::str::FromStr).
macro_rules! by_name {
    ($($type:ty),*) => {
        $(
            impl serde::Serialize for $type {
                fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    serializer.collect_str(self)
                }
            }

            impl<'de> serde::Deserialize<'de> for $type {
                fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    let name = String::deserialize(deserializer)?;
                    name.parse().map_err(serde::de::Error::custom)
                }
            }
        )*
    };
}

by_name!(Dtype, Codec);

/// Serialises a finite number or none. JSON writes others as null, which would come back as none.
pub(crate) fn finite<S: serde::Serializer>(x: &Option<f32>, serializer: S) -> Result<S::Ok, S::Error> {
    use serde::Serialize;
    match x {
        Some(x) if !x.is_finite() => {
            Err(serde::ser::Error::custom(format_args!("{x} is not a finite number")))
        }
        x => x.serialize(serializer),
    }
}
