//! How values of our own format are written. An error is of one value, so that it has that value's line.

use std::path::PathBuf;
use std::time::Duration;

use node::duration;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

/// Longest time that can be configured; what is longer is a slip of the pen.
pub(super) const MAX_TIME: Duration = Duration::from_secs(24 * 3600);

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
