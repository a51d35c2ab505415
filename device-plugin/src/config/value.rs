//! How values of our own format are written. An error is of one value, so that it has that value's line.

use std::path::PathBuf;
use std::time::Duration;

use hca::LinkLayer;
use node::duration;
use node::pattern::Pattern;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use super::range::RangeSet;
use crate::candidate::link_type;

/// Longest time that can be configured; what is longer is a slip of the pen.
pub(crate) const MAX_TIME: Duration = Duration::from_secs(24 * 3600);

/// A list of words, each read by itself.
fn list<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    read: fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, D::Error> {
    let words = Vec::<String>::deserialize(deserializer)?;
    let read = words.iter().map(|word| read(word));
    read.collect::<Result<_, _>>().map_err(D::Error::custom)
}

/// PCI IDs: four hex digits, with or without `0x`, in either case.
pub(super) fn pci_ids<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Pattern>, D::Error> {
    list(from, |word| {
        let lower = word.to_ascii_lowercase();
        let digits = lower.strip_prefix("0x").unwrap_or(&lower);
        match digits.len() == 4 && digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            true => Ok(Pattern::Exact(digits.to_owned())),
            false => Err(format!("{word:?} is not four hex digits, as 15b3")),
        }
    })
}

/// GUIDs: sixteen hex digits, with or without colons and `0x`, or a pattern of them.
pub(super) fn guids<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Pattern>, D::Error> {
    list(from, |word| {
        let plain = word.to_ascii_lowercase().replace(':', "");
        let digits = plain.strip_prefix("0x").unwrap_or(&plain);
        let pattern = Pattern::parse(digits)?;
        let is_guid = digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit());
        match is_guid || matches!(pattern, Pattern::Glob(_)) {
            true => Ok(pattern),
            false => Err(format!("GUID {word:?} is not sixteen hex digits")),
        }
    })
}

/// Partition keys without the membership bit.
pub(super) fn partition_keys<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u16>, D::Error> {
    list(from, |word| {
        let digits = word.strip_prefix("0x").unwrap_or(word);
        let key = u16::from_str_radix(digits, 16).ok();
        let key = key.map(|key| key & 0x7fff).filter(|key| *key != 0);
        key.ok_or_else(|| {
            format!("partition key {word:?} is not hexadecimal between 0x1 and 0xffff")
        })
    })
}

/// The words of link types; `other` is what no selector can ask for.
pub(super) fn link_types<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<Pattern>, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Word {
        Ether,
        Infiniband,
    }
    let words = Vec::<Word>::deserialize(deserializer)?.into_iter();
    let words = words.map(|word| match word {
        Word::Ether => link_type(LinkLayer::Ethernet),
        Word::Infiniband => link_type(LinkLayer::InfiniBand),
    });
    Ok(words.map(|word| Pattern::Exact(word.into())).collect())
}

pub(super) fn numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RangeSet, D::Error> {
    Vec::deserialize(deserializer).map(RangeSet::of)
}

pub(super) fn ranges<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RangeSet, D::Error> {
    let mut all = RangeSet::default();
    Vec::deserialize(deserializer)?
        .into_iter()
        .for_each(|range| all.extend(range));
    Ok(all)
}

/// A time of at most [`MAX_TIME`].
pub(super) fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    match duration::parse(&text) {
        Some(time) if time <= MAX_TIME => Ok(time),
        Some(_) => Err(D::Error::custom(format!("time {text:?}: give at most 24h"))),
        None => Err(D::Error::custom(format!(
            "time {text:?}: write a number and ms, s, m or h, as 500ms"
        ))),
    }
}

pub(super) fn flaps<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        flaps @ 2.. => Ok(flaps),
        flaps => Err(D::Error::custom(format!(
            "flaps is {flaps}; one loss is not flapping, give 2 or more"
        ))),
    }
}

pub(super) fn absolute<'de, D: Deserializer<'de>, T: From<PathBuf>>(
    deserializer: D,
) -> Result<T, D::Error> {
    let path = absolute_path(&String::deserialize(deserializer)?);
    path.map(T::from).map_err(D::Error::custom)
}

pub(super) fn module<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    module_name(&String::deserialize(deserializer)?).map_err(D::Error::custom)
}

pub(super) fn absolute_path(path: &str) -> Result<PathBuf, String> {
    let absolute = Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    absolute.ok_or_else(|| format!("{path:?} is not an absolute path"))
}

/// A kernel module, by its name or its file's: the kernel writes `_` for `-`.
pub(super) fn module_name(name: &str) -> Result<String, String> {
    let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match !name.is_empty() && name.chars().all(legal) {
        true => Ok(name.replace('-', "_")),
        false => Err(format!("{name:?} is not the name of a kernel module")),
    }
}
