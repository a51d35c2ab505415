//! `rdmactl status`: is RDMA on this node healthy?

use clap::Args;
use ipam::plugin::Plugin;
use node::table::cell;
use node_wire::rdma_node;
use node_wire::status::DaemonStatus;
use serde::Serialize;
use serde_json::{Value, json};

use crate::addresses::pools;
use crate::global::Global;
use crate::node_state::Sources;
use crate::output::{Ended, Exit, columns, complain, optional, page, table};
use crate::state_rows::{HCAS, RESOURCES, hcas, resources};

/// Shows resources, HCAs with the reason where one is unhealthy, addresses left, and what is wrong.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 the daemon or the kubelet answered, 1 neither did or a read hangs, \
    2 wrong usage."
)]
pub(crate) struct Status {
    #[command(flatten)]
    sources: Sources,
}

/// What is printed.
#[derive(Debug, Serialize)]
pub(crate) struct StatusDocument {
    /// The daemon's state; `None` if it did not answer.
    pub daemon: Option<DaemonStatus>,
    /// As the node's `RdmaNode` has it.
    pub state: rdma_node::NodeState,
    /// Address ranges of the node's stores.
    pub addresses: Vec<Value>,
    /// What is missing and what is worth knowing.
    pub notes: Vec<String>,
}

impl Status {
    pub(crate) fn run(&self, global: &Global) -> Ended {
        let state = self.sources.read(global);
        let mut notes = state.notes();
        // A store that cannot be read is noted already.
        let addresses = match state.leases.is_ok() {
            true => addresses(global, &mut notes),
            false => Vec::new(),
        };
        let faults = state.faults();
        let document = StatusDocument {
            state: state.shown(),
            daemon: state.daemon.ok(),
            addresses,
            notes,
        };
        global.say(json!(document), || text(&document));
        faults.iter().for_each(|fault| complain(fault));
        Ok(Exit::good_if(faults.is_empty()))
    }
}

/// How full the ranges of this node's stores are. What cannot be read is noted.
fn addresses(global: &Global, notes: &mut Vec<String>) -> Vec<Value> {
    // A wrong policy is noted already.
    let Ok(policy) = global.policy() else {
        return Vec::new();
    };
    let node_name = global.node_name();
    let plugin = Plugin::new(policy, &global.host_root, node_name.as_deref());
    ranges(&plugin).unwrap_or_else(|error| {
        notes.push(format!("addresses: {error}"));
        Vec::new()
    })
}

fn ranges(plugin: &Plugin) -> anyhow::Result<Vec<Value>> {
    let Some(leases) = plugin.leases_if_any()? else {
        return Ok(Vec::new());
    };
    Ok(pools::read(&leases, None, plugin.policy().ipam.cooldown)?)
}

/// The document for a person.
fn text(document: &StatusDocument) -> String {
    let mut blocks = Vec::new();
    if let Some(daemon) = &document.daemon {
        blocks.push(format!(
            "version {}, up {} s, configuration {} (generation {}), netns mode {}\n",
            cell(&daemon.program_version),
            daemon.uptime_seconds,
            daemon.configuration.file.display(),
            daemon.configuration.generation,
            optional(daemon.netns_mode.as_deref()),
        ));
    }
    let state = &document.state;
    for (header, rows) in [(RESOURCES, resources(state)), (HCAS, hcas(state))] {
        if !rows.is_empty() {
            blocks.push(table(header, rows));
        }
    }
    if !document.addresses.is_empty() {
        blocks.push(columns(pools::COLUMNS, &document.addresses));
    }
    let problems = document.state.problems.iter();
    let notes = problems.chain(&document.notes);
    page(blocks, notes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_answers_steers_no_terminal() {
        let document = StatusDocument {
            daemon: None,
            state: rdma_node::NodeState::default(),
            addresses: Vec::new(),
            notes: vec!["\u{1b}[2J".into()],
        };
        assert!(!text(&document).contains('\u{1b}'));
    }
}
