//! What is wrong with the form of a file, in our words and with its place.

use serde::Deserialize;
use serde_saphyr::Location;

use node::spelling::nearest;

use crate::config::Problems;

pub(super) fn from_text<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Problems> {
    serde_saphyr::from_str(text).map_err(|error| Problems::one(message(error)))
}

/// The present name of a key or a value that an earlier version knew.
pub(super) fn renamed(old: &str) -> Option<&'static str> {
    match old {
        "spare" => Some("exclude"),
        "legacy" => Some("all-hcas"),
        _ => None,
    }
}

/// What the library says, with the place first as in all our messages.
pub(super) fn message(error: serde_saphyr::Error) -> String {
    let location = error.location();
    let message = match error.without_snippet() {
        serde_saphyr::Error::SerdeUnknownField {
            field, expected, ..
        } => {
            let near = nearest(field, expected);
            let hint = match (renamed(field), near) {
                (Some(now), _) => format!("its name is {now:?} now"),
                (None, Some(near)) => format!("did you mean {near:?}?"),
                (None, None) => format!("known keys: {}", expected.join(", ")),
            };
            format!("unknown key {field:?}; {hint}")
        }
        other => {
            let text = other.to_string();
            let text = text.split(" at line ").next().unwrap_or(&text);
            let old = text
                .strip_prefix("unknown variant `")
                .and_then(|rest| rest.split('`').next());
            match old.and_then(renamed) {
                Some(now) => format!("{text}; its name is {now:?} now"),
                None => text.to_owned(),
            }
        }
    };
    format!("{}{message}", location.map_or_else(String::new, at))
}

pub(super) fn at(location: Location) -> String {
    format!("line {}, column {}: ", location.line(), location.column())
}
