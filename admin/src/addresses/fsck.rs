//! `rdmactl addresses fsck`: what contradicts what in the leases of this node, and what to do. It repairs
//! nothing: DEL, reclaim and release free what is to be freed.

use super::{Scope, shown};
use crate::output::{Ended, Exit};
use cni_wire::text::printable;
use ipam::leases::{Checkup, Finding};
use serde_json::json;

pub(super) fn run(scope: &Scope<'_>) -> Ended {
    let (plugin, leases) = scope.open_used()?;
    let checkup = match leases {
        Some(leases) => leases.check(plugin.owns(&leases.list()?.leases)?)?,
        None => Checkup::default(),
    };
    let finding = |one: &Finding| json!({"file": one.path, "what": one.what});
    let findings: Vec<_> = checkup.findings.iter().map(finding).collect();
    let document = json!({"sound": checkup.sound, "findings": findings});
    scope.global.say(document, || {
        let mut text = String::new();
        for Finding { path, what } in &checkup.findings {
            text += &format!("{}: {}\n", shown(path), printable(what));
        }
        let (sound, found) = (checkup.sound, checkup.findings.len());
        text + &format!("{sound} sound leases, {found} findings\n")
    });
    Ok(Exit::good_if(checkup.findings.is_empty()))
}
