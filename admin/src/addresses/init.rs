//! `rdmactl addresses init`: makes a directory a store.

use serde_json::json;

use super::Scope;
use crate::output::{Ended, Exit};

pub(super) fn run(scope: &Scope<'_>) -> Ended {
    let store = scope.plugin()?.init(scope.store)?;
    let (directory, id, filesystem) = (store.directory(), store.id(), store.file_system());
    let document = json!({
        "directory": directory, "id": id, "filesystem": filesystem, "shared": store.is_shared(),
    });
    scope.global.say(document, || {
        format!("{} is store {id} ({filesystem})\n", directory.display())
    });
    Ok(Exit::Good)
}
