//! The words that values have in documents, metrics and messages.

use serde::Serialize;
use serde_json::Value;

/// The word that serde knows a variant by, whatever it holds.
#[must_use]
pub fn word(variant: &impl Serialize) -> String {
    match serde_json::to_value(variant) {
        Ok(Value::String(word)) => word,
        Ok(Value::Object(variant)) => variant.into_iter().map(|(word, _)| word).collect(),
        _ => String::new(),
    }
}
