//! `rdmactl addresses init`: makes a directory of the policy a store.

use serde_json::json;

use super::Scope;
use crate::output::{Ended, Outcome, say, say_json};

pub(super) fn run(scope: &Scope<'_>) -> Ended {
    let store = scope.plugin()?.init(scope.store)?;
    if scope.global.json {
        say_json(json!({
            "directory": store.directory(),
            "id": store.id(),
            "filesystem": store.file_system(),
            "shared": store.is_shared(),
        }));
        return Ok(Outcome::Good);
    }
    say(&format!(
        "{} is store {} ({})\n",
        store.directory().display(),
        store.id(),
        store.file_system()
    ));
    Ok(Outcome::Good)
}
