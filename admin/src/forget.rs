//! `rdmactl forget HCA`: an HCA that is missing was removed for good.

use serde_json::json;

use crate::global::Global;
use crate::node_state::Sources;
use crate::output::{Ended, Exit};

/// Tells the daemon that an HCA that is missing was removed for good.
#[derive(Debug, clap::Args)]
pub(crate) struct Forget {
    /// The HCA, as rdmactl status names it
    hca: String,
    #[command(flatten)]
    sources: Sources,
}

impl Forget {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        self.sources.forget(&self.hca)?;
        let hca = &self.hca;
        global.say(json!({"forgotten": hca}), || {
            format!("{hca} is not missed any more\n")
        });
        Ok(Exit::Good)
    }
}
