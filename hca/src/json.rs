//! The JSON form of parts of the inventory, where the plain form would not be read by people:
//! numbers that everybody writes in hexadecimal.
//!
//! Keys are camelCase. The functions take references to the whole field, as serde hands it over.

use serde::{Deserialize as _, Deserializer, Serializer, de};

/// Reads and writes types by their text form.
macro_rules! by_text {
    ($($name:ty),+) => {$(
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
                let text = <String as serde::Deserialize>::deserialize(from)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    )+};
}
pub(crate) use by_text;

type Result<S> = std::result::Result<<S as Serializer>::Ok, <S as Serializer>::Error>;

/// `0x15b3`.
pub(crate) fn hex16<S: Serializer>(value: &u16, serializer: S) -> Result<S> {
    serializer.collect_str(&format_args!("{value:#06x}"))
}

/// Reads the number that [`hex16`] or [`hex24`] wrote.
pub(crate) fn hex<'de, D: Deserializer<'de>, T: TryFrom<u32>>(
    deserializer: D,
) -> std::result::Result<T, D::Error> {
    let text = String::deserialize(deserializer)?;
    let digits = text.strip_prefix("0x").unwrap_or_default();
    let number = u32::from_str_radix(digits, 16).ok();
    number
        .and_then(|number| T::try_from(number).ok())
        .ok_or_else(|| de::Error::custom(format!("{text:?} is not a number such as 0x15b3")))
}

/// `0x020000`.
pub(crate) fn hex24<S: Serializer>(value: &u32, serializer: S) -> Result<S> {
    serializer.collect_str(&format_args!("{value:#08x}"))
}
