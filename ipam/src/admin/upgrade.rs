//! `rdma-ipam upgrade`: raises a store of an earlier version to the latest format.

use super::{Global, Outcome, confirmed, say, say_json};
use crate::lease::RecordFormat;
use crate::store::Store;
use anyhow::{Context, Result};
use clap::Args;
use serde_json::json;

#[derive(Debug, Args)]
pub(super) struct Upgrade {
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
}

impl Upgrade {
    pub(super) fn run(self, global: &Global) -> Result<Outcome> {
        let (_, store) = global.open_used()?;
        let Some(store) = store else {
            return Ok(Outcome::Found);
        };
        let before = store.format();
        let raised = before != RecordFormat::LATEST;
        if raised && !confirmed(self.yes, &question(&store))? {
            return Ok(Outcome::Found);
        }
        if raised {
            store.raise().with_context(|| {
                let latest = RecordFormat::LATEST.version();
                format!("raise store {} to format {latest}", store.id())
            })?;
        }
        if global.json {
            say_json(json!({
                "directory": store.directory(),
                "id": store.id(),
                "from": before.version(),
                "to": RecordFormat::LATEST.version(),
            }));
            return Ok(Outcome::Done);
        }
        let done = if raised { "now has" } else { "already has" };
        say(&format!(
            "store {} in {} {done} format {}\n",
            store.id(),
            store.directory().display(),
            RecordFormat::LATEST.version()
        ));
        Ok(Outcome::Done)
    }
}

fn question(store: &Store) -> String {
    let (from, to) = (store.format().version(), RecordFormat::LATEST.version());
    format!(
        "raise store {} in {} from format {from} to {to}? Nodes whose rdma-ipam does not know \
         format {to} refuse the store from then on, for ADD and for DEL, and there is no way back.",
        store.id(),
        store.directory().display(),
    )
}
