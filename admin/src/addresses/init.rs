//! `rdma-ipam init`: makes a directory of the policy a store.

use super::{Global, Outcome, say, say_json};
use anyhow::Result;
use clap::Args;
use serde_json::json;

#[derive(Debug, Args)]
pub(super) struct Init {}

impl Init {
    pub(super) fn run(self, global: &Global) -> Result<Outcome> {
        let store = global.plugin()?.init(&global.store)?;
        if global.json {
            say_json(json!({
                "directory": store.directory(),
                "id": store.id(),
                "filesystem": store.file_system(),
                "shared": store.is_shared(),
            }));
            return Ok(Outcome::Done);
        }
        say(&format!(
            "{} is store {} ({})\n",
            store.directory().display(),
            store.id(),
            store.file_system()
        ));
        Ok(Outcome::Done)
    }
}
