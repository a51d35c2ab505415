//! JSON documents that the programs print for other programs, with `--json` and on `/status`.

use serde_json::Value;

/// The version of all these documents, their field `version`. It goes up when a field gets another
/// name or meaning, or goes; a new field leaves it as it is.
pub const VERSION: u32 = 1;

/// The document with its version. It has to be an object: a list has no place for one.
#[must_use]
pub fn versioned(mut document: Value) -> Value {
    if let Some(fields) = document.as_object_mut() {
        fields.insert("version".into(), VERSION.into());
    }
    document
}
